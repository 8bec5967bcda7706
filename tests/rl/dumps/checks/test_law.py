# What the sampler's own numbers say: of the law that drew, of values that were made from others, of
# the mask of the loss, of advantages and of versions.  Every lie has a healthy neighbour.

from dataclasses import replace

import numpy as np
import pytest

from servanda.rl.dumps.checks.law import _Place
from servanda.traces.rollouts import Rollouts
from tests.rl.dumps.checks.test_lies import CLEAN, odd, step, trained

BOTH = ("logp_train_N", "logp_infer_N")


def siblings(number, *, drawn=1.0, told=1.0, after=0.0, prompts=60, group=8, tokens=6, ids=12):
    """Responses to one prompt, drawn from softmax(z / drawn); told are softmax(z / told) + after.

    A law depends on the whole prefix.
    """
    rng = np.random.default_rng([7, number])
    rows, names = [], []
    for p in range(prompts):
        laws = {}
        for _ in range(group):
            prefix, logp = (), []
            for _ in range(tokens):
                if prefix not in laws:
                    laws[prefix] = rng.normal(0, 1.5, ids)
                z = laws[prefix] / drawn
                at = int(rng.choice(ids, p=np.exp(z - np.logaddexp.reduce(z))))
                z = laws[prefix] / told
                logp.append(min(float(z[at] - np.logaddexp.reduce(z)) + after, -1e-6))
                prefix = (*prefix, at)
            rows.append(((1000 + p, 5, *prefix), logp))
            names.append(f"{number}.{p}")
    width = tokens + 2
    infer = np.array([[np.nan, np.nan, *logp] for _, logp in rows]).ravel()
    mask = np.tile([False] * 2 + [True] * tokens, len(rows))
    train = np.where(mask, np.minimum(infer + rng.normal(0, 0.02, len(infer)), -1e-9), np.nan)
    return Rollouts(
        number,
        np.full(len(rows), width),
        np.array([ids for ids, _ in rows]).ravel(),
        mask,
        train,
        infer,
        tuple(names),
        tuple(f"row {i}" for i in range(len(rows))),
    )


@pytest.mark.parametrize(
    ("law", "expected", "words"),
    [
        ({"after": 0.5}, "unsound", "sum to more than 1"),
        ({"told": 1.0, "drawn": 0.4}, "unsound", "the same next token more often than"),
        ({"told": 0.4, "drawn": 1.0}, "warning", "or prompt groups were selected"),
        ({"told": 1.0, "drawn": 2.5}, "warning", "the same next token less often than"),
    ],
    ids=["above 1", "colder", "hotter", "much hotter"],
)
def test_a_law_that_is_none_or_that_nobody_drew_from_is_said(law, expected, words):
    state, text = odd([siblings(n, **law) for n in range(1, 4)])["siblings"]
    assert state == expected and words in text


@pytest.mark.parametrize("heat", [0.3, 1.0, 2.0])
def test_draws_of_the_recorded_law_are_sound(heat):
    parts = [siblings(n, drawn=heat, told=heat, after=0.01) for n in range(1, 4)]
    assert not {"siblings", "draws"} & {*odd(parts)}


def test_so_many_draws_have_the_probability_that_is_claimed():
    """Of N places with one probability, n draws: at most C(N, n) p^n, and honest ones hold."""
    rng = np.random.default_rng(3)
    p, size, found = 0.02, 400, 0
    for _ in range(500):
        hit = rng.random(size) < p
        place = _Place()
        place.add(np.where(hit, 9, rng.integers(10, 10_000, size)), np.full(size, np.log(p)))
        found += any(place.impossible())
    assert found == 0
    place = _Place()
    place.add(np.full(160, 9), np.full(160, np.log(p)))
    place.add(rng.integers(10, 10_000, size - 160), np.full(size - 160, np.log(0.5)))
    ((token, n, nats),) = place.impossible()
    assert (token, n, round(np.exp(nats), 6)) == (9, 160, p)


