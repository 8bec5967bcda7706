# What a verdict says of parts of its workload that no slice shows, or that met no token.

import pytest

from servanda.runner import run
from tests import kit


def judged(folder, **how):
    path, _ = kit.write(folder, **{"claim": "realised", "last": 64, **how})
    return run.check(path, run_dir=folder / "run", open=run.in_process)


def texts(verdict):
    return [spot.text for spot in verdict.blind_spots if spot.subject == "slice"]


def test_a_slice_without_a_token_is_said(tmp_path):
    """Monitored, so that the contract may hold: nothing breaks it, and nothing was seen."""
    slices = """slices:
  - {name: depth, split: context.position, at: [2]}
  - {name: late, match: {context.position: {gte: 4}}}"""
    more = "  - {id: l, metric: tv, aggregate: mean, at_most: 0.05, mode: monitor, slices: [late]}"
    ends = {"": [0.0, 0.0, 0.0, 0.0, 1.0]}  # every answer is its end

    verdict = judged(tmp_path, p=ends, q=ends, slices=slices, more=more, limit=0.2)

    assert "slices 'depth>=2', 'late' met no token: nothing is known of them" in texts(verdict)
    assert "met no token" in str(verdict)


@pytest.mark.slow
def test_a_slice_that_answers_hardly_reach_is_told_from_one_of_too_few_groups(tmp_path):
    slices = "slices: [{name: late, match: {context.position: {gte: 3}}}]"
    ends = {"": [0.02, 0.02, 0.02, 0.04, 0.9]}

    verdict = judged(tmp_path, p=ends, q=ends, slices=slices, last=640, limit=0.1)

    assert verdict.outcome == "inconclusive"
    assert any(
        t.startswith("slice 'late' has 0.") and "move its edges" in t for t in texts(verdict)
    )


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        (
            "slices: [{name: depth, split: context.position, at: [2]}]",
            "label 'kind' (3 values) is in no slice: a value that differs is averaged with the "
            "others",
        ),
        (
            "slices: [{name: kind, split: labels.kind, most: 1}]",
            "label 'kind': 'y', 'z', 50 % of the prompts, not by itself: judged together in one "
            "slice",
        ),
        (
            "slices: [{name: x, match: {labels.kind: {in: [x]}}}]",
            "label 'kind': 'y', 'z', 50 % of the prompts, not by itself: judged with the whole "
            "alone",
        ),
        (
            "slices: [{name: x, match: {labels.kind: {in: [x]}}},"
            " {name: y, match: {labels.kind: {in: [y]}, context.position: {lt: 2}}}]",
            "label 'kind': 'y', 'z', 50 % of the prompts, not by itself: judged with the whole "
            "alone",
        ),
        ("slices: [{name: kind, split: labels.kind}]", None),
    ],
)
def test_values_of_a_label_that_no_slice_shows_alone_are_named(tmp_path, slices, said):
    labels = {text: {"kind": kind} for text, kind in zip("abcd", "xxyz", strict=True)}
    verdict = judged(
        tmp_path, prompts=["a", "b", "c", "d"], labels=labels, slices=slices, limit=0.3
    )
    of_label = [text for text in texts(verdict) if text.startswith("label")]
    assert of_label == ([said] if said else [])


def test_a_declared_slice_that_no_clause_asks_for_is_said(tmp_path):
    slices = """slices:
  - {name: depth, split: context.position, at: [2]}
  - {name: odd, match: {outcome.rank: {gte: 3}}}"""
    verdict = judged(tmp_path, slices=slices, limit=0.3)
    assert "slice 'odd' is declared, and no clause is judged on it" in texts(verdict)


def of_slices(verdict):
    return [spot for spot in verdict.blind_spots if spot.subject != "guard"]


def test_what_is_judged_by_depth_and_by_nothing_else_says_so(tmp_path):
    (spot,) = of_slices(judged(tmp_path / "whole", limit=0.3))
    assert spot.text.startswith("no slice is by")
    depth = "slices: [{name: depth, split: context.position, at: [2]}]"
    assert not of_slices(judged(tmp_path / "depth", limit=0.3, slices=depth))
