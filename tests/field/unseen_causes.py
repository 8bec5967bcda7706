"""Dumps of rollouts with one or two known faults each, and the names of the causes that are right.

Every number is computed. A token is drawn from the law that the engine really used, the engine's
number is that law's (or what the fault makes of it), and the trainer's number comes from the same
logits, with the fault, and with the small noise of a healthy pair. A law is that of a model in
`models/` (`played`), or synthetic (`drawn`): a context has logits over some token ids, and a
direction in which an update of the weights moves them. `causes` was fixed before any run.

    python -m tests.field.unseen_causes NAME FOLDER [SEED]
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer

ROOT = Path(__file__).parents[2]
CONTEXTS, END = 4096, 0


@dataclass(frozen=True)
class Case:
    """`sized`: the gap is far beyond the usual limits, and has the tokens to show it. `kind` is
    fault, healthy, or unsound (data that cannot be evidence)."""

    name: str
    what: str
    make: Callable[[Path, int], None]
    causes: frozenset[str]
    sized: bool
    kind: str = "fault"


FOUND: list[Case] = []


def case(causes, what, kind="fault", into=FOUND):
    """Adds a function (folder, rng) to the cases of a file, under its own name."""

    def add(write):
        name = write.__name__

        def make(folder: Path, seed: int = 0) -> None:
            write(Path(folder), np.random.default_rng([seed, zlib.crc32(name.encode())]))

        names = frozenset(causes.split())
        into.append(Case(name, what, make, names, kind != "healthy", kind))
        return write

    return add


# ---- the record


class Record:
    """Rows of all steps, written at the end: a file for each step and rank."""

    def __init__(self):
        self.rows = []

    def add(self, step, group, pieces, labels, rank=0, staleness=None):
        """`pieces`: (ids, None, None) of a prompt or a tool, (ids, train, infer) of a turn."""
        ids, mask, train, infer = [], [], [], []
        for tokens, a, b in pieces:
            none = np.full(len(tokens), np.nan)
            ids.append(np.asarray(tokens, np.int64))
            mask.append(np.full(len(tokens), a is not None))
            train.append(none if a is None else np.asarray(a, float))
            infer.append(none if b is None else np.asarray(b, float))
        columns = [np.concatenate(x) for x in (ids, mask, train, infer)]
        self.rows.append((step, rank, str(group), columns, labels, staleness))

    def write(self, folder):
        places = {}
        for row in self.rows:
            places.setdefault((row[0], row[1]), []).append(row)
        for (step, rank), rows in sorted(places.items()):
            ids, mask, train, infer = (list(x) for x in zip(*(r[3] for r in rows), strict=True))
            labels = {k: [str(r[4][k]) for r in rows] for k in rows[0][4]}
            extra = {} if rows[0][5] is None else {"staleness": np.array([r[5] for r in rows])}
            Writer(folder, rank=rank).step(
                step, ids, mask, train, infer, groups=[r[2] for r in rows], labels=labels, **extra
            )


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def cut(z, top_p=1.0, top_k=0, min_p=0.0):
    """Logits with everything outside the nucleus at -inf."""
    order = np.argsort(-z, -1, kind="stable")
    p = np.take_along_axis(np.exp(log_softmax(z)), order, -1)
    keep = (np.cumsum(p, -1) - p < top_p) & (p >= min_p * p[..., :1])
    if top_k:
        keep[..., top_k:] = False
    back = np.empty_like(keep)
    np.put_along_axis(back, order, keep, -1)
    return np.where(back, z, -np.inf)


def first_end(tokens):
    """Length of each row: up to its first end token, or all."""
    ends = tokens == END
    return np.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1])


def noisy(z, rng, amount, kind):
    """The trainer's arithmetic: small errors of the logits, [S, W, K]."""
    e = rng.standard_t(3, z.shape) / 3**0.5 if kind == "heavy" else rng.normal(size=z.shape)
    if kind == "by_answer":
        e = e * np.exp(rng.normal(0, 0.6, (len(z), 1, 1)) - 0.18)
    return z + amount * e


# ---- synthetic laws


