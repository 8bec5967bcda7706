# The cause of a gap: named where it explains the gap on tokens that did not choose it; else none.

import math
import shlex
from dataclasses import replace

import numpy as np
import pytest

from servanda.judgement.causes.catalogue import CAUSES, OF_CHECKS, REMEDIES, UNEXPLAINED
from servanda.judgement.causes.gap_cause import EXPLAINS, Case, alike_everywhere, explain
from servanda.judgement.causes.gap_shape import SETTINGS
from tests import transcripts
from tests.judgement.causes.gaps import table

LIMIT = 0.025
REPLICA = {"replica": lambda s: f"r{s % 4}"}
RANK = {"rank": lambda s: f"{s % 4}"}
ENV = {"env": lambda s: f"e{s % 4}"}
QUIET = 0.05  # noise of sides without a fault


def _third(row, *_):
    return row % 4 == 3


def _late(row, length, position, *_):
    return position >= 60


# how a gap is drawn, its cause, and a part of the sentence
KNOWN = {
    "noise alike everywhere": ({"noise": 0.3}, "numerics", "alike at equal probability"),
    "noise that arithmetic seldom makes": (
        {"noise": 1.2},
        UNEXPLAINED,
        "alike at equal probability",
    ),
    "noise from nothing": (
        {"noise": lambda step: 0.01 + 0.06 * (step - 1)},
        "stale_weights",
        "it grows x",
    ),
    "noise that grows from the first step on": (
        {"noise": lambda step: 0.15 + 0.04 * step},
        "stale_weights",
        "it grows x",
    ),
    "one replica": ({"labels": REPLICA, "wrong": _third}, "one_engine", "replica r3: "),
    "one rank of the trainer": ({"labels": RANK, "wrong": _third}, "one_rank", "rank 3: a rank of"),
    "a rank with its own replica": (
        {"labels": REPLICA | RANK, "wrong": _third},
        "one_machine",
        "which the labels do not tell apart",
    ),
    "one environment": ({"labels": ENV, "wrong": _third}, "one_kind", "requests of env e3"),
    "two replicas": (
        {
            "labels": {"replica": lambda s: f"r{s * 5 % 24 // 6}"},
            "wrong": lambda row, *_: row * 5 % 24 // 6 % 2 == 1,
        },
        "one_engine",
        "replica r1 and r3: ",
    ),
    "requests from the cache": (
        {"labels": {"cached_tokens": lambda s: f"{s % 4 * 512}"}, "wrong": _third},
        "stale_cache",
        "in cached_tokens 1536",
    ),
    "an environment that has one replica to itself": (
        {"labels": ENV | {"node": lambda s: f"n{s % 4}"}, "wrong": _third},
        UNEXPLAINED,
        "the same tokens as node n3",
    ),
    "an environment that has a node nearly to itself": (
        {
            "size": 96,
            "labels": ENV | {"node": lambda s: f"n{s % 4 if s else 3}"},
            "wrong": _third,
        },
        "one_kind",
        "requests of env e3: ",
    ),
    "a label that is another text for each sequence": (
        {"labels": {"uid": lambda s: f"{s}"}, "wrong": _third},
        "batch",
        "row modulo 4 3",
    ),
    "a place in the batch": ({"wrong": _third}, "batch", "row modulo 4 3"),
    "the first tokens": (
        {"noise": QUIET, "wrong": lambda _, __, position, *___: position < 2},
        UNEXPLAINED,
        "is in the first 2 tokens; the others have 0.008; most likely what stands before the",
    ),
    "no token before a length": (
        {"noise": 0.01, "wrong": lambda _, length, at, *__: length + at >= 300},
        "long_context",
        "in context length from 300",
    ),
    "short prompts": (
        {"noise": QUIET, "wrong": lambda _, length, *__: length < 100},
        UNEXPLAINED,
        "is in prompt tokens below ",
    ),
    "few tokens anywhere": (
        {"noise": 0.02, "wrong": lambda *of: of[-1].random(of[3].shape) < 0.06},
        "routing",
        "% of the tokens, in all sequences and places",
    ),
    "one step": ({"noise": lambda step: 0.05 + 0.4 * (step == 3)}, "steps", "step 3, and not the"),
    "two steps that are no neighbours": (
        {"steps": 9, "noise": lambda step: 0.05 + 0.4 * (step in (3, 7))},
        "steps",
        "steps 3 and 7, and not the other",
    ),
    "neighbouring steps": (
        {"steps": 9, "noise": lambda step: 0.05 + 0.4 * (4 <= step <= 6)},
        "steps",
        "steps 4 to 6, and not the other",
    ),
    "a change": ({"noise": lambda step: 0.05 + 0.4 * (step >= 4)}, "change", "step from 4 on"),
    "a queue that fills in four steps": (
        {"steps": 12, "noise": lambda step: 0.01 + 0.12 * min(step - 1, 3)},
        "stale_weights",
        "over the steps; step 1 has",
    ),
    "noise that ends": ({"noise": lambda step: 0.3 - 0.04 * step}, UNEXPLAINED, "uneven by step"),
    "some steps alone": (
        {"noise": lambda step: 0.1 + 0.2 * (step % 2)},
        UNEXPLAINED,
        "uneven by step",
    ),
    "half of the gap in a place": (
        {"noise": 0.15, "wrong": lambda _, __, position, *___: position < 2},
        UNEXPLAINED,
        "of the gap above noise is in the first 2 tokens",
    ),
    "two places": (
        {"noise": QUIET, "labels": REPLICA, "wrong": lambda *of: _third(*of) | _late(*of)},
        "one_engine",
        "more remains: position from 60",
    ),
}


