# Soundness: each fault that was put into a dump is found, and by its own check alone.

import math
from dataclasses import replace

import numpy as np
import pytest

from servanda.rl.dumps.checks import CHECKS, Soundness
from servanda.rl.dumps.checks.copies import Copies
from servanda.rl.dumps.checks.pairs import LAGS, MeanWeight, correlation
from servanda.theory.sampling import Sampling, draw, processed_logprobs
from servanda.traces.rollouts import Rollouts
from tests.rl.dumps.checks.made import rollouts, shifted

CLEAN = rollouts()


def found(*chunks):
    soundness = Soundness()
    for chunk in chunks:
        soundness.add(chunk)
    return {finding.check: finding for finding in soundness.findings()}


def others(findings, *names):
    """States of all checks but those."""
    return {f.state for name, f in findings.items() if name not in names}


QUIET = {"loss", "lag", "routes", "replay", "versions", "piles", "filled", "draws", "outcome",
         "siblings", "left_out", "groups", "updates"}  # fmt: skip


def test_a_clean_dump_has_nothing_to_be_said_against_it():
    findings = found(CLEAN)
    none = QUIET  # it records nothing of them, or they have nothing to say
    assert sorted(findings) == sorted({*CHECKS} - none)
    assert [*findings][:4] == ["values", "coverage", "zeros", "line_up"]
    assert {f.state for f in findings.values()} == {"ok"}
    assert findings["coverage"].text == "both logprobs present on 100.00 % of 1,000 trained tokens"
    assert findings["zeros"].text == "no missing logprob was written as 0"
    assert findings["line_up"].text.startswith("rows line up (correlation 0.99")


def test_chunks_say_what_the_whole_says():
    parts = [rollouts(seed=s, step=s) for s in range(3)]
    once = Soundness()
    for part in parts:
        once.add(part)
    whole = Rollouts(
        1,
        *(
            np.concatenate([getattr(p, c) for p in parts])
            for c in ("length_S", "token_N", "mask_N", "logp_train_N", "logp_infer_N")
        ),
        group_S=sum((p.group_S for p in parts), ()),
        source_S=sum((p.source_S for p in parts), ()),
    )
    for a, b in zip(once.findings(), found(whole).values(), strict=True):
        assert a.text == b.text
        assert a.numbers == pytest.approx(b.numbers, rel=1e-9)


@pytest.mark.parametrize(
    ("missing", "state"), [(0, "ok"), (1, "ok"), (5, "warning"), (50, "unsound")]
)
def test_coverage_is_the_share_of_trained_tokens_with_both_logprobs(missing, state):
    many = rollouts(sequences=400)
    holes = np.flatnonzero(many.mask_N)[:missing]
    infer = many.logp_infer_N.copy()
    infer[holes] = np.nan
    finding = found(replace(many, logp_infer_N=infer))["coverage"]
    assert finding.state == state
    assert finding.numbers["both"] == 20_000 - missing
    assert finding.first == ("dump.jsonl:1" if missing else "")


def test_a_filled_zero_is_told_from_a_certain_token():
    infer = CLEAN.logp_infer_N.copy()
    sure = np.flatnonzero(CLEAN.mask_N & (CLEAN.logp_train_N > -0.5))
    infer[sure[:5]] = 0.0
    assert found(replace(CLEAN, logp_infer_N=infer))["zeros"].state == "ok"
    wide = np.flatnonzero(CLEAN.mask_N & (CLEAN.logp_train_N < -2))
    infer[wide[:5]] = 0.0
    finding = found(replace(CLEAN, logp_infer_N=infer))["zeros"]
    assert finding.state == "unsound"
    assert finding.numbers == {"tokens": 5, "train": 0, "infer": 5}


@pytest.mark.parametrize("lag", [lag for lag in LAGS if lag])
def test_a_shifted_side_is_unsound_and_its_lag_named(lag):
    finding = found(replace(CLEAN, logp_infer_N=shifted(CLEAN.logp_infer_N, lag)))["line_up"]
    assert finding.state == "unsound"
    assert f"shifted by {lag:+d} against the trainer's" in finding.text


