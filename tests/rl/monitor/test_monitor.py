# The monitor: what it says of a step, and that it never says more than the exact path does.

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from servanda.errors import ContractError, EvidenceError
from servanda.judgement.clauses.statistical import RATIO_METRICS
from servanda.rl import Monitor
from servanda.rl.dumps.checks.pairs import IMPOSSIBLE
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.steps.contract import contract_of
from servanda.theory.divergence.base import DIVERGENCES, sampled
from tests.drawn import examples
from tests.kit import parse
from tests.rl.monitor.made import exactly, step
from tests.rl.monitor.test_ranks import observed

CONTRACT = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: run}
kernels:
  train: {engine: external}
  infer: {engine: external}
weights: {changes: every_step}
claim: realised
workload: {source: trainer, sampling: {max_new_tokens: 4096}}
slices:
  - {name: depth, split: context.position, at: [16, 64]}
  - {name: start, match: {context.turn: {gte: 2}, context.turn_position: {lt: 3}}}
  - {name: old, match: {outcome.staleness: {gte: 1}}}
  - {name: env, split: labels.env}
  - {name: unsure, match: {context.entropy_nats: {gte: 3.0}}}
gradient: {advantage: {group_size: 8}, score_norm: logit_space, weighting: {mis: [0.5, 2.0]}}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.02}
  - {id: k3, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.05}
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p97, at_most: 0.182}
  - {id: half, metric: le_cam, aggregate: mean, at_most: 0.1}
  - {id: left, metric: weight_gap, at_most: 0.3}
  - {id: bias, metric: policy_gradient_bias, at_most: 2.0, slices: [all]}
observability:
  clauses:
    - {id: finite, metric: valid_ratio, at_least: 0.999}
    - {id: coherent, metric: weight_mean_check}