def world(rng, vocab, length):
    k = min(vocab // 2, 24)
    ids = np.empty((CONTEXTS, k), np.int64)
    for c in range(CONTEXTS):  # common ids are shared by many contexts
        some = 1 + ((vocab - 1) ** rng.random(20 * k)).astype(np.int64) % (vocab - 1)
        _, first = np.unique(some, return_index=True)
        some = some[np.sort(first)][:k]
        rest = np.setdiff1d(np.arange(1, min(vocab, 4 * k)), some)[: k - len(some)]
        ids[c] = np.concatenate([some, rest])
    steep = rng.uniform(0.6, 2.4, (CONTEXTS, 1))
    logits = rng.normal(0, 0.5, (CONTEXTS, k)) - steep * np.log1p(np.arange(k))
    sure = rng.random(CONTEXTS) < 0.5
    logits[sure, 0] += rng.uniform(3, 9, sure.sum())
    ending = rng.random(CONTEXTS) < 1.5 / length
    ids[ending, 0] = END
    logits[ending, 0] += 5
    moves = rng.normal(size=(CONTEXTS, k))
    return SimpleNamespace(ids=ids, logits=logits, moves=moves, other=rng.normal(size=moves.shape))


def drawn(
    folder,
    rng,
    *,
    vocab,
    steps,
    answers,
    width,
    group=4,
    labels=None,
    noise=0.03,
    kind="gaussian",
    prompt=(6, 40),
    turns=1,
    move=0.0,
    ranks=1,
    engine=None,
    trainer=None,
    report=None,
    lag=None,
    again=0.0,
):
    """Writes a synthetic dump. `engine` and `trainer` take (b, z) and return other logits; `report`
    takes (b, r) and edits the two columns; `move` is the length of an update of the weights."""
    w, out = world(rng, vocab, width), Record()
    for step in range(1, steps + 1):
        S = answers
        row = np.arange(S)
        g = row // group
        b = SimpleNamespace(step=step, steps=steps, row=row, group=g, member=row % group, rng=rng)
        b.rank = row * ranks // S
        b.lag = lag(b) if lag else np.zeros(S, int)
        b.labels = {}
        for name, values in (labels or {}).items():
            drawn_values = np.array(values)[rng.integers(len(values), size=S)]
            b.labels[name] = drawn_values if name == "replica" else drawn_values[g * group]
        starts = rng.integers(prompt[0], prompt[1] + 1, S)[g * group]
        heads = 1 + ((vocab - 1) ** rng.random((S, prompt[1]))).astype(np.int64)[g * group] % (
            vocab - 1
        )
        pieces = [[(heads[s, : starts[s]], None, None)] for s in row]
        for turn in range(1, turns + 1):
            b.turn = turn
            c = rng.integers(CONTEXTS, size=(S, width))
            if turn == 1:
                c[:, 0] = c[g * group, 0]
            b.moves, b.other = w.moves[c], w.other[c]
            now = w.logits[c] + move * step * b.moves
            old = now - move * b.lag[:, None, None] * b.moves
            zq = engine(b, old) if engine else old
            lq = log_softmax(zq)
            pick = (np.cumsum(np.exp(lq), -1) < rng.random((S, width, 1))).sum(-1)
            pick = np.minimum(pick, (lq > -np.inf).shape[-1] - 1)
            # rounding of the sum may point behind the nucleus
            pick = np.where(np.take_along_axis(lq, pick[..., None], -1)[..., 0] > -np.inf, pick, 0)
            lp = log_softmax(noisy(trainer(b, now) if trainer else now, rng, noise, kind))
            r = SimpleNamespace(
                ids=np.take_along_axis(w.ids[c], pick[..., None], -1)[..., 0],
                infer=np.take_along_axis(lq, pick[..., None], -1)[..., 0],
                train=np.take_along_axis(lp, pick[..., None], -1)[..., 0],
                best=lq.max(-1),
            )
            r.length = first_end(r.ids)
            if report:
                report(b, r)
            for s in row:
                n = r.length[s]
                pieces[s].append((r.ids[s, :n], r.train[s, :n], r.infer[s, :n]))
                if turn < turns:
                    tool = rng.integers(1, vocab, rng.integers(4, 20))
                    pieces[s].append((tool, None, None))
        order = np.concatenate([row, row[: round(again * S)]])
        for s in order:
            own = {k: v[s] for k, v in b.labels.items()}
            age = int(b.lag[s]) if lag else None
            out.add(step, f"s{step}p{g[s]}", pieces[s], own, int(b.rank[s]), age)
    out.write(folder)


def by(values):
    """A condition on answers, for use with logits."""
    return np.asarray(values)[:, None, None]


# ---- laws of a model


@cache
def torch_():
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return torch


def load(name):
    torch = torch_()
    from transformers import AutoModelForCausalLM

    path = str(ROOT / "models" / name)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
def texts():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / "models/tiny-lm/tokenizer.json"))
    with open(ROOT / "data/prompts.jsonl") as lines:
        read = [json.loads(line) for line in lines]
    sort = {}
    for r in read[:1500]:
        sort.setdefault(r["labels"]["domain"], []).append(tokenizer.encode(r["prompt"]).ids)
    return sort