def test_correlations_of_lags_are_those_of_pairs_taken_one_by_one():
    mask = np.random.default_rng(3).random(1200) < 0.7
    chunk = replace(CLEAN, mask_N=mask)
    findings = found(chunk)
    for lag in LAGS:
        pairs = []
        for s in range(len(chunk)):
            for i in range(60):
                j = i + lag
                if 0 <= j < 60 and mask[s * 60 + i] and mask[s * 60 + j]:
                    pairs.append((chunk.logp_train_N[s * 60 + i], chunk.logp_infer_N[s * 60 + j]))
        expected = np.corrcoef(np.array(pairs).T)[0, 1]
        assert findings["line_up"].numbers[f"lag{lag:+d}"] == pytest.approx(expected, rel=1e-9)


def test_shifted_sequences_among_others_are_seen():
    many = rollouts(sequences=40, tokens=200)
    infer = many.logp_infer_N.copy()
    infer[:1000] = shifted(infer[:1000], 1)  # five of forty: the whole still lines up
    finding = found(replace(many, logp_infer_N=infer))["line_up"]
    assert finding.state == "unsound"
    assert finding.text.startswith("5 of 40 long sequences are shifted")
    assert finding.first == "dump.jsonl:1"


def test_sides_of_other_tokens_line_up_at_no_lag():
    many, other = rollouts(sequences=200, tokens=200), rollouts(sequences=200, tokens=200, seed=9)
    finding = found(replace(many, logp_infer_N=other.logp_infer_N))["line_up"]
    assert finding.state == "unsound"
    assert "line up at no lag" in finding.text


def test_few_pairs_and_constant_logprobs_cannot_be_told():
    few = found(rollouts(sequences=2))["line_up"]
    assert (few.state, few.text) == (
        "warning",
        "96 pairs of tokens are too few to check that rows line up",
    )
    flat = found(replace(CLEAN, logp_infer_N=np.full(1200, -1.0)))["line_up"]
    assert flat.state == "warning"
    assert "a side are equal" in flat.text
    assert math.isnan(correlation(np.array([4.0, 4.0, 8.0, 4.0, 16.0, 8.0])))