def _second_turn(row, at):
    """The index in the second turn, which begins at another position in each row."""
    return at - 20 - row % 6


@pytest.mark.parametrize("core", [0, 9])
def test_later_turns_are_named_though_their_first_tokens_are_the_worst(core):
    def wrong(row, _, at, token, rng):
        begun = _second_turn(row, at)
        return (begun >= 0) & ((begun < core) | (rng.random(token.shape) < 0.12))

    drawn = table(3, noise=QUIET, wrong=wrong)
    begun_K = _second_turn(drawn.numbers["context.row"], drawn.numbers["context.position"])
    turns = {
        "context.turn": np.where(begun_K < 0, 1.0, 2.0),
        "context.turn_position": np.where(begun_K < 0, drawn.numbers["context.position"], begun_K),
    }

    found = explain(replace(drawn, numbers=drawn.numbers | turns), LIMIT)

    assert found.cause == "turns", found.text


@pytest.mark.parametrize("name", [*KNOWN])
def test_a_cause_is_named_with_what_was_measured(name):
    how, cause, words = KNOWN[name]

    found = explain(table(3, **how), LIMIT, place="my dump")

    assert (found.cause, found.named) == (cause, cause != UNEXPLAINED)
    assert words in found.text
    assert any(map(str.isdigit, found.evidence))
    assert found.text.endswith(found.evidence) and "{" not in found.text + found.command
    assert found.rival in CAUSES and (found.rival != found.cause or not found.named)


def _with(drawn, some_K, train=None, infer=None):
    """A table with other logprobs at some tokens."""
    columns = {"train_K": train, "infer_K": infer}
    return replace(
        drawn,
        **{
            name: np.where(some_K, of(drawn), getattr(drawn, name))
            for name, of in columns.items()
            if of is not None
        },
    )


def _lagged(drawn):
    return np.roll(drawn.infer_K, 1)


def _shuffled(drawn):
    return np.random.default_rng(2).permutation(drawn.infer_K)