def ask(rng, count, low, high):
    """Prompts of a length from `low` to `high`, and the domain of each."""
    sort = texts()
    names = sorted(sort)
    prompts, domains = [], []
    for _ in range(count):
        domain = names[rng.integers(len(names))]
        ids, length = [], int(rng.integers(low, high + 1))
        while len(ids) < length:
            ids = sort[domain][rng.integers(len(sort[domain]))] + ids
        prompts.append(ids[-length:])
        domains.append(domain)
    return prompts, domains


def moved(model, amount, seed):
    """The model after updates: each matrix goes some way in a fixed direction."""
    import copy

    torch = torch_()
    other, noise = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for p in other.parameters():
        if p.dim() > 1:
            p += amount * p.std() * torch.randn(p.shape, generator=noise)
    return other


def pad(rows):
    """Ids padded on the left, and where they are tokens."""
    width = max(map(len, rows))
    ids, there = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    for s, r in enumerate(rows):
        ids[s, width - len(r) :], there[s, width - len(r) :] = r, 1
    return ids, there


def places(there):
    return (np.cumsum(there, 1) - 1).clip(0)


def play(model, prompts, width, rng, law=None, prefill=None):
    """The engine: tokens [S, W] and the numbers it reports. `law` takes (z, past, there) and
    returns the logits that it draws from and those that it reports; `prefill` reads the prompts."""
    torch = torch_()
    ids, there = pad(prompts)
    S, P = ids.shape
    past, seen = np.zeros((S, P + width), np.int64), np.zeros((S, P + width), np.int64)
    past[:, :P], seen[:, :P] = ids, there
    tokens, infer = np.zeros((S, width), np.int64), np.zeros((S, width))
    store, at = None, slice(0, P)
    if prefill is not None:  # all but the last token of the prompt was read before
        got = prefill(
            input_ids=torch.tensor(ids[:, :-1]),
            attention_mask=torch.tensor(there[:, :-1]),
            position_ids=torch.tensor(places(there)[:, :-1]),
            use_cache=True,
        )
        store, at = got.past_key_values, slice(P - 1, P)
    for t in range(width):
        got = model(
            input_ids=torch.tensor(past[:, at]),
            attention_mask=torch.tensor(seen[:, : at.stop]),
            position_ids=torch.tensor(places(seen[:, : at.stop])[:, at]),
            past_key_values=store,
            use_cache=True,
            logits_to_keep=1,
        )
        store, z = got.past_key_values, got.logits[:, -1].double().numpy()
        draws, reports = law(z, past[:, : P + t], seen[:, : P + t]) if law else (z, z)
        pick = (draws + rng.gumbel(size=z.shape)).argmax(1)
        tokens[:, t], infer[:, t] = pick, log_softmax(reports)[np.arange(S), pick]
        past[:, P + t], seen[:, P + t] = pick, 1
        at = slice(P + t, P + t + 1)
    return tokens, infer


def score(model, prompts, tokens, rng, noise=0.03, kind="gaussian", law=None, window=0, pads=False):
    """The trainer: one pass over prompts and tokens. `window` cuts its attention, `pads` makes it
    read the padding."""
    torch = torch_()
    ids, there = pad(prompts)
    S, P = ids.shape
    W = tokens.shape[1]
    ids = np.concatenate([ids, tokens], 1)
    there = np.concatenate([there, np.ones_like(tokens)], 1)
    if pads:
        there[:] = 1
    L = P + W
    back = np.arange(L)[:, None] - np.arange(L)[None, :]
    sees = (back >= 0) & ((back < window) if window else True)
    sees = sees[None] & (there[:, None, :] > 0) | (back == 0)[None]
    out = np.empty((S, W))
    for s in range(0, S, 64):
        n = slice(s, s + 64)
        bias = torch.where(torch.tensor(sees[n, None]), 0.0, -1e9)
        got = model(
            input_ids=torch.tensor(ids[n]),
            attention_mask=bias,
            position_ids=torch.tensor(places(there[n])),
            use_cache=False,
            logits_to_keep=W + 1,
        )
        z = got.logits[:, :-1].double().numpy()
        z = noisy(law(z) if law else z, rng, noise, kind)
        out[n] = np.take_along_axis(log_softmax(z), tokens[n, :, None], -1)[..., 0]
    return out


def record(folder, prompts, tokens, train, infer, steps, labels=None, group=1):
    """Writes answers of one turn: they are spread over the steps in their order."""
    out, length, S = Record(), first_end(tokens), len(prompts)
    for s in range(S):
        n, step = length[s], 1 + s * steps // S
        answer = (tokens[s, :n], train[s, :n], infer[s, :n])
        own = {k: v[s] for k, v in (labels or {}).items()}
        out.add(step, f"g{s // group}", [(prompts[s], None, None), answer], own)
    out.write(folder)


def repeated(prompts, domains, group):
    return [p for p in prompts for _ in range(group)], [d for d in domains for _ in range(group)]


# ---- faults: the sampling