def dump_of(train, infer, real, sequences=40):
    """Draws of a known distribution, with what each side says of them."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(sequences * 50, 60)) * 2
    tokens = draw(processed_logprobs(logits, real), rng.random(len(logits)))
    at = np.arange(len(logits))
    return rollouts(
        sequences=sequences,
        tokens=50,
        prompt=0,
        token_N=tokens,
        logp_train_N=processed_logprobs(logits, train)[at, tokens],
        logp_infer_N=processed_logprobs(logits, infer)[at, tokens],
    )


def test_raw_logprobs_of_processed_draws_are_unsound():
    cold, raw = Sampling(temperature=0.6), Sampling()
    finding = found(dump_of(cold, raw, cold))["coherence"]
    assert finding.state == "unsound"
    assert "raw, or of other tokens" in finding.text


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.3])
def test_another_temperature_of_the_trainer_is_not_held_for_raw_logprobs(temperature):
    train = Sampling(temperature=temperature)
    assert found(dump_of(train, Sampling(), Sampling()))["coherence"].state == "ok"


def test_logprobs_above_0_are_unsound_but_for_rounding():
    train = CLEAN.logp_train_N.copy()
    train[20] = 5e-4
    assert found(replace(CLEAN, logp_train_N=train))["values"].state == "ok"
    train[20] = 0.25
    finding = found(replace(CLEAN, logp_train_N=train))["values"]
    assert (finding.state, finding.first) == ("unsound", "dump.jsonl:1")
    assert (
        finding.text
        == "1 logprobs are above 0 (trainer 1; up to 0.25 nats), which no distribution has"
    )


@pytest.mark.parametrize("sides", [("train",), ("infer",), ("train", "infer")])
def test_losses_in_the_place_of_logprobs_are_named(sides):
    turned = {f"logp_{side}_N": -getattr(CLEAN, f"logp_{side}_N") for side in sides}
    findings = found(replace(CLEAN, **turned))
    values = findings["values"]
    assert values.state == "unsound"
    assert values.text.endswith("losses, which have the other sign?")
    if len(sides) == 1:
        assert findings["line_up"].state == "unsound"
        assert findings["line_up"].text.startswith("the two sides are negatively correlated (-0.99")


def test_infinite_logprobs_are_counted_and_those_of_the_sampler_told_for_what_they_are():
    train, infer = CLEAN.logp_train_N.copy(), CLEAN.logp_infer_N.copy()
    train[[20, 90]] = -np.inf
    finding = found(replace(CLEAN, logp_train_N=train))["values"]
    assert (finding.state, finding.text) == ("warning", "2 logprobs are infinite")
    infer[30] = -np.inf
    finding = found(replace(CLEAN, logp_infer_N=infer))["values"]
    assert (finding.state, finding.numbers["impossible"]) == ("warning", 1)
    assert "its own tokens" in finding.text and "weights are infinite" in finding.text


def test_a_mask_over_some_prompts_is_not_a_dump_without_prompts():
    mask = CLEAN.mask_N.copy()
    mask[0:10] = True
    some = found(replace(CLEAN, mask_N=mask))["prompts"]
    assert some.text.startswith("1 of 20 sequences begin with a trained token")
    assert some.state == "unsound"
    every = found(replace(CLEAN, mask_N=np.ones_like(mask)))["prompts"]
    assert every.state == "warning"
    assert every.text.startswith("every sequence begins with a trained token: the dump has no")


def test_sequences_without_trained_tokens_are_counted():
    mask = CLEAN.mask_N.copy()
    mask[60:120] = False
    finding = found(replace(CLEAN, mask_N=mask))["trained"]
    assert finding.state == "ok"
    assert finding.numbers == {"sequences": 20, "empty": 1}
    assert finding.first == "dump.jsonl:2"
    mask[: 60 * 11] = False
    assert found(replace(CLEAN, mask_N=mask))["trained"].state == "warning"


def test_a_copy_counts_once_it_is_in_the_same_step():
    def copied(chunk):
        columns = {}
        for name in ("token_N", "logp_infer_N", "logp_train_N"):
            column = getattr(chunk, name).copy()
            column[60 * 7 : 60 * 8] = column[:60]
            columns[name] = column
        return replace(chunk, **columns)

    finding = found(copied(CLEAN))["copies"]
    assert finding.state == "warning"
    assert (finding.numbers["repeated"], finding.numbers["other_groups"]) == (1, 1)
    assert finding.first == "dump.jsonl:8"
    assert found(CLEAN, rollouts(seed=5, step=2))["copies"].state == "ok"
    twice = found(CLEAN, CLEAN)["copies"]
    assert (twice.state, twice.numbers["repeated"]) == ("unsound", 20)
    assert twice.text.endswith("every rank write the whole batch?")


def at_step(chunk, step):
    return replace(chunk, step=step)


@pytest.mark.parametrize("between", [0, 3])
def test_sequences_of_an_earlier_step_are_no_new_draws(between):
    fresh = [rollouts(seed=s, step=s) for s in range(2, 2 + between)]
    first = rollouts(seed=1)
    finding = found(first, *fresh, at_step(first, 9))["copies"]
    assert finding.state == "unsound"
    assert "step 9 as step 1" in finding.text
    half = np.arange(20) < 10
    columns = {
        name: np.where(np.repeat(half, 60), getattr(first, name), getattr(rollouts(seed=7), name))
        for name in ("token_N", "logp_train_N", "logp_infer_N")
    }
    finding = found(first, *fresh, replace(first, step=9, **columns))["copies"]
    assert (finding.state, finding.numbers["again"]) == ("unsound", 10)
    assert finding.first == "dump.jsonl:1, of step 1"


def test_a_step_of_short_answers_that_is_there_twice_is_seen_in_any_order():
    """No single answer of 8 tokens proves a copy; all of a step do."""
    short = {"tokens": 18, "sequences": 30}
    first, other = rollouts(seed=1, **short), rollouts(seed=2, step=2, **short)
    turned = {
        name: getattr(first, name).reshape(30, 18)[::-1].ravel()
        for name in ("token_N", "logp_train_N", "logp_infer_N")
    }
    assert found(first, other)["copies"].state == "ok"
    assert found(first, other, replace(first, step=3, **turned))["copies"].state == "unsound"


def test_a_draw_that_is_used_again_with_other_weights_is_one_draw_and_no_copy():
    first = rollouts(seed=1)
    later = replace(first, step=2, logp_train_N=first.logp_train_N - 1e-3)
    finding = found(first, later)["copies"]
    assert (finding.state, finding.numbers["reused"]) == ("warning", 20)


def test_one_answer_that_is_carried_over_to_a_later_step_is_a_warning():
    first, later = rollouts(seed=1, sequences=100), rollouts(seed=2, sequences=100, step=2)
    own_N = np.repeat(np.arange(100) == 7, 60)
    columns = {
        name: np.where(own_N, getattr(first, name), getattr(later, name))
        for name in ("token_N", "logp_train_N", "logp_infer_N")
    }
    finding = found(first, replace(later, **columns))["copies"]
    assert (finding.state, finding.numbers["again"]) == ("warning", 1)


def test_answers_that_are_all_but_certain_may_recur():
    sure = np.where(np.arange(1200) % 7, 0.0, -1e-7)
    chunk = rollouts(seed=1, logp_train_N=sure, logp_infer_N=sure)
    assert found(chunk, at_step(chunk, 2))["copies"].state == "ok"


def test_digests_of_earlier_steps_are_bounded_and_a_copied_step_is_still_seen(monkeypatch):
    monkeypatch.setattr("servanda.rl.dumps.checks.copies.HELD", 80)
    steps = [rollouts(seed=s, step=s) for s in range(30)]
    check = Copies()
    for chunk in steps:
        check.add(chunk)
        assert len(check._drawn) <= 80
    half = rollouts(seed=99, step=30, sequences=620)
    columns = {
        name: np.concatenate([getattr(s, name) for s in (*steps, rollouts(seed=98))])
        for name in ("token_N", "logp_train_N", "logp_infer_N")
    }
    check.add(replace(half, **columns))
    assert check.finding().numbers["again"] > 5


def written(chunk, place, side="logp_infer_N", every=1):
    """A side whose value at one place of each turn is 0."""
    mask, at = chunk.mask_N, chunk.turn_token_N
    nexts = np.r_[at[1:], 0]
    flag = {"last": mask & (nexts <= 0), "first": at == 0}[place]
    flag &= chunk.sequence_N % every == 0
    return replace(chunk, **{side: np.where(flag, 0.0, getattr(chunk, side))})


@pytest.mark.parametrize("tokens", [12, 60, 2000])  # 12: answers of two tokens
@pytest.mark.parametrize(
    ("side", "name"), [("logp_infer_N", "sampler"), ("logp_train_N", "trainer")]
)
def test_an_end_token_that_is_written_as_0_is_found_at_any_length(tokens, side, name):
    chunk = rollouts(tokens=tokens, sequences=400 if tokens == 12 else 40, noise=0.001)
    finding = found(written(chunk, "last", side, every=2))["zeros"]
    assert finding.state == "unsound"
    assert f"the {name} has a logprob of exactly 0 at the last trained token of seq" in finding.text
    assert "the end token" in finding.text


def test_ends_of_turns_are_named_as_such_and_beginnings_too():
    text = found(written(turns(), "last"))["zeros"].text
    assert "last trained token of turns" in text
    text = found(written(turns(), "first"))["zeros"].text
    assert "first trained token of turns" in text and "begins one token early" in text


@pytest.mark.parametrize(("by", "word"), [(1, "late"), (-1, "early")])
def test_a_mask_off_by_one_is_named(by, word):
    """The sampler's value beside each turn shows where its tokens are."""
    clean = turns()
    infer = np.where(clean.mask_N, clean.logp_infer_N, 0.0)
    mask = np.roll(clean.mask_N, by)
    kept = np.where(mask | (infer != 0), infer, np.nan)
    findings = found(replace(clean, mask_N=mask, logp_infer_N=kept))
    assert f"the loss mask is off by one, it begins and ends one token {word}" in (
        findings["zeros"].text
    )
    assert findings["zeros"].state == "unsound"
    assert findings["retokenised"].state == "ok"


