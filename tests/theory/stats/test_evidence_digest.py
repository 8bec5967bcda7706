# The digest of evidence is of every number that a verdict can follow from, whatever measured it.

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from servanda.judgement.clauses.statistical import Grown
from servanda.judgement.evidence import Evidence
from servanda.runner import run
from tests import kit
from tests.runner.test_timing import SECONDS, TTFT, Clock, opening, write

Leaf = tuple[tuple[str, ...], Any, Callable[[Any], Any]]
RARE = "slices: [{name: rare, match: {outcome.rank: {gte: 2}}}]"
MORE = """\
  - {id: noise, metric: tv, aggregate: mean, at_most: {times: 3.0, of: self_noise}}
  - {id: stable, metric: tv, aggregate: mean, at_most: {times: 3.0, of: stable}, slices: [all]}
  - {id: p90, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.9, claim: realised}
  - {id: gap, metric: mass_gap, aggregate: mean, at_most: 0.9, slices: [rare]}
  - {id: drift, metric: reward_drift, at_most: 0.9, slices: all}
  - {id: reward, metric: reward_gap, at_most: 0.9, slices: all}
reward: {range: [0, 1], of: "rewards.py:score"}
numerical:
  - {id: kl, metric: kl_nats, at_most: 0.5}
observability:
  clauses:
    - {id: coherent, metric: weight_mean_check}
    - {id: served, metric: served_fidelity}
    - {id: steady, metric: self_noise, at_most: 0.1}
golden: {prompts: golden.jsonl}
"""


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Evidence:
    """Of one contract with a clause of nearly every kind, on rounds, golden texts and timings."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "rewards.py").write_text("def score(prompt, answer):\n    return 'a' in answer\n")
    kit.golden(folder)
    path = write(
        folder, [TTFT.format("at_most: 0.6")], infer=SECONDS, stable=SECONDS, last=64, slices=RARE
    )
    text = path.read_text()
    path.write_text(text.replace("runtime:", f"{MORE}runtime:"))
    plan = run.compile(run.load(path))
    return run.weigh(plan, run.measure(plan, folder / "run", open=opening(Clock())))


def leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every number and text within: where it is, itself, and the whole with another in its place.

    What follows from the rest is left out: evidence about a limit, from its process.
    """
    if is_dataclass(value):
        for f in fields(value):
            derived = isinstance(value, Grown) and f.name != "process"
            if f.repr and not derived:
                name = f"{type(value).__name__}.{f.name}"
                for place, leaf, put in leaves(getattr(value, f.name), (*at, name)):
                    yield place, leaf, lambda new, n=f.name, p=put: _with(value, n, p(new))
    elif isinstance(value, Mapping):
        for key in value:
            for place, leaf, put in leaves(value[key], (*at, str(key))):
                yield place, leaf, lambda new, k=key, p=put: {**value, k: p(new)}
    elif isinstance(value, tuple | np.ndarray):
        for i in range(len(value)):
            for place, leaf, put in leaves(value[i], (*at, "*")):
                yield place, leaf, lambda new, i=i, p=put: _set(value, i, p(new))
    elif value is not None:
        yield at, value, lambda new: new


def _with(whole: Any, name: str, part: Any) -> Any:
    """A frozen dataclass with another part, though it would refuse it."""
    other = copy.copy(whole)
    object.__setattr__(other, name, part)
    return other


def _set(whole: Any, i: int, part: Any) -> Any:
    if isinstance(whole, np.ndarray):
        other = whole.copy()
        other[i] = part
        return other
    return (*whole[:i], part, *whole[i + 1 :])


def another(leaf: Any) -> Any:
    """The nearest other value."""
    if isinstance(leaf, str):
        return leaf + "x"
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int | np.integer):
        return leaf + 1
    return 0.0 if math.isinf(leaf) else math.nextafter(leaf, math.inf)


@pytest.mark.parametrize("part", ["rounds", "once"])
def test_one_number_that_differs_makes_another_digest(evidence, part):
    """One leaf of each sort, the last that there is: in each cell, on each side, of each peer."""
    last = {place: (leaf, put) for place, leaf, put in leaves(getattr(evidence, part))}
    assert len(last) > 10
    unseen = [
        place
        for place, (leaf, put) in last.items()
        if replace(evidence, **{part: put(another(leaf))}).digest == evidence.digest
    ]
    assert unseen == []


def test_all_that_is_measured_is_there(evidence):
    """So that what the test above walks over is not empty where it matters."""
    assert {"golden", "timing"} <= evidence.once.keys()
    round_ = next(iter(evidence.rounds.values()))
    assert any(round_.noise) and any(round_.stable)


def test_no_number_is_written_as_a_version_of_numpy_writes_it(evidence):
    assert "np." not in repr((sorted(evidence.rounds.items()), sorted(evidence.once.items())))