@case(
    "raw_logprobs",
    "The engine draws at temperature 0.6 and reports the logprobs before it (vLLM's default); the "
    "trainer divides its logits by 0.6.",
)
def processed_by_one_side(folder, rng):
    prompts, domains = repeated(*ask(rng, 40, 8, 30), 4)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 48, rng, lambda z, *_: (z / 0.6, z))
    train = score(model, prompts, tokens, rng, 0.03, law=lambda z: z / 0.6)
    replica = [f"r{i}" for i in rng.integers(3, size=len(prompts))]
    record(folder, prompts, tokens, train, infer, 4, {"env": domains, "replica": replica}, 4)


@case(
    "temperature odd_sequences",
    "To explore, each second half of a group of 8 is requested at temperature 1.35, which the "
    "engine reports and the trainer does not know; no field names the requests.",
)
def hot_half_of_each_group(folder, rng):
    def engine(b, z):
        return z / np.where(by(b.member >= 4), 1.35, 1.0)

    drawn(
        folder, rng, vocab=50_000, steps=8, answers=248, width=60, group=8, engine=engine,
        labels={"env": ("math", "code")}, kind="by_answer",
    )  # fmt: skip


@case(
    "top_p one_kind one_engine",
    "Two faults: requests of the environment shell carry top_p 0.8, whose law is reported, and "
    "replica r2 of 4 runs another attention kernel with a large error.",
)
def cut_in_shell_and_a_bad_replica(folder, rng):
    def engine(b, z):
        z = z + 0.5 * by(b.labels["replica"] == "r2") * rng.normal(size=z.shape)
        return np.where(by(b.labels["env"] == "shell"), cut(z, top_p=0.8), z)

    drawn(
        folder, rng, vocab=32_000, steps=10, answers=160, width=80, engine=engine,
        labels={"env": ("math", "shell", "search"), "replica": ("r0", "r1", "r2", "r3")},
    )  # fmt: skip


@case(
    "top_p",
    "The engine takes top_k 20 and top_p 0.9 from the model's generation_config, reports the law "
    "that is left, and the trainer scores with the whole vocabulary.",
)
def generation_config_cuts(folder, rng):
    prompts, domains = repeated(*ask(rng, 20, 6, 40), 8)
    model = load("tiny-qwen3")

    def law(z, past, seen):
        z = cut(z, top_p=0.9, top_k=20)
        return z, z

    tokens, infer = play(model, prompts, 56, rng, law)
    train = score(model, prompts, tokens, rng, 0.025, "heavy")
    record(folder, prompts, tokens, train, infer, 5, {"domain": domains}, 8)


@case(
    "penalty",
    "The engine applies a repetition penalty of 1.15 to every token of the prompt and of the "
    "answer, and reports the penalised law; the trainer applies none.",
)
def repetition_penalty(folder, rng):
    prompts, _ = ask(rng, 180, 12, 40)
    model = load("tiny-lm")

    def law(z, past, seen):
        used = np.zeros(z.shape, bool)
        s, t = np.nonzero(seen)
        used[s, past[s, t]] = True
        z = np.where(used, np.where(z > 0, z / 1.15, z * 1.15), z)
        return z, z

    tokens, infer = play(model, prompts, 44, rng, law)
    record(folder, prompts, tokens, score(model, prompts, tokens, rng, 0.03), infer, 3)


# ---- faults: places


@case(
    "one_engine",
    "One replica of 5 runs on other cards, whose kernel has a large random error; it reports the "
    "law that it draws from. A game with 64 tokens.",
)
def replica_on_other_cards(folder, rng):
    def engine(b, z):
        return z + 0.4 * by(b.labels["replica"] == "b200-0") * rng.normal(size=z.shape)

    drawn(
        folder, rng, vocab=64, steps=6, answers=320, width=40, group=16, engine=engine,
        labels={
            "replica": ("h100-0", "h100-1", "h100-2", "h100-3", "b200-0"),
            "opponent": ("easy", "hard"),
        },
    )  # fmt: skip


@case(
    "one_rank",
    "Rank 2 of the trainer's 4 loaded one shard of an older checkpoint, and scores its rows with "
    "it.",
)
def rank_with_an_old_shard(folder, rng):
    def trainer(b, z):
        return z + 0.5 * by(b.rank == 2) * b.other

    drawn(
        folder, rng, vocab=48_000, steps=12, answers=96, width=120, trainer=trainer, ranks=4,
        labels={"env": ("math", "code", "chat"), "replica": ("r0", "r1")}, kind="heavy",
    )  # fmt: skip