def test_zeros_that_a_top_p_of_the_sampler_makes_anywhere_are_no_fault_of_a_place():
    chunk = rollouts(sequences=60)
    sure = np.random.default_rng(3).random(3600) < 0.3
    infer = np.where(sure, 0.0, chunk.logp_infer_N)
    train = np.where(sure, -0.3, chunk.logp_train_N)
    assert found(replace(chunk, logp_infer_N=infer, logp_train_N=train))["zeros"].state == "ok"


def turns():
    """Two turns a sequence: trained 10..29 and 40..59."""
    at = np.tile(np.arange(60), 20)
    return rollouts(mask=((at >= 10) & (at < 30)) | (at >= 40))


def test_retokenised_turns_are_those_that_begin_far_apart():
    clean = turns()
    assert found(clean)["retokenised"].text == (
        "no gross re-tokenisation: at the start of 20 later turns, differences above 4 nats are "
        "not much more frequent than elsewhere"
    )
    infer = clean.logp_infer_N.copy()
    infer[[40, 42, 100]] -= 9.0  # twice in the first sequence
    finding = found(replace(clean, logp_infer_N=infer))["retokenised"]
    assert finding.state == "warning"
    assert (finding.numbers["suspects"], finding.numbers["sequences"]) == (2, 2)
    assert finding.first == "dump.jsonl:1"
    far = clean.logp_infer_N - np.where(np.arange(1200) % 5 == 0, 9.0, 0.0)  # everywhere
    assert found(replace(clean, logp_infer_N=far))["retokenised"].state == "ok"


