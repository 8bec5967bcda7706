# Whether the trainer used the experts that the sampler recorded.

from dataclasses import replace

import numpy as np
import pytest

from servanda.judgement.slices.columns import columns
from servanda.rl.dumps.checks.routes import ReplayCheck
from servanda.rl.steps.blocks import paired, taken
from servanda.traces.expert_columns import route_column
from servanda.traces.rollouts import REPLAYS, ROUTE, ROUTE_TRAIN, UNROUTED
from tests.rl.dumps.checks.made import rollouts

TOKENS, LAYERS, EXPERTS, PICKED = 60, 3, 16, 4


def routed(flipped=0.0, says=False, layers=range(LAYERS), shift=0, seed=3, **more):
    """Both sides of a mixture; `flipped`: share of the pairs whose trainer picks another expert."""
    chunk = rollouts(tokens=TOKENS, **more)
    rng = np.random.default_rng(seed)
    score_NLE = rng.normal(size=(len(chunk.token_N), LAYERS, EXPERTS))
    infer_NLK = np.argsort(-score_NLE)[..., :PICKED].astype(np.int16)
    train_NLK = infer_NLK[..., ::-1].copy()  # the order of experts has no meaning
    flip_NL = rng.random(train_NLK.shape[:2]) < flipped
    flip_NL[:, [layer for layer in range(LAYERS) if layer not in layers]] = False
    train_NLK[flip_NL, 0] = np.argsort(-score_NLE)[..., PICKED][flip_NL]
    train_NLK = np.roll(train_NLK, -shift, axis=0)
    for route_NLK in (infer_NLK, train_NLK):
        route_NLK[chunk.start_S] = UNROUTED
    numbers = {REPLAYS: np.ones(len(chunk))} if says else {}
    columns = {ROUTE: infer_NLK, ROUTE_TRAIN: train_NLK}
    return replace(chunk, per_token=columns, per_sequence=numbers), flip_NL


def finding(*chunks):
    check = ReplayCheck()
    for chunk in chunks:
        check.add(chunk)
    return check.finding()


@pytest.mark.parametrize("says", [True, False])
def test_equal_experts_in_any_order_are_a_replay(says):
    chunk, _ = routed(says=says)
    found = finding(chunk)
    tokens = len(chunk.token_N) - len(chunk)
    assert found.state == "ok"
    assert found.text == (
        f"the trainer's experts are the sampler's, in every layer of {tokens:,} tokens"
    )


def test_a_replay_that_leaves_out_a_layer_names_it_and_its_first_sequence():
    chunk, flip_NL = routed(flipped=0.02, says=True, layers=[1])
    found = finding(chunk)
    flip_NL[chunk.start_S] = False
    wrong, whole = int(flip_NL.any(axis=1).sum()), len(chunk.token_N) - len(chunk)
    assert found.state == "unsound"
    assert f"replays the sampler's experts, and {wrong:,} of {whole:,} tokens have" in found.text
    sequences = len({*chunk.sequence_N[flip_NL.any(axis=1)].tolist()})
    assert found.text.endswith(f"(layer 1; in {sequences} of 20 sequences, of step 1)")
    first = int(np.flatnonzero(flip_NL.any(axis=1))[0])
    assert found.first == chunk.source_S[chunk.sequence_of(first)]


def test_a_single_missed_token_of_many_is_a_warning():
    chunk, _ = routed(says=True)
    columns = {name: of.copy() for name, of in chunk.per_token.items()}
    columns[ROUTE_TRAIN][5, 0] = [12, 13, 14, 15]
    columns[ROUTE][5, 0] = [0, 1, 2, 3]
    assert finding(replace(chunk, per_token=columns)).state == "warning"


def test_steps_and_ranks_of_a_replay_that_is_dropped_are_named():
    """One rank of four replays nothing, in two of three steps."""
    chunks = []
    for step in (4, 5, 6):
        for rank in range(4):
            wrong = rank == 2 and step > 4
            chunk, _ = routed(0.1 if wrong else 0.0, says=True, step=step, seed=10 * step + rank)
            source_S = tuple(f"step_{step}.rank{rank}.parquet:{at + 1}" for at in range(len(chunk)))
            chunks.append(replace(chunk, source_S=source_S))
    found = finding(*chunks)
    assert "; in 40 of 240 sequences, of steps 5, 6, all of rank 2)" in found.text
    assert found.first == "step_5.rank2.parquet:1"
    labelled = [
        replace(c, source_S=("",) * len(c), labels={"rank": ("3",) * len(c)}) for c in chunks
    ]
    assert "rank" not in finding(*labelled).text  # there is no other


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("says", [True, False])
def test_a_misaligned_replay_is_named_with_its_lag(shift, says):
    found = finding(routed(shift=shift, says=says)[0])
    assert found.state == "unsound"
    assert f"row t is the sampler's row t{shift:+d} (100 % of the layers" in found.text
    assert found.text.endswith("at lag 0, in 20 of 20 sequences, of step 1)")
    assert found.numbers["p_misaligned"] < 1e-4


def test_a_shift_of_one_sequence_is_no_shift_of_all():
    """It cannot be told from chance with the error probability that a shift of all has."""
    shifted, whole = routed(shift=1, sequences=1)[0], routed(sequences=40)[0]
    found = finding(shifted, whole)
    assert found.numbers["p_misaligned"] == 1.0
    assert found.text.startswith("the trainer routes by itself")