@case(
    "change",
    "After a restart before step 15 of 40 the engine runs with an FP8 KV cache: the same larger "
    "random error in every step from then on.",
)
def restarted_with_another_cache(folder, rng):
    def engine(b, z):
        return z + (0.45 if b.step >= 15 else 0.0) * rng.normal(size=z.shape)

    drawn(
        folder, rng, vocab=12_000, steps=40, answers=40, width=90, engine=engine, group=4,
        labels={"env": ("a", "b")},
    )  # fmt: skip


@case(
    "one_kind",
    "Requests of the environment charts carry images, which the engine resizes in another way: all "
    "their answers come from another law. Three other labels say nothing.",
)
def images_resized(folder, rng):
    def engine(b, z):
        return z + 0.55 * by(b.labels["env"] == "charts") * b.other

    drawn(
        folder, rng, vocab=50_000, steps=5, answers=240, width=70, engine=engine, group=6,
        labels={
            "env": ("charts", "maps", "text", "tables", "web"),
            "difficulty": ("1", "2", "3"),
            "language": ("de", "en", "zh"),
            "replica": ("r0", "r1", "r2"),
        },
    )  # fmt: skip


@case(
    "turns",
    "The chat template of the engine drops earlier answers (as reasoning) from the second turn on; "
    "the trainer scores later turns with the earlier answers before them.",
)
def reasoning_dropped_between_turns(folder, rng):
    prompts, domains = ask(rng, 120, 10, 24)
    model, out, width = load("tiny-lm"), Record(), 26
    tools = [ask(rng, 120, 3, 5)[0] for _ in range(2)]
    served, full = [list(p) for p in prompts], [list(p) for p in prompts]
    pieces = [[(p, None, None)] for p in prompts]
    for turn in range(3):
        tokens, infer = play(model, served, width, rng)
        train, length = score(model, full, tokens, rng, 0.03), first_end(tokens)
        for s, n in enumerate(length):
            pieces[s].append((tokens[s, :n], train[s, :n], infer[s, :n]))
            if turn < 2:
                pieces[s].append((tools[turn][s], None, None))
                served[s] = served[s] + tools[turn][s]
                full[s] = full[s] + list(tokens[s, :n]) + tools[turn][s]
    for s in range(120):
        out.add(1 + s // 20, f"g{s}", pieces[s], {"env": domains[s]})
    out.write(folder)


# ---- faults: weights


@case(
    "stale_weights",
    "The adapter is loaded into the engine once and never again: it serves the first weights in "
    "all 12 steps, with the name of the new ones.",
)
def adapter_never_reloaded(folder, rng):
    prompts, domains = ask(rng, 240, 8, 28)
    first, steps = load("tiny-lm"), 12
    tokens, infer = play(first, prompts, 40, rng)
    each = len(prompts) // steps
    train = np.empty(tokens.shape)
    for k in range(steps):
        n = slice(k * each, (k + 1) * each)
        new = moved(first, 0.025 * k, 7)
        train[n] = score(new, prompts[n], tokens[n], rng, 0.03)
    record(folder, prompts, tokens, train, infer, steps, {"domain": domains})


@case(
    "stale_replica",
    "Replica r1 of 4 lost its broadcast group after step 4 of 20 and keeps the weights of that "
    "step.",
)
def replica_left_the_broadcast(folder, rng):
    def engine(b, z):
        behind = max(b.step - 4, 0)
        return z - 0.06 * behind * by(b.labels["replica"] == "r1") * b.moves

    drawn(
        folder, rng, vocab=30_000, steps=20, answers=80, width=80, engine=engine, move=0.06,
        labels={"replica": ("r0", "r1", "r2", "r3"), "env": ("math", "code")},
    )  # fmt: skip


@case(
    "old_weights",
    "A fully asynchronous trainer takes answers of recorded age 0 to 4; each update moves the law "
    "far.",
)
def far_off_policy(folder, rng):
    drawn(
        folder, rng, vocab=20_000, steps=14, answers=100, width=90, move=0.14,
        lag=lambda b: rng.integers(0, 5, len(b.row)), labels={"env": ("math", "code")},
    )  # fmt: skip


@case(
    "stale_cache",
    "The prefix cache is not flushed at a sync: the prompts of one answer in 8 are read from keys "
    "and values of the first weights, in 8 steps of training.",
)
def prefix_cache_outlives_the_sync(folder, rng):
    prompts, domains = ask(rng, 384, 20, 44)
    first, steps = load("tiny-qwen3"), 8
    each, width = len(prompts) // steps, 24
    parts = []
    for k in range(steps):
        own, now = prompts[k * each : (k + 1) * each], moved(first, 0.06 * k, 11)
        hit = rng.choice(each, each // 8, replace=False)
        tokens, infer = play(now, own, width, rng)
        tokens[hit], infer[hit] = play(now, [own[i] for i in hit], width, rng, prefill=first)
        parts.append((tokens, score(now, own, tokens, rng, 0.03), infer))
    tokens, train, infer = (np.concatenate(x) for x in zip(*parts, strict=True))
    record(folder, prompts, tokens, train, infer, steps, {"domain": domains})


# ---- faults: contexts


@case(
    "positions",
    "The engine computes the angles of its rotary embedding in bfloat16, so their error grows with "
    "the position; prompts have 8 to 280 tokens.",
)
def angles_in_bfloat16(folder, rng):
    prompts, domains = ask(rng, 100, 8, 280)
    model = load("tiny-lm")
    tokens, infer = play(coarse_angles(model), prompts, 36, rng)
    train = score(model, prompts, tokens, rng, 0.025)
    record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


def coarse_angles(model):
    import copy

    torch, other = torch_(), copy.deepcopy(model)
    rotary = other.model.rotary_emb

    def forward(x, position_ids, *_, **__):
        angles = position_ids[:, :, None].float() * rotary.inv_freq[None, None]
        angles = angles.to(torch.bfloat16).float()
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    rotary.forward = forward
    return other


@case(
    "attention_window",
    "The trainer's attention has the sliding window of 40 tokens that the config names and the "
    "engine ignores.",
)
def window_in_the_trainer(folder, rng):
    prompts, domains = ask(rng, 120, 10, 24)
    model = load("tiny-qwen3")
    tokens, infer = play(model, prompts, 96, rng)
    train = score(model, prompts, tokens, rng, 0.025, window=40)
    record(folder, prompts, tokens, train, infer, 3, {"domain": domains})


@case(
    "template",
    "The engine renders prompts without their last 3 tokens (the generation prompt), which the "
    "trainer's template has.",
)
def generation_prompt_missing(folder, rng):
    prompts, domains = repeated(*ask(rng, 60, 12, 40), 4)
    model = load("tiny-qwen3")
    tokens, infer = play(model, [p[:-3] for p in prompts], 40, rng)
    train = score(model, prompts, tokens, rng, 0.03)
    record(folder, prompts, tokens, train, infer, 6, {"domain": domains}, 4)


@case(
    "padding",
    "The trainer pads prompts on the left to a common length and passes no attention mask: short "
    "prompts are read behind many pad tokens.",
)
def pads_are_read(folder, rng):
    prompts, domains = ask(rng, 200, 4, 64)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 36, rng)
    train = score(model, prompts, tokens, rng, 0.03, pads=True)
    record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


# ---- faults: values


@case(
    "unit one_engine",
    "One replica of 3 is another server behind the same API, and reports logarithms to base 10.",
)
def base_ten_from_one_server(folder, rng):
    def report(b, r):
        r.infer[b.labels["replica"] == "sgl-0"] /= np.log(10)

    drawn(
        folder, rng, vocab=50_000, steps=4, answers=200, width=60, report=report,
        labels={"replica": ("vllm-0", "vllm-1", "sgl-0"), "env": ("math", "chat")},
    )  # fmt: skip


@case(
    "rounding steps",
    "Two faults: logprobs travel as int8 with a scale for each step, so they lie on a grid of "
    "about 0.4; and in steps 7 to 9 of 18 the engine served a damaged checkpoint.",
)
def int8_on_the_wire_and_a_burst(folder, rng):
    def engine(b, z):
        return z + (0.8 if 7 <= b.step <= 9 else 0.0) * b.other

    def report(b, r):
        grid = rng.uniform(46, 56) / 127
        r.infer = np.round(r.infer / grid) * grid

    drawn(
        folder, rng, vocab=32_000, steps=18, answers=64, width=90, engine=engine, report=report,
        labels={"env": ("math", "code")},
    )  # fmt: skip


@case(
    "clamp",
    "The engine's client cuts logprobs at -3 from below, so that no token fills a log.",
)
def client_bounds_its_logprobs(folder, rng):
    prompts, domains = ask(rng, 170, 8, 30)
    model = load("tiny-moe")
    tokens, infer = play(model, prompts, 40, rng)
    train = score(model, prompts, tokens, rng, 0.03)
    record(folder, prompts, tokens, train, np.maximum(infer, -3.0), 2, {"domain": domains})


@case(
    "other_tokens",
    "The client reads the first entry of top_logprobs: the number of the most probable token, not "
    "of the drawn one.",
)
def number_of_the_best_token(folder, rng):
    def report(b, r):
        r.infer = r.best

    drawn(
        folder, rng, vocab=40_000, steps=1, answers=600, width=100, report=report, group=1,
        labels={"replica": ("r0", "r1")},
    )  # fmt: skip


# ---- faults: throughout


@case(
    "numerics",
    "The engine serves 3-bit weights, with a scale for 64 (the embedding is left), and the "
    "trainer has the full ones.",
)
def three_bit_weights(folder, rng):
    prompts, domains = ask(rng, 180, 8, 30)
    model = load("tiny-lm")
    tokens, infer = play(rounded(model), prompts, 44, rng)
    train = score(model, prompts, tokens, rng, 0.02)
    replica = [f"r{i}" for i in rng.integers(4, size=len(prompts))]
    labels = {"domain": domains, "replica": replica}
    record(folder, prompts, tokens, train, infer, 6, labels)


def rounded(model):
    import copy

    other = copy.deepcopy(model)
    for name, p in other.named_parameters():
        if p.dim() > 1 and "embed" not in name and "lm_head" not in name:
            blocks = p.view(-1, 64)
            grid = blocks.abs().amax(1, keepdim=True) / 3
            p.copy_(((blocks / grid).round() * grid).view(p.shape))
    return other


@case(
    "routing",
    "The engine's dispatch drops tokens over the capacity of an expert: 4 % of the tokens pass "
    "some layers without their experts.",
)
def tokens_over_the_capacity(folder, rng):
    prompts, domains = ask(rng, 200, 8, 30)
    model, served = load("tiny-moe"), load("tiny-moe")
    torch = torch_()

    def dropping(module, args, got):
        first = got[0] if isinstance(got, tuple) else got
        if first.shape[1] > 1:  # a prompt has room
            return got
        keep = torch.tensor(rng.random((len(first), 1, 1)) >= 0.04, dtype=first.dtype)
        return (first * keep, *got[1:]) if isinstance(got, tuple) else first * keep

    for layer in served.model.layers:
        layer.mlp.register_forward_hook(dropping)
    tokens, infer = play(served, prompts, 44, rng)
    train = score(model, prompts, tokens, rng, 0.01)
    record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


@case(
    "precision_drift",
    "The scales of the engine's FP8 weights were set once before training: its error is twice the "
    "usual at the start and grows with the weights through 24 steps.",
)
def scales_never_set_again(folder, rng):
    def engine(b, z):
        return z + (0.12 + 0.4 * (b.step - 1) / 23) * rng.normal(size=z.shape)

    drawn(
        folder, rng, vocab=25_000, steps=24, answers=64, width=90, engine=engine,
        labels={"env": ("math", "code", "chat")},
    )  # fmt: skip


# ---- healthy


@case("", "A calm pair: 40 steps, groups of 4, three labels.", "healthy")
def calm_and_long(folder, rng):
    drawn(
        folder, rng, vocab=50_000, steps=40, answers=48, width=80,
        labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2"), "level": ("1", "2")},
    )  # fmt: skip


@case("", "A game with 64 tokens and 2,000 short answers.", "healthy")
def calm_game(folder, rng):
    drawn(
        folder, rng, vocab=64, steps=1, answers=2000, width=16, group=8,
        labels={"opponent": ("easy", "hard")}, noise=0.02,
    )  # fmt: skip


@case("", "Errors with a heavy tail, in answers of three turns.", "healthy")
def calm_turns(folder, rng):
    drawn(
        folder, rng, vocab=32_000, steps=8, answers=96, width=40, turns=3, kind="heavy",
        labels={"env": ("shell", "search")}, noise=0.035,
    )  # fmt: skip


@case("", "Answers differ in their error, as batches of several sizes do; four ranks.", "healthy")
def calm_by_answer(folder, rng):
    drawn(
        folder, rng, vocab=20_000, steps=10, answers=128, width=60, kind="by_answer", ranks=4,
        labels={"replica": ("r0", "r1", "r2", "r3")}, noise=0.03,
    )  # fmt: skip


@case("", "One update of recorded age, and small updates.", "healthy")
def calm_and_async(folder, rng):
    drawn(
        folder, rng, vocab=20_000, steps=12, answers=96, width=70, move=0.012, noise=0.025,
        lag=lambda b: rng.integers(0, 2, len(b.row)), labels={"env": ("math", "code")},
    )  # fmt: skip


@case("", "Both sides cut the law at top_p 0.95 and agree on the nucleus.", "healthy")
def calm_with_the_same_cut(folder, rng):
    def kept(b, z):
        b.kept = cut(z, top_p=0.95)
        return b.kept

    drawn(
        folder, rng, vocab=30_000, steps=6, answers=120, width=80, engine=kept,
        trainer=lambda b, z: np.where(b.kept > -np.inf, z, -np.inf), labels={"env": ("a", "b")},
    )  # fmt: skip


@case("", "A model and its engine, both at temperature 0.8 and both reporting it.", "healthy")
def calm_model(folder, rng):
    prompts, domains = repeated(*ask(rng, 40, 6, 40), 4)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 44, rng, lambda z, *_: (z / 0.8, z / 0.8))
    train = score(model, prompts, tokens, rng, 0.03, law=lambda z: z / 0.8)
    record(folder, prompts, tokens, train, infer, 4, {"domain": domains}, 4)


