# A verdict that JSON gives back is the verdict.

import json
import math

import pytest

from servanda.errors import EvidenceError
from servanda.judgement.token_profile import Sums
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.runner import run
from servanda.traces.serialization import from_plain, to_plain
from tests import kit
from tests.report import made


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", made.VERDICTS)
def test_a_verdict_survives_json(name):
    verdict = made.VERDICTS[name]
    text = FORMATS["json"](verdict)
    again = Verdict.from_dict(json.loads(text))
    assert again == verdict
    assert (again.power, again.circumstances) == (verdict.power, verdict.circumstances)
    assert FORMATS["json"](again) == text
    assert FORMATS["html"](again) == FORMATS["html"](verdict)


def test_a_measured_verdict_survives_json(tmp_path):
    path, _ = kit.write(tmp_path, golden=kit.golden(tmp_path))
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    data = json.loads((tmp_path / "run" / "attempt-1" / "verdict.json").read_text())
    again = Verdict.from_dict(data)
    assert again == verdict and again.circumstances == verdict.circumstances
    assert again.circumstances.contract_text == path.read_text()
    assert again.circumstances.seconds > 0 and again.circumstances.stopped == "decided"
    assert {*again.circumstances.fingerprints} == {"train", "infer"}


def test_how_long_a_resumed_run_took_is_not_known(tmp_path):
    path, _ = kit.write(tmp_path)
    first, again = (
        run.check(path, run_dir=tmp_path / "run", open=run.in_process) for _ in range(2)
    )
    assert first.circumstances.seconds is not None and again.circumstances.seconds is None


def test_infinities_are_texts_and_absence_is_null():
    sums = Sums(n=2, k3=math.inf, k1=-math.inf)
    assert to_plain(sums)["k3"] == "inf"
    assert from_plain(Sums, json.loads(json.dumps(to_plain(sums)))) == sums
    assert to_plain({"a": math.nan, "b": (None, 1.5)}) == {"a": None, "b": [None, 1.5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outcome": "fine"}, "outcome is 'fine', not 'violated' or 'error'"),
        ({"cells": 3}, "cells is 3, not a list"),
        ({"alpha": "much"}, "alpha is 'much', not a number"),
        ({"groups": True}, "groups is True, not a int"),
        ({"key": None}, "key is None, not a mapping"),
        ({"portraits": {"infer": {"total": {"n": "2"}}}}, "portraits.infer.total.n is '2'"),
    ],
)
def test_what_is_no_verdict_is_refused_by_place(change, message):
    data = made.VERDICTS["holds"].to_dict() | change
    with pytest.raises(EvidenceError, match=f"^{message}"):
        Verdict.from_dict(data)


def test_a_missing_key_is_named():
    data = made.VERDICTS["holds"].to_dict()
    del data["cells"][0]["clause"]
    with pytest.raises(EvidenceError, match=r"^cells\[0\].clause is missing"):
        Verdict.from_dict(data)


def test_a_key_with_a_default_may_be_missing_and_an_unknown_one_be_there():
    data = made.VERDICTS["holds"].to_dict()
    del data["circumstances"], data["portraits"]
    again = Verdict.from_dict({**data, "else": 1})
    assert again.portraits == {} and again.circumstances.seconds is None