def _put(part, at, token, nats):
    """One id at some tokens, with about one logprob on both sides."""
    changed = {name: getattr(part, name).copy() for name in BOTH}
    for values in changed.values():
        values[at] = nats - 0.01 * np.arange(len(at))
    ids = part.token_N.copy()
    ids[at] = token
    return replace(part, token_N=ids, **changed)


def _opening(part):
    """Half of the answers begin with one id, which the sampler finds improbable."""
    return _put(part, np.flatnonzero(part.mask_N)[:: int(part.trained_S[0])][::2], 7, -6.0)


def _padding(part):
    """The last three tokens of each answer are those of padding."""
    rows = np.flatnonzero(part.mask_N).reshape(len(part), -1)
    return _put(part, rows[:, -3:].ravel(), 0, -12.0)


def _inside(part):
    """One id stands anywhere in the answers, where the sampler never expects it."""
    return _put(part, np.flatnonzero(part.mask_N)[5::37], 8, -14.0)


@pytest.mark.parametrize("lie", [_opening, _padding, _inside])
def test_ids_that_the_sampler_makes_impossible_were_not_drawn(lie):
    state, text = odd([lie(part) for part in CLEAN])["draws"]
    assert state == "unsound" and "it was not drawn" in text


def test_a_hot_sampler_with_raw_logprobs_drew_its_tokens():
    assert "draws" not in odd([siblings(n, drawn=1.8, told=1.0) for n in range(1, 4)])


# ---- values that were made from others


def _line(part):
    """A fifth of the tokens of both columns are interpolated."""
    lost = np.random.default_rng(5).random((len(part), 40)) < 0.2
    lost[:, [0, -1]] = False
    for name in BOTH:
        rows = getattr(part, name)[part.mask_N].reshape(-1, 40)
        for row, gone in zip(rows, lost, strict=True):
            row[gone] = np.interp(np.flatnonzero(gone), np.flatnonzero(~gone), row[~gone])
        part = trained(part, name, rows.ravel())
    return part


def _by_id(part):
    """An id has its last number in all places of an answer; ids are few."""
    token = part.token_N.copy()
    token[part.mask_N] %= 11
    part = replace(part, token_N=token)
    ids = token[part.mask_N].reshape(-1, 40)
    for name in BOTH:
        rows = getattr(part, name)[part.mask_N].reshape(-1, 40)
        for row, of in zip(rows, ids, strict=True):
            last = dict(zip(of, row, strict=True))
            row[:] = [last[i] for i in of]
        part = trained(part, name, rows.ravel())
    return part


def _half(values, kind):
    if kind == "float16":
        return values.astype(np.float16).astype(float)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)


def _rounded(kind):
    def lie(part):
        infer = part.logp_infer_N.copy()
        mine = np.repeat(np.arange(len(part)) % 4 == 0, part.length_S) & part.mask_N
        infer[mine] = _half(part.logp_train_N[mine], kind)
        return replace(part, logp_infer_N=infer)

    return lie


MADE = {
    "interpolated": (_line, "lie on the line through their neighbours"),
    "kept by id": (_by_id, "of an earlier place of the same id"),
    "the trainer's in bfloat16": (_rounded("bfloat16"), "rounded to a smaller format"),
    "the trainer's in float16": (_rounded("float16"), "rounded to a smaller format"),
}


@pytest.mark.parametrize("name", MADE)
def test_values_that_are_made_from_others_are_unsound(name):
    lie, words = MADE[name]
    state, text = odd([lie(part) for part in CLEAN])["filled"]
    assert state == "unsound" and words in text


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("noise", [1.0, 0.02])
def test_a_sampler_that_records_few_bits_is_no_copy(kind, noise):
    def recorded(part):
        train = part.infer_K + noise * (part.train_K - part.infer_K)
        part = trained(part, "logp_infer_N", _half(part.infer_K, kind))
        return trained(part, "logp_train_N", np.minimum(train, -1e-9))

    assert "filled" not in odd([recorded(part) for part in CLEAN])


def test_a_sure_sampler_that_records_few_bits_is_no_copy():
    parts = [step(n, sure=9.0) for n in (1, 2, 3)]
    parts = [trained(part, "logp_infer_N", _half(part.infer_K, "bfloat16")) for part in parts]
    assert "filled" not in odd(parts)