@case("", "A mixture of experts and its engine; weights that both sides follow.", "healthy")
def calm_mixture(folder, rng):
    model, parts = load("tiny-moe"), []
    prompts, domains = ask(rng, 192, 8, 30)
    for k in range(4):
        own, now = prompts[k * 48 : (k + 1) * 48], moved(model, 0.02 * k, 5)
        tokens, infer = play(now, own, 36, rng)
        parts.append((tokens, score(now, own, tokens, rng, 0.03), infer))
    tokens, train, infer = (np.concatenate(x) for x in zip(*parts, strict=True))
    record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


# ---- unsound


@case("shift", "The trainer's labels are not shifted: its column stands one token late.", "unsound")
def labels_not_shifted(folder, rng):
    def report(b, r):
        r.train[:, 1:] = r.train[:, :-1].copy()

    drawn(folder, rng, vocab=32_000, steps=6, answers=120, width=80, report=report)


@case(
    "shift one_kind",
    "In the environment shell the client drops the engine's first number (of a leading token), and "
    "pads the end: its column stands one token early.",
    "unsound",
)
def one_number_dropped_in_shell(folder, rng):
    def report(b, r):
        for s in np.flatnonzero(b.labels["env"] == "shell"):
            n = r.length[s]
            r.infer[s, : n - 1] = r.infer[s, 1:n].copy()

    drawn(
        folder, rng, vocab=50_000, steps=4, answers=160, width=70, report=report,
        labels={"env": ("shell", "math", "web"), "replica": ("r0", "r1")},
    )  # fmt: skip