# what one side writes instead of its logprob, the cause, and a part of the sentence
WRITTEN = {
    "log2": ({"infer": lambda t: t.infer_K / math.log(2)}, "unit", "the engine writes bits (log2)"),
    "log10 of the trainer": (
        {"train": lambda t: t.train_K / math.log(10)},
        "unit",
        "the trainer writes log10 instead of nats",
    ),
    "a grid of .5": (
        {"infer": lambda t: np.rint(t.infer_K * 2) / 2},
        "rounding",
        "multiples of 0.5",
    ),
    "a bound": (
        {"infer": lambda t: np.maximum(t.infer_K, -1.5)},
        "clamp",
        "the engine's logprobs below -1.5 are written as -1.5",
    ),
    "a bound of most": (
        {"infer": lambda t: np.minimum(t.infer_K, -0.6)},
        "clamp",
        "the engine's logprobs above -0.6 are written as -0.6",
    ),
    "another response": ({"infer": _shuffled}, "other_tokens", "unrelated tokens (correlation"),
    "the token before": ({"infer": _lagged}, "shift", "engine's logprob of the token +1"),
    "a number where there is none": (
        {"infer": lambda t: np.where(np.arange(len(t)) % 9 == 3, -100.0, t.infer_K)},
        "missing_data",
        "the engine's logprob is -100 at 11 %",
    ),
    "one number": (
        {"infer": lambda t: np.full(len(t), -0.7)},
        "missing_data",
        "the engine's logprob is -0.7 at 100 %",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*WRITTEN])
def test_what_is_written_instead_of_a_logprob_is_named_everywhere_and_in_a_place(name):
    how, cause, words = WRITTEN[name]
    drawn = table(4, noise=0.01, labels=ENV, size=48)
    texts, code_K = drawn.labels["env"]

    whole = explain(_with(drawn, True, **how), LIMIT)
    part = explain(_with(drawn, code_K == texts.index("e1"), **how), LIMIT)

    assert (whole.cause, part.cause) == (cause, cause), (whole.text, part.text)
    assert words in whole.text and words in part.text and "in env e1" in part.text


def test_the_place_of_one_fault_and_what_is_written_elsewhere_are_both_said():
    drawn = table(3, noise=QUIET, labels=REPLICA, wrong=_third)
    found = explain(replace(drawn, infer_K=np.rint(drawn.infer_K * 2) / 2), LIMIT)
    assert found.cause == "one_engine" and found.text.startswith("replica r3: ")
    assert "more remains: the engine's logprobs are multiples of 0.5" in found.text


@pytest.mark.parametrize("name", ["another response", "the token before"])
def test_what_is_written_in_a_few_sequences_is_named_there(name):
    how, cause, _ = WRITTEN[name]
    drawn = table(4, noise=0.01, size=96)
    found = explain(_with(drawn, drawn.sequence_K % 37 == 5, **how), LIMIT)
    assert found.cause == cause and "in a few sequences" in found.text


def test_a_recorded_version_is_an_age_where_a_step_has_several():
    drawn = table(3, labels={"weight_version": lambda s: f"{s % 3}"})
    version_K = np.array([int(t or 0) for t in drawn.labels["weight_version"][0]])
    age_K = drawn.step_K - version_K[drawn.labels["weight_version"][1]]
    assert (drawn.numbers["outcome.staleness"] == age_K - age_K.min()).all() and age_K.min() == -1
    assert "outcome.staleness" not in table(3, labels={"weight_version": "1".format}).numbers


def test_ids_that_are_no_range_are_named():
    drawn = table(4, noise=0.02)
    token_K = drawn.token_K % 25
    wrong_K = np.isin(token_K, (3, 11, 19))
    moved_K = np.where(wrong_K, 2 * np.random.default_rng(0).standard_normal(len(drawn)), 0)
    train_K = np.minimum(drawn.train_K + moved_K, 0)
    found = explain(replace(drawn, token_K=token_K, train_K=train_K), LIMIT)
    assert found.cause == "vocabulary" and "3 token ids, such as 3, have it" in found.text