def test_bounds_are_no_values_that_were_filled_in():
    def bounded(part):
        infer = part.infer_K.copy()
        low, high = np.quantile(infer, [0.05, 0.8])
        return trained(part, "logp_infer_N", np.clip(infer, low, high))

    assert "filled" not in odd([bounded(part) for part in CLEAN])


# ---- the mask of the loss, advantages, and versions


def with_outcome(part, seed, after=0.0, order=False, penalty=0.0):
    """Rewards of 0 and 1, and advantages that are centred in groups of four."""
    rng = np.random.default_rng([seed, part.step])
    reward = (rng.random((len(part) // 4, 4)) < 0.5).astype(float)
    shaped = reward - penalty * rng.random(reward.shape)
    advantage = (shaped - shaped.mean(1, keepdims=True)).ravel()
    column_N = np.repeat(advantage, part.length_S)
    moved = part.logp_train_N + after * column_N
    if order:
        column_N = np.repeat(rng.permutation(advantage), part.length_S)
    return replace(
        part,
        logp_train_N=np.minimum(moved, -1e-9),
        per_sequence={"reward": reward.ravel()},
        per_token={"advantage": column_N},
    )


def test_a_trainer_that_knows_the_outcome_and_advantages_of_other_rows_are_said():
    parts = [step(n) for n in range(1, 7)]
    state, text = odd([with_outcome(part, 1, after=0.02) for part in parts])["outcome"]
    assert state == "unsound" and "goes with its advantage" in text
    state, text = odd([with_outcome(part, 2, order=True) for part in parts])["outcome"]
    assert state == "warning" and "are the advantages those of these rows?" in text
    for seed in range(6):
        assert "outcome" not in odd([with_outcome(part, seed, penalty=0.3) for part in parts])


def test_tokens_of_the_loss_that_the_mask_leaves_out_are_unsound():
    def used(part, by):
        loss_N = np.roll(part.mask_N, by).astype(float)
        return replace(part, per_token={"loss_mask": loss_N})

    parts = [step(n, turns=4) for n in (1, 2, 3)]
    state, text = odd([used(part, 1) for part in parts])["loss"]
    assert state == "unsound" and "tokens that the mask leaves out" in text
    assert "loss" not in odd([used(part, 0) for part in parts])


def served(part, version, replica_S):
    version_N = np.repeat(version, part.length_S).astype(float)
    labels = {"replica": tuple(f"r{r}" for r in replica_S)}
    per_token = {"weight_version": version_N, "staleness": np.maximum(part.step - version_N, 0.0)}
    return replace(part, per_token=per_token, labels=labels)


def test_versions_ahead_of_the_trainer_and_counters_that_restart_are_unsound():
    parts, replica_S = [step(n) for n in range(1, 9)], np.arange(48) % 2
    ahead = [served(part, part.step + (np.arange(48) % 5 == 0), replica_S) for part in parts]
    state, text = odd(ahead)["versions"]
    assert state == "unsound" and "are of weights newer than those of the trainer" in text

    def restarted(part):
        late = 5 * (replica_S == 1) * (part.step >= 6)
        return served(part, part.step - late, replica_S)

    state, text = odd([restarted(part) for part in parts])["versions"]
    assert state == "unsound" and "replica r1 are version 1 at step 6" in text

    def rolled_back(part):
        wide = 3.0 if part.step >= 6 else 1.0
        train = part.infer_K + wide * (part.train_K - part.infer_K)
        return restarted(trained(part, "logp_train_N", np.minimum(train, -1e-9)))

    state, text = odd([rolled_back(part) for part in parts])["versions"]
    assert state == "warning" and "went back to older weights" in text
    late = [served(part, part.step - (np.arange(48) % 5 == 0), replica_S) for part in parts]
    assert "versions" not in odd(late)
    once = [served(p, np.full(48, p.step - 4 * (p.step == 5)), replica_S) for p in parts]
    assert "versions" not in odd(once)