def test_turns_of_other_tokens_are_a_fault_of_those_tokens_and_not_of_the_dump():
    """The mean weight is far above 1 where later turns begin, and nowhere else."""
    at = np.tile(np.arange(50), 400)
    mask = (at < 20) | (at >= 30)
    dump = dump_of(Sampling(), Sampling(), Sampling(), sequences=400)
    infer = np.where((at >= 30) & (at < 33), -6.0, dump.logp_infer_N)
    findings = found(replace(dump, mask_N=mask, logp_infer_N=infer))
    assert findings["coherence"].state == findings["retokenised"].state == "warning"
    assert "only at the first tokens of later turns" in findings["coherence"].text
    everywhere = found(replace(dump, mask_N=mask, logp_infer_N=np.where(at % 5, infer, -6.0)))
    assert everywhere["coherence"].state == "unsound"


def test_a_mean_weight_above_1_by_less_than_a_thousandth_is_no_fault_of_the_dump():
    """A bias of a float32 softmax shows in many tokens of nearly equal kernels."""
    many = rollouts(sequences=4000, noise=0.0)
    train = many.logp_infer_N + 2e-4
    finding = found(replace(many, logp_train_N=train))["coherence"]
    assert finding.state == "warning"
    assert "above 1 by less than a thousandth" in finding.text
    assert found(replace(many, logp_train_N=many.logp_infer_N + 5e-3))["coherence"].state == (
        "unsound"
    )