def test_ids_with_a_bias_are_named_though_all_others_lose_what_they_get():
    drawn = table(4, noise=0.01)
    token_K = np.random.default_rng(0).integers(0, 500, len(drawn))
    low_K = np.minimum(drawn.infer_K, -0.5)
    lost_K = np.random.default_rng(1).uniform(0.02, 0.12, len(drawn))  # by its context
    train_K = low_K + np.where(token_K < 20, -2.0, lost_K)
    found = explain(replace(drawn, token_K=token_K, infer_K=low_K, train_K=train_K), LIMIT)
    assert found.cause == "vocabulary" and "20 token ids" in found.text, found.text


def test_a_penalty_is_seen_by_the_signs_of_repeated_tokens():
    drawn = table(4, noise=0.01)
    shift_K = np.where(drawn.repeated_K, 0.3, -0.1)
    found = explain(replace(drawn, train_K=np.minimum(drawn.infer_K + shift_K, 0)), LIMIT)
    assert found.cause == "penalty" and "repeats less often" in found.text


def test_a_token_that_gains_much_mass_is_no_cut():
    """Another token loses it, so that the weights below 1 are not the mass that a cut takes."""
    rng = np.random.default_rng(1)
    drawn = table(4, noise=0.001)
    gains_K = rng.random(len(drawn)) < 0.3
    rare_K = ~gains_K & (rng.random(len(drawn)) < 0.03)
    moved_K = np.where(gains_K, np.log(0.25 / 0.55), np.where(rare_K, np.log(0.35 / 0.05), 0.0))
    found = explain(replace(drawn, train_K=np.minimum(drawn.infer_K - 2, -2) + moved_K,
                            infer_K=np.minimum(drawn.infer_K - 2, -2)), LIMIT)  # fmt: skip
    assert found.cause != "top_p"


def test_a_gap_that_grows_in_a_replica_is_one_of_old_weights_there():
    def wrong(row, *_):
        return row % 4 == 3

    drawn = table(3, noise=0.01, labels=REPLICA, wrong=wrong)
    grown_K = drawn.infer_K + (drawn.train_K - drawn.infer_K) * (drawn.step_K - 1) / 5
    found = explain(replace(drawn, train_K=grown_K), LIMIT)
    assert found.cause == "stale_replica" and found.text.startswith("replica r3: ")


@pytest.mark.parametrize("check", [*OF_CHECKS, "a check of a plug-in"])
def test_a_failed_check_is_the_cause_and_forbids_others(check):
    found = explain(table(3, labels=REPLICA, wrong=_third), LIMIT, {check: "row 3 is odd"})
    # a mean weight above 1 alone does not tell what the sampler did
    several = check == "coherence"
    assert found.text == ("unexplained; row 3 is odd" if several else "row 3 is odd")
    assert found.slices == () and found.named != several
    assert found.cause == (UNEXPLAINED if several else OF_CHECKS.get(check, "unsound"))


def test_the_most_telling_check_speaks():
    problems = {"coherence": "the mean weight is above 1", "values": "9 logprobs are above 0"}
    assert explain(table(3), LIMIT, problems).text == "9 logprobs are above 0"


def test_weights_above_one_are_explained_by_what_was_written():
    drawn = table(4, noise=0.01)
    drawn = replace(drawn, infer_K=drawn.infer_K / math.log(2))
    found = explain(drawn, LIMIT, {"coherence": "the mean weight is above 1"})
    assert found.cause == "unit" and found.text.startswith("the mean weight is above 1; ")