@pytest.mark.parametrize(("flipped", "state"), [(0.02, "ok"), (0.6, "warning")])
def test_a_trainer_that_routes_by_itself_has_its_shares(flipped, state):
    chunk, flip_NL = routed(flipped)
    flip_NL = np.delete(flip_NL, chunk.start_S, axis=0)
    found = finding(chunk)
    assert found.state == state
    assert found.text.startswith("the trainer routes by itself: other experts than the sampler's")
    assert found.numbers["flipped"] == pytest.approx(flip_NL.mean())
    assert found.numbers["touched"] == pytest.approx(flip_NL.any(axis=1).mean())


def test_the_gap_of_touched_tokens_is_told_apart():
    chunk, flip_NL = routed(0.1)
    touched_N = flip_NL.any(axis=1) & (np.arange(len(flip_NL)) % TOKENS > 0)
    train_N = chunk.logp_infer_N + np.where(touched_N, 0.3, 0.01)
    found = finding(replace(chunk, logp_train_N=train_N))
    far, near = (int((chunk.mask_N & of_N).sum()) for of_N in (touched_N, ~touched_N))
    near -= int(chunk.mask_N[chunk.start_S].sum())
    share = 0.3 * far / (0.3 * far + 0.01 * near)
    assert "is 0.3 nats, that of the others 0.01" in found.text
    assert f"and {100 * share:.0f} % of the gap is theirs" in found.text


def test_a_slice_of_touched_tokens_has_those_whose_route_flipped():
    """In a dump and in a run of two kernels, by the same numbers."""
    chunk, flip_NL = routed(0.3)
    flipped_N = np.where(np.arange(len(flip_NL)) % TOKENS > 0, flip_NL.sum(axis=1), np.nan)
    pair = paired(chunk, 0)
    name = "outcome.flipped_layers"
    wanted = flipped_N[chunk.mask_N]
    np.testing.assert_array_equal(columns(pair, [], [name])[name], wanted)
    routes = [chunk.per_token[side][chunk.mask_N].astype(float) for side in (ROUTE, ROUTE_TRAIN)]
    sides = {}
    for side, route_NLK in zip(("infer", "train"), routes, strict=True):
        route_NLK[(route_NLK < 0).any(axis=(1, 2))] = np.nan
        own = {
            route_column(layer, k): route_NLK[:, layer, k]
            for layer in range(LAYERS)
            for k in range(PICKED)
        }
        trace = getattr(pair, side)
        logp = {"logp": trace.columns["logp"]}
        sides[side] = replace(trace, columns={**logp, **own})
    np.testing.assert_array_equal(columns(replace(pair, **sides), [], [name])[name], wanted)


def test_chunks_and_workers_do_not_change_the_finding():
    chunk, _ = routed(0.05, says=True)
    parts = [taken(chunk, at, min(at + 3, len(chunk))) for at in range(0, len(chunk), 3)]
    checks = [ReplayCheck() for _ in parts]
    for check, part in zip(checks, parts, strict=True):
        check.add(part)
    for later in checks[1:]:
        checks[0].join(later)
    assert checks[0].finding() == finding(*parts) == finding(chunk)


def test_routes_of_two_models_are_unsound_and_none_are_no_finding():
    chunk, _ = routed()
    columns = {**chunk.per_token, ROUTE_TRAIN: chunk.per_token[ROUTE_TRAIN][:, :2]}
    assert finding(replace(chunk, per_token=columns)).state == "unsound"
    assert finding(replace(chunk, per_token={ROUTE: chunk.per_token[ROUTE]})).text == ""


@pytest.mark.parametrize("absent", ["column", "cells"])
def test_a_replay_that_is_claimed_and_not_recorded_is_a_warning(absent):
    chunk, _ = routed(says=True)
    columns = dict(chunk.per_token)
    if absent == "column":
        del columns[ROUTE_TRAIN]
    else:
        columns[ROUTE_TRAIN] = np.full_like(columns[ROUTE_TRAIN], UNROUTED)
    found = finding(replace(chunk, per_token=columns))
    assert found.state == "warning"
    assert found.text == (
        "the trainer says that it replays the sampler's experts, and of "
        f"{len(chunk.token_N) - len(chunk):,} tokens its own are not in the dump, so whether it "
        "does is unknown: pass routes_train="
    )
    # a trainer that does not say so owes nothing
    assert finding(replace(chunk, per_token=columns, per_sequence={})).text == ""


def test_a_replay_of_which_a_part_is_recorded_is_a_warning():
    whole, _ = routed(says=True)
    columns = {name: of for name, of in whole.per_token.items() if name != ROUTE_TRAIN}
    found = finding(whole, replace(whole, per_token=columns))
    assert found.state == "warning" and "are not in the dump" in found.text


@pytest.mark.parametrize(("larger", "state"), [(16, "unsound"), (15, "ok")])
def test_a_lag_is_named_that_is_sure_at_its_share_of_the_error(larger, state):
    """4 x 2^-16 < 1e-4 < 4 x 2^-15; another lag has more equal pairs, and is less sure."""
    check = ReplayCheck()
    check.add(routed()[0])
    check.lags.update({(2, True): 10**9})
    check.shifted = np.array([[0, 30], [larger, 0], [0, 30], [15, 0]])
    found = check.finding()
    assert found.state == state
    assert state == "ok" or "row t is the sampler's row t-1 " in found.text
