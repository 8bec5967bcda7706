# Parts: checks of some steps each, joined in their order, find what one pass over a dump finds.

import pickle
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.rl.dumps.checks import Soundness
from servanda.rl.dumps.checks.copies import Copies
from servanda.theory.divergence.precision import errors
from servanda.theory.stats.bets import Coherence
from servanda.traces.rollouts import Rollouts
from tests.drawn import examples
from tests.rl.dumps.checks.made import rollouts, shifted

TOKENS, SEQUENCES = 50, 8
SHAPE = {"tokens": TOKENS, "sequences": SEQUENCES}


def with_values(chunk, name, at, value):
    column = getattr(chunk, name).copy()
    column[at] = value
    return replace(chunk, **{name: column})


def two_turns(chunk):
    at = np.tile(np.arange(TOKENS), SEQUENCES)
    return replace(chunk, mask_N=chunk.mask_N & ((at < 20) | (at >= 30)))


def copied(chunk):
    """The first sequence in the place of the third, in another group."""
    columns = {}
    for name in ("token_N", "logp_train_N", "logp_infer_N"):
        columns[name] = getattr(chunk, name).copy()
        columns[name][2 * TOKENS : 3 * TOKENS] = columns[name][:TOKENS]
    return replace(chunk, group_S=tuple("abcdefgh"), **columns)


def coarse(kind):
    return lambda c: replace(
        c, logp_train_N=c.logp_train_N.astype(kind).astype(float), logp_infer_N=c.logp_infer_N
    )


FAULTS = {
    "none": lambda c: c,
    "missing": lambda c: with_values(c, "logp_infer_N", [25, 130], np.nan),
    "zero": lambda c: with_values(c, "logp_infer_N", [99, 149, 199, 249, 299, 349], 0.0),
    "shifted": lambda c: replace(c, logp_infer_N=shifted(c.logp_infer_N, 1)),
    "raw": lambda c: replace(c, logp_infer_N=c.logp_infer_N - 1.0),
    "heads": lambda c: with_values(two_turns(c), "logp_infer_N", [30, 31, 80, 131], -9.0),
    "turns": two_turns,
    "copied": copied,
    "infinite": lambda c: with_values(c, "logp_infer_N", 33, -np.inf),
    "without mass": lambda c: with_values(c, "logp_train_N", 34, -np.inf),
    "above": lambda c: with_values(c, "logp_train_N", 35, 0.5),
    "huge": lambda c: with_values(c, "logp_train_N", 36, 1e300),
    "prompts": lambda c: with_values(c, "mask_N", slice(100, 110), True),
    "empty": lambda c: with_values(c, "mask_N", slice(100, 150), False),
    "untrained": lambda c: with_values(c, "mask_N", slice(None), False),
    "float16": coarse(np.float16),
    "float32": coarse(np.float32),
}


def made(step, seed, fault):
    """A chunk of a step; chunks of one seed have the same tokens and logprobs, but for faults."""
    chunk = rollouts(seed=seed, step=step, **SHAPE)
    places = tuple(f"step{step}.jsonl:{s}" for s in range(SEQUENCES))
    return FAULTS[fault](replace(chunk, source_S=places))


def part_of(steps):
    """The checks of some steps, as they come from another process."""
    part = Soundness()
    for step in steps:
        for chunk in step:
            part.add(chunk)
    return pickle.loads(pickle.dumps(part))


def joined(parts):
    whole = Soundness()
    for part in parts:
        whole.join(part)
    return whole


def exact(findings):
    return [repr(finding) for finding in findings]  # NaN equals NaN


chunks = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*FAULTS])), min_size=1, max_size=2)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.lists(chunks, min_size=1, max_size=5), st.data())
def test_any_parts_find_what_one_pass_finds(made_of, data):
    dump = [[made(n, *one) for one in step] for n, step in enumerate(made_of, 1)]
    cuts = data.draw(st.sets(st.integers(1, len(dump))).map(sorted))
    bounds = [0, *cuts, len(dump)]
    spans = [dump[a:b] for a, b in pairwise(bounds)]
    once = Soundness()
    for step in dump:
        for chunk in step:
            once.add(chunk)
    expected = exact(once.findings())
    assert exact(joined(map(part_of, spans)).findings()) == expected
    last = joined([part_of(dump[:-1]), joined([part_of(dump[-1:])])])
    assert exact(last.findings()) == expected
    assert last.steps == once.steps


@settings(max_examples=examples(30))
@given(st.lists(chunks, min_size=2, max_size=4))
def test_a_step_after_others_is_judged_alone_but_for_copies_of_them(made_of):
    dump = [[made(n, *one) for one in step] for n, step in enumerate(made_of, 1)]
    whole = Soundness()
    for step in dump:
        part = part_of([step])
        before, alone = exact(whole.findings()), part.findings()
        found = part.findings_after(whole)
        assert exact(found) == exact(part.findings_after(whole))
        assert exact(f for f in found if f.check != "copies") == exact(
            f for f in alone if f.check != "copies"
        )
        assert exact(whole.findings()) == before  # nothing is joined yet
        whole.join(part)


