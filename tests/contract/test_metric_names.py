# A metric may have two names in contracts: both parse to one contract, with one digest.

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from servanda.authoring.schema import json_schema
from servanda.contract.clause import METRIC_ALIASES
from servanda.judgement.clauses.base import GUARDS
from servanda.report.explain.glossary import explain_name
from servanda.runner import load
from tests.contract.test_language import problems_of

TINY = Path(__file__).parents[2] / "examples" / "tiny-bf16.kernelcontract.yaml"


def with_check(written: str) -> str:
    """The example contract with one more validity check."""
    data = TINY.read_text(encoding="utf-8")
    head, key, rest = data.partition("observability:\n")
    assert key and "  clauses:\n" in rest
    return head + key + rest.replace("  clauses:\n", f"  clauses:\n    - {written}\n", 1)


WRITTEN = {
    "usable_ratio": "{{id: x, metric: {}, at_least: 0.99}}",
    "rescored_ratio": "{{id: x, metric: {}, at_least: 0.005}}",
    "coherence": "{{id: x, metric: {}, mode: monitor}}",
}


@pytest.mark.parametrize(("new", "stored"), METRIC_ALIASES.items())
def test_both_names_of_a_metric_are_one_contract_with_one_digest(new, stored):
    one, other = (
        load.contract_of(with_check(WRITTEN[stored].format(name)), str(TINY))
        for name in (new, stored)
    )

    assert one == other
    assert one.digest == other.digest
    assert one.observability.clauses[0].metric == stored


def test_a_contract_with_the_old_names_keeps_its_digest():
    new = TINY.read_text(encoding="utf-8")
    old = new.replace("prompt_groups:", "sequences:").replace("valid_ratio", "usable_ratio")

    assert "sequences:" in old
    assert "usable_ratio" in old
    for text in (new, old):
        assert load.contract_of(text, str(TINY)).digest.startswith("e2c7f840")


def test_every_alias_is_of_a_metric_and_is_no_metric_itself():
    assert set(METRIC_ALIASES.values()) <= set(GUARDS)
    assert not set(METRIC_ALIASES) & set(GUARDS)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("valid_ration", "valid_ratio"),
        ("weight_mean_chek", "weight_mean_check"),
        ("scoring_rat", "scoring_rate"),
    ],
)
def test_a_misspelt_new_name_has_a_hint(typed, meant):
    (problem,) = problems_of(with_check(f"{{id: x, metric: {typed}}}"))

    assert problem.hint == f"did you mean '{meant}'?"


def test_a_message_gives_the_new_name():
    (problem,) = problems_of(with_check("{id: x, metric: usable_ratio, at_least: 2}"))

    assert problem.message == "valid_ratio is at most 1: it can never be at least 2"


@pytest.mark.parametrize(("new", "stored"), METRIC_ALIASES.items())
def test_the_schema_and_explain_know_both_names(new, stored):
    schema = json_schema(["transformers"], [])
    names = schema["definitions"]["Clause"]["properties"]["metric"]["enum"]

    Draft7Validator.check_schema(schema)
    assert {new, stored} <= set(names)
    for name in (new, stored):
        assert f"names    {new}; verdicts and older contracts: {stored}" in explain_name(name)
