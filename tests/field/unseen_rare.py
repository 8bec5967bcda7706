"""Cases of rare or partial faults, each with its healthy twin of the same shape.

A dump is drawn from categorical laws. A position has a law over `SUPPORT` token ids, found by its
context (the prompt, the position's block, the last two tokens), and a thin uniform tail over the
vocabulary. The engine draws a token from the law that it really used, and reports a number; the
trainer scores the recorded tokens under softmax(logits + noise). Where the engine reports the law
it drew from, E_infer[exp(logp_train - logp_infer)] <= 1 holds. A case whose reported numbers are
those of no law says so in `what`. Steps are counted from 0.

The answers of `truth`, fixed before any run: "violated" is that verdict; "finding" is a named
finding, or any verdict but holds; "not holds" is any verdict but holds; "error" is a refusal that
names the reason. `tolerance` says what still counts as caught. The healthy twin must answer holds,
unless `tolerance` allows inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

CONTEXTS, SUPPORT, SPARE = 997, 16, 16
# what a fault can turn: of the engine's draw and report, and of the trainer's forward
ENGINE = {
    "shift": 0,
    "drift": 0.0,
    "damage": 0.0,
    "heat": 1.0,
    "drop": False,
    "repeat": 0.0,
    "force": -1,
    "clean": False,
}
TRAINER = {"t_shift": 0, "t_drift": 0.0, "t_damage": 0.0, "t_heat": 1.0, "t_label": -1}


@dataclass(frozen=True)
class Shape:
    """The size of a dump, and the noise of its healthy pair (a scale on the trainer's logits)."""

    steps: int
    responses: int
    length: tuple[int, int]
    vocab: int
    noise: str  # gaussian | heavy | by_sequence
    scale: float
    group: int = 1
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    prompt: tuple[int, int] = (4, 12)
    skewed: bool = False  # lengths log-uniform instead of uniform
    staleness: bool = False


@dataclass
class Batch:
    """What is known of a step before a token is drawn."""

    step: int
    row: np.ndarray
    group: np.ndarray
    member: np.ndarray
    seed: np.ndarray
    prompt: np.ndarray
    length: np.ndarray
    width: int
    labels: dict[str, np.ndarray]
    hit: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


@dataclass
class Rolled:
    """What was recorded of a step; the edits of a fault write into it."""

    token: np.ndarray
    infer: np.ndarray
    length: np.ndarray
    train: np.ndarray | None = None


@dataclass(frozen=True)
class Fault:
    """Which responses are hit (a rate among the eligible), and what then happens to them.

    `knobs` change the engine's or the trainer's law, `edit` the record of the engine before it is
    scored, `late` both columns at the end."""

    rate: float | tuple[float, ...]
    knobs: Callable | None = None
    eligible: Callable | None = None
    edit: Callable | None = None
    late: Callable | None = None


@dataclass(frozen=True)
class UnseenCase:
    name: str
    thread: str
    what: str
    truth: dict
    tolerance: str
    shape: Shape
    make: Callable[[bool, np.random.Generator], list[dict]]


# ---- laws


@dataclass(frozen=True)
class World:
    vocab: int
    ids: np.ndarray
    logits: np.ndarray
    drift: np.ndarray  # another version of the weights is logits + amount * drift
    tail: np.ndarray


def make_world(rng, vocab):
    draws = (vocab ** rng.random((CONTEXTS, 12 * SUPPORT))).astype(
        np.int64
    )  # common ids are shared
    ids = np.empty((CONTEXTS, SUPPORT), np.int64)
    for c in range(CONTEXTS):
        _, first = np.unique(draws[c], return_index=True)
        ids[c] = draws[c][np.sort(first)[:SUPPORT]]
    decay = rng.uniform(0.8, 2.5, (CONTEXTS, 1)) * np.log1p(np.arange(SUPPORT))
    logits = rng.normal(0, 0.4, (CONTEXTS, SUPPORT)) - decay
    sure = rng.random(CONTEXTS) < 0.6
    logits[sure, 0] += rng.uniform(3, 9, sure.sum())
    drift = rng.normal(0, 1, (CONTEXTS, SUPPORT))
    return World(vocab, ids, logits, drift, rng.uniform(-12, -7, CONTEXTS))


def context(seed, t, last, last_but_one):
    return (seed * 7919 + (t // 32) * 31 + last * 104729 + last_but_one * 1299709 + 13) % CONTEXTS


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def token_prob(world, ids, p, tail, token):
    inside = np.where(ids == token[:, None], p, 0.0).sum(1)
    mass = np.exp(tail)
    return np.minimum((1 - mass) * inside + mass / world.vocab, 1.0)


def roll(world, b, knobs, rng):
    """The engine: draws the answers, reports the law it drew from, or (`clean`) the right one."""
    S, L = len(b.row), b.width
    k = {name: np.broadcast_to(knobs.get(name, v), (S, L)) for name, v in ENGINE.items()}
    token, infer = np.zeros((S, L), np.int64), np.zeros((S, L))
    past = np.zeros((2, S), np.int64)
    for t in range(int(b.length.max())):
        r = np.flatnonzero(b.length > t)
        at = {name: v[r, t] for name, v in k.items()}
        true = context(b.seed[r], t, past[0, r], past[1, r])
        c = (true + at["shift"]) % CONTEXTS
        z = world.logits[c] + at["drift"][:, None] * world.drift[c]
        if at["damage"].any():
            z = z + at["damage"][:, None] * rng.normal(size=z.shape)
        z = z / at["heat"][:, None]
        if at["drop"].any():  # the top token of these rows is out of reach
            z[at["drop"], z[at["drop"]].argmax(1)] = -np.inf
        p, tail = softmax(z), world.tail[c]
        chosen = (np.cumsum(p, 1) < rng.random(len(r))[:, None]).sum(1).clip(0, SUPPORT - 1)
        tok = world.ids[c, chosen]
        tok = np.where(
            rng.random(len(r)) < np.exp(tail), rng.integers(world.vocab, size=len(r)), tok
        )
        again = rng.random(len(r)) < at["repeat"]
        tok = np.where(again, past[0, r], tok)
        tok = np.where(at["force"] >= 0, at["force"], tok)
        q = token_prob(world, world.ids[c], p, tail, tok)
        q = at["repeat"] * (tok == past[0, r]) + (1 - at["repeat"]) * q
        if at["clean"].any():
            own = token_prob(
                world, world.ids[true], softmax(world.logits[true]), world.tail[true], tok
            )
            q = np.where(at["clean"], own, q)
        token[r, t], infer[r, t] = tok, np.log(q)
        past[1, r], past[0, r] = past[0, r], tok
    return Rolled(token, infer, b.length.copy())


def score(world, b, rolled, knobs, shape, rng):
    """The trainer: one forward over the recorded tokens, under its own noisy law."""
    S, L = rolled.token.shape
    mask = np.arange(L) < rolled.length[:, None]
    s, t = np.nonzero(mask)
    padded = np.concatenate([np.zeros((S, 2), np.int64), rolled.token], 1)
    c = context(b.seed[s], t, padded[s, t + 1], padded[s, t])
    k = {name: np.broadcast_to(knobs.get(name, v), (S, L))[s, t] for name, v in TRAINER.items()}
    c = (c + k["t_shift"]) % CONTEXTS
    label = np.where(k["t_label"] >= 0, k["t_label"], rolled.token[s, t])
    scale = np.full(S, shape.scale)
    if shape.noise == "by_sequence":
        scale = scale * np.exp(rng.normal(0, 0.8, S) - 0.32)
    out, rolled.train = np.empty(len(s)), np.zeros((S, L))
    for lo in range(0, len(s), 100_000):
        n = slice(lo, lo + 100_000)
        size = (len(c[n]), SUPPORT + 1)
        eps = rng.standard_t(3, size) / 3**0.5 if shape.noise == "heavy" else rng.normal(size=size)
        eps *= scale[s[n], None]
        z = world.logits[c[n]] + k["t_drift"][n, None] * world.drift[c[n]] + eps[:, :SUPPORT]
        if k["t_damage"][n].any():
            z = z + k["t_damage"][n, None] * rng.normal(size=z.shape)
        p = softmax(z / k["t_heat"][n, None])
        tail = world.tail[c[n]] + eps[:, SUPPORT].clip(-1, 1)
        out[n] = np.log(token_prob(world, world.ids[c[n]], p, tail, label[n]))
    rolled.train[mask] = out


# ---- dumps


def draw_batches(shape, rng):
    batches = []
    for step in range(shape.steps):
        S, (lo, hi) = shape.responses, shape.length
        row = np.arange(S)
        u = rng.random(S)
        length = lo * ((hi + 1) / lo) ** u if shape.skewed else lo + u * (hi + 1 - lo)
        group = row // shape.group
        first = group * shape.group
        seed = rng.integers(1, 10**6, S)[first]
        prompt = rng.integers(shape.prompt[0], shape.prompt[1] + 1, S)[first]
        labels = {k: np.array(v)[rng.integers(len(v), size=S)][first] for k, v in shape.labels}
        length = np.minimum(length.astype(np.int64), hi)
        width = hi + SPARE
        batches.append(Batch(step, row, group, row - first, seed, prompt, length, width, labels))
    return batches


def choose_hits(batches, fault, rng):
    """Marks the responses that a fault hits: a rate among the eligible of the dump, one or more."""
    able = [fault.eligible(b) if fault.eligible else np.ones(len(b.row), bool) for b in batches]
    if isinstance(fault.rate, tuple):
        for b, ok, rate in zip(batches, able, fault.rate, strict=True):
            b.hit = ok & (rng.random(len(ok)) < rate)
        return
    flat = np.flatnonzero(np.concatenate(able))
    taken = np.zeros(sum(map(len, able)), bool)
    taken[rng.choice(flat, max(1, round(fault.rate * len(flat))), replace=False)] = True
    per_step = taken.reshape(len(batches), -1)
    for b, hit in zip(batches, per_step, strict=True):
        b.hit = hit


def lay_out(shape, b, rolled, rng, vocab):
    S = len(b.row)
    T = int((b.prompt + rolled.length).max())
    out = {
        "step": b.step,
        "token_ST": np.zeros((S, T), np.int32),
        "mask_ST": np.zeros((S, T), bool),
        "logp_train_ST": np.zeros((S, T), np.float32),
        "logp_infer_ST": np.zeros((S, T), np.float32),
        "groups": [f"s{b.step}-p{g}" for g in b.group],
        "labels": {name: [str(v) for v in values] for name, values in b.labels.items()},
    }
    start, end = b.prompt[:, None], (b.prompt + rolled.length)[:, None]
    column = np.arange(T)[None, :]
    first = np.arange(S) - b.member  # the prompt of a group is the same
    prompt_tokens = rng.integers(0, vocab, (S, T))[first]
    out["mask_ST"][:] = (column >= start) & (column < end)
    out["token_ST"][:] = np.where(column < start, prompt_tokens, 0)
    answer = np.arange(rolled.token.shape[1]) < rolled.length[:, None]
    out["token_ST"][out["mask_ST"]] = rolled.token[answer]
    out["logp_train_ST"][out["mask_ST"]] = rolled.train[answer]
    out["logp_infer_ST"][out["mask_ST"]] = rolled.infer[answer]
    if shape.staleness:
        out["staleness_ST"] = np.zeros((S, T), np.int32)
    return out


def build(shape, fault, faulty, rng):
    """The dumps of a case, and the responses that the fault hit."""
    world, batches, dumps, hits = make_world(rng, shape.vocab), draw_batches(shape, rng), [], []
    if faulty:
        choose_hits(batches, fault, rng)
    for b in batches:
        knobs = fault.knobs(b, rng) if faulty and fault.knobs else {}
        rolled = roll(world, b, knobs, rng)
        if faulty and fault.edit:
            fault.edit(b, rng, rolled)
        score(world, b, rolled, knobs, shape, rng)
        if faulty and fault.late:
            fault.late(b, rng, rolled)
        dumps.append(lay_out(shape, b, rolled, rng, world.vocab))
        hits.append(b.hit if faulty else np.zeros(len(b.row), bool))
    return dumps, hits


def make_dumps(shape, fault, faulty, rng):
    return build(shape, fault, faulty, rng)[0]


# ---- parts of faults


def span(b, start=0, stop=None, somewhere=False):
    """The positions [S, L] of the hit responses: from `start`, or from a drawn token on."""
    column = np.arange(b.width)[None, :]
    begin = np.full(len(b.row), start)[:, None]
    if somewhere is not False:
        begin = (somewhere.random(len(b.row)) * np.maximum(b.length - 1, 1)).astype(int)[:, None]
    end = b.length[:, None] if stop is None else np.minimum(begin + stop, b.length[:, None])
    return b.hit[:, None] & (column >= begin) & (column < end)


def scattered(b, rng, rate):
    """Single tokens of the hit responses."""
    return span(b) & (rng.random((len(b.row), b.width)) < rate)


def other_request(where, rng):
    """A context of another request: the same foreign state for the whole span."""
    return where * rng.integers(1, CONTEXTS, (len(where), 1))


def foreign(start=0, stop=None, somewhere=False):
    """The engine reads the state of another request, draws from that law and reports it."""

    def knobs(b, rng):
        where = span(b, start, stop, rng if somewhere else False)
        return {"shift": other_request(where, rng)}

    return knobs


def turned(knob, value, start=0, stop=None, somewhere=False):
    """One knob has a value over a span of the hit responses."""

    def knobs(b, rng):
        where = span(b, start, stop, rng if somewhere else False)
        return {knob: np.where(where, value, 1.0 if knob.endswith("heat") else 0.0)}

    return knobs


def shift_report(ahead, start=0, somewhere=False, fill=0.0):
    """The reported column moves by one from a token on; no law gives these numbers."""

    def edit(b, rng, r):
        begins = span(b, start, None, rng if somewhere else False).argmax(1)
        for s in np.flatnonzero(b.hit):
            a, n = begins[s], r.length[s]
            old = r.infer[s, a:n].copy()
            r.infer[s, a:n] = np.append(old[1:], fill) if ahead else np.append(fill, old[:-1])

    return edit


def overwrite(column, value, pick):
    """Sets a column to a value where `pick(b, rng, r)` says; no law gives these numbers."""

    def late(b, rng, r):
        getattr(r, column)[pick(b, rng, r)] = value

    return late


def last_tokens(most):
    def pick(b, rng, r):
        back = r.length[:, None] - np.arange(b.width)[None, :]
        return span(b) & (back <= rng.integers(1, most + 1, (len(b.row), 1)))

    return pick


def whole(b, rng, r):
    return span(b)


def single(rate):
    def pick(b, rng, r):
        return scattered(b, rng, rate)

    return pick


def near_certain(rate):
    def pick(b, rng, r):
        return scattered(b, rng, rate) & (r.infer > -1e-3)

    return pick


def any_of_64_ids(b, rng):
    return {"t_label": np.where(span(b), rng.integers(0, 64, (len(b.row), b.width)), -1)}


def every_second_repeats(b, rng):
    return {"repeat": np.where(span(b, 1) & (np.arange(b.width) % 2 == 1), 0.88, 0.0)}


def each_128th_damaged(b, rng):
    return {"damage": np.where(span(b, 1) & (np.arange(b.width) % 128 == 0), 6.0, 0.0)}


def one_token_forced(b, rng):
    where = span(b, 0, None, rng)
    return {"force": np.where(where, 0, -1), "clean": where}


def chunk_twice(width):
    """A chunk of the stream was delivered twice: tokens and numbers stand there twice."""

    def edit(b, rng, r):
        for s in np.flatnonzero(b.hit & (r.length > width)):
            a, n = rng.integers(0, r.length[s] - width + 1), r.length[s]
            for array in (r.token, r.infer):
                array[s, a + width : n + width] = array[s, a:n].copy()
            r.length[s] = n + width

    return edit


def split_token(b, rng, r):
    """Text was encoded again: one token became two, the reported column stayed, 0 fills its end."""
    for s in np.flatnonzero(b.hit):
        a, n = rng.integers(0, max(r.length[s] // 2, 1)), r.length[s]
        r.token[s, a + 2 : n + 1] = r.token[s, a + 1 : n].copy()
        r.token[s, a : a + 2] = (r.token[s, a] * np.array([7, 13]) + 5) % (r.token.max() + 1)
        r.infer[s, n], r.length[s] = 0.0, n + 1


def swap_answers(b, rng, r):
    """Hit answers go round in a ring: tokens and report together, to another prompt each."""
    rows = np.flatnonzero(b.hit)
    for array in (r.token, r.infer, r.length):
        array[rows] = array[np.roll(rows, 1)].copy()


def neighbours_report(most):
    """A stretch of the reported column comes from the row above: numbers of other tokens."""

    def edit(b, rng, r):
        above = np.roll(r.infer, 1, axis=0)
        where = span(b, 0, most, rng) & (above < 0)
        r.infer[where] = above[where]

    return edit


def append_stop(b, rng, r):
    """The client puts a stop token, never drawn, at the end, and repeats the last number."""
    rows = np.flatnonzero(b.hit)
    n = r.length[rows]
    r.token[rows, n], r.infer[rows, n] = 0, r.infer[rows, n - 1]
    r.length[rows] = n + 1


def impossible_id(b, rng, r):
    """A placeholder id of -1 stands where a token was; the trainer scored an id of its tail."""
    rows = np.flatnonzero(b.hit)
    at = (rng.random(len(rows)) * r.length[rows]).astype(int)
    r.token[rows, at] = -1


def label_of_next(b, rng):
    """The trainer's label of the last token is the first token of the next packed sequence."""
    last = np.arange(b.width)[None, :] == b.length[:, None] - 1
    return {"t_label": np.where(last & b.hit[:, None], rng.integers(0, 30000, (len(b.row), 1)), -1)}


def to_bfloat16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def round_report(b, rng, r):
    r.infer[b.hit] = to_bfloat16(r.infer[b.hit])


def floor_report(at):
    def late(b, rng, r):
        r.infer[b.hit] = np.maximum(r.infer[b.hit], at)

    return late


def alternate(size):
    """The report is too high and too low by turns; no law gives these numbers."""

    def late(b, rng, r):
        sign = np.where(np.arange(b.width) % 2, 1.0, -1.0)[None, :]
        r.infer = np.minimum(np.where(span(b), r.infer + size * sign, r.infer), 0.0)

    return late


def labelled(name, *values):
    return lambda b: np.isin(b.labels[name], values)


def in_steps(*steps):
    return lambda b: np.full(len(b.row), b.step in steps)


def both(*tests):
    return lambda b: np.logical_and.reduce([test(b) for test in tests])


def case(name, thread, what, answer, where, cause, wrong, tolerance, shape, fault):
    truth = {
        "answer": answer,
        "where": where,
        "cause_words": cause.split(),
        "wrong_words": wrong.split(),
    }
    return UnseenCase(
        name, thread, what, truth, tolerance, shape, partial(make_dumps, shape, fault)
    )


MODEL = "temperature tokenizer rounding"  # causes that a wrong state or wrong weights don't have
FEW = "Twin: holds; inconclusive is allowed, the tokens are few. "
REPLICA = ("replica", tuple(f"r{i}" for i in range(8)))

# fmt: off
THREADS = (
    case(
        "async_draft_garbage", "vllm-project/vllm#46669",
        "Draft tokens with async scheduling and more than one request: some answers are garbage "
        "from a token on; most look fine (no rate given).",
        "violated", {"sequences": 1 / 12, "positions": "from a token on, to the end"},
        "state cache speculative context request", MODEL,
        "Violated, or a finding that names some responses; a uniform shift of all tokens is a "
        "wrong answer.",
        Shape(1, 768, (64, 384), 150_000, "gaussian", 0.01),
        Fault(1 / 12, foreign(somewhere=True)),
    ),
    case(
        "lora_of_other_user", "vllm-project/vllm#47724",
        "After an adapter is loaded at run time, a request in flight goes on with another user's "
        "adapter; silently, no rate given.",
        "finding", {"steps": [2, 3], "sequences": 0.03, "positions": "from a token on"},
        "adapter weights lora version policy", "tokenizer rounding stop",
        "A finding that some responses differ, or any verdict but holds.",
        Shape(4, 384, (40, 160), 32_000, "heavy", 0.02, 4, (("adapter", ("a", "b", "c", "d")),)),
        Fault(0.06, turned("drift", 1.2, somewhere=True), in_steps(2, 3)),
    ),
    case(
        "retract_shifts_by_one", "sgl-project/sglang#26510",
        "A request retracted during its prefill loses the first reported number: each later one "
        "stands one token early, and one is missing at the end (filled with 0). No law gives "
        "these numbers.",
        "violated", {"sequences": 1 / 64, "positions": "whole answers"},
        "shift align off-by-one offset misaligned", "temperature weights adapter",
        "Violated or a finding; an explanation by single odd tokens alone is half right.",
        Shape(2, 1024, (20, 140), 128_000, "gaussian", 0.02),
        Fault(1 / 64, edit=shift_report(True)),
    ),
    case(
        "session_from_disk", "LMCache/LMCache#4385",
        "Long-context sessions that return from the disk tier get the cache of other requests: "
        "answers with the facts of another conversation. Here 1 in 3 of the prompts of over 250 "
        "tokens.",
        "violated", {"sequences": 0.05, "positions": "whole answers, long prompts only"},
        "state cache context request prompt", MODEL,
        "Violated or a finding; that long prompts are hit is a bonus.",
        Shape(1, 512, (30, 90), 128_000, "by_sequence", 0.01, 1, (), (4, 300)),
        Fault(1 / 3, foreign(), lambda b: b.prompt > 250),
    ),
    case(
        "blocks_not_yet_written", "vllm-project/vllm#37152",
        "Requests of one prefix in one step read cache blocks before they are written; wrong "
        "tokens even at temperature 0. Here all but the first answer of 1 prompt in 24.",
        "violated", {"sequences": 0.036, "positions": "whole answers of few prompts"},
        "cache state prefix group prompt context", MODEL,
        "Violated or a finding; that few prompts carry it is a bonus.",
        Shape(2, 768, (24, 120), 152_000, "gaussian", 0.005, 8),
        Fault(1.0, turned("damage", 1.5), lambda b: (b.group % 24 == 3) & (b.member > 0)),
    ),
    case(
        "recovered_engine", "radixark/miles#1724",
        "A replaced engine joins the router before its weights are sent: its answers come from "
        "the first checkpoint for a while (no rate given). Here replica r3 in step 5.",
        "violated", {"steps": [5], "label": {"replica": "r3"}},
        "weights stale version policy sync checkpoint", "tokenizer rounding",
        "Violated or a finding that names step 5 or replica r3.",
        Shape(8, 192, (40, 160), 100_000, "gaussian", 0.03, 1, (REPLICA,)),
        Fault(1.0, turned("drift", 0.8), both(in_steps(5), labelled("replica", "r3"))),
    ),
    case(
        "one_number_too_many", "eval-protocol/python-sdk#457",
        "The list of numbers is one longer than the ids; spikes in 1-2% of rows, KLD up to 60 "
        "against 0.028. Here 1.5% of the answers stand one token late from a token on. No law "
        "gives these numbers.",
        "violated", {"sequences": 0.015, "positions": "from a token on"},
        "shift align off-by-one offset misaligned", "temperature weights adapter",
        "Violated or a finding.",
        Shape(3, 512, (32, 128), 151_000, "gaussian", 0.02, 4),
        Fault(0.015, edit=shift_report(False, somewhere=True)),
    ),
    case(
        "encoded_again", "rllm-org/rllm#816",
        "Ids come from encoding the text again while the numbers stay those of the sampled "
        "tokens; a short list is filled with 0. Here one token became two in 1 answer of 30. No "
        "law gives these numbers.",
        "violated", {"sequences": 1 / 30, "positions": "from a token on"},
        "token align shift tokenizer encod misaligned", "temperature weights",
        "Violated or a finding.",
        Shape(1, 900, (30, 200), 128_000, "heavy", 0.01),
        Fault(1 / 30, edit=split_token),
    ),
    case(
        "nan_where_certain", "huggingface/trl#6693",
        "The engine reports NaN for tokens of probability near 1 (seen at entropy 4e-4). Here 1 "
        "in 400 of the tokens above -1e-3.",
        "error", {"positions": "single tokens that are near certain"},
        "nan finite missing", "temperature weights shift",
        "A refusal or a finding that names NaN; NaN silently dropped with holds is a miss.",
        Shape(2, 256, (50, 250), 64_000, "gaussian", 0.01),
        Fault(1.0, late=overwrite("infer", np.nan, near_certain(1 / 400))),
    ),
    case(
        "prefix_cache_after_sync", "areal-project/AReaL#421",
        "The prefix cache is not rightly flushed at a weight update; the learning curve collapses "
        "in the middle of training. Here 1 answer in 10 from step 6 on, its first 48 tokens.",
        "finding",
        {"steps": [6, 7, 8, 9, 10, 11], "sequences": 0.05, "positions": "first 48 tokens"},
        "stale cache weights version policy state", "tokenizer rounding",
        "A finding on late steps, early positions, or few responses, or any verdict but holds.",
        Shape(12, 128, (64, 192), 150_000, "by_sequence", 0.02, 8),
        Fault(0.1, turned("drift", 0.7, 0, 48), lambda b: np.full(len(b.row), b.step >= 6)),
    ),
    case(
        "label_of_next_sequence", "verl-project/verl#6564",
        "In packed rows the label of a sequence's last token is the first token of the next "
        "sequence. Here 7 of 8 answers, that one token. The trainer's number is of another token.",
        "violated", {"positions": "last token of the answers"},
        "last end shift boundary label align", "temperature weights adapter",
        "Violated or a finding; the last position should be named.",
        Shape(2, 512, (12, 80), 32_000, "gaussian", 0.02),
        Fault(1.0, label_of_next, lambda b: b.row % 8 != 7),
    ),
    case(
        "all_tokens_masked", "vllm-project/vllm-gaudi#1200",
        "Free-text requests beside json ones get a grammar mask of zeros and emit one token ('!') "
        "again and again. The engine reports the unmasked law, so the columns agree and the "
        "tokens were not drawn from it.",
        "finding", {"label": {"mode": "text"}, "sequences": 0.06, "positions": "from a token on"},
        "sampled law drawn impossible unlikely repeat", "weights shift",
        "A finding that tokens were not drawn from the reported law, or any verdict but holds.",
        Shape(1, 640, (40, 160), 152_000, "gaussian", 0.02, 1, (("mode", ("text", "json")),)),
        Fault(1 / 8, one_token_forced, labelled("mode", "text")),
    ),
    case(
        "worse_with_each_batch", "sgl-project/sglang#23020",
        "Prefill-decode split: cache corruption grows; right answers fall from 94-96% to 68-84% "
        "and then 46-55% over 150 requests. Here the damaged share by step: 0, 0.02, 0.05, 0.1, "
        "0.25, 0.45.",
        "violated", {"steps": [2, 3, 4, 5]},
        "state cache context request drift later", MODEL,
        "Violated or a finding; it should say that late steps are worse.",
        Shape(6, 96, (200, 600), 150_000, "gaussian", 0.02),
        Fault((0, 0.02, 0.05, 0.1, 0.25, 0.45), turned("damage", 2.0, somewhere=True)),
    ),
    case(
        "rows_of_neighbours", "vllm-project/vllm#29216",
        "Draft tokens with chunked prefill: offsets into the log-probability rows ignore "
        "discarded samples. Here 1 answer in 40 reports 1-8 numbers of another request. No law "
        "gives these numbers.",
        "violated", {"sequences": 1 / 40, "positions": "a stretch of 8 tokens"},
        "align offset request row shift misaligned", "temperature weights adapter",
        "Violated, a finding of few tokens, or any verdict but holds.",
        Shape(2, 600, (30, 120), 150_000, "gaussian", 0.01),
        Fault(1 / 40, edit=neighbours_report(8)),
    ),
    case(
        "base_with_adapter", "vllm-project/vllm#42008",
        "With an adapter loaded, requests to the base model can be affected by its deltas. Here 1 "
        "in 4 of the base requests, none of the adapters'.",
        "violated", {"label": {"adapter": "base"}, "sequences": 0.08},
        "adapter lora weights version policy", "tokenizer rounding",
        "Violated or a finding; the label should be named.",
        Shape(2, 480, (30, 150), 131_000, "heavy", 0.02, 4, (("adapter", ("base", "a1", "a2")),)),
        Fault(1 / 4, turned("drift", 0.8), labelled("adapter", "base")),
    ),
    case(
        "every_second_twice", "intel/llm-scaler#721",
        "With an fp8 cache each second token repeats the one before with high confidence (-0.003 "
        "to -0.25). Here 1 replica of 8, and there 1 answer in 5.",
        "violated", {"label": {"replica": "r6"}, "sequences": 0.025},
        "cache confident repeat state replica", "tokenizer temperature",
        "Violated or a finding; the replica should be named.",
        Shape(3, 320, (40, 120), 128_000, "gaussian", 0.03, 1, (REPLICA,)),
        Fault(1 / 5, every_second_repeats, labelled("replica", "r6")),
    ),
    case(
        "top_token_dropped", "https://www.anthropic.com/engineering/a-postmortem-of-three-recent-issues",
        "A miscompiled approximate top-k now and then dropped the most probable token, on one "
        "platform only (no rate given). Here 1 token in 400 of the label tpu; the law without the "
        "top token is reported.",
        "violated", {"label": {"platform": "tpu"}, "positions": "single tokens"},
        "confident top tail single few support", "weights shift stale",
        "Violated or a finding of few extreme tokens.",
        Shape(
            2, 400, (60, 240), 150_000, "gaussian", 0.02, 1,
            (("platform", ("tpu", "gpu", "gpu2")),),
        ),
        Fault(1.0, lambda b, g: {"drop": scattered(b, g, 1 / 400)}, labelled("platform", "tpu")),
    ),
    case(
        "image_placeholder", "verl-project/verl#7038",
        "A sampled image placeholder has no image behind it, and each consumer takes it that "
        "there is one: the trainer's state is wrong from there on. Here 1 answer in 200 (no rate "
        "given).",
        "violated", {"sequences": 1 / 200, "positions": "from a token on, to the end"},
        "state context position trainer image", "temperature rounding stale",
        "Violated or a finding.",
        Shape(2, 800, (50, 200), 152_000, "by_sequence", 0.02),
        Fault(1 / 200, lambda b, g: {"t_shift": other_request(span(b, 0, None, g), g)}),
    ),
    case(
        "hash_collision", "openvinotoolkit/openvino.genai#3722",
        "Two prefixes with one hash: the wrong block is used, silently; the chance is low but not "
        "zero. Here 1 answer in 16,000.",
        "finding", {"sequences": 1 / 16_000, "positions": "one whole answer"},
        "state cache context request outlier", MODEL,
        "A finding that names one or few responses, or any verdict but holds.",
        Shape(4, 4000, (6, 20), 65_000, "gaussian", 0.01),
        Fault(1 / 16_000, foreign()),
    ),
    case(
        "filled_with_zero", "vllm-project/vime#70",
        "Missing numbers of the engine are filled with 0.0, that is probability 1, silently. Here "
        "the last 1-6 tokens of 1 answer in 50. No law gives these numbers.",
        "violated", {"sequences": 1 / 50, "positions": "last tokens"},
        "zero missing filled padding placeholder", "temperature weights stale",
        "Violated or a finding; exact zeros should be named.",
        Shape(1, 1000, (20, 150), 128_000, "heavy", 0.02),
        Fault(1 / 50, late=overwrite("infer", 0.0, last_tokens(6))),
    ),
)

INVENTED = (
    case(
        "one_in_20000", "invented",
        "One answer of 20,000 short ones was drawn from another prompt's state.",
        "finding", {"sequences": 1 / 20_000, "positions": "one whole answer"},
        "state cache context request prompt outlier", MODEL,
        "A finding that names the one response, or any verdict but holds.",
        Shape(1, 20_000, (6, 16), 50_000, "gaussian", 0.02),
        Fault(1 / 20_000, foreign()),
    ),
    case(
        "beyond_1024", "invented",
        "The engine's positions are wrong beyond the 1,024th answer token: only long answers are "
        "damaged.",
        "violated", {"positions": "1024 and later"},
        "position long length late context", "weights stale tokenizer",
        "Violated or a finding; late positions should be named.",
        Shape(1, 160, (100, 2000), 150_000, "gaussian", 0.01),
        Fault(1.0, turned("damage", 0.7, 1024)),
    ),
    case(
        "one_env_slightly", "invented",
        "One env of twelve has another version of the weights in 1 answer of 3, a small error.",
        "finding", {"label": {"env": "e7"}, "sequences": 1 / 36},
        "weights version policy stale env", "shift align",
        "A finding that names the label, or any verdict but holds.",
        Shape(
            4, 384, (40, 180), 100_000, "gaussian", 0.01, 1,
            (("env", tuple(f"e{i}" for i in range(12))),),
        ),
        Fault(1 / 3, turned("drift", 0.3), labelled("env", "e7")),
    ),
    case(
        "creeps_in_late", "invented",
        "From step 11 of 16 on the share of answers with damaged state is 2, 4, 8, 12 and 16%.",
        "finding", {"steps": [11, 12, 13, 14, 15]},
        "late state cache drift step", "tokenizer rounding",
        "A finding on late steps, or any verdict but holds.",
        Shape(16, 96, (32, 160), 150_000, "by_sequence", 0.01),
        Fault((0,) * 11 + (0.02, 0.04, 0.08, 0.12, 0.16), turned("damage", 1.0)),
    ),
    case(
        "one_step_too_cold", "invented",
        "In step 7 of 16 the engine drew 1 answer in 3 at temperature 0.7 and reported that law; "
        "the trainer scores at 1.",
        "violated", {"steps": [7], "sequences": 0.02},
        "temperature scale confident sharp", "shift align stale tokenizer",
        "Violated or a finding that names step 7.",
        Shape(16, 96, (40, 160), 64_000, "gaussian", 0.02, 4),
        Fault(1 / 3, turned("heat", 0.7), in_steps(7)),
    ),
    case(
        "id_minus_one", "invented",
        "1 answer in 400 has a placeholder id of -1 where a token was; the engine's number "
        "stayed.",
        "error", {"sequences": 1 / 400, "positions": "single tokens"},
        "id negative vocabulary token impossible", "temperature weights stale",
        "A refusal or a finding that names the id; a finding of few extreme tokens also counts.",
        Shape(1, 1200, (20, 120), 30_000, "gaussian", 0.01),
        Fault(1 / 400, edit=impossible_id),
    ),
    case(
        "engine_minus_45", "invented",
        "1 token in 20,000 is reported at -45 while the trainer's number is ordinary. No law "
        "gives that number for a drawn token.",
        "finding", {"positions": "single tokens"},
        "single extreme outlier sentinel few reported", "temperature stale tokenizer",
        "A finding of few tokens, or any verdict but holds.",
        Shape(2, 600, (60, 240), 128_000, "gaussian", 0.02),
        Fault(1.0, late=overwrite("infer", -45.0, single(1 / 20_000))),
    ),
    case(
        "second_population", "invented",
        "8% of the answers have an error of a second kind of kernel, 10 times the usual, no label "
        "for it. The engine reports the law it drew from.",
        "not holds", {"sequences": 0.08, "positions": "whole answers"},
        "population precision noise heterogeneous kernel few", "shift align tokenizer",
        "Any verdict but holds, or a finding that the error sits in few responses.",
        Shape(1, 1000, (40, 200), 150_000, "gaussian", 0.06),
        Fault(0.08, turned("damage", 0.4)),
    ),
    case(
        "small_in_few", "invented",
        "1 answer in 20 was drawn from slightly other weights; the healthy pair is very close.",
        "not holds", {"sequences": 0.05, "positions": "whole answers"},
        "weights version policy stale few", "shift align tokenizer",
        "Any verdict but holds, or a finding of few responses.",
        Shape(2, 640, (50, 150), 100_000, "heavy", 0.001),
        Fault(0.05, turned("drift", 0.1)),
    ),
    case(
        "answers_in_a_ring", "invented",
        "1 answer in 100 stands beside another prompt: tokens and the engine's numbers moved "
        "together.",
        "violated", {"sequences": 0.01, "positions": "whole answers"},
        "prompt context state request mixed swapped", MODEL,
        "Violated or a finding.",
        Shape(2, 1000, (20, 100), 50_000, "gaussian", 0.02, 4),
        Fault(0.01, edit=swap_answers),
    ),
    case(
        "chunk_delivered_twice", "invented",
        "A stream was tried again: a chunk of 8 tokens stands twice in 1 answer of 80, with its "
        "numbers.",
        "violated", {"sequences": 1 / 80, "positions": "from the chunk on"},
        "duplicate repeat chunk context position state", "temperature weights stale",
        "Violated or a finding.",
        Shape(1, 1600, (30, 130), 128_000, "by_sequence", 0.005),
        Fault(1 / 80, edit=chunk_twice(8)),
    ),
    case(
        "late_by_one_after_tool", "invented",
        "After a tool call the reported column stands one token late, in 1 of 6 answers with a "
        "tool. No law gives these numbers.",
        "violated", {"label": {"tool": "yes"}, "sequences": 0.056, "positions": "from a token on"},
        "shift align off-by-one offset misaligned", "temperature weights adapter",
        "Violated or a finding; the label is a bonus.",
        Shape(4, 256, (40, 200), 151_000, "gaussian", 0.02, 8, (("tool", ("yes", "no", "none")),)),
        Fault(1 / 6, edit=shift_report(False, somewhere=True), eligible=labelled("tool", "yes")),
    ),
    case(
        "rounded_in_few", "invented",
        "1 answer in 10 has the engine's column rounded to bfloat16; the healthy pair differs by "
        "1e-4. The numbers are a law's but for the rounding.",
        "not holds", {"sequences": 0.1, "positions": "whole answers"},
        "round precision bfloat16 bf16 grid quantis", "weights stale shift",
        "Any verdict but holds, or a finding of rounding.",
        Shape(1, 800, (40, 160), 32_000, "gaussian", 0.0001),
        Fault(0.1, late=round_report),
    ),
    case(
        "half_of_a_replica", "invented",
        "One replica of 16 draws half of its answers at temperature 1.3 and reports that law.",
        "violated", {"label": {"replica": "r11"}, "sequences": 1 / 32},
        "temperature scale flat", "shift align stale",
        "Violated or a finding that names the replica.",
        Shape(
            4, 480, (30, 120), 64_000, "heavy", 0.02, 1,
            (("replica", tuple(f"r{i}" for i in range(16))),),
        ),
        Fault(1 / 2, turned("heat", 1.3), labelled("replica", "r11")),
    ),
    case(
        "bursts", "invented",
        "In steps 2, 3 and 6 of 8 a run of six neighbouring rows is garbage from a token on.",
        "violated", {"steps": [2, 3, 6], "sequences": 0.009},
        "state cache context request burst", MODEL,
        "Violated or a finding; the steps are a bonus.",
        Shape(8, 256, (20, 150), 150_000, "gaussian", 0.02),
        Fault(
            1.0, foreign(somewhere=True),
            lambda b: np.isin(b.step, (2, 3, 6)) & (b.row // 6 == 9 + b.step),
        ),
    ),
    case(
        "too_high_and_too_low", "invented",
        "1 answer in 16 is reported 0.5 too high and 0.5 too low by turns (capped at 0): the mean "
        "hides it. No law gives these numbers.",
        "violated", {"sequences": 1 / 16, "positions": "whole answers, by turns"},
        "alternat parity cancel spread noise reported", "weights stale tokenizer",
        "Violated or a finding of few responses.",
        Shape(1, 960, (30, 150), 64_000, "gaussian", 0.02),
        Fault(1 / 16, late=alternate(0.5)),
    ),
    case(
        "too_confident_tokens", "invented",
        "1 token in 250 is drawn at temperature 0.35, and so reported: the engine is too sure "
        "there.",
        "not holds", {"positions": "single tokens"},
        "confident temperature sharp single few", "shift align stale",
        "Any verdict but holds, or a finding of few tokens.",
        Shape(2, 500, (60, 240), 150_000, "gaussian", 0.005),
        Fault(1.0, lambda b, g: {"heat": np.where(scattered(b, g, 1 / 250), 0.35, 1.0)}),
    ),
    case(
        "column_missing", "invented",
        "1 answer in 256 came without the engine's numbers, and the collator put 0.0. No law "
        "gives that.",
        "violated", {"sequences": 1 / 256, "positions": "whole answers"},
        "zero missing filled placeholder column", "temperature weights stale",
        "Violated, an error or a finding that names zeros.",
        Shape(4, 512, (24, 96), 100_000, "by_sequence", 0.02, 8),
        Fault(1 / 256, late=overwrite("infer", 0.0, whole)),
    ),
    case(
        "trainer_nan_row", "invented",
        "The trainer's forward overflowed on 1 row of 512: its whole answer is NaN.",
        "error", {"sequences": 1 / 512, "positions": "one whole answer"},
        "nan finite overflow missing", "temperature stale shift",
        "A refusal or a finding that names NaN; silently dropped with holds is a miss.",
        Shape(1, 512, (30, 200), 32_000, "gaussian", 0.01),
        Fault(1 / 512, late=overwrite("train", np.nan, whole)),
    ),
    case(
        "stop_token_appended", "invented",
        "In 1 answer of 25 the client appended a stop token that was never drawn, with the number "
        "before it copied. No law gives that number.",
        "violated", {"sequences": 0.04, "positions": "last token"},
        "last stop eos end appended", "temperature weights stale",
        "Violated or a finding; the last position should be named.",
        Shape(3, 500, (10, 90), 150_000, "gaussian", 0.02),
        Fault(1 / 25, edit=append_stop),
    ),
    case(
        "one_slot_overflows", "invented",
        "One slot of 64 overflows at each 128th position: that single token is drawn from a "
        "damaged law.",
        "not holds", {"sequences": 1 / 64, "positions": "each 128th token"},
        "overflow slot position block single periodic", "weights stale tokenizer",
        "Any verdict but holds, or a finding of few tokens. Inconclusive counts: some 60 tokens "
        "are hit.",
        Shape(2, 320, (200, 640), 150_000, "gaussian", 0.02),
        Fault(1.0, each_128th_damaged, lambda b: b.row % 64 == 17),
    ),
    case(
        "first_tokens_of_few", "invented",
        "The first 4 tokens of 1 answer in 10 come from a cut prefix.",
        "violated", {"sequences": 0.1, "positions": "first 4 tokens"},
        "first early start prefix prefill position", "weights stale tokenizer",
        "Violated or a finding; early positions should be named.",
        Shape(2, 700, (30, 150), 128_000, "heavy", 0.1, 4),
        Fault(0.1, turned("damage", 2.5, 0, 4)),
    ),
    case(
        "answers_of_one_token", "invented",
        "Answers of one token (a classifier): 1 in 50 was drawn from the state of another "
        "request.",
        "violated", {"sequences": 0.02},
        "state context request prompt mixed", MODEL,
        "Violated or a finding. " + FEW,
        Shape(2, 3000, (1, 1), 32_000, "gaussian", 0.01, 1, (("task", ("a", "b", "c")),)),
        Fault(1 / 50, foreign()),
    ),
    case(
        "two_of_sixty_four", "invented",
        "A small dump of 64 answers, 2 of them garbage.",
        "violated", {"sequences": 1 / 32, "positions": "whole answers"},
        "state context request cache", MODEL,
        "Violated or a finding. " + FEW,
        Shape(1, 64, (20, 120), 150_000, "gaussian", 0.02),
        Fault(1 / 32, foreign()),
    ),
    case(
        "small_vocabulary_env", "invented",
        "A game with 64 tokens: in the env maze the trainer looks up other ids in 1 answer of "
        "3.",
        "violated", {"label": {"env": "maze"}, "sequences": 1 / 9},
        "label id token align shift offset mapping", "temperature stale weights",
        "Violated or a finding that names the env.",
        Shape(4, 400, (8, 60), 64, "gaussian", 0.15, 1, (("env", ("maze", "chess", "cards")),)),
        Fault(
            1 / 3,
            any_of_64_ids,
            labelled("env", "maze"),
        ),
    ),
    case(
        "wrong_staleness", "invented",
        "1 answer in 24 was drawn with old weights although its staleness is recorded as 0.",
        "finding", {"sequences": 1 / 24, "positions": "whole answers"},
        "stale weights version policy", "tokenizer rounding shift",
        "A finding of few responses or of weights, or any verdict but holds.",
        Shape(6, 240, (30, 150), 100_000, "by_sequence", 0.03, 4, staleness=True),
        Fault(1 / 24, turned("drift", 0.6)),
    ),
    case(
        "floor_at_minus_6", "invented",
        "In 1 env of 4 the reported column has a floor at -6: few improbable tokens are touched. "
        "No law gives these numbers.",
        "finding", {"label": {"env": "d"}, "positions": "improbable tokens"},
        "clip floor clamp bound improbable tail", "weights stale shift",
        "A finding on improbable tokens or the label, or any verdict but holds.",
        Shape(2, 500, (50, 200), 128_000, "gaussian", 0.03, 1, (("env", ("a", "b", "c", "d")),)),
        Fault(1.0, late=floor_report(-6.0), eligible=labelled("env", "d")),
    ),
    case(
        "skewed_lengths_few_tokens", "invented",
        "Lengths of 1 to 1,500; 1 token in 3,000 is drawn from the state of another request.",
        "finding", {"positions": "single tokens"},
        "single few state extreme outlier request", MODEL,
        "A finding of few tokens, or any verdict but holds.",
        Shape(3, 300, (1, 1500), 150_000, "heavy", 0.01, skewed=True),
        Fault(1.0, lambda b, g: {"shift": scattered(b, g, 1 / 3000) * 311}),
    ),
)
# fmt: on

CASES: tuple[UnseenCase, ...] = THREADS + INVENTED


def describe(each):
    """Makes a case both ways, and says what is in it."""
    shape, fault = each.make.args
    dumps, hits = build(shape, fault, True, np.random.default_rng(0))
    twin = each.make(False, np.random.default_rng(0))
    assert len(twin) == shape.steps and not any(np.isnan(d["logp_train_ST"]).any() for d in twin)

    def answers(of):
        return [(d["logp_train_ST"] - d["logp_infer_ST"])[d["mask_ST"]] for d in of]

    d, calm = np.concatenate(answers(dumps)), np.concatenate(answers(twin))
    hit = np.concatenate(
        [np.repeat(h, x["mask_ST"].sum(1)) for x, h in zip(dumps, hits, strict=True)]
    )
    sizes = [np.abs(x)[np.isfinite(x)] for x in (d[hit], d[~hit], calm)]
    means = "  ".join(f"{x.mean():.5f}" if len(x) else "-" for x in sizes)
    finite = np.exp(d[np.isfinite(d)]).mean()
    print(f"{each.name:26} {shape.steps:2} x {shape.responses:<5} {len(d):6} tokens", end="  ")
    print(f"hit share {np.concatenate(hits).mean():.5f}  NaN {np.isnan(d).sum()}", end="  ")
    print(f"|d| of hit, rest, twin {means}  E exp(d) {finite:.4g}, twin {np.exp(calm).mean():.5f}")


if __name__ == "__main__":
    for each in CASES:
        describe(each)