@case(
    "missing_data",
    "Tokens that a draft model proposed and the engine accepted have no number: 15 % of the column "
    "is 0.",
    "unsound",
)
def accepted_drafts_are_zero(folder, rng):
    def report(b, r):
        r.infer[rng.random(r.infer.shape) < 0.15] = 0.0

    drawn(
        folder, rng, vocab=50_000, steps=8, answers=100, width=80, report=report,
        labels={"env": ("math", "code")},
    )  # fmt: skip


@case(
    "missing_data",
    "The server returns numbers for the first 60 tokens only; those behind are missing.",
    "unsound",
)
def numbers_for_the_first_sixty(folder, rng):
    def report(b, r):
        r.infer[:, 60:] = np.nan

    drawn(folder, rng, vocab=32_000, steps=5, answers=120, width=150, report=report)


@case(
    "missing_data steps",
    "In steps 5 and 6 of 10 the trainer's pass was skipped, and the buffer's -1 was written for "
    "every token.",
    "unsound",
)
def buffer_of_minus_one(folder, rng):
    def report(b, r):
        if b.step in (5, 6):
            r.train[:] = -1.0

    drawn(
        folder, rng, vocab=16_000, steps=10, answers=80, width=70, report=report,
        labels={"replica": ("r0", "r1", "r2")},
    )  # fmt: skip