@pytest.mark.parametrize("tokens", [1200, 40_000])
def test_weights_above_one_are_raw_where_the_trainer_has_a_setting_of_the_sampler(tokens):
    """Of few tokens the moments tell little of a temperature, and do not speak against one."""
    drawn = table(4, noise=0.01).taken(np.arange(tokens) % 7_000)
    rng = np.random.default_rng(0)
    logits = rng.gumbel(size=(tokens, 40)) + 2 * rng.random((tokens, 1)) * rng.normal(size=(1, 40))

    def logp(z):
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    sampled, at_K = logp(logits / 0.6), np.arange(tokens)
    token_K = (sampled + rng.gumbel(size=sampled.shape)).argmax(1)
    raw = replace(
        drawn,
        token_K=token_K,
        train_K=sampled[at_K, token_K],
        infer_K=logp(logits)[at_K, token_K],
        sequence_K=at_K // 40,
        group_K=at_K // 40,
    )
    problem = {"coherence": "the mean weight is above 1"}
    assert explain(raw, LIMIT, problem).cause == "raw_logprobs"
    of_others = replace(raw, infer_K=raw.infer_K[rng.permutation(tokens)])
    assert explain(of_others, LIMIT, problem).cause == UNEXPLAINED


def test_one_ratio_for_all_tokens_is_no_cut():
    """The fit itself: of such a ratio a temperature explains as much, and is asked as well."""
    drawn = table(4, noise=0.002)
    kept_K = np.random.default_rng(0).uniform(0.6, 1.0, len(drawn))
    assert SETTINGS["top_p"](drawn, replace(drawn, train_K=drawn.infer_K - 0.12)) is None
    assert SETTINGS["top_p"](drawn, replace(drawn, train_K=drawn.infer_K + np.log(kept_K)))


def test_a_cut_that_leaves_one_token_is_told_from_logprobs_that_were_written_as_0():
    zeros = {"zeros": "13 trained tokens have a logprob of exactly 0"}
    rng = np.random.default_rng(0)
    drawn = table(4, noise=0.001)
    kept_K = rng.uniform(0.7, 1.0, len(drawn))
    one_K = rng.random(len(drawn)) < 0.03
    cut = replace(
        drawn,
        train_K=np.where(one_K, -1.1, np.minimum(drawn.infer_K, -0.01) + np.log(kept_K)),
        infer_K=np.where(one_K, 0.0, np.minimum(drawn.infer_K, -0.01)),
    )
    written = _with(drawn, rng.random(len(drawn)) < 0.1, infer=lambda t: np.zeros(len(t)))

    assert explain(cut, LIMIT, zeros).cause == "top_p"
    assert explain(written, LIMIT, zeros).cause == "missing_data"
    assert explain(cut, LIMIT, {**zeros, "coverage": "30 % missing"}).cause == "missing_data"


def test_alike_is_said_after_the_test_that_it_is():
    for noise, alike in ((0.3, True), (lambda step: 0.1 + 0.2 * (step % 2), False)):
        said, text = alike_everywhere(Case(table(3, noise=noise), LIMIT))
        assert said == alike and ("alike at equal probability" in text) == alike
    spread = Case(table(3, noise=0.3, spread=1.0, size=96), LIMIT)
    said, text = alike_everywhere(spread)
    assert not said and "uneven by sequence" in text


def test_a_violated_slice_of_a_contract_is_a_part_that_may_differ():
    """Not at twice the gap of the others, so that no search finds it."""
    drawn = table(3, noise=0.3, labels=ENV)
    some_K = drawn.labels["env"][1] == 1
    drawn = _with(drawn, some_K, train=lambda t: t.infer_K + 1.9 * (t.train_K - t.infer_K))
    match = {"labels.env": {"in": [drawn.labels["env"][0][1]]}}
    assert not alike_everywhere(Case(drawn, LIMIT, (match,)))[0]


def test_a_name_needs_most_of_the_gap():
    assert EXPLAINS == 0.8


@pytest.mark.parametrize("name", [*CAUSES])
def test_every_cause_has_a_rival_a_remedy_and_a_command_that_exists(name):
    cause = CAUSES[name]
    assert cause.rival in CAUSES and cause.rival != name and name in REMEDIES
    command = cause.command.replace("{dir}", "DIR").replace("{step}", "3")
    transcripts.parsed(shlex.split(command))
