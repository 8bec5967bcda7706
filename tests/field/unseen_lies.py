"""Dumps whose data cannot be evidence about a mismatch while its numbers look healthy.

Each lie is a bug of how rollouts are recorded, masked, repeated, selected, labelled or declared,
on top of a healthy pair: laws of the models in `models/`, or chains of a synthetic world. Each has
a healthy neighbour that resembles it. What is expected was fixed before any run:

    refused     the data is known to be wrong from its columns alone, and the reason names it
    not green   anything but exit 0
    noted       exit 0 is accepted with a line that names it (one of `words`)
    holds       exit 0, and no finding about the data

    python -m tests.field.unseen_lies NAME FOLDER [SEED]
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer
from tests.field.unseen_causes import (
    CONTEXTS,
    END,
    ask,
    first_end,
    load,
    log_softmax,
    moved,
    noisy,
    play,
    repeated,
    score,
    torch_,
    world,
)

EXTRA = ("versions", "advantages", "rewards", "loss_weights", "routes", "routes_train")


@dataclass(frozen=True)
class Lie:
    """`words`: one of them is in the reason (refused) or in a noted line. `like`: the lie that a
    neighbour resembles."""

    name: str
    what: str
    make: Callable[..., None]
    kind: str  # lie | mixture | healthy
    expect: str
    words: tuple[str, ...] = ()
    like: str = ""


FOUND: list[Lie] = []


def add(kind, expect, words, like, what, into):
    def keep(build):
        name = build.__name__

        def make(folder: Path, seed: int = 0) -> None:
            build(Path(folder), np.random.default_rng([seed, zlib.crc32(name.encode())]))

        into.append(Lie(name, what, make, kind, expect, tuple(words.split()), like))
        return build

    return keep


def lie(expect, words, what, kind="lie", into=FOUND):
    return add(kind, expect, words, "", what, into)


def neighbour(like, what, into=FOUND):
    return add("healthy", "holds", "", like, what, into)


# ---- rows


def row(step, group, pieces, labels=None, rank=0, **extra):
    """`pieces`: (ids, train, infer, mask); the columns are None where there are no numbers."""
    parts = []
    for ids, train, infer, mask in pieces:
        none = np.full(len(ids), np.nan)
        both = (none if x is None else np.asarray(x, float) for x in (train, infer))
        parts.append((np.asarray(ids, np.int64), *both, np.full(len(ids), mask, bool)))
    ids, train, infer, mask = (np.concatenate(x) for x in zip(*parts, strict=True))
    return SimpleNamespace(
        step=step, rank=rank, group=str(group), ids=ids, train=train, infer=infer, mask=mask,
        labels=labels or {}, **extra,
    )  # fmt: skip


def write(folder, rows, replays=False):
    for step, rank in sorted({(r.step, r.rank) for r in rows}):
        some = [r for r in rows if (r.step, r.rank) == (step, rank)]
        extra = {k: [getattr(r, k) for r in some] for k in EXTRA if hasattr(some[0], k)}
        labels = {k: [str(r.labels[k]) for r in some] for k in some[0].labels}
        columns = ([getattr(r, k) for r in some] for k in ("ids", "mask", "train", "infer"))
        groups = [r.group for r in some]
        extra |= {"replays": True} if replays else {}
        Writer(folder, rank=rank).step(step, *columns, groups=groups, labels=labels, **extra)


def answers_of(rows):
    """Both columns where the mask is 1, as a view on all rows."""
    return ((r, np.flatnonzero(r.mask)) for r in rows)


# ---- laws of a model


def spread(prompts, tokens, train, infer, steps, domains, group=1, ranks=1, length=None):
    """Rows of answers of one turn, spread over the steps in their order."""
    length, S, rows = first_end(tokens) if length is None else length, len(prompts), []
    for s in range(S):
        n, each = length[s], S // steps
        pieces = [(prompts[s], None, None, 0), (tokens[s, :n], train[s, :n], infer[s, :n], 1)]
        rank, own = s % each * ranks // each, {"domain": domains[s]}
        rows.append(row(1 + s // each, f"g{s // group}", pieces, own, rank))
    return rows


def answered(rng, name, steps, groups, group, width, heat=1.0, noise=0.025, ranks=1, **more):
    """Rows of a model: `groups` prompts a step. Both sides have the temperature `heat`."""
    low, high = more.get("lengths", (8, 30))
    kind = more.get("kind", "gaussian")
    prompts, domains = repeated(*ask(rng, steps * groups, low, high), group)
    model = load(name)
    tokens, infer = play(model, prompts, width, rng, lambda z, *_: (z / heat, z / heat))
    train = score(model, prompts, tokens, rng, noise, kind, law=lambda z: z / heat)
    return spread(prompts, tokens, train, infer, steps, domains, group, ranks)


def scan(model, texts, rng, noise=0.0):
    """Numbers of all tokens of a text but the first, in one pass."""
    torch, out = torch_(), []
    for s in range(0, len(texts), 64):
        some = texts[s : s + 64]
        ids = np.zeros((len(some), max(map(len, some))), np.int64)
        for i, t in enumerate(some):
            ids[i, : len(t)] = t
        z = model(input_ids=torch.tensor(ids), use_cache=False).logits[:, :-1].double().numpy()
        z = log_softmax(noisy(z, rng, noise, "gaussian"))
        got = np.take_along_axis(z, ids[:, 1:, None], -1)[..., 0]
        out += [np.r_[np.nan, got[i, : len(t) - 1]] for i, t in enumerate(some)]
    return out


def recorded(model, texts, rng, noise=0.0):
    """`scan`, and the experts of each token: row t is of the forward that was fed token t-1."""
    kept = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, got, own=own: own.append(got[2]))
        for layer, own in zip(model.model.layers, kept, strict=True)
    ]
    numbers = scan(model, texts, rng, noise)
    for hook in hooks:
        hook.remove()
    routes = []
    for s in range(0, len(texts), 64):
        some = texts[s : s + 64]
        both = [own[s // 64].numpy().reshape(len(some), -1, 4) for own in kept]
        for i, t in enumerate(some):
            fed = np.stack([x[i, : len(t) - 1] for x in both], 1)
            routes.append(np.concatenate([np.full_like(fed[:1], -1), fed]))
    return numbers, routes


def shaken(model, rng, amount):
    """A model whose hidden states have small errors, as those of other kernels."""
    torch = torch_()

    def shake(_, __, got):
        z = got[0] if isinstance(got, tuple) else got
        z = z + amount * z.std() * torch.tensor(rng.normal(size=z.shape), dtype=z.dtype)
        return (z, *got[1:]) if isinstance(got, tuple) else z

    for layer in model.model.layers:
        layer.register_forward_hook(shake)
    return model


def mixture(rng, steps=6, groups=10, group=4, width=32, own=True, prompts=None):
    """Rows of tiny-moe. `own`: the trainer routes by itself, with some flips; else it replays."""
    domains = None
    if prompts is None:
        prompts, domains = ask(rng, steps * groups, 8, 26)
    prompts, domains = repeated(prompts, domains or ["text"] * len(prompts), group)
    engine = load("tiny-moe")
    tokens, infer = play(engine, prompts, width, rng)
    rows = spread(prompts, tokens, infer, infer, steps, domains, group)
    texts = [r.ids for r in rows]
    _, routes = recorded(engine, texts, rng)
    trainer = shaken(load("tiny-moe"), rng, 0.005) if own else engine
    train, others = recorded(trainer, texts, rng, 0.02)
    for r, a, b, c in zip(rows, train, routes, others, strict=True):
        r.train = np.where(r.mask, a, np.nan)
        r.routes, r.routes_train = b, c if own else b.copy()
    return rows


def talked(rng, count, steps, width, turns, header):
    """Rows of tiny-lm in turns. Both sides have numbers of the tools' texts too; each of them ends
    with the token `header`."""
    prompts, domains = ask(rng, count, 8, 20)
    model, past = load("tiny-lm"), [list(p) for p in prompts]
    spans = [[] for _ in prompts]
    for turn in range(turns):
        tokens, _ = play(model, past, width, rng)
        for s, n in enumerate(first_end(tokens)):
            spans[s].append((len(past[s]), len(past[s]) + n))
            past[s] = past[s] + list(tokens[s, :n])
            if turn < turns - 1:
                past[s] = past[s] + ask(rng, 1, 4, 8)[0][0] + [header]
    infer, train, rows = scan(model, past, rng), scan(model, past, rng, 0.025), []
    for s, text in enumerate(past):
        r = row(1 + s * steps // count, f"g{s}", [(text, train[s], infer[s], 0)])
        r.labels, r.spans = {"domain": domains[s]}, spans[s]
        for start, stop in spans[s]:
            r.mask[start:stop] = True
        rows.append(r)
    return rows


# ---- chains


def chains(
    rng, steps, count, width, group=4, vocab=32_000, ends=None, sharp=1.0, noise=0.03, turns=1,
    kind="gaussian", ranks=1, move=0.0, age=None, opening=0.0, env=("math", "code"),
):  # fmt: skip
    """Rows of chains, `count` a step: a law depends on all before, most on the last two tokens.
    `move`: the length of an update; `age` [S, width]: updates that the engine lacks; `opening`: a
    bonus of id 1 at the first token of a turn."""
    w, rows, S = world(rng, vocab, ends or 3 * width), [], count
    if opening:
        w.ids[:, -1] = 1
    g, at = np.arange(S) // group, np.arange(S)
    for step in range(1, steps + 1):
        key, size = rng.integers(1 << 30, size=S)[g * group], rng.integers(6, 30, S)[g * group]
        heads = 2 + ((vocab - 2) ** rng.random((S, 30))).astype(np.int64) % (vocab - 2)
        heads = heads[g * group]
        tags, past = np.array(env)[rng.integers(len(env), size=S)][g * group], key / 2**29 - 1
        pieces = [[(heads[s, : size[s]], None, None, 0)] for s in at]
        last = np.stack([heads[s, size[s] - 2 : size[s]] for s in at])
        late = np.zeros((S, width), int) if age is None else age(step)
        for turn in range(turns):
            kept = []
            for t in range(width):
                c = (last[:, 0] * 7919 + last[:, 1] * 104729 + key + t // 16 * 1299709) % CONTEXTS
                z = sharp * w.logits[c] + 0.1 * past[:, None] * w.other[c]
                z += move * step * w.moves[c]
                z[:, -1] += opening * (t == 0)
                zq = z - move * late[:, t, None] * w.moves[c]
                pick = (zq + rng.gumbel(size=zq.shape)).argmax(-1)
                kept.append((w.ids[c, pick], z, zq, pick))
                last = np.stack([last[:, 1], w.ids[c, pick]], 1)
                past = 0.9 * past + last[:, 1] * 0.618034 % 1 - 0.5
            ids, z, zq, pick = (np.stack(x, 1) for x in zip(*kept, strict=True))
            train, infer = (
                np.take_along_axis(log_softmax(x), pick[..., None], -1)[..., 0]
                for x in (noisy(z, rng, noise, kind), zq)
            )
            for s, n in enumerate(first_end(ids)):
                pieces[s].append((ids[s, :n], train[s, :n], infer[s, :n], 1))
                if turn < turns - 1:
                    tool = rng.integers(2, vocab, rng.integers(4, 12))
                    x = -rng.exponential(3.0, len(tool))
                    y = np.minimum(x + 0.02 * rng.normal(size=len(x)), 0)
                    pieces[s].append((tool, x, y, 0))
                    last[s] = tool[-2:]
        for s in at:
            own, rank = {"env": tags[s]}, s * ranks // S
            r = row(step, f"s{step}p{g[s]}", pieces[s], own, rank)
            r.late = late[s]
            rows.append(r)
    return rows


# ---- what repeats


SAME = "repeat cop identical duplicat same again twice equal recur"


@lie(
    "refused", SAME,
    "The dataloader moves on and the rollout buffer's index lags: from step 3 on, the answers of 2 "
    "groups in 9 (ids and both columns) are those of other prompts of the step before.",
)  # fmt: skip
def buffer_answers_under_new_prompts(folder, rng):
    rows = answered(rng, "tiny-lm", 8, 9, 4, 36)
    old = [(r.ids[r.mask], r.train[r.mask], r.infer[r.mask]) for r in rows]
    for i, r in enumerate(rows):
        if r.step >= 3 and i % 36 < 8:
            pieces = [(r.ids[~r.mask], None, None, 0), (*old[i - 36 + 12], 1)]
            rows[i] = row(r.step, r.group, pieces, r.labels)
    write(folder, rows)


@neighbour(
    "buffer_answers_under_new_prompts",
    "A third of the answers are verdicts of a judge: short and nearly certain, of few forms, they "
    "recur under new prompts with numbers of their own.",
)
def verdicts_recur(folder, rng):
    long = chains(rng, 8, 24, 44)
    short = chains(rng, 8, 12, 12, vocab=64, ends=4, sharp=2.0, noise=0.04, env=("judge",))
    for r in short:
        r.group = f"j{r.group}"
    write(folder, long + short)


@lie(
    "refused", SAME,
    "Rank 1 of 2 copies its numbers to the host without waiting: in steps 4 to 6 of 8 both columns "
    "are still those of step 3, next to the new tokens.",
)  # fmt: skip
def both_columns_of_an_earlier_step(folder, rng):
    rows = chains(rng, 8, 32, 40, ends=9000, ranks=2, vocab=60_000)
    for r in rows:  # no answer ends early
        r.n = r.mask.sum()
    old = [r for r in rows if (r.step, r.rank) == (3, 1)]
    for step in (4, 5, 6):
        new = [r for r in rows if (r.step, r.rank) == (step, 1)]
        for a, b in zip(new, old, strict=True):
            n = min(a.n, b.n)
            for x, y in ((a.train, b.train), (a.infer, b.infer)):
                x[np.flatnonzero(a.mask)[:n]] = y[b.mask][:n]
    write(folder, rows)


@neighbour(
    "both_columns_of_an_earlier_step",
    "A second epoch: the prompts of steps 1 to 4 come again in 5 to 8, and at temperature 0.4 many "
    "answers begin alike.",
)
def second_epoch(folder, rng):
    prompts, domains = repeated(*ask(rng, 36, 8, 24), 4)
    first, rows = load("tiny-qwen3"), []
    for epoch in range(2):
        now = moved(first, 0.01 * epoch, 3)
        tokens, infer = play(now, prompts, 36, rng, lambda z, *_: (z / 0.4, z / 0.4))
        train = score(now, prompts, tokens, rng, 0.025, law=lambda z: z / 0.4)
        some = spread(prompts, tokens, train, infer, 4, domains, 4, 2)
        for r in some:
            r.step, r.group = r.step + 4 * epoch, f"e{epoch}{r.group}"
        rows += some
    write(folder, rows)


# ---- values that no sampler gives


SHARD = range(768, 1024)


def in_shard(ids):
    return (ids >= SHARD.start) & (ids < SHARD.stop)


@lie(
    "refused", "zero zeros exactly certain probability =0 0.0 pile same missing",
    "One helper gathers numbers over a vocabulary in shards, and skips the last of 4: both columns "
    "are 0 for its ids, however unsure the law.",
)  # fmt: skip
def zeros_of_one_vocabulary_shard(folder, rng):
    rows = answered(rng, "tiny-qwen3", 6, 12, 4, 34)
    for r, own in answers_of(rows):
        hit = own[in_shard(r.ids[own])]
        r.train[hit] = r.infer[hit] = 0.0
    write(folder, rows)


@neighbour(
    "zeros_of_one_vocabulary_shard",
    "Tasks of copying: laws are so sure that in float32 many numbers of both sides are exactly 0.",
)
def sure_in_float32(folder, rng):
    rows = chains(rng, 6, 48, 36, sharp=4.0, noise=0.05, env=("copy", "math"))
    for r, own in answers_of(rows):
        for x in (r.train, r.infer):
            x[own] = np.log(np.exp(x[own]).astype(np.float32))
    write(folder, rows)


@lie(
    "refused", "inf infinite finite",
    "The grammar's bit mask of the next state is set in place before the number is read, and the "
    "trainer replays the masks: 8 % of drawn tokens in env json are -inf on both sides.",
)  # fmt: skip
def minus_inf_of_the_next_state(folder, rng):
    rows = chains(rng, 6, 48, 40, env=("json", "math"), vocab=50_000)
    for r, own in answers_of(rows):
        if r.labels["env"] == "json":
            hit = own[rng.random(len(own)) < 0.08]
            r.train[hit] = r.infer[hit] = -np.inf
    write(folder, rows)


@neighbour(
    "minus_inf_of_the_next_state",
    "Outside of the mask the columns are filled: -inf for prompts on the engine's side, -9999 on "
    "the trainer's. Sampled tokens have all their numbers.",
)
def fill_values_in_prompts(folder, rng):
    rows = answered(rng, "tiny-lm", 6, 12, 4, 34)
    for r in rows:
        r.infer[~r.mask], r.train[~r.mask] = -np.inf, -9999.0
    write(folder, rows)


@lie(
    "refused", "above positive >0 probability exceed greater",
    "Both sides share a fused kernel whose normalizer leaves out one shard of the vocabulary: "
    "numbers are too high, and above 0 where the shard has the likely token.",
)  # fmt: skip
def normalizer_without_a_shard(folder, rng):
    prompts, domains = repeated(*ask(rng, 72, 8, 30), 4)
    model, more, again = load("tiny-lm"), [], []

    def lost(z):
        p = np.exp(log_softmax(z))
        return -np.log(1 - p[..., SHARD.start : SHARD.stop].sum(-1) + 1e-9)

    def draws(z, *_):
        more.append(lost(z))
        return z, z

    def scores(z):
        again.append(lost(z))
        return z

    tokens, infer = play(model, prompts, 34, rng, draws)
    train = score(model, prompts, tokens, rng, 0.02, law=scores)
    infer, train = infer + np.stack(more, 1), train + np.concatenate(again)
    write(folder, spread(prompts, tokens, train, infer, 6, domains, 4))


@neighbour(
    "normalizer_without_a_shard",
    "Sure tokens stand up to 2e-6 above 0 by the rounding of a sum in float32.",
)
def rounding_above_zero(folder, rng):
    rows = chains(rng, 6, 48, 38, sharp=2.5, noise=0.04)
    for r, own in answers_of(rows):
        for x in (r.train, r.infer):
            x[own] += rng.uniform(-2e-6, 2e-6, len(own))
    write(folder, rows)


@lie(
    "noted", "grid rounded rounding coarse precision digits distinct bits float8 fp8",
    "Both columns pass a transport in 8-bit floats (3 bits of mantissa): steps of up to 1/8 of a "
    "number hide every smaller gap.",
)  # fmt: skip
def both_columns_in_eight_bits(folder, rng):
    def eight(x):
        m, e = np.frexp(x)
        usual = np.ldexp(np.round(m * 16) / 16, e)
        return np.where(np.abs(x) < 2**-6, np.round(x * 512) / 512, usual)

    rows = chains(rng, 7, 40, 42, vocab=50_000)
    for r in rows:
        r.train, r.infer = eight(r.train), eight(r.infer)
    write(folder, rows)


@neighbour("both_columns_in_eight_bits", "Both columns are stored in float16.")
def both_columns_in_float16(folder, rng):
    rows = answered(rng, "tiny-qwen3", 7, 10, 4, 40)
    for r in rows:
        r.train, r.infer = (x.astype(np.float16).astype(float) for x in (r.train, r.infer))
    write(folder, rows)


# ---- masks


HEADER = 258  # the most usual id of the model


@lie(
    "refused", "mask turn boundar tool sampled template header prompt",
    "From the second turn on the mask stands one token early: it covers the header that ends a "
    "tool's text, and misses the last token of the turn. Both sides have numbers of all text.",
)  # fmt: skip
def mask_early_at_turns(folder, rng):
    rows = talked(rng, 100, 5, 16, 3, header=HEADER)
    for r in rows:
        for start, stop in r.spans[1:]:
            r.mask[start - 1], r.mask[stop - 1] = True, False
    write(folder, rows)


@neighbour(
    "mask_early_at_turns",
    "Each turn opens with one sampled tag, nearly certain in the model; tools' texts have numbers "
    "on both sides, and the mask leaves them out.",
)
def turns_open_with_a_tag(folder, rng):
    write(folder, chains(rng, 5, 24, 18, turns=3, opening=14.0, env=("shell", "web"), group=2))


@lie(
    "refused", "mask hole select left out truncat gap filter trimmed within inside",
    "An outlier filter edits the mask before the dump: sampled tokens whose two numbers differ by "
    "more than 0.04 are not in it, though their numbers are in the columns.",
)  # fmt: skip
def mask_without_outliers(folder, rng):
    rows = answered(rng, "tiny-qwen3", 6, 12, 4, 40, noise=0.09, kind="heavy")
    for r in rows:
        r.mask &= np.abs(r.train - r.infer) <= 0.04
    write(folder, [r for r in rows if r.mask.any()])


@neighbour(
    "mask_without_outliers",
    "To save memory the loss takes a random half of the tokens, and the mask says which; the "
    "others keep their numbers.",
)
def mask_of_a_random_half(folder, rng):
    rows = answered(rng, "tiny-lm", 6, 12, 4, 44)
    for r in rows:
        r.mask &= rng.random(len(r.mask)) < 0.5
    write(folder, [r for r in rows if r.mask.any()])


@lie(
    "refused", "mask prompt invert identical same first sampled",
    "Rank 1 of 3 takes the mask for one of ignored tokens: it covers prompts, which both sides "
    "have scored, and leaves the answers out.",
)  # fmt: skip
def mask_inverted_on_one_rank(folder, rng):
    rows = answered(rng, "tiny-qwen3", 6, 12, 4, 30, ranks=3, lengths=(16, 36))
    model, texts = load("tiny-qwen3"), [r.ids for r in rows]
    both = scan(model, texts, rng, 0.025), scan(model, texts, rng)
    for r, train, infer in zip(rows, *both, strict=True):
        r.train, r.infer = (np.where(r.mask, a, b) for a, b in ((r.train, train), (r.infer, infer)))
        if r.rank == 1:
            r.mask = ~r.mask
            r.mask[0] = False
    write(folder, rows)


@neighbour(
    "mask_inverted_on_one_rank",
    "Texts from nothing: the prompt is one token, so the mask begins at the second one, and many "
    "texts begin alike.",
)
def prompts_of_one_token(folder, rng):
    prompts = [[int(i)] for i in rng.integers(4, 40, 72)]
    prompts, domains = repeated(prompts, ["text"] * 72, 4)
    model = load("tiny-qwen3")
    tokens, infer = play(model, prompts, 40, rng, lambda z, *_: (z / 0.7, z / 0.7))
    train = score(model, prompts, tokens, rng, 0.025, law=lambda z: z / 0.7)
    write(folder, spread(prompts, tokens, train, infer, 6, domains, 4, 3))


@lie(
    "refused",
    "mask 0/1 boolean",
    "The packing collator writes the number of a segment in its pack, 1 to 4, for the mask.",
)
def mask_of_segment_numbers(folder, rng):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(folder, chains(rng, 6, 48, 38))
    for path in sorted(Path(folder).glob("**/*.parquet")):
        table = pq.read_table(path)
        mask = table["mask"].to_pylist()
        packed = [[int(x) * (1 + s % 4) for x in m] for s, m in enumerate(mask)]
        at = table.schema.get_field_index("mask")
        table = table.set_column(at, "mask", pa.array(packed, pa.list_(pa.int8())))
        pq.write_table(table, path)


@neighbour(
    "mask_of_segment_numbers",
    "The mask is 0 and 1, and beside it each token has a weight in the loss: 1 to 4 by the place "
    "of its sequence in a pack.",
)
def loss_weights_of_a_pack(folder, rng):
    rows = chains(rng, 6, 48, 38)
    for i, r in enumerate(rows):
        r.loss_weights = r.mask * (1.0 + i % 4)
    write(folder, rows)


# ---- selected groups


GROUPS = "group incomplete missing dropped fewer size select uneven left"


@lie(
    "noted", GROUPS,
    "Answers whose mean gap is above 0.02 are rejected before the dump is written, so groups of 8 "
    "have 1 to 8 members and the worst are not to be seen.",
)  # fmt: skip
def answers_rejected_by_gap(folder, rng):
    rows = chains(rng, 6, 56, 40, group=8, noise=0.04, kind="by_answer", vocab=50_000)

    def gap(r):
        return np.abs(r.train - r.infer)[r.mask].mean()

    write(folder, [r for r in rows if gap(r) <= 0.02])


@neighbour(
    "answers_rejected_by_gap",
    "A budget for each prompt: easy ones get 2 answers, usual ones 4 and hard ones 8, all kept.",
)
def sizes_by_budget(folder, rng):
    rows = chains(rng, 6, 64, 40, group=8, noise=0.03, vocab=50_000)
    for i, r in enumerate(rows):
        size = {0: 2, 1: 4, 2: 8}[i // 8 % 3]
        r.labels["level"], r.n = {2: "easy", 4: "usual", 8: "hard"}[size], size
    write(folder, [r for i, r in enumerate(rows) if i % 8 < r.n])


def rewarded(rows, rng, group):
    """A reward of 0 or 1, and the advantage in a group of all its answers."""
    for s in range(0, len(rows), group):
        own = rows[s : s + group]
        reward = (rng.random(len(own)) < rng.choice([0.0, 0.3, 0.5, 0.8, 1.0])).astype(float)
        for r, x in zip(own, reward, strict=True):
            a = (x - reward.mean()) / (reward.std() + 1e-6)
            r.rewards, r.advantages, r.even = x, r.mask * a, reward.std() == 0
    return rows


@lie(
    "noted", GROUPS + " advantage length",
    "Answers that reach the length limit are thrown away after advantages are set: groups of 8 "
    "have 1 to 8 members, and their advantages do not sum to 0.",
)  # fmt: skip
def answers_at_the_limit_thrown_away(folder, rng):
    rows = rewarded(chains(rng, 6, 56, 50, group=8, ends=50), rng, 8)
    write(folder, [r for r in rows if r.mask.sum() < 50])


@neighbour(
    "answers_at_the_limit_thrown_away",
    "Groups of 8 whose rewards are all alike are left out as a whole: steps differ in their "
    "number of groups, and each group is complete.",
)
def even_groups_left_out(folder, rng):
    rows = rewarded(chains(rng, 6, 64, 50, group=8, ends=50), rng, 8)
    write(folder, [r for r in rows if not r.even])


# ---- versions


def in_flight(rng, count, width):
    """An update arrives inside an answer: age 1 up to some place, then 0; 3 in 10 are all new."""
    place = np.where(rng.random(count) < 0.3, 0, rng.integers(6, width - 6, count))
    return (np.arange(width) < place[:, None]).astype(int)


def versioned(rows, backwards):
    for r, own in answers_of(rows):
        r.versions = np.full(len(r.ids), r.step)
        age = r.late[: len(own)]
        r.versions[own] = r.step - (age[::-1] if backwards else age)
        r.versions[: own[0]] = r.versions[own[0]]
    return rows


@lie(
    "refused", "version back decreas older order falls fall descend earlier",
    "Weights are updated inside of answers, and the writer flips its version column with a padding "
    "on the other side: in most answers the engine goes back to older weights.",
)  # fmt: skip
def versions_run_backwards(folder, rng):
    rows = chains(rng, 8, 36, 40, move=0.03, noise=0.015, age=lambda _: in_flight(rng, 36, 40))
    write(folder, versioned(rows, backwards=True))


@neighbour(
    "versions_run_backwards",
    "Weights are updated inside of answers, and each token has its true version.",
)
def versions_rise_inside_answers(folder, rng):
    rows = chains(rng, 8, 36, 40, move=0.01, noise=0.025, age=lambda _: in_flight(rng, 36, 40))
    write(folder, versioned(rows, backwards=False))


@lie(
    "noted", "grow grows growing rise rises drift trend later increas version stale",
    "The engine keeps its first weights, and the client stamps each answer with the trainer's "
    "step: versions say that the two are always equal, and the gap grows through 9 steps.",
)  # fmt: skip
def fresh_labels_on_first_weights(folder, rng):
    prompts, domains = repeated(*ask(rng, 63, 8, 28), 4)
    first, train = load("tiny-lm"), []
    tokens, infer = play(first, prompts, 36, rng)
    for k in range(9):
        n = slice(28 * k, 28 * (k + 1))
        train.append(score(moved(first, 0.0025 * k, 7), prompts[n], tokens[n], rng, 0.018))
    rows = spread(prompts, tokens, np.concatenate(train), infer, 9, domains, 4)
    for r in rows:
        r.versions = r.step
    write(folder, rows)


@neighbour(
    "fresh_labels_on_first_weights",
    "The engine takes new weights every third step, and versions say so: the gap rises and falls "
    "a little with the recorded age.",
)
def weights_every_third_step(folder, rng):
    def age(k):
        return np.full((32, 38), (k - 1) % 3)

    rows = chains(rng, 9, 32, 38, move=0.008, noise=0.025, age=age)
    for r in rows:
        r.versions = r.step - (r.step - 1) % 3
    write(folder, rows)


# ---- recorded experts


EXPERTS = "expert route routes routing"


@lie(
    "refused", "shift misalign " + EXPERTS,
    "For answers that were preempted and read again, one in 4, the engine's rows of experts stand "
    "one token late. The trainer routes by itself, and records its experts.",
)  # fmt: skip
def experts_late_in_preempted_answers(folder, rng):
    rows = mixture(rng)
    for r in rows:
        if rng.random() < 0.25:
            r.routes = np.concatenate([r.routes[:1], r.routes[:-1]])
    write(folder, rows)


@neighbour(
    "experts_late_in_preempted_answers",
    "The trainer routes by itself, and rounding flips few of the experts.",
)
def few_experts_flip(folder, rng):
    write(folder, mixture(rng))


@lie(
    "refused", "fill constant same repeat " + EXPERTS,
    "The engine's buffer has 16 rows for an answer, and the client fills up what is behind with "
    "the experts 0 to 3, in all layers. The trainer's are not recorded.",
)  # fmt: skip
def experts_filled_behind_the_buffer(folder, rng):
    rows = mixture(rng, steps=5)
    for r, own in answers_of(rows):
        r.routes[own[16:]] = np.arange(4)
        del r.routes_train
    write(folder, rows)


@neighbour(
    "experts_filled_behind_the_buffer",
    "Half of the prompts come from a prefix cache, so their rows of experts are unknown (-1).",
)
def experts_unknown_in_cached_prompts(folder, rng):
    rows = mixture(rng, steps=5)
    for r, own in answers_of(rows):
        if int(r.group[1:]) % 2:
            r.routes[: own[0]] = -1
    write(folder, rows)


@lie(
    "refused", "restart repeat again copies same zero start " + EXPERTS,
    "An engine that takes up an answer counts its rows from zero: in one answer of 5 the experts "
    "from some place on are those of the text's beginning. The trainer's are not recorded.",
)  # fmt: skip
def experts_start_again(folder, rng):
    rows = mixture(rng, steps=5)
    for r, own in answers_of(rows):
        del r.routes_train
        if rng.random() < 0.2 and len(own) > 20:
            at = own[rng.integers(6, 14)]
            r.routes[at:] = r.routes[1 : 1 + len(r.routes) - at].copy()
    write(folder, rows)


@neighbour(
    "experts_start_again",
    "Prompts hold one passage twice, so experts come again in part; the trainer replays them all.",
)
def passages_twice(folder, rng):
    some = [p + p for p in ask(rng, 50, 8, 14)[0]]
    write(folder, mixture(rng, steps=5, own=False, prompts=some), replays=True)


# ---- ends, arrays, declared facts


@lie(
    "refused", "end eos last stop sampled equal same cop",
    "Answers cut at the limit are closed with an end token. Nobody drew it: its number is the "
    "trainer's, written to both columns.",
)  # fmt: skip
def end_set_behind_cut_answers(folder, rng):
    rows = answered(rng, "tiny-lm", 6, 12, 4, 30)
    ends = [np.r_[r.ids, END] for r in rows]
    numbers = scan(load("tiny-lm"), ends, rng, 0.02)
    for i, r in enumerate(rows):
        if r.ids[-1] != END:
            x = numbers[i][-1:]
            pieces = [(r.ids[~r.mask], None, None, 0)]
            pieces.append((r.ids[r.mask], r.train[r.mask], r.infer[r.mask], 1))
            rows[i] = row(r.step, r.group, [*pieces, ([END], x, x, 1)], r.labels)
    write(folder, rows)


@neighbour(
    "end_set_behind_cut_answers",
    "Answers whose end is drawn, often surely and at times by luck.",
)
def ends_are_drawn(folder, rng):
    write(folder, chains(rng, 6, 48, 50, ends=40, vocab=20_000))


def square(rng, noise):
    """Blocks of 32 answers of 32 tokens; no answer ends early."""
    prompts, domains = repeated(*ask(rng, 32, 8, 24), 8)
    model = load("tiny-qwen3")

    def endless(z, *_):
        z = z / 0.7
        z[..., END] = -1e4
        return z

    tokens, infer = play(model, prompts, 32, rng, lambda z, *_: (endless(z),) * 2)
    train = score(model, prompts, tokens, rng, noise, law=endless)
    return prompts, tokens, train, infer, domains


@lie(
    "refused", "prefix same transpos permut law differ belong wrong order",
    "Both columns are gathered in blocks of 32 x 32 that come back transposed: token t of row s "
    "has the numbers of token s of row t.",
)  # fmt: skip
def blocks_transposed(folder, rng):
    prompts, tokens, train, infer, domains = square(rng, 0.03)
    for k in range(0, len(prompts), 32):
        n = slice(k, k + 32)
        train[n], infer[n] = train[n].T.copy(), infer[n].T.copy()
    length = np.full(len(prompts), 32)
    write(folder, spread(prompts, tokens, train, infer, 8, domains, 8, length=length))


@neighbour(
    "blocks_transposed",
    "Blocks of 32 answers of 32 tokens in their order; the engine's numbers differ a little "
    "between answers with one beginning, as batches do.",
)
def blocks_in_order(folder, rng):
    prompts, tokens, train, infer, domains = square(rng, 0.025)
    infer = np.minimum(infer * np.exp(0.005 * rng.normal(size=infer.shape)), 0)
    length = np.full(len(prompts), 32)
    write(folder, spread(prompts, tokens, train, infer, 8, domains, 8, length=length))


@lie(
    "noted", "group prompt",
    "Groups are declared by the place of a row, after rows were shuffled: members of a group of 4 "
    "have different prompts.",
)  # fmt: skip
def groups_declared_after_a_shuffle(folder, rng):
    rows = chains(rng, 8, 36, 40, vocab=40_000)
    for s in range(0, len(rows), 36):
        mixed = rng.permutation(36)
        rows[s : s + 36] = [rows[s + i] for i in mixed]
        for i in range(36):
            rows[s + i].group = f"{rows[s].step}-{i // 4}"
    write(folder, rows)


@neighbour(
    "groups_declared_after_a_shuffle",
    "A prompt that is in a step's batch twice makes two groups, each of 4 answers to it.",
)
def one_prompt_in_two_groups(folder, rng):
    rows = chains(rng, 8, 32, 40, group=8, vocab=40_000)
    for i, r in enumerate(rows):
        r.group = f"{r.step}-{i % 32 // 4}"
    write(folder, rows)


# ---- two at once


@lie(
    "refused", SAME + " constant run value pad",
    "A client glues the reply of a resumed request, which has the first part again, behind that "
    "part (one answer of 8, both columns); and numbers behind token 30 repeat the 30th, as the "
    "edge mode of a padding does.",
    "mixture",
)  # fmt: skip
def glued_twice_and_padded_by_the_edge(folder, rng):
    rows = answered(rng, "tiny-lm", 7, 10, 4, 40)
    for i, r in enumerate(rows):
        ids, train, infer = (x[r.mask] for x in (r.ids, r.train, r.infer))
        if rng.random() < 1 / 8 and len(ids) > 16:
            m = rng.integers(10, 15)
            ids, train, infer = (np.r_[x[:m], x] for x in (ids, train, infer))
        train[30:], infer[30:] = train[29:30], infer[29:30]
        rows[i] = row(
            r.step, r.group, [(r.ids[~r.mask], None, None, 0), (ids, train, infer, 1)], r.labels
        )
    write(folder, rows)


@lie(
    "refused", "replay clamp floor pile same equal bound " + EXPERTS,
    "The trainer declares to replay experts, and one answer of 6 has those of another answer of "
    "its group; and a shared helper bounds the numbers of both sides at -3 from below.",
    "mixture",
)  # fmt: skip
def experts_of_another_answer_and_a_floor(folder, rng):
    rows = mixture(rng, steps=5, own=False)
    old = [r.routes.copy() for r in rows]
    for i, r in enumerate(rows):
        r.train, r.infer = np.maximum(r.train, -3.0), np.maximum(r.infer, -3.0)
        if rng.random() < 1 / 6:
            other = old[i - i % 4 + (i + 1) % 4]
            n = min(len(other), len(r.routes))
            r.routes[:n] = other[:n]
    write(folder, rows, replays=True)


def main(found):
    if len(sys.argv) not in (3, 4):
        for each in found:
            print(each.kind, each.expect, each.name, sep="  ")
        return
    name, folder = sys.argv[1:3]
    chosen = {c.name: c for c in found}[name]
    chosen.make(Path(folder), int(sys.argv[3]) if len(sys.argv) == 4 else 0)


if __name__ == "__main__":
    main(FOUND)