"""


BARE = CONTRACT[: CONTRACT.index("slices:")]
GRADIENT = "gradient: {advantage: {group_size: 8}, score_norm: logit_space}\n"
TV = "statistical: [{id: tv, metric: tv, aggregate: mean, at_most: 0.02}]"


def contract(more=""):
    return parse(CONTRACT + more, "run.kernelcontract.yaml", engines=["table"])[0]


def bitwise(preset):
    """The contract of a preset whose kernels are declared to compute the same bits."""
    return contract_of(preset, preset, (), bitwise=True)[1]


def test_identical_kernels_hold():
    train, infer, mask = step(np.random.default_rng(0), size=32, width=512, tv=0.0)

    found = Monitor(bitwise("verl-sync")).observe(train, infer, mask, weights=3)

    assert (found.outcome, found.exit_code, found.action) == ("holds", 0, ())
    assert found.verdict.outcome == "holds"
    assert found.metrics["servanda/observed_tokens"] == mask.sum()
    assert found.metrics["servanda/gradient"] == 0.0
    (note,) = (note for note in found.notes if "in every bit" in note)
    assert "could not have shown a disagreement" in note


def test_a_gap_on_one_slice_is_red_there_and_not_elsewhere():
    rng = np.random.default_rng(1)
    tv = np.where(np.arange(512) >= 256, 0.2, 0.002)
    train, infer, mask = step(rng, size=64, width=512, tv=tv)

    found = Monitor("verl-sync").observe(train, infer, mask, weights=0)

    red = {
        c.slice for c in found.verdict.cells if c.outcome == "violated" and c.clause == "gradient"
    }
    assert found.outcome == "violated"
    assert "position>=256" in red
    assert not red & {"position<16", "position=16..64", "position=64..256"}
    assert "in position from 256" in found.cause


def test_a_share_beyond_a_threshold_is_counted_and_not_rounded():
    tail = "{id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.2, slices: [all]}"
    infer = np.full((8, 512), -1.0)
    train = infer - 0.5 * (np.arange(512) < 3)

    found = Monitor(parse(f"{BARE}statistical: [{tail}]", "run.yaml", engines=["table"])[0])
    verdict = found.observe(train, infer, np.ones((8, 512), dtype=bool), weights=0).verdict

    (cell,) = (c for c in verdict.cells if c.clause == "tail")
    assert cell.value == 3 / 512


sizes = st.integers(2, 12)
truths = st.sampled_from([0.0, 0.004, 0.02, 0.05, 0.31, 0.55])


@pytest.mark.slow
@settings(max_examples=examples(10), phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 10_000),
    tv=truths,
    size=sizes,
    turns=st.integers(1, 3),
    prompts=st.integers(0, 20),
    lost=st.sampled_from([0.0, 0.0005, 0.2]),
    wide=st.booleans(),
)
def test_a_monitor_says_nothing_that_the_exact_path_denies(
    seed, tv, size, turns, prompts, lost, wide
):
    """Its intervals contain the exact ones, and no cell is decided the other way."""
    rng = np.random.default_rng(seed)
    dtype = np.float64 if wide else np.float32
    train, infer, mask = step(rng, size, 128, tv, prompts=prompts, turns=turns, dtype=dtype)
    train[rng.random(train.shape) < 0.002] = -np.inf
    infer[rng.random(infer.shape) < lost] = np.nan
    stale = rng.integers(0, 3, size).astype(float)
    stale[0] = np.nan
    given = {
        "labels": {"env": ["a" if b % 2 else "b" for b in range(size)]},
        "staleness": stale,
    }
    monitor = Monitor(contract())

    found = monitor.observe(train, infer, mask, weights=0, **given).verdict
    exact = exactly(monitor, train, infer, mask, **given)

    for mine, theirs in zip(found.cells, exact.cells, strict=True):
        assert (mine.clause, mine.slice, mine.n) == (theirs.clause, theirs.slice, theirs.n)
        assert mine.missing == theirs.missing
        if mine.outcome in ("holds", "violated") and mine.kind == "certificate":
            assert theirs.outcome == mine.outcome
        if mine.interval is not None:
            (low, high), (exact_low, exact_high) = mine.interval, theirs.interval
            hair = 1e-4 * (exact_high - exact_low) + 1e-9  # both ends are found by halving
            assert low <= exact_low + hair
            assert high >= exact_high - hair
        if theirs.value is not None and theirs.value < 100:
            assert mine.value == pytest.approx(theirs.value, rel=5e-3, abs=1e-3)


def test_what_a_step_does_not_tell_is_shown_and_not_counted():
    train, infer, mask = step(np.random.default_rng(0), size=8)
    found = Monitor(contract()).observe(
        train, infer, mask, weights=0, labels={"env": ["a", "b"] * 4}, staleness=[0] * 8
    )

    unsure = [c for c in found.verdict.cells if c.slice == "unsure"]

    assert {c.outcome for c in unsure} == {"not applicable"}
    assert unsure[0].note == "a training step has no context.entropy_nats"


def test_a_slice_by_a_label_that_is_not_there_is_refused():
    train, infer, mask = step(np.random.default_rng(0), size=8)
    with pytest.raises(ContractError, match="splits by label 'env', which no line of the first"):
        Monitor(contract()).observe(train, infer, mask, weights=0)


def test_the_slices_of_the_first_step_are_kept():
    rng = np.random.default_rng(0)
    monitor = Monitor("verl-sync")
    first = monitor.observe(*step(rng, size=32, width=512), weights=0)
    later = monitor.observe(*step(rng, size=4, width=64), weights=1)
    cell = next(c for c in later.verdict.cells if c.slice == "position>=256")

    names = [[(c.clause, c.slice) for c in s.verdict.cells] for s in (first, later)]
    assert names[0] == names[1]
    assert ("gradient", "position>=256") in names[0]
    assert cell.outcome in ("holds", "not applicable")


# four bad inputs


BAD_INPUTS = {
    "no logprob of infer": (
        lambda train, infer, mask: (train, infer * np.nan, mask),
        "present on 0 of",
    ),
    "logprobs above 0": (lambda train, infer, mask: (-train, infer, mask), "logprobs are above 0"),
    "filled with 0": (
        lambda train, infer, mask: (
            np.where(np.arange(16)[:, None] == 3, -2.0, train),
            np.where(np.arange(16)[:, None] == 3, 0.0, infer),
            mask,
        ),
        "missing values that were written as 0",
    ),
}


@pytest.mark.parametrize("columns", [0, 8])
def test_a_step_without_a_trained_token_is_no_answer(columns):
    found = Monitor("trl").observe(*(np.zeros((4, columns)) for _ in range(3)), weights=0)
    assert (found.outcome, found.exit_code, found.cause) == ("inconclusive", 3, "")
    assert "the mask has no trained token" in found.notes


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_is_an_error_and_not_agreement(name):
    spoil, cause = BAD_INPUTS[name]
    monitor = Monitor("trl")
    train, infer, mask = spoil(*step(np.random.default_rng(0)))
    found = monitor.observe(train, infer, mask, weights=0)

    assert (found.outcome, found.exit_code) == ("error", 4)
    assert cause in found.cause
    if "0" not in name:  # nothing is left that could be compared
        assert found.metrics.get("servanda/coverage", 0.0) == 0.0
        assert not {"servanda/gradient", "servanda/abs_log_ratio_nats"} & {*found.metrics}
        assert not found.token_weights.any()
    assert {c.outcome for c in found.verdict.cells} <= {"inconclusive", "not applicable", "error"}
    assert found.token_weights.shape == mask.shape
    assert monitor.observe(*step(np.random.default_rng(0)), weights=1).outcome != "error"


def test_what_the_mask_leaves_out_may_hold_anything():
    train, infer, mask = step(np.random.default_rng(0), size=32, width=512)
    plain = Monitor("verl-sync").observe(train, infer, mask, weights=0)
    for values, odd in ((train, 7.0), (infer, np.inf)):
        values[~mask] = odd
    found = Monitor("verl-sync").observe(train, infer, mask, weights=0)

    assert found.verdict.evidence == plain.verdict.evidence
    assert found.outcome == "holds"


def test_an_infinite_logprob_and_none_in_a_list_count_as_missing():
    train, infer, mask = step(np.random.default_rng(0), size=32, width=512)
    train[0, :4], infer[1, :4] = np.inf, -np.inf
    infer_of_json = infer.tolist()
    infer_of_json[3][0] = None
    found = Monitor("verl-sync").observe(train, infer_of_json, mask, weights=0)

    assert found.metrics["servanda/unusable_tokens"] == 9.0
    assert found.verdict.cells[0].missing == 9
    assert not found.token_weights[[0, 1], :4].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_BT": None}, "step 0 has no mask, so the trained tokens are unknown"),
        ({"mask_BT": np.ones((16, 127))}, "logp_train has shape (16, 128), and the mask (16, 127)"),
        ({"mask_BT": np.ones(128)}, "the mask has shape (128,)"),
        ({"mask_BT": np.full((16, 128), np.nan)}, "the mask is NaN in places"),
        ({"mask_BT": np.full((16, 128), -100)}, "the mask is -100 in places\n  hint: 1 for a"),
        ({"mask_BT": np.ones((128, 16))}, "of the mask, (128, 16): is one of them transposed?"),
        ({"logp_infer_BT": None}, "logp_infer is missing"),
        (
            {"logp_infer_BT": [[0.0], [0.0, 1.0]]},
            "logp_infer is not a rectangular array of numbers",
        ),
        ({"weights": 1.5}, "weights is 1.5"),
        ({"weights": True}, "weights is True"),
        ({"weights": {"lm_head": np.zeros(9)}}, "weights is a dict"),
        ({"groups": ["a"]}, "16 sequences have 1 values of groups"),
        ({"groups": 8}, "groups is a int\n  hint: one value of groups for each sequence"),
        ({"groups": "abcdefghijklmnop"}, "groups is a str"),
        ({"groups": np.zeros((16, 1))}, "a value of groups is a list"),
        ({"labels": {"env": ["a"]}}, "16 sequences have 1 values of env"),
        ({"labels": {"env": None}}, "env is a NoneType"),
        (
            {"labels": ["a"] * 16},
            "labels are a list\n  hint: name -> text of each sequence, such as",
        ),
        ({"staleness": np.zeros(3)}, "staleness has shape (3,), and the mask (16, 128)"),
        ({"staleness": 1}, "of the mask, (16,) or (16, 1) or (16, 128)"),
        ({"staleness": np.full(16, -1)}, "a token is -1 updates old"),
        ({"tokens": np.zeros((16, 9), dtype=int)}, "tokens have shape (16, 9), and the mask"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(change, message):
    train, infer, mask = step(np.random.default_rng(0))
    given = {"logp_train_BT": train, "logp_infer_BT": infer, "mask_BT": mask, "weights": 0}
    with pytest.raises(EvidenceError) as error:
        Monitor("trl").observe(**{**given, **change})
    assert message in str(error.value)


def test_an_unknown_preset_and_what_is_no_contract_are_refused():
    with pytest.raises(ContractError, match="'ver-sync' does not exist"):
        Monitor("ver-sync")
    with pytest.raises(ContractError, match="'fp8' is for serving"):
        Monitor("fp8")
    with pytest.raises(ContractError, match="the contract of a monitor is a dict"):
        Monitor({"metadata": {}})


def test_one_array_on_both_sides_is_an_error_and_not_agreement():
    torch = pytest.importorskip("torch")
    train, _, mask = step(np.random.default_rng(0), size=32, width=512)
    why = "logp_train and logp_infer are one array: the trainer's own logprobs were not computed"
    for both in (train, torch.tensor(train)):
        found = Monitor("verl-sync").observe(both, both, mask, weights=0)
        assert (found.outcome, found.cause) == ("error", why)
    view = Monitor("verl-sync").observe(train, train[:], mask, weights=0)
    copy = Monitor("verl-sync").observe(train, train.copy(), mask, weights=0)
    halves = np.stack([train, train], axis=-1)
    beside = Monitor("verl-sync").observe(halves[..., 0], halves[..., 1], mask, weights=0)
    assert [s.outcome for s in (view, copy, beside)] == ["error"] * 3
    assert copy.cause.startswith("both sides' logprobs are equal in every bit, on all ")
    declared = Monitor("verl-sync", bitwise=True).observe(train, train.copy(), mask, weights=0)
    assert declared.outcome == "holds"
    assert any("could not have shown" in spot.text for spot in declared.verdict.blind_spots)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_sequences_that_were_copied_among_others_are_an_error(share):
    train, infer, mask = step(np.random.default_rng(3), size=64, width=128, tv=0.002)
    copied = np.arange(64) < 64 * share
    found = Monitor("verl-sync").observe(
        np.where(copied[:, None], infer, train), infer, mask, weights=0
    )
    whole = Monitor("verl-sync").observe(train, infer, mask, weights=0)
    declared = Monitor(bitwise("verl-sync")).observe(train, infer, mask, weights=0)

    assert found.outcome == "error"
    assert f"in {copied.sum()} of 64 sequences" in found.cause
    assert whole.outcome != "error"
    assert declared.outcome == "violated"
    assert any("differ do, in 64 of 64 sequences" in note for note in declared.notes)


def test_a_close_pair_that_was_stored_in_bfloat16_is_no_copy():
    """Rounding to 8 bits makes most tokens of close kernels coincide, and no two sides one."""
    torch = pytest.importorskip("torch")
    train, infer, mask = step(np.random.default_rng(4), size=64, width=256, tv=0.0005)
    both = [torch.tensor(logp).bfloat16() for logp in (train, infer)]
    found = Monitor("verl-sync").observe(*both, mask, weights=0)

    equal = (both[0] == both[1]).numpy()[mask.astype(bool)].mean()
    assert equal > 0.5
    assert found.outcome == "holds", found.cause


def test_agreement_at_float32_rounding_is_said():
    _, infer, mask = step(np.random.default_rng(5), size=32, width=256)
    noise = np.random.default_rng(6).normal(0, 5e-7, infer.shape)
    found = Monitor("verl-sync").observe(infer + noise, infer, mask, weights=0)

    assert found.outcome == "holds"
    (note,) = found.notes
    assert "float32 rounding" in note and note.endswith("both sides look like one program")


def test_a_sampler_that_repeats_itself_is_an_error():
    """Eight equal answers of each prompt are one draw; an answer that is certain may repeat."""
    rng = np.random.default_rng(7)
    infer = np.repeat(-rng.exponential(1.0, (8, 64)), 8, axis=0)
    train = infer + rng.normal(0, 0.01, infer.shape)
    groups, mask = np.repeat(np.arange(8), 8), np.ones(infer.shape)
    found = Monitor("verl-sync").observe(train, infer, mask, groups=groups, weights=0)
    own = Monitor("verl-sync").observe(
        train, rng.permuted(infer, axis=1), mask, groups=groups, weights=0
    )
    sure = infer / 100
    certain = Monitor("verl-sync").observe(
        sure + rng.normal(0, 1e-4, infer.shape), sure, mask, groups=groups, weights=0
    )

    assert found.outcome == "error"
    assert "56 of 64 sequences repeat" in found.cause and "repeats itself" in found.cause
    assert "repeat" not in own.cause
    assert certain.outcome == "holds"
    for nats, outcome in ((14.01, "error"), (13.99, "holds")):  # one in a million
        likely = infer * (nats / -infer.sum(axis=1, keepdims=True))
        seen = Monitor("verl-sync").observe(
            likely + rng.normal(0, 1e-4, infer.shape), likely, mask, groups=groups, weights=0
        )
        assert seen.outcome == outcome


def test_a_guard_that_failed_is_the_cause():
    train, infer, mask = step(np.random.default_rng(0), size=32, width=512)
    infer[:8] = np.nan
    found = Monitor("trl").observe(train, infer, mask, weights=0)

    known, all_ = int(mask[8:].sum()), int(mask.sum())
    assert found.outcome == "error"
    assert found.cause == (
        f"both logprobs present on {known:,} of {all_:,} trained tokens "
        f"(the trainer's on {all_:,}, the sampler's on {known:,}) (first: sequence 0)"
    )


def test_labels_that_no_slice_shows_are_noted():
    given = step(np.random.default_rng(0), size=32, width=512)
    monitor = Monitor("verl-sync")
    first = monitor.observe(*given, weights=0, labels={"task": ["x"] * 32, "env": ["a", "b"] * 16})
    later = monitor.observe(*given, weights=1, labels={"env": ["a", "c"] * 16})
    last = monitor.observe(*given, weights=2, labels={"env": ["a", "c"] * 16})

    odd = "label 'task' has no slice; slices are by env, replica, rank"
    new = "'c' of label 'env' first occurred after the first step, so it has no slice"
    assert first.notes == (odd,)
    assert later.notes == last.notes == (odd, new)


def test_a_step_before_the_last_is_noted():
    given = step(np.random.default_rng(0))
    monitor = Monitor("verl-sync")
    found = [monitor.observe(*given, weights=weights) for weights in (30, 30, 3, 4)]

    note = "step 3 came after step 30: the records from that step on are discarded"
    assert [s.notes for s in found] == [(), (), (note,), (note,)]


@pytest.mark.parametrize("weighting", ["", "{tis: 1.5}", "{mis: [0.9, 1.1]}"])
def test_the_contributions_are_what_the_weighting_leaves_by_the_sign_of_the_advantage(weighting):
    rng = np.random.default_rng(0)
    train, infer, mask = step(rng, tv=0.2, dtype=np.float64)
    infer[0, :3] = np.nan
    advantage = rng.normal(size=16)
    advantage[1] = np.nan
    given = f", weighting: {weighting}" if weighting else ""
    frame = GRADIENT.replace("}\n", f"{given}}}\n")
    own = parse(BARE + frame + TV, "run.kernelcontract.yaml", engines=["table"])[0]
    found = Monitor(own).observe(train, infer, mask, advantages=advantage, weights=0)

    psi = {
        "": lambda w: w**0,
        "{tis: 1.5}": lambda w: min(w, 1.5),
        "{mis: [0.9, 1.1]}": lambda w: w * (0.9 <= w <= 1.1),
    }[weighting]
    sums, n = {1: 0.0, -1: 0.0}, 0
    for b, t in zip(*np.nonzero(mask), strict=True):
        if not np.isnan([advantage[b], infer[b, t]]).any():
            w = math.exp(train[b, t] - infer[b, t])
            sums[int(np.sign(advantage[b]))] += (psi(w) - w) * advantage[b]
            n += 1
    for name, sign in (("positive", 1), ("negative", -1)):
        measured = found.metrics[f"servanda/contribution/{name}"]
        assert measured == pytest.approx(sums[sign] / n, abs=1e-12)


def test_without_advantages_or_with_infinite_weights_there_is_no_contribution():
    train, infer, mask = step(np.random.default_rng(0), dtype=np.float64)
    without = Monitor("trl").observe(train, infer, mask, weights=0)
    infer[0, 0] = -1e4
    mask[0, 0] = True
    with_one = Monitor("trl").observe(train, infer, mask, advantages=[1.0] * 16, weights=0)

    named = [[n for n in s.metrics if "contribution" in n] for s in (without, with_one)]
    assert named == [[], ["servanda/contribution/negative"]]


@pytest.mark.slow
def test_a_step_at_its_limits_is_decided_no_more_often_than_promised():
    """Truth = limit: mean TV, a share of tokens, and a weighting whose jump half of them lie at."""
    of_tv = Monitor(parse(BARE + TV, "run.kernelcontract.yaml", engines=["table"])[0])
    tail = "statistical: [{id: tail, metric: abs_log_ratio_nats, aggregate: p97, at_most: 0.182}]"
    of_tail = Monitor(parse(BARE + tail, "run.kernelcontract.yaml", engines=["table"])[0])
    left = "statistical: [{id: left, metric: weight_gap, at_most: 0.5}]"
    jumps = BARE + GRADIENT.replace("}\n", ", weighting: {mis: [0.5, 2.0]}}\n") + left
    of_jump = Monitor(parse(jumps, "run.kernelcontract.yaml", engines=["table"])[0])
    decided = {"tv": 0, "tail": 0, "jump": 0}
    steps = 80
    for weights in range(steps):
        rng = np.random.default_rng([7, weights])
        at_tv = step(rng, 16, 128, 0.02)
        infer = rng.normal(-2.0, 0.1, (16, 128)).astype(np.float32)
        far = np.where(rng.random(infer.shape) < 0.03, rng.choice([-0.2, 0.19], infer.shape), 0.0)
        far += rng.normal(0.0, 1e-3, infer.shape)  # no token is a copy of the other side's
        at_tail = (infer + far, infer, np.ones(infer.shape))
        # w = 2 on one token in four, 2/3 on the others: the gap is 1/2 where 2 is outside
        quarter = rng.random(infer.shape) < 0.25
        at_jump = (np.log(np.full(infer.shape, 0.5)), np.log(np.where(quarter, 0.25, 0.75)), infer)
        at_jump = (*(a.astype(np.float32) for a in at_jump[:2]), np.ones(infer.shape))
        for name, monitor, arrays in (
            ("tv", of_tv, at_tv),
            ("tail", of_tail, at_tail),
            ("jump", of_jump, at_jump),
        ):
            decided[name] += monitor.observe(*arrays, weights=weights).outcome != "inconclusive"

    assert max(decided.values()) <= 0.05 * steps


def test_lists_and_tensors_read_as_arrays_do():
    torch = pytest.importorskip("torch")
    train, infer, mask = step(np.random.default_rng(0), size=4)
    plain = Monitor("trl").observe(train, infer, mask, weights=0)
    of_torch = Monitor("trl").observe(
        torch.tensor(train, requires_grad=True), torch.tensor(infer), torch.tensor(mask), weights=0
    )
    of_lists = Monitor("trl").observe(train.tolist(), infer.tolist(), mask.tolist(), weights=0)

    assert of_torch.verdict.evidence == plain.verdict.evidence
    assert of_lists.metrics == pytest.approx(plain.metrics, rel=1e-3, abs=1e-9)


def test_half_precision_tensors_are_read_exactly():
    torch = pytest.importorskip("torch")
    train, infer, mask = step(np.random.default_rng(0), size=4)
    halves = [torch.tensor(values).to(torch.bfloat16) for values in (train, infer)]

    found = Monitor("trl").observe(*halves, torch.tensor(mask), weights=0)
    plain = Monitor("trl").observe(*(h.float().numpy() for h in halves), mask, weights=0)

    assert found.verdict.evidence == plain.verdict.evidence


def test_a_contract_of_real_kernels_is_asked_as_of_a_trainer(tmp_path):
    """Its engines, prompts and population claim are a comparison's; the limits stay."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    text = CONTRACT.replace("engine: external", "engine: table, model: t.json")
    text = text.replace("source: trainer", "prompts: p.jsonl").replace("realised", "population")
    text = text.replace("weights: {changes: every_step}\n", "")
    (tmp_path / "t.json").write_text("{}")
    path = tmp_path / "run.kernelcontract.yaml"
    path.write_text(text)
    monitor = Monitor(path)

    assert monitor.contract.claim == "realised"
    assert monitor.contract.kernels.train.engine == "external"
    train, infer, mask = step(np.random.default_rng(0), size=8, tv=0.3)
    found = monitor.observe(train, infer, mask, weights=0, labels={"env": ["a", "b"] * 4})
    assert found.outcome == "violated"


