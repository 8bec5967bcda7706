# A dump to a verdict: rollouts of two known kernels, whose total variation is known.

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.contract.model import WHOLE
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.verdict import judge
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.report import render
from servanda.rl.dumps.statistics import DumpStatistics
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.blocks import blocks, paired, taken
from servanda.rl.steps.contract import Counts, rules_of
from tests.drawn import examples
from tests.rl.dumps import made


def judged(folder, **asked):
    return judge_dump(DumpOptions(folder, **asked))


def cell(answer, clause, slice_=WHOLE):
    return next(c for c in answer.verdict.cells if (c.clause, c.slice) == (clause, slice_))


def red(answer):
    """Of the whole dump; what single steps say stands beside it."""
    return [
        (c.clause, c.slice)
        for c in answer.verdict.cells
        if c.enforced and c.outcome == "violated" and c.steps is None
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tv", [0.002, 0.01])
def test_a_healthy_dump_holds_and_its_interval_has_the_truth(tmp_path, tv, seed):
    answer = judged(made.write(tmp_path, seed, tv=tv))

    assert answer.verdict.exit_code == 0
    low, high = cell(answer, "gradient").interval
    assert low <= tv <= high
    assert answer.preset == "verl-sync"
    assert "HOLDS" in render(answer)


@pytest.mark.slow
def test_one_bad_slice_is_red_alone_and_named_since_its_step(tmp_path):
    made.write(tmp_path, steps=range(1, 25), n=32, turns=4, tv=made.bad_starts)

    answer = judged(tmp_path)

    assert red(answer) == [("gradient", "start-3"), ("gradient", "start-4-on")]
    assert set(answer.since.values()) == {14}
    assert answer.verdict.exit_code == 1
    text = render(answer)
    assert "first 3 tokens of turn 3" in text and "since step 14" in text
    assert "or tokenised differently; 100 % of the excess over the other tokens" in text
    assert "match: {context.turn_position: {lt: 3}, context.turn: {gte: 3}}}" in text
    # 2 x 3 of 4 x 32 tokens; all others have .005
    assert answer.share == pytest.approx(6 / 128)
    assert answer.left == pytest.approx(0.005, abs=0.0005)
    assert "Without them the mean total variation is 0.005" in text


def test_slices_that_are_red_for_sharing_tokens_are_not_left_out(tmp_path):
    made.write(tmp_path, turns=3, tv=lambda _s, _q, turn, i: 0.4 if turn > 1 and i < 3 else 0.004)

    answer = judged(tmp_path)

    assert ("gradient", "turn-2") in red(answer)
    assert answer.out == ("start-2", "start-3-on")
    assert answer.share == pytest.approx(2 * 3 / (3 * 32))
    text = render(answer)
    assert "those of first 3 tokens of turn 2, first 3 tokens of turn 3 and later;" in text
    assert "the other red slices share tokens with them" in text


def test_where_all_is_off_nothing_is_to_be_left_out(tmp_path):
    answer = judged(made.write(tmp_path, turns=3, tv=0.06))

    text = render(answer)
    assert answer.share > 0.9
    assert "VIOLATED on the whole: no slice explains it." in text
    assert "--mask" not in text


def test_a_bad_replica_is_named(tmp_path):
    made.write(
        tmp_path,
        tv=lambda _, s, *__: 0.08 if s % 4 == 3 else 0.002,
        labels={"replica": lambda s: f"r{s % 4}"},
    )

    answer = judged(tmp_path)

    assert ("gradient", "replica-r3") in red(answer)
    assert answer.verdict.advice.cause.startswith("replica r3: its weights")


def test_staleness_is_told_apart_from_the_kernel(tmp_path):
    made.write(
        tmp_path,
        tv=lambda _, s, *__: [0.002, 0.01, 0.2][s % 3],
        staleness=lambda s: s % 3,
    )

    answer = judged(tmp_path)

    assert answer.preset == "verl-async"
    assert ("gradient", "all") in red(answer)
    adds = {c.slice: c.value for c in answer.verdict.cells if c.clause == "adds"}
    assert adds["stale-2-on"] > 10 * adds["stale-1"] > 10 * adds["stale-0"]
    assert answer.verdict.advice.cause.startswith(
        "staleness: tokens sampled by older weights, in age of the weights 2; "
    )
    assert "kernel mismatch and staleness are mixed: tokens are up to 2 updates old" in render(
        answer
    )


def test_a_small_dump_is_inconclusive(tmp_path):
    answer = judged(made.write(tmp_path, steps=[1], n=2, turn_tokens=8))

    assert answer.verdict.exit_code == 3
    assert "INCONCLUSIVE: too few tokens for a decision" in render(answer)
    assert "Likely cause" not in render(answer)  # nothing is beyond a limit


def test_a_growing_drift_is_told_and_is_no_reason_for_exit_1(tmp_path):
    made.write(tmp_path, steps=range(1, 13), tv=lambda step, *_: 0.0005 * step)

    answer = judged(tmp_path)

    assert answer.verdict.exit_code == 0
    assert answer.trend.ratio == pytest.approx(10 / 3, rel=0.1)
    assert "it has doubled" in render(answer)


def edited(folder, change, **how):
    """A dump whose rollouts were changed before they were written."""
    rng, writer = np.random.default_rng(3), Writer(folder)
    for step in range(1, 7):
        made.store(writer, change(made.rollouts(rng, step, 24, **how)))
    return folder


def test_a_side_that_is_nan_everywhere_is_an_error(tmp_path):
    edited(tmp_path, lambda r: dataclasses.replace(r, logp_train_N=r.logp_train_N * np.nan))

    with pytest.raises(
        EvidenceError, match="none of its trained tokens has both logprobs"
    ) as caught:
        judged(tmp_path)
    assert caught.value.exit_code == 4


def test_a_dump_with_some_sequences_zero_filled_gets_no_verdict(tmp_path):
    def zeroed(r):
        train_N = r.logp_train_N.copy()
        train_N[r.sequence_N == 0] = 0.0
        return dataclasses.replace(r, logp_train_N=train_N)

    answer = judged(edited(tmp_path, zeroed))

    assert answer.verdict.exit_code == 4
    assert all(c.outcome in ("inconclusive", "not applicable") for c in answer.verdict.cells)
    assert "UNSOUND: 6 sequences rejected: the trainer's logprobs are all zero" in render(answer)


def test_a_shifted_copy_gets_no_verdict(tmp_path):
    def shifted(r):
        return dataclasses.replace(r, logp_infer_N=np.roll(r.logp_infer_N, 1))

    answer = judged(edited(tmp_path, shifted))

    assert answer.verdict.exit_code == 4
    text = render(answer)
    assert "shifted by +1 against the trainer's" in text
    assert "no answer: the data cannot be trusted" in text
    assert text.split("\n")[-1].startswith("exit 4")


def test_scattered_zero_fills_get_no_verdict(tmp_path):
    def zeroed(r):
        train_N, infer_N = r.logp_train_N * 2, r.logp_infer_N * 2  # below -1 nat
        train_N[::20] = 0.0
        return dataclasses.replace(r, logp_train_N=train_N, logp_infer_N=infer_N)

    answer = judged(edited(tmp_path, zeroed))

    assert answer.verdict.exit_code == 4
    assert any(t.level == "error" and "exactly 0" in t.text for t in answer.lines)


def test_missing_logprobs_are_no_pass(tmp_path):
    def holed(r):
        train_N = r.logp_train_N.copy()
        train_N[::50] = np.nan
        return dataclasses.replace(r, logp_train_N=train_N)

    answer = judged(edited(tmp_path, holed))

    assert answer.verdict.exit_code == 4
    assert "UNSOUND" in render(answer)


def test_an_empty_folder_is_no_dump(tmp_path):
    with pytest.raises(ContractError, match="holds no dump"):
        judged(tmp_path)


def test_steps_that_are_not_there_are_an_error(tmp_path):
    made.write(tmp_path, steps=[3, 4])
    with pytest.raises(MeasurementError) as caught:
        judged(tmp_path, steps=(10, None))
    assert str(caught.value).endswith("lies in 10:\n  hint: its steps are 3 to 4")


def test_only_the_asked_steps_are_judged(tmp_path):
    made.write(tmp_path, tv=lambda step, *_: 0.002 if step <= 6 else 0.08)

    assert judged(tmp_path, steps=(None, 6)).verdict.exit_code == 0
    assert judged(tmp_path).verdict.exit_code == 1


def test_a_serving_preset_is_refused(tmp_path):
    made.write(tmp_path, steps=[1])
    with pytest.raises(ContractError, match="'fp8' is for serving"):
        judged(tmp_path, preset="fp8")


def test_masks_name_the_tokens_of_red_slices(tmp_path):
    made.write(tmp_path / "dump", steps=range(10, 18), n=32, turns=4, tv=made.bad_starts)

    answer = judged(tmp_path / "dump", mask=tmp_path / "masks")

    assert answer.masked == 6 * 32 * 8
    with np.load(tmp_path / "masks" / "step_14.npz") as masks:
        assert len(masks["source"]) == 32
        own = masks["token"][masks["sequence"] == 5].tolist()
    turn_3 = made.PROMPT + 2 * (32 + made.TOOL)
    turn_4 = turn_3 + 32 + made.TOOL
    assert own == [turn_3 + i for i in range(3)] + [turn_4 + i for i in range(3)]


# streaming


def weighed(chunks):
    counts = Counts()
    for block in blocks(chunks):
        counts.add(paired(block, 0))
    rules, _ = rules_of(counts, 100)
    _, contract = of_run.contract_of("trl", "made", rules)
    statistics = DumpStatistics(contract, "made")
    for block in blocks(chunks):
        statistics.add_labels(paired(block, 0))
    for block in blocks(chunks, 512):
        statistics.add(block)
    return statistics


def whole():
    rng = np.random.default_rng(5)
    how = {"turns": 2, "labels": {"env": lambda s: f"e{s % 2}"}}
    return [made.rollouts(rng, step, 12, **how) for step in (1, 2)]


WHOLE_DUMP = whole()
WEIGHED = weighed(WHOLE_DUMP)


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(st.lists(st.integers(1, 11), max_size=4, unique=True))
def test_how_a_reader_cuts_its_chunks_changes_no_number(cuts):
    ends = [0, *sorted(cuts), 12]
    chunks = [
        taken(rollouts, first, end)
        for rollouts in WHOLE_DUMP
        for first, end in itertools.pairwise(ends)
    ]

    (plan, evidence), (_, first) = weighed(chunks).evidence(), WEIGHED.evidence()

    assert evidence.digest == first.digest
    assert evidence.key.corpus == first.key.corpus
    assert judge(plan, evidence) == judge(plan, first)


def test_a_label_that_the_head_did_not_have_is_judged_with_the_whole():
    late = made.rollouts(np.random.default_rng(6), 3, 12, labels={"env": lambda _: "late"})
    statistics = weighed(WHOLE_DUMP)
    cells = [c.name for c in statistics.evidence()[0].cells]

    for block in blocks([late]):
        statistics.add(block)

    plan, evidence = statistics.evidence()
    assert [c.name for c in plan.cells] == cells
    assert judge(plan, evidence).tokens == statistics.trained


def test_evidence_does_not_grow_with_the_rounds():
    assert len(WEIGHED.evidence()[1].rounds) == 1


def test_another_number_in_the_dump_is_another_key():
    changed = WHOLE_DUMP[0].logp_train_N.copy()
    at = int(np.flatnonzero(WHOLE_DUMP[0].mask_N)[0])
    changed[at] -= 1e-9
    other = weighed([dataclasses.replace(WHOLE_DUMP[0], logp_train_N=changed), WHOLE_DUMP[1]])
    assert other.evidence()[1].key.corpus != WEIGHED.evidence()[1].key.corpus


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_healthy_dumps_are_never_red(seed):
    """The same law on both sides but for noise far below the limit: 100 dumps, 0 red."""
    rng = np.random.default_rng(1000 + seed)
    chunks = [made.rollouts(rng, step, 8, turns=3, turn_tokens=12) for step in range(1, 4)]
    plan, evidence = weighed(chunks).evidence()
    cells = judge(plan, evidence, intervals=False).cells
    assert not [c for c in cells if c.enforced and c.outcome == "violated"]