@pytest.mark.parametrize("fault", [*FAULTS])
def test_each_fault_is_found_in_a_part_and_in_the_joined_parts(fault):
    clean, odd = [made(1, 1, "none")], [made(2, 2, fault)]
    part = {f.check: f for f in part_of([odd]).findings()}
    whole = {f.check: f for f in joined([part_of([clean]), part_of([odd])]).findings()}
    for name, finding in whole.items():
        if finding.first:
            assert finding.first == part[name].first and finding.first.startswith("step2")


def test_copies_of_earlier_parts_are_found_with_their_places():
    parts = [part_of([[made(1, 1, "none")]]), part_of([[made(2, 2, "none")]])]
    whole = joined(parts)
    half = made(3, 3, "none")
    columns = {}
    for name in ("token_N", "logp_train_N", "logp_infer_N"):
        columns[name] = getattr(half, name).copy()
        columns[name][TOKENS : 3 * TOKENS] = getattr(made(2, 2, "none"), name)[: 2 * TOKENS]
    last = part_of([[replace(half, **columns)]])
    own = next(f for f in last.findings_after(whole) if f.check == "copies")
    assert (own.numbers["again"], own.odd[:2]) == (2, (2, 8))
    assert own.first == "step3.jsonl:1, of step 2"
    whole.join(last)
    copies = next(f for f in whole.findings() if f.check == "copies")
    assert (copies.numbers["again"], copies.odd[:2]) == (2, (2, 24))
    assert copies.first == own.first


def test_a_step_that_is_written_again_in_a_later_part_is_found_by_its_digest_alone():
    """A state file keeps the digests of steps, and nothing else."""
    whole, resumed = part_of([[made(1, 1, "none")], [made(2, 2, "none")]]), Soundness()
    whole.findings()
    resumed.steps.update(whole.steps)
    again = part_of([[made(7, 2, "none")]])
    finding = next(f for f in again.findings_after(resumed) if f.check == "copies")
    assert finding.state == "unsound" and "step 7 as step 2" in finding.text


def test_held_sequences_are_bounded_however_parts_are_joined(monkeypatch):
    monkeypatch.setattr("servanda.rl.dumps.checks.copies.HELD", 80)
    whole = Copies()
    for n in range(30):
        part = Copies()
        for seed in (n, n):  # all of it twice
            part.add(made(n, seed, "none"))
        assert len(part._drawn) + len(part._more) <= 80
        whole.join(part)
        assert len(whole._drawn) + len(whole._more) <= 80
    assert whole.finding().numbers["repeated"] == 30 * SEQUENCES
    later = Copies()
    for n in range(30):
        later.add(made(50 + n, n, "none"))
    assert later.finding(whole).numbers["again"] > 5
    whole.join(later)
    assert len(whole._drawn) + len(whole._more) <= 80
    assert whole.finding().numbers["again"] > 5


def test_a_part_that_comes_back_can_read_on():
    part, once = part_of([[made(1, 1, "none")]]), Soundness()
    part.add(made(1, 2, "zero"))
    for seed, fault in ((1, "none"), (2, "zero")):
        once.add(made(1, seed, fault))
    assert exact(part.findings()) == exact(once.findings())


@pytest.mark.parametrize("noise", [1e-5, 0.02, 0.5, 3.0])
@pytest.mark.parametrize("shift", [-9.0, 0.0, 0.01, 4.0])
def test_the_mean_weight_of_counted_tokens_is_slightly_less_evidence_than_of_each(noise, shift):
    many = rollouts(sequences=300, noise=noise)
    chunk = replace(many, logp_infer_N=many.logp_infer_N - shift)
    finding = {f.check: f for f in part_of([[chunk]]).findings()}["coherence"]
    train_K, infer_K = chunk.train_K, chunk.infer_K
    error_K = errors(train_K, "float64") + errors(infer_K, "float64")
    each = Coherence.of(train_K - infer_K, error_N=error_K)
    assert each.n == finding.numbers["tokens"]
    gap = each.log_e - finding.numbers["log_e"]
    assert -1e-9 * abs(each.log_e) <= gap <= 1e-3 * abs(each.log_e) + 1e-3


@given(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=8))
def test_turns_are_the_runs_of_trained_tokens(masks):
    length_S = np.array([len(mask) for mask in masks])
    mask_N = np.array([m for mask in masks for m in mask], dtype=bool)
    n, own = len(mask_N), tuple(map(str, masks))
    chunk = Rollouts(1, length_S, np.arange(n), mask_N, np.zeros(n), np.zeros(n), own, own)
    expected = []
    for start, mask in zip(chunk.start_S.tolist(), masks, strict=True):
        runs = [list(run) for on, run in groupby(range(len(mask)), mask.__getitem__) if on]
        for number, run in enumerate(runs, 1):
            expected.append((start + run[0], len(run), number, run is runs[-1]))
    turns = chunk.turns
    found = zip(turns.first_T, turns.length_T, turns.number_T, turns.final_T, strict=True)
    assert [*found] == expected
    assert chunk.trained_K[turns.trained_T].tolist() == turns.first_T.tolist()
    assert chunk.trained_S.tolist() == [sum(mask) for mask in masks]
    assert chunk.sums_S(np.ones(mask_N.sum())).tolist() == chunk.trained_S.tolist()
    Soundness().add(chunk)  # also without tokens


def test_a_part_is_small():
    """A few hundred bytes a sequence: much less than its tokens."""
    size = len(pickle.dumps(part_of([[rollouts(sequences=400, tokens=500)]])))
    assert size < 400 * 300