def test_metrics_are_plain_numbers():
    train, infer, mask = step(np.random.default_rng(0))
    found = Monitor("trl").observe(train, infer, mask, weights=0, staleness=np.arange(16) % 2)

    assert all(type(value) is float for value in found.metrics.values())
    json.dumps(dict(found.metrics), allow_nan=False)
    assert found.metrics["servanda/staleness/max"] == 1.0


def test_the_metrics_that_a_step_can_answer_know_nothing_but_the_log_ratio():
    rng = np.random.default_rng(0)
    train, infer = -rng.exponential(1, 50), -rng.exponential(1, 50)
    sides = {"logp_train": train, "logp_infer": infer}
    alone = {"logp_train": train - infer, "logp_infer": np.zeros(50)}
    for name in RATIO_METRICS:
        assert sampled(name, alone) == pytest.approx(sampled(name, sides))
    others = {n for n, d in DIVERGENCES.items() if "logprob" in d.forms and not d.outcome}
    assert others == {*RATIO_METRICS}


def test_the_monitor_costs_numpy_and_the_language_of_contracts():
    code = (
        "import sys; from servanda.rl import Monitor; Monitor('trl'); "
        "print([m for m in ('torch', 'scipy', 'pyarrow', 'click') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_token_that_train_gives_no_mass_is_evidence_and_no_number_of_nats(tmp_path):
    train, infer, mask = step(np.random.default_rng(0), size=32, width=512, tv=0.0)
    train[0, 0] = -np.inf
    path = tmp_path / "state.jsonl"
    found = Monitor("verl-sync", state=path).observe(train, infer, mask, weights=0)

    assert found.metrics["servanda/coverage"] == 1.0
    assert found.metrics["servanda/abs_log_ratio_nats"] == 0.0
    assert found.metrics["servanda/gradient"] == pytest.approx(1 / mask.sum(), rel=1e-3)
    # one such token may be noise, or not: it is told, and the step does not hold
    assert json.loads(path.read_text())["outcome"] == "inconclusive"
    assert found.verdict.cells[-1].note.startswith("too few to tell from noise: 1 of 32 responses")


def test_a_step_that_is_too_small_says_how_many_tokens_it_needs():
    """And a step of that many is decided, by the same kernels."""

    def observed(sequences):
        rng = np.random.default_rng(3)
        shape = (sequences, 12)
        infer_BT = -rng.exponential(1.0, shape)
        train_BT = np.minimum(infer_BT + rng.normal(0, 0.005, shape), 0)
        return Monitor("trl").observe(
            train_BT, infer_BT, np.ones(shape), groups=[b // 4 for b in range(sequences)], weights=0
        )

    small = observed(12)
    assert small.outcome == "inconclusive"
    assert small.needs_tokens > small.verdict.tokens == 144
    said = f"a step needs about {small.needs_tokens:,} tokens to be decided, and this one has 144"
    assert str(small).splitlines()[-1] == said

    enough = observed(4 * math.ceil(small.needs_tokens / 48))
    assert (enough.outcome, enough.needs_tokens) == ("holds", None)
    assert enough.verdict.tokens <= small.needs_tokens + 48


def test_the_worst_cell_of_a_step_is_the_red_one_and_not_the_largest():
    rng = np.random.default_rng(4)
    infer_BT = -rng.exponential(1.0, (64, 64))
    noise_BT = rng.normal(0, np.where(np.arange(64) < 16, 0.4, 0.002)[:, None], (64, 64))
    step = Monitor("trl").observe(
        np.minimum(infer_BT + noise_BT, 0),
        infer_BT,
        np.ones((64, 64)),
        labels={"env": ["code" if b < 16 else "prose" for b in range(64)]},
        weights=0,
    )

    red = [c for c in step.verdict.cells if c.enforced and c.outcome == "violated"]
    assert step.worst in red
    assert step.worst.value / step.worst.limit == max(c.value / c.limit for c in red)


@pytest.mark.parametrize("above", [0.02, 0.1])
def test_weights_that_average_above_1_are_an_error_as_in_a_dump(tmp_path, above):
    """A trainer that is too high on every token has no total variation: no other check sees it."""
    rng = np.random.default_rng(5)
    infer = np.log(rng.uniform(0.05, 0.6, (32, 256)))
    train, mask = infer + rng.normal(above, 0.02, infer.shape), np.ones(infer.shape, bool)
    token = rng.integers(0, 99, infer.shape)

    found = Monitor("verl-sync").observe(train, infer, mask)

    assert (found.exit_code, found.cause) == (4, IMPOSSIBLE)
    names = ("logp_train_BT", "logp_infer_BT", "mask_BT")
    halves = [[part[at] for part in (train, infer, mask)] for at in (slice(16), slice(16, 32))]
    shards = [lambda w, h=h: {**dict(zip(names, h, strict=True)), "weights": w} for h in halves]
    assert {told[0].cause for told in observed(shards)} == {IMPOSSIBLE}
    monitor = Monitor("verl-sync", dump=tmp_path, sample=1.0)
    monitor.observe(train, infer, mask, tokens=token, weights=0)
    verdict = judge_dump(DumpOptions(tmp_path)).verdict
    assert verdict.exit_code == 4 and any(IMPOSSIBLE in cell.note for cell in verdict.cells)


def shifted(train, infer, mask, rng):
    return np.roll(train, 1, axis=1), infer, mask


def repeated_values(train, infer, mask, rng):
    gone = rng.random(infer.shape) < 0.2
    gone[:, 0] = False
    for column in (train, infer):
        for t in range(1, column.shape[1]):
            column[:, t] = np.where(gone[:, t], column[:, t - 1], column[:, t])
    return train, infer, mask


def zeros_on_both_sides(train, infer, mask, rng):
    mask[:, -60:] = True
    train[:, -60:] = infer[:, -60:] = 0.0
    return train, infer, mask


def filtered_by_the_mismatch(train, infer, mask, rng):
    return train, infer, mask & (np.abs(train - infer) < 0.03)


def copied_from_one_side(train, infer, mask, rng):
    train[:24] = infer[:24]
    return train, infer, mask


LIES = [
    shifted,
    repeated_values,
    zeros_on_both_sides,
    filtered_by_the_mismatch,
    copied_from_one_side,
]


@pytest.mark.parametrize("lie", [None, *LIES], ids=lambda lie: lie.__name__ if lie else "healthy")
def test_data_that_a_dump_refuses_is_an_error_of_the_step(tmp_path, lie):
    rng = np.random.default_rng(11)
    infer = np.log(rng.uniform(0.02, 0.7, (64, 128)))
    train = np.minimum(infer + rng.normal(0, 0.02, infer.shape), -1e-4)
    mask = np.ones(infer.shape, bool)
    if lie is not None:
        train, infer, mask = lie(train, infer, mask, rng)
    monitor = Monitor("verl-sync", dump=tmp_path, sample=1.0)
    token = rng.integers(0, 5000, infer.shape)

    step = monitor.observe(train, infer, mask, tokens=token, weights=0)
    offline = judge_dump(DumpOptions(tmp_path)).verdict

    assert (step.exit_code == 4, offline.exit_code == 4) == (lie is not None,) * 2
    if lie is not None:
        assert step.outcome == "error" and step.cause


def test_weights_above_1_at_the_first_tokens_of_later_turns_alone_are_no_error():
    rng = np.random.default_rng(6)
    infer = np.log(rng.uniform(0.01, 0.1, (64, 200)))
    mask = np.ones(infer.shape, bool)
    mask[:, 40::50] = False  # a tool's answer of one token
    train = infer + rng.normal(0, 0.01, infer.shape)
    for start in range(41, 200, 50):
        train[:, start : start + 3] += 2.0

    assert Monitor("verl-sync").observe(train, infer, mask).cause != IMPOSSIBLE
    train[:, :30] += 0.5
    assert Monitor("verl-sync").observe(train, infer, mask).cause == IMPOSSIBLE


@pytest.mark.parametrize("odd", [0.5, 2, 97])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused_with_the_number(odd):
    train, infer, mask = step(np.random.default_rng(5))
    given = mask.astype(np.float64)
    given[3, np.flatnonzero(mask[3])[0]] = odd
    with pytest.raises(EvidenceError, match=f"the mask is {odd:g} in places") as error:
        Monitor("verl-sync").observe(train, infer, given, weights=0)
    assert "loss_weights=" in error.value.problems[0].hint


@pytest.mark.parametrize("turns", [1, 3])
def test_a_transposed_batch_is_noted_with_its_shape_and_no_other_is(turns):
    train, infer, mask = step(np.random.default_rng(6), size=48, width=96, turns=turns, prompts=4)
    right = Monitor("verl-sync").observe(train, infer, mask, weights=0)
    wrong = Monitor("verl-sync").observe(train.T, infer.T, mask.T, weights=0)
    assert not any("transposed" in note for note in right.notes)
    assert any("shape [96, 48], read as 96 sequences of 48" in note for note in wrong.notes)