def test_precision_is_the_coarsest_format_that_is_exact():
    coarse = CLEAN.logp_train_N.astype(np.float16).astype(float)
    findings = found(replace(CLEAN, logp_train_N=coarse))
    assert findings["precision"].state == "warning"
    assert findings["precision"].text.startswith(
        "logprobs recorded in float16 (trainer) and float64 (sampler): rounding to float16 alone"
    )
    both = {name: getattr(CLEAN, name).astype(np.float32).astype(float) for name in
            ("logp_train_N", "logp_infer_N")}  # fmt: skip
    single = found(replace(CLEAN, **both))["precision"]
    assert (single.state, single.numbers) == ("ok", {"train_bits": 24.0, "infer_bits": 24.0})


def test_a_dump_of_nothing_is_told_by_every_check_and_one_without_a_trained_token_is_unsound():
    assert found()["coverage"].state == "unsound"
    assert sorted(found()) == sorted({*CHECKS} - QUIET)
    finding = found(replace(CLEAN, mask_N=np.zeros_like(CLEAN.mask_N)))["coverage"]
    assert (finding.state, finding.text) == ("unsound", "the dump has no trained token")
    outside = np.where(CLEAN.mask_N, CLEAN.logp_infer_N, np.nan)  # missing there is no hole
    assert found(replace(CLEAN, logp_infer_N=outside))["coverage"].state == "ok"


def answers(cut=0, sequences=400, longest=50, end=7, seed=0):
    """A chunk of answers, most of which end in `end` early; `cut` of them stop at any token."""
    rng = np.random.default_rng(seed)
    length_S = rng.integers(20, longest, sequences)
    length_S[:5] = longest
    token_N = rng.integers(100, 1000, length_S.sum())
    last_S = np.cumsum(length_S) - 1
    token_N[last_S[5 + cut :]] = end
    n = len(token_N)
    infer_N = -rng.exponential(1.5, n)
    return Rollouts(
        1,
        length_S,
        token_N,
        np.ones(n, dtype=bool),
        np.minimum(infer_N + 0.02 * rng.normal(size=n), -1e-6),
        infer_N,
        tuple(f"g{s // 4}" for s in range(sequences)),
        tuple(f"dump.jsonl:{s + 1}" for s in range(sequences)),
    )


@pytest.mark.parametrize(
    ("cut", "state"), [(0, "ok"), (1, "ok"), (40, "warning"), (300, "warning")]
)
def test_answers_that_stop_early_and_at_no_end_token_are_counted(cut, state):
    """The fewer answers come to their end, the less often is any token the last one."""
    finding = found(answers(cut))["ends"]

    assert (finding.state, finding.numbers["cut"]) == (state, cut)
    if cut:
        assert finding.text.startswith(f"{cut} of 400 responses are shorter than the longest")
        assert finding.first == "dump.jsonl:6"


def test_a_length_limit_of_each_step_cuts_no_answer():
    early = answers(seed=1)
    short_N = np.arange(len(early.token_N)) - np.repeat(early.start_S, early.length_S) < 32
    halved = replace(
        early,
        step=0,
        length_S=np.minimum(early.length_S, 32),
        **{
            name: getattr(early, name)[short_N]
            for name in ("token_N", "mask_N", "logp_train_N", "logp_infer_N")
        },
    )
    assert found(halved, answers())["ends"].numbers["cut"] == 0


def test_where_no_token_ends_answers_it_is_said_that_cuts_cannot_be_told():
    finding = found(answers(cut=395))["ends"]
    assert finding.state == "ok" and "cut" not in finding.numbers
    assert "cannot tell" in finding.text


def test_answers_after_a_prompt_of_any_length_may_fill_the_context():
    """The longest answer, and the longest prompt with its answer, are both a limit."""
    chunk = answers()
    starts = np.cumsum(chunk.length_S) - chunk.length_S
    mask_N = chunk.mask_N.copy()
    for start in starts[:5]:
        mask_N[start : start + 30] = False  # full contexts, whose answers are short
    assert found(replace(chunk, mask_N=mask_N))["ends"].numbers["cut"] == 0


