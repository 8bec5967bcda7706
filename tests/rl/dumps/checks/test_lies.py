# Data that cannot be evidence although its numbers look healthy: inventions of each class, each
# beside a healthy neighbour of the same shape.

from dataclasses import replace

import numpy as np
import pytest

from servanda.rl.dumps.checks import Soundness
from servanda.traces.rollouts import VERSIONS, Rollouts

PROMPT, ANSWER, GROUP, PROMPTS, VOCABULARY = 6, 40, 4, 12, 500
LAW = np.random.default_rng(11).normal(0, 2.5, (4096, 40))  # a context's logits of 40 ids
IDS = np.random.default_rng(12).integers(1, VOCABULARY, (4096, 40))


def step(number=1, *, turns=1, sure=0.0, seed=0, groups=PROMPTS, sizes=None, **more):
    """Answers that a law draws: the last three tokens choose the context.

    Args:
        sure: added to the first logit of every second context.
        turns: stretches of the answer; 5 tokens of a tool stand before each later one.
        sizes: responses of each group.
    """
    rng = np.random.default_rng([seed, number])
    rows = {"token": [], "mask": [], "infer": [], "train": []}
    group, length = [], []
    for g in range(groups):
        prompt = rng.integers(1, VOCABULARY, PROMPT).tolist()
        for _ in range(GROUP if sizes is None else sizes[g]):
            ids, mask, infer, train = list(prompt), [0] * PROMPT, [np.nan] * PROMPT, []
            train = [np.nan] * PROMPT
            for t in range(ANSWER):
                if turns > 1 and t and t % (ANSWER // turns) == 0:
                    ids += rng.integers(1, VOCABULARY, 5).tolist()
                    mask, infer, train = mask + [0] * 5, infer + [np.nan] * 5, train + [np.nan] * 5
                at = hash((*ids[-3:], *prompt[:2])) % 4096
                z = LAW[at] + sure * (at % 2) * (np.arange(40) == 0)
                logp = z - np.logaddexp.reduce(z)
                drawn = int(rng.choice(40, p=np.exp(logp)))
                ids.append(int(IDS[at, drawn]))
                mask.append(1)
                infer.append(logp[drawn])
                noisy = z + rng.normal(0, 0.02, 40)
                train.append((noisy - np.logaddexp.reduce(noisy))[drawn])
            group.append(f"{number}.{g}")
            length.append(len(ids))
            for name, column in zip(rows, (ids, mask, infer, train), strict=True):
                rows[name] += column
    made = {
        "length_S": np.array(length),
        "token_N": np.array(rows["token"]),
        "mask_N": np.array(rows["mask"], bool),
        "logp_train_N": np.array(rows["train"]),
        "logp_infer_N": np.array(rows["infer"]),
        "group_S": tuple(group),
        "source_S": tuple(f"step {number}, row {s}" for s in range(len(group))),
    }
    return Rollouts(number, **{**made, **more})


CLEAN = [step(n) for n in (1, 2, 3)]


def odd(parts):
    """check -> (state, text) of all findings that are not fine."""
    sound = Soundness()
    for part in parts:
        sound.add(part)
    return {f.check: (f.state, f.text) for f in sound.findings() if f.state != "ok"}


def trained(part, column, values):
    whole = getattr(part, column).copy()
    whole[part.mask_N] = values
    return replace(part, **{column: whole})


def test_healthy_steps_have_no_finding():
    assert odd(CLEAN) == {}
    assert odd([step(n, turns=4) for n in (1, 2)]) == {}
    assert odd([step(n, sure=14.0) for n in (1, 2)]) == {}


# ---- what repeats


def _prompts_anew(part, of):
    """The prompts of a step before the answers and both columns of another."""
    at_N = np.arange(len(part.token_N)) - np.repeat(part.start_S, part.length_S)
    first = (at_N < PROMPT) & (of.length_S[0] == part.length_S[0])
    token_N = np.where(first, part.token_N, of.token_N)
    return replace(of, step=part.step, token_N=token_N, group_S=part.group_S)


REPEATS = {
    "answers under new prompts": lambda a, b: _prompts_anew(b, a),
    "sampler's column": lambda a, b: replace(b, logp_infer_N=a.logp_infer_N),
    "trainer's column": lambda a, b: replace(b, logp_train_N=a.logp_train_N),
    "of a neighbour": lambda _, b: replace(
        b, **{n: np.roll(getattr(b, n), PROMPT + ANSWER) for n in ("logp_train_N", "logp_infer_N")}
    ),
}


@pytest.mark.parametrize("name", REPEATS)
def test_what_repeats_under_other_tokens_is_no_evidence(name):
    a, b, _ = CLEAN
    found = odd([a, REPEATS[name](a, b), replace(REPEATS[name](a, b), step=3)])
    assert found["copies"][0] == "unsound"


def test_the_same_prompts_drawn_again_and_a_replayed_batch_are_no_copies():
    again = step(1, seed=1)
    assert "copies" not in odd([CLEAN[0], replace(again, step=2)])
    rng = np.random.default_rng(2)
    moved = CLEAN[0].train_K + 0.01 * rng.normal(size=len(CLEAN[0].train_K))
    replayed = trained(replace(CLEAN[0], step=2), "logp_train_N", np.minimum(moved, -1e-9))
    assert odd([CLEAN[0], replayed])["copies"][0] == "warning"


# ---- values that no sampler gives


def _some(share, value, sides=("logp_train_N", "logp_infer_N"), runs=1):
    def change(part):
        rng = np.random.default_rng(5)
        at = np.repeat(rng.random(part.mask_N.sum() // runs + 1) < share, runs)
        for column in sides:
            values = getattr(part, column)[part.mask_N].copy()
            values[at[: len(values)]] = value
            part = trained(part, column, values)
        return part

    return change


def _grid(step_, sides):
    def change(part):
        for column in sides:
            values = getattr(part, column)[part.mask_N]
            part = trained(part, column, np.rint(values / step_) * step_)
        return part

    return change


def _edge(part):
    at_N = np.arange(len(part.token_N)) - np.repeat(part.start_S, part.length_S)
    edge_N = np.minimum(at_N, PROMPT + 30) - at_N + np.arange(len(at_N))
    columns = {n: getattr(part, n)[edge_N] for n in ("logp_train_N", "logp_infer_N")}
    return replace(part, **columns)


def _padding(part):
    """The last four tokens of each answer are padding."""
    ends_S = part.start_S + part.length_S
    at = (ends_S[:, None] - 1 - np.arange(4)).ravel()
    columns = {n: getattr(part, n).copy() for n in ("token_N", "logp_train_N", "logp_infer_N")}
    for values in columns.values():
        values[at] = 0
    return replace(part, **columns)


BOTH = ("logp_train_N", "logp_infer_N")
VALUES = {
    "text with zeros on both sides": (_some(0.15, 0.0, runs=5), *("piles", "unsound", "loss mask")),
    "padding": (_padding, "piles", "unsound", "at the end of 144 of 144 sequences"),
    "a few zeros on both sides": (_some(0.03, 0.0), "piles", "warning", "exactly 0 on both sides"),
    "+inf of the trainer": (_some(0.01, np.inf, BOTH[:1]), "values", "unsound", "trainer"),
    "one value of both": (
        _some(0.2, -1.25),
        "piles",
        "unsound",
        "both sides' logprobs are exactly",
    ),
    "one value of the sampler": (_some(0.02, -2.5, BOTH[1:]), "piles", "warning", "the sampler's"),
    "the trainer on a grid": (_grid(1 / 32, BOTH[:1]), "precision", "warning", "multiples of 1/32"),
    "two digits of both": (_grid(0.01, BOTH), "precision", "warning", "multiples of 0.01"),
    "the edge again": (_edge, "filled", "unsound", "repeat that of the token before"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_no_sampler_gives_are_named_with_their_side(name):
    change, check, state, words = VALUES[name]
    found = odd([change(part) for part in CLEAN])
    assert found[check][0] == state
    assert words in found[check][1]


def test_ids_that_are_always_0_were_filled_in_and_certain_tokens_were_not():
    def shard(part):
        zero = part.mask_N & (part.token_N < 40)
        return replace(part, **{n: np.where(zero, 0.0, getattr(part, n)) for n in BOTH})

    def certain(part):  # as float32 has it
        return replace(
            part, **{n: getattr(part, n).astype(np.float32) + np.float64(0) for n in BOTH}
        )

    found = odd([shard(step(n, sure=2.0)) for n in (1, 2, 3)])
    assert found["piles"][0] == "unsound" and "wherever they occur" in found["piles"][1]
    assert "piles" not in odd([certain(step(n, sure=16.0)) for n in (1, 2, 3)])


def test_zeros_of_a_filter_that_both_sides_apply_are_no_lie():
    """Of a nucleus of one token, the two sides are exactly sure."""

    def cut(part):
        one = part.mask_N & (part.logp_infer_N > np.log(0.5))
        return replace(part, **{n: np.where(one, 0.0, getattr(part, n)) for n in BOTH})

    steps = [cut(step(n)) for n in (1, 2, 3)]
    assert (steps[0].infer_K == 0).mean() > 0.1
    assert odd(steps)["piles"][0] == "warning"


def test_a_value_that_was_copied_to_the_last_token_was_not_drawn():
    def ended(part):
        last = (part.start_S + part.length_S - 1)[::2]
        infer = part.logp_infer_N.copy()
        infer[last] = part.logp_train_N[last]
        return replace(part, logp_infer_N=infer)

    state, text = odd([ended(part) for part in CLEAN])["zeros"]
    assert state == "unsound" and "equal in every bit at the last trained token" in text


def test_mass_that_the_engine_never_draws_is_noted():
    def cut(part):
        keep = part.mask_N & (part.logp_infer_N > np.log(0.03))
        infer = part.logp_infer_N - np.log(0.97)
        return replace(part, mask_N=keep, logp_infer_N=np.minimum(infer, -1e-9))

    state, text = odd([cut(part) for part in CLEAN])["coherence"]
    assert state == "warning" and "(almost) never draws" in text


# ---- masks and drawn tokens


def _header(part):
    """The token before each later turn, the same everywhere, is trained."""
    starts = np.flatnonzero(part.mask_N[1:] & ~part.mask_N[:-1]) + 1
    later = starts[~np.isin(starts, part.start_S + PROMPT)]
    token, mask = part.token_N.copy(), part.mask_N.copy()
    token[later - 1], mask[later - 1] = 7, True
    columns = {n: getattr(part, n).copy() for n in BOTH}
    for values in columns.values():
        values[later - 1] = -4.0 + 0.3 * np.random.default_rng(1).normal(size=len(later))
    return replace(part, token_N=token, mask_N=mask, **columns)


def _prefix(part):
    token = part.token_N.copy()
    token[part.start_S + PROMPT] = 9
    return replace(part, token_N=token)


def _filtered(part):
    far = np.abs(part.logp_train_N - part.logp_infer_N) > 0.02
    return replace(part, mask_N=part.mask_N & ~far)


MASKS = {
    "a header before later turns": (
        _header,
        "draws",
        "id 7 is 432 of 432 first tokens of later turns, where the sampler gives it",
    ),
    "a prefix of the template": (_prefix, "draws", "id 9 is 144 of 144 first tokens of answers"),
    "a filter by the mismatch": (_filtered, "left_out", "a filter by the mismatch"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_cover_what_nobody_drew_or_leave_out_what_differs(name):
    change, check, words = MASKS[name]
    state, text = odd([change(step(n, turns=4)) for n in (1, 2, 3)])[check]
    assert state == "unsound" and words in text


def test_a_tag_that_is_nearly_certain_and_a_random_half_of_the_tokens_are_sound():
    def tagged(part):
        first = part.start_S + PROMPT
        token, columns = part.token_N.copy(), {n: getattr(part, n).copy() for n in BOTH}
        token[first] = 9
        for values in columns.values():
            values[first] = -1e-3 - 1e-4 * np.random.default_rng(1).random(len(first))
        return replace(part, token_N=token, **columns)

    def half(part):
        some = np.random.default_rng(3).random(len(part.mask_N)) < 0.5
        return replace(part, mask_N=part.mask_N & some)

    assert not {"draws", "left_out"} & {*odd([tagged(p) for p in CLEAN])}
    assert not {"draws", "left_out"} & {*odd([half(p) for p in CLEAN])}


# ---- prompts and groups


def test_answers_that_begin_alike_with_other_logprobs_are_of_other_prompts():
    def other(part):  # each answer's numbers are those of its tokens in reverse
        turned = {}
        for name in BOTH:
            rows = getattr(part, name)[part.mask_N].reshape(-1, ANSWER)[:, ::-1]
            turned[name] = rows.ravel()
        for name, values in turned.items():
            part = trained(part, name, values)
        return part

    steps = [step(n, sure=2.0, groups=24) for n in (1, 2, 3)]
    state, text = odd([other(part) for part in steps])["siblings"]
    assert state == "unsound" and "begin alike" in text
    assert "siblings" not in odd(steps)


def test_groups_that_were_shuffled_and_groups_with_missing_responses_are_noted():
    def shuffled(part):
        mixed = np.random.default_rng(1).permutation(part.group_S)
        return replace(part, group_S=tuple(mixed.tolist()))

    state, text = odd([shuffled(part) for part in CLEAN])["siblings"]
    assert state == "warning" and "do the groups belong to these rows?" in text
    fewer = [4, 3, 4, 2, 4, 4, 3, 4, 4, 3, 4, 4]
    state, text = odd([step(n, sizes=fewer) for n in (1, 2, 3)])["groups"]
    assert state == "warning" and text.startswith("12 of 36 prompt groups have fewer responses")
    budget = [2 + 2 * (g % 2) for g in range(PROMPTS)]
    labels = {"budget": tuple(f"b{g % 2}" for g in range(PROMPTS) for _ in range(budget[g]))}
    assert "groups" not in odd([step(n, sizes=budget, labels=labels) for n in (1, 2, 3)])


# ---- versions


def _versioned(part, version_N, stale_N=None):
    own = {"weight_version": version_N.astype(float)}
    own["staleness"] = part.step - version_N if stale_N is None else stale_N
    return replace(part, per_token=own)


def test_versions_that_fall_never_change_or_do_not_show_what_grows():
    def within(part, way):
        at_N = np.arange(len(part.token_N)) - np.repeat(part.start_S, part.length_S)
        late = at_N >= PROMPT + 20
        return _versioned(part, part.step - 1 + (late if way > 0 else ~late))

    state, text = odd([within(part, -1) for part in CLEAN])["versions"]
    assert state == "unsound" and "later tokens are of older weights" in text
    assert "versions" not in odd([within(part, 1) for part in CLEAN])
    never = [_versioned(part, np.zeros(len(part.token_N))) for part in CLEAN]
    state, text = odd(never)["lag"]
    assert state == "warning" and "was sampled by version 0" in text

    def grown(number):
        part = step(number)
        train = part.infer_K + number * (part.train_K - part.infer_K)
        part = trained(part, "logp_train_N", np.minimum(train, -1e-9))
        return _versioned(part, np.full(len(part.token_N), number))

    state, text = odd([grown(n) for n in range(1, 8)])["lag"]
    assert state == "warning" and "grows from" in text


def test_answers_of_several_versions_are_compared_with_the_others():
    def mixed(part):
        some = np.arange(len(part)) % 4 == 0
        train = part.logp_train_N + 3 * (part.logp_train_N - part.logp_infer_N) * np.repeat(
            some, part.length_S
        )
        return replace(
            part,
            logp_train_N=np.minimum(train, -1e-9),
            per_sequence={VERSIONS: 1.0 + 2 * some},
        )

    state, text = odd([mixed(part) for part in CLEAN])["versions"]
    assert state == "warning"
    assert text.startswith("36 of 144 responses mix up to 3 weight versions")