@case(
    "copies",
    "The last batch of a step is filled up by its first rows: a quarter of the rows are there "
    "twice.",
    "unsound",
)
def filled_with_the_first_rows(folder, rng):
    drawn(
        folder, rng, vocab=32_000, steps=8, answers=96, width=70, again=1 / 3,
        labels={"env": ("math", "code")},
    )  # fmt: skip


@case(
    "other_tokens",
    "Answers return in the order they end, and the engine's columns are put in the order of "
    "requests: most belong to another answer of the group.",
    "unsound",
)
def columns_of_other_answers(folder, rng):
    def report(b, r):
        r.length[:] = r.ids.shape[1]  # all of one length, as with ignore_eos
        for g in range(b.group.max() + 1):
            rows = np.flatnonzero(b.group == g)
            r.infer[rows] = r.infer[rng.permutation(rows)]

    drawn(folder, rng, vocab=24_000, steps=5, answers=120, width=64, group=8, report=report)


@case(
    "unit",
    "The engine's column is the negative log-likelihood: the sign is turned.",
    "unsound",
)
def sign_turned(folder, rng):
    def report(b, r):
        r.infer = -r.infer

    drawn(
        folder, rng, vocab=50_000, steps=3, answers=150, width=70, report=report,
        labels={"env": ("math", "code")},
    )  # fmt: skip


def main(cases):
    if len(sys.argv) not in (3, 4):
        for each in cases:
            print(each.kind, each.name, *sorted(each.causes))
        return
    name, folder = sys.argv[1:3]
    chosen = {c.name: c for c in cases}[name]
    chosen.make(Path(folder), int(sys.argv[3]) if len(sys.argv) == 4 else 0)


if __name__ == "__main__":
    main(FOUND)