def weighed(weight_N, **more):
    return replace(CLEAN, per_token={"loss_weight": weight_N, **more})


def test_the_weights_of_the_loss_are_described():
    w_N = np.exp(CLEAN.logp_train_N - CLEAN.logp_infer_N)

    finding = found(weighed(np.minimum(w_N, 1.02)))["loss"]

    assert finding.state == "ok"
    assert finding.numbers["mean_weight"] == pytest.approx(
        np.minimum(w_N, 1.02)[CLEAN.mask_N].mean()
    )
    assert finding.text.endswith("its weights are the token's own w, at most 1.02")


def test_weights_of_whole_sequences_that_count_a_batch_little_are_a_warning():
    w_S = np.exp(CLEAN.sums_S(CLEAN.ratio_K)) * 0.06

    finding = found(weighed(np.repeat(w_S, CLEAN.length_S)))["loss"]

    assert finding.state == "warning"
    assert 0 < finding.numbers["mean_weight"] < 0.1


def test_an_infinite_weight_of_a_trained_token_is_unsound():
    weight_N = np.where(np.arange(len(CLEAN.mask_N)) % 60 < 11, np.inf, 1.0)

    finding = found(weighed(weight_N))["loss"]

    assert (finding.state, finding.text) == (
        "unsound",
        "the loss weight of 20 of 1,000 trained tokens is infinite",
    )


def test_a_mask_of_the_loss_is_counted():
    dropped_N = np.arange(len(CLEAN.mask_N)) % 60 >= 50  # the last ten of fifty

    finding = found(replace(CLEAN, per_token={"loss_mask": ~dropped_N * 1.0}))["loss"]

    assert finding.text == "the loss dropped 20.00 % of the trained tokens"


def test_chunks_of_weights_say_what_the_steps_say():
    w_N = np.minimum(np.exp(CLEAN.logp_train_N - CLEAN.logp_infer_N), 1.01)
    steps = [replace(weighed(w_N), step=step) for step in range(3)]
    one, two = Soundness(), Soundness()
    one.add(steps[0])
    for step in steps[1:]:
        two.add(step)
    one.join(two)

    joined = {f.check: f for f in one.findings()}

    assert joined["loss"] == found(*steps)["loss"]


def test_versions_split_the_drift_into_kernel_and_staleness():
    made = rollouts(sequences=400, noise=0.0, seed=4)
    lag_S = np.random.default_rng(4).integers(0, 4, 400)
    lag_N = np.repeat(lag_S, made.length_S).astype(float)
    noise_N = np.random.default_rng(5).normal(size=len(lag_N)) * np.sqrt(np.pi / 2)
    train_N = np.minimum(made.logp_infer_N + (0.02 + 0.01 * lag_N) * noise_N, -1e-6)
    aged = replace(
        made,
        logp_train_N=train_N,
        group_S=tuple(f"g{s // 2}" for s in range(400)),
        per_token={"staleness": lag_N, "weight_version": 9 - lag_N},
    )

    finding = found(aged)["lag"]

    assert finding.state == "ok"
    assert finding.numbers["gap_nats"] == pytest.approx(0.02, abs=0.002)
    assert finding.numbers["per_update_nats"] == pytest.approx(0.01, abs=0.002)
    assert finding.text.endswith("an estimate, not a bound")
    assert "lag" not in found(replace(aged, per_token={"staleness": lag_N}))


@pytest.mark.parametrize(("e_value", "state"), [(1e6, "unsound"), (999_999.0, "ok")])
def test_the_mean_weight_is_rejected_at_a_million(monkeypatch, e_value, state):
    name = "servanda.rl.dumps.checks.pairs.log_mean_exp"
    monkeypatch.setattr(name, lambda _: math.log(e_value))
    check = MeanWeight()
    check.add(rollouts())
    assert check.finding().state == state
