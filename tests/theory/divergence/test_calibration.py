# Calibration: the number against one bin and one position at a time, and the clause.

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.judgement.clauses.numerical import Calibration
from servanda.runner import run
from servanda.theory.divergence.calibration import calibration, calibration_error
from tests import kit, oracles

scores = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


@given(scores)
def test_the_calibration_error_is_its_definition(pairs):
    conf, hit = zip(*pairs, strict=True)
    assert calibration_error(conf, hit) == pytest.approx(oracles.calibration_error(conf, hit))


@given(st.integers(0, 15))
def test_a_confidence_on_an_edge_falls_below_it(edge):
    """Bin i is (i / 15, (i + 1) / 15], as published; 0 itself is in the first."""
    conf, hit = [edge / 15, 0.5 / 15], [1, 0]
    assert calibration_error(conf, hit) == pytest.approx(oracles.calibration_error(conf, hit))


def test_confidence_that_is_always_earned_has_no_error():
    assert calibration_error([0.75] * 4, [1, 1, 1, 0]) == 0.0
    assert calibration_error([1.0] * 3, [0, 0, 0]) == 1.0


def test_the_metric_is_the_difference_of_both_sides_whichever_is_larger():
    earned, vain = ([0.75] * 4, [1, 1, 1, 0]), ([0.75] * 4, [1, 1, 0, 0])
    assert calibration(*earned, *vain) == calibration(*vain, *earned) == pytest.approx(0.25)
    assert calibration(*vain, *vain) == 0.0


def test_absent_is_not_zero():
    assert math.isnan(calibration_error([], []))
    assert math.isnan(calibration_error([0.5, math.nan], [1, 0]))


def test_unequal_columns_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\) confidences for \(1,\) hits"):
        calibration_error([0.5, 0.5], [1])


TEXTS = ("a b c d a b", "b b a d c a", "c a b a b a")
P, Q = [0.6, 0.1, 0.1, 0.1, 0.1], [0.2, 0.5, 0.1, 0.1, 0.1]


def checked(folder, limit, q, infer=""):
    folder.mkdir(exist_ok=True)
    numerical = f"numerical: [{{id: ece, metric: calibration, at_most: {limit}}}]"
    golden = kit.golden(folder, TEXTS) + "\n" + numerical
    path, _ = kit.write(folder, p={"": P}, q={"": q}, infer=infer, golden=golden, limit=0.6)
    verdict = run.check(path, run_dir=folder / "run", open=run.in_process)
    return next(c for c in verdict.cells if c.clause == "ece" and c.slice == "all")


def expected():
    tokens = " ".join(t[2:] for t in TEXTS).split()
    errors = [
        oracles.calibration_error([max(law)] * len(tokens), [t == best for t in tokens])
        for law, best in ((P, "a"), (Q, "b"))
    ]
    return abs(errors[0] - errors[1]), len(tokens)


def test_a_calibration_clause_is_a_fact_of_the_golden_tokens(tmp_path):
    value, n = expected()
    good = checked(tmp_path / "good", value + 0.01, Q)
    assert (good.outcome, good.kind, good.n) == ("holds", "fact", n)
    assert good.value == pytest.approx(value)
    assert good.floor == 0.0
    assert checked(tmp_path / "bad", value - 0.01, Q).outcome == "violated"


def test_it_judges_each_slice_by_its_own_positions(tmp_path):
    numerical = "numerical: [{id: ece, metric: calibration, at_most: 0.9}]"
    golden = kit.golden(tmp_path, TEXTS) + "\n" + numerical
    slices = "slices: [{name: first, split: labels.first}]"
    path, _ = kit.write(tmp_path, p={"": P}, q={"": Q}, golden=golden, slices=slices, limit=0.6)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    n = {c.slice: c.n for c in verdict.cells if c.clause == "ece"}
    assert n["all"] == 15 and sum(v for k, v in n.items() if k != "all") == 15


def test_positions_without_logits_are_an_error_and_never_a_pass():
    columns = ("conf_train", "hit_train", "conf_infer", "hit_infer")
    exact = {name: np.array([0.5, math.nan, 1.0]) for name in columns}
    view = SimpleNamespace(exact=exact, usable_N=np.ones(3), mask=lambda _: np.ones(3, bool))
    clause = SimpleNamespace(
        at_most=0.5, id="ece", metric="calibration", aggregate=None, severity="error", enforced=True
    )
    cut = SimpleNamespace(name="all")
    cell = SimpleNamespace(
        clause=clause, cut=cut, section="numerical", claim="population", workload=""
    )
    kind = Calibration()
    scores = kind.weigh(cell, view)
    answer = kind.judge(cell, [scores], None, None)
    assert (answer.outcome, answer.n, answer.missing) == ("error", 2, 1)
    assert answer.note == "1 golden positions have NaN or infinite logits"
    assert kind.judge(cell, [], None, None).outcome == "inconclusive"
    # beyond the limit, and within twice the floor: nobody's fault
    unequal = scores.__class__(((0.9, 1.0, 0.9, 0.0),))
    assert kind.judge(cell, [unequal], 0.5, None).outcome == "inconclusive"
    assert kind.judge(cell, [unequal], 0.1, None).outcome == "violated"
