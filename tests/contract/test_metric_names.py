# Three validity checks have one name in contracts and another in verdicts and digests.

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from servanda.authoring.schema import json_schema
from servanda.contract.clause import METRIC_ALIASES
from servanda.judgement.clauses.base import GUARDS
from servanda.report.explain.contract import explain_name
from servanda.runner import load
from tests.contract.test_language import problems_of

TINY = Path(__file__).parents[2] / "examples" / "tiny-bf16.kernelcontract.yaml"


def with_check(written: str) -> str:
    """The example contract with one more validity check."""
    data = TINY.read_text(encoding="utf-8")
    head, key, rest = data.partition("observability:\n")
    assert key and "  clauses:\n" in rest
    return head + key + rest.replace("  clauses:\n", f"  clauses:\n    - {written}\n", 1)


@pytest.mark.parametrize(("written", "stored"), METRIC_ALIASES.items())
def test_a_contract_writes_one_name_and_verdicts_have_another(written, stored):
    limit = {"valid_ratio": ", at_least: 0.99", "scoring_rate": ", at_least: 0.005"}
    text = with_check(f"{{id: x, metric: {written}{limit.get(written, ', mode: monitor')}}}")
    assert load.contract_of(text, str(TINY)).observability.clauses[0].metric == stored

    (problem,) = problems_of(text.replace(written, stored, 1))
    assert problem.message == f"no metric is named '{stored}'"
    assert problem.hint == f"did you mean '{written}'?"


def test_a_contract_keeps_its_digest():
    assert load.contract_of(TINY.read_text(), str(TINY)).digest.startswith("e2c7f840")


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
def test_a_misspelt_name_has_a_hint(typed, meant):
    (problem,) = problems_of(with_check(f"{{id: x, metric: {typed}}}"))

    assert problem.hint == f"did you mean '{meant}'?"


def test_a_message_gives_the_name_of_contracts():
    (problem,) = problems_of(with_check("{id: x, metric: valid_ratio, at_least: 2}"))

    assert problem.message == "valid_ratio is at most 1: it can never be at least 2"


@pytest.mark.parametrize(("written", "stored"), METRIC_ALIASES.items())
def test_the_schema_knows_the_name_of_contracts_and_explain_knows_both(written, stored):
    schema = json_schema(["transformers"], [])
    names = schema["definitions"]["Clause"]["properties"]["metric"]["enum"]

    Draft7Validator.check_schema(schema)
    assert written in names and stored not in names
    for name in (written, stored):
        assert f"names    {written}; in verdicts and logs: {stored}" in explain_name(name)
