# Slices of outcomes: what a set of tokens contributes, and the mass it gained or lost.

import dataclasses

import numpy as np
import pytest

import servanda as sv
from servanda.judgement.slices.rules import TOKEN_CLASSES
from servanda.runner import run
from tests import kit

SLICES = "slices: [{name: second, match: {outcome.rank: {gte: 1, lt: 2}}}]"


def cells(tmp_path, more, q, **options):
    path, pair = kit.write(
        tmp_path, q=q, slices=SLICES, more=more, claim="realised", width=1, limit=0.9, **options
    )
    verdict = sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    return {(c.clause, c.slice): c for c in verdict.cells}, pair


def truth(pair):
    """p(S) - q(S), and half of sum over S of |p - q|, of the second most likely token of q."""
    p, q = pair.rows(())
    (second,) = np.flatnonzero(np.argsort(-q, kind="stable").argsort() == 1)
    return p[second] - q[second], abs(p[second] - q[second]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("moved", [0.04, -0.04], ids=["lost", "gained"])
def test_the_mass_of_a_slice_of_outcomes_is_compared(tmp_path, moved):
    more = (
        "  - {id: gap, metric: mass_gap, aggregate: mean, at_most: 0.12, slices: [second]}\n"
        "  - {id: tight, metric: mass_gap, aggregate: mean, at_most: 0.01, slices: [second]}\n"
        "  - {id: part, metric: tv_contribution, aggregate: mean, clip: 1.0, at_most: 0.2, "
        "slices: [second]}"
    )
    q = {"": kit.moved(kit.BASE, moved, a=1, b=3)}
    found, pair = cells(tmp_path, more, q, first=1500, last=6000)
    gap, part = truth(pair)
    assert found["gap", "second"].outcome == "holds"
    assert found["gap", "second"].value == pytest.approx(gap, abs=0.02)
    low, high = found["gap", "second"].interval
    assert low <= gap <= high
    assert found["tight", "second"].outcome == "violated"
    assert found["part", "second"].outcome == "holds"
    assert found["part", "second"].value == pytest.approx(part, abs=0.01)


def test_identical_kernels_have_no_gap(tmp_path):
    more = "  - {id: gap, metric: mass_gap, aggregate: mean, at_most: 0.05, slices: [second]}"
    found, _ = cells(tmp_path, more, {"": kit.BASE}, last=4000)
    assert found["gap", "second"].outcome == "holds"
    assert found["gap", "second"].value == pytest.approx(0.0, abs=1e-12)


def test_classes_of_tokens_cut_outcomes_and_contexts():
    from servanda.judgement.slices.columns import class_of, codes

    assert [class_of(t) for t in ("Ġ12", "Ġword", "Ċ", ".", "é", "\ufffd")] == [
        "digit",
        "letter",
        "space",
        "punctuation",
        "letter",
        "other",
    ]
    assert [TOKEN_CLASSES[int(c)] for c in codes(["a", "1", "<eos>"], [2])] == [
        "letter",
        "digit",
        "end",
    ]


@pytest.mark.slow
def test_an_outcome_that_was_not_recorded_is_missing_and_no_agreement(tmp_path):
    """Law 1: a kernel that halves the mass of a slice must not hold because ranks were lost."""
    from servanda.engines.table import TableEngine

    class Silent(TableEngine):
        def generate(self, batch, sampling, seed):
            trace = super().generate(batch, sampling, seed)
            columns = {name: c for name, c in trace.columns.items() if name != "rank"}
            return dataclasses.replace(trace, columns=columns)

    more = "  - {id: gap, metric: mass_gap, aggregate: mean, at_most: 0.05, slices: [second]}"
    path, _ = kit.write(
        tmp_path,
        q={"": kit.moved(kit.BASE, 0.1, a=1, b=3)},
        slices=SLICES,
        more=more,
        claim="realised",
        width=1,
        limit=0.9,
        last=1500,
    )
    verdict = sv.check(path, run_dir=tmp_path / "run", open=lambda kernel, _: Silent(kernel))
    (gap,) = (c for c in verdict.cells if c.clause == "gap")
    assert gap.outcome == "inconclusive" and gap.missing == gap.n
