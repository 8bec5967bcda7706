"""More dumps of rollouts with known faults, healthy ones and unsound ones, with the right causes.

The rules are those of `unseen_causes`, whose machinery this uses: a token is drawn from the law
that the engine really used, and both numbers come from logits. `chained` is another synthetic
world: a law depends on the two tokens before it, the group and the place, so answers are chains.
`causes` was fixed before any run. Several names are right where the fault has several faces, where
there are two faults, or where the data cannot tell them apart.

    python -m tests.field.more_unseen_causes NAME FOLDER [SEED]
"""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np

from tests.field import unseen_causes as unseen
from tests.field.unseen_causes import (
    CONTEXTS,
    END,
    Case,
    Record,
    ask,
    cut,
    first_end,
    load,
    log_softmax,
    moved,
    noisy,
    play,
    record,
    repeated,
    score,
    torch_,
    world,
)

FOUND: list[Case] = []


case = partial(unseen.case, into=FOUND)


# ---- chains


def chained(
    folder,
    rng,
    *,
    vocab,
    steps,
    answers,
    width,
    ends=None,
    group=4,
    labels=None,
    noise=0.03,
    kind="gaussian",
    prompt=(6, 40),
    turns=1,
    move=0.0,
    ranks=1,
    sharp=1.0,
    engine=None,
    trainer=None,
    report=None,
    lag=None,
    head=None,
    rows=None,
):
    """Writes a dump of chains. `engine` takes (b, z [S, K]) at the place b.t, `trainer` takes
    (b, z [S, W, K]), `report` takes (b, r) and edits the columns. A label is a tuple of values, or
    a function of b; `ends` is the usual length of an answer without a limit; `head` returns the two
    columns of a prompt that the mask covers; `rows` says which (row, step, rank) are written."""
    w, out = world(rng, vocab, ends or width), Record()
    S, row = answers, np.arange(answers)
    g = row // group
    for step in range(1, steps + 1):
        b = SimpleNamespace(step=step, steps=steps, row=row, group=g, member=row % group, rng=rng)
        b.rank, b.labels, b.width, b.move = row * ranks // S, {}, width, move
        b.lag = lag(b) if lag else np.zeros(S, int)
        for name, values in (labels or {}).items():
            if callable(values):
                b.labels[name] = np.asarray(values(b))
            else:
                some = np.array(values)[rng.integers(len(values), size=S)]
                b.labels[name] = some if name == "replica" else some[g * group]
        b.starts = rng.integers(prompt[0], prompt[1] + 1, S)[g * group]
        heads = 1 + ((vocab - 1) ** rng.random((S, prompt[1]))).astype(np.int64) % (vocab - 1)
        heads, key = heads[g * group], rng.integers(1 << 30, size=S)[g * group]
        pieces, last = [], np.zeros((S, 2), np.int64)
        for s in row:
            ids = heads[s, : b.starts[s]]
            pieces.append([(ids, *(head(b, ids) if head else (None, None)))])
            last[s] = ids[-2:]
        for turn in range(1, turns + 1):
            b.turn, kept = turn, []
            for t in range(width):
                b.t = t
                c = last[:, 0] * 7919 + last[:, 1] * 104729 + key + t // 16 * 1299709
                c %= CONTEXTS
                b.moves, b.other, b.ids = w.moves[c], w.other[c], w.ids[c]
                z = sharp * w.logits[c] + move * step * b.moves
                old = z - move * b.lag[:, None] * b.moves
                zq = engine(b, old) if engine else old
                pick = (zq + rng.gumbel(size=zq.shape)).argmax(-1)
                kept.append((b.ids, z, zq, b.moves, b.other, pick))
                last = np.stack([last[:, 1], b.ids[row, pick]], 1)
            b.ids, z, zq, b.moves, b.other, pick = (np.stack(x, 1) for x in zip(*kept, strict=True))
            at, lq = pick[..., None], log_softmax(zq)
            lp = log_softmax(noisy(trainer(b, z) if trainer else z, rng, noise, kind))
            r = SimpleNamespace(at=at, laws=lq)
            r.ids, r.infer, r.train, r.raw = (
                np.take_along_axis(x, at, -1)[..., 0] for x in (b.ids, lq, lp, log_softmax(z))
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
                    last[s] = tool[-2:]
        where = rows(b) if rows else [(s, step, b.rank[s]) for s in row]
        for s, at, rank in where:
            own = {k: v[s] for k, v in b.labels.items()}
            age = int(b.lag[s]) if lag else None
            out.add(at, f"s{at}p{g[s]}", pieces[s], own, int(rank), age)
    out.write(folder)


def of(values):
    """A condition on answers, for the logits of one place."""
    return np.asarray(values)[:, None]


def real(
    folder,
    rng,
    name,
    count,
    width,
    steps,
    *,
    sent=list,
    served=lambda m: m,
    draws=None,
    trained=lambda m: m,
    scores=None,
    noise=0.03,
    lengths=(8, 36),
):
    """A dump of a model: `sent` changes a prompt for the engine, `served` its model, `draws` its
    law; `trained` changes the trainer's model, `scores` its law."""
    prompts, domains = ask(rng, count, *lengths)
    model = load(name)
    tokens, infer = play(served(model), [sent(p) for p in prompts], width, rng, draws)
    train = score(trained(model), prompts, tokens, rng, noise, law=scores)
    record(folder, prompts, tokens, train, infer, steps, {"domain": domains})


# ---- faults: laws


@case(
    "penalty",
    "Requests carry a presence penalty of 1.2 on the tokens that the answer has already; the "
    "engine reports the penalised law, and the trainer knows nothing of it.",
)
def presence_penalty(folder, rng):
    def draws(z, past, seen):
        # prompts of one length: those behind it are the answer's
        used = np.zeros(z.shape, bool)
        np.put_along_axis(used, past[:, 24:], True, 1)
        return z - 1.2 * used, z - 1.2 * used

    real(folder, rng, "tiny-qwen3", 200, 56, 5, draws=draws, lengths=(24, 24))


@case(
    "temperature",
    "Both sides are set to temperature 0.8, and the trainer divides its logits by it twice: in the "
    "model's wrapper and in the loss.",
)
def temperature_twice(folder, rng):
    real(
        folder, rng, "tiny-lm", 200, 48, 8,
        draws=lambda z, *_: (z / 0.8, z / 0.8), scores=lambda z: z / 0.64,
    )  # fmt: skip


@case(
    "raw_logprobs",
    "Prompts are sampled at temperatures from 0.5 to 1.2, one for each group, which the trainer "
    "applies too; the engine reports the law before the temperature.",
)
def a_temperature_for_each_group(folder, rng):
    def heat(b):
        return 0.5 + 0.1 * (b.group * 5 % 8)

    def report(b, r):
        r.infer = r.raw

    chained(
        folder, rng, vocab=128_000, steps=6, answers=160, width=70, group=8, report=report,
        engine=lambda b, z: z / of(heat(b)), trainer=lambda b, z: z / heat(b)[:, None, None],
        labels={"env": ("math", "code", "logic")},
    )  # fmt: skip


@case(
    "softcap",
    "The engine caps the final logits at 14 by a tanh, as the config says; the trainer's "
    "implementation leaves the cap out.",
)
def final_cap_left_out(folder, rng):
    def draws(z, *_):
        z = 14 * np.tanh(z / 14)
        return z, z

    real(folder, rng, "tiny-lm", 220, 48, 6, draws=draws)


@case(
    "top_p steps",
    "Two faults: the engine has min_p 0.08 from the model's own defaults, whose law it reports; "
    "and in steps 6 and 7 of 12 it served half-loaded weights after a wake-up.",
)
def min_p_and_half_loaded_weights(folder, rng):
    def engine(b, z):
        return cut(z + (1.0 if b.step in (6, 7) else 0.0) * b.other, min_p=0.08)

    chained(
        folder, rng, vocab=150_000, steps=12, answers=96, width=80, engine=engine, sharp=0.7,
        labels={"env": ("math", "code")},
    )  # fmt: skip


@case(
    "rounding clamp",
    "The gateway in front of the engine sends probabilities with two decimals (at least 0.01), and "
    "the client takes their logarithm.",
)
def probabilities_in_percent(folder, rng):
    def report(b, r):
        r.infer = np.log(np.maximum(np.round(np.exp(r.infer), 2), 0.01))

    chained(
        folder, rng, vocab=32_000, steps=4, answers=240, width=60, report=report, sharp=0.6,
        labels={"env": ("chat", "math"), "replica": ("r0", "r1")},
    )  # fmt: skip


# ---- faults: places


@case(
    "one_kind temperature stale_replica one_engine",
    "Two faults: requests of the environment puzzle go out at temperature 0.65, which the engine "
    "reports and the trainer does not know; and replica r3 came back at step 5 with the weights of "
    "step 1 and stays there.",
)
def cool_puzzles_and_a_failover(folder, rng):
    def engine(b, z):
        behind = (b.step - 1 if b.step >= 5 else 0) * (b.labels["replica"] == "r3")
        z = z - b.move * of(behind) * b.moves
        return z / of(np.where(b.labels["env"] == "puzzle", 0.65, 1.0))

    chained(
        folder, rng, vocab=50_000, steps=16, answers=120, width=70, engine=engine, move=0.07,
        labels={"env": ("puzzle", "math", "code"), "replica": ("r0", "r1", "r2", "r3")},
    )  # fmt: skip


@case(
    "one_machine one_engine",
    "Each node has one replica and one rank of the trainer, which trains on its replica's answers. "
    "The attention kernel of the engine on node 2 of 4 has a large random error.",
)
def node_with_both_sides(folder, rng):
    def engine(b, z):
        return z + 0.5 * of(b.rank == 2) * rng.normal(size=z.shape)

    chained(
        folder, rng, vocab=24_000, steps=8, answers=128, width=80, engine=engine, ranks=4,
        labels={
            "env": ("math", "code", "web"),
            "replica": lambda b: [f"n{i}" for i in b.rank],
        },
    )  # fmt: skip


@case(
    "one_rank end_of_answer",
    "Two faults: rank 5 of the trainer's 8 falls back to another attention kernel with a large "
    "error; and the last window of 6 tokens before the length limit is taken from the draft model, "
    "unverified and with its numbers.",
)
def a_rank_and_the_last_window(folder, rng):
    def engine(b, z):
        return z + (1.0 if b.t >= b.width - 6 else 0.0) * b.other

    def trainer(b, z):
        return z + 0.45 * (b.rank == 5)[:, None, None] * rng.normal(size=z.shape)

    chained(
        folder, rng, vocab=64_000, steps=6, answers=256, width=64, ends=400, engine=engine,
        trainer=trainer, ranks=8, labels={"env": ("math", "code")}, kind="by_answer",
    )  # fmt: skip


@case(
    "change temperature",
    "The config is loaded anew before step 9 of 20: from then on the engine samples at temperature "
    "0.75 and reports it, and the trainer stays at 1.",
)
def cooler_after_a_reload(folder, rng):
    chained(
        folder, rng, vocab=16_000, steps=20, answers=64, width=80,
        engine=lambda b, z: z / (0.75 if b.step >= 9 else 1.0),
        labels={"env": ("a", "b"), "replica": ("r0", "r1", "r2")},
    )  # fmt: skip


@case(
    "batch",
    "The trainer's kernel reads behind its bounds for the last row of each micro-batch of 8, whose "
    "logits are wrong at random.",
)
def last_row_of_each_micro_batch(folder, rng):
    def trainer(b, z):
        return z + 0.7 * (b.row % 8 == 7)[:, None, None] * rng.normal(size=z.shape)

    chained(
        folder, rng, vocab=100_000, steps=10, answers=120, width=90, trainer=trainer,
        labels={"env": ("math", "shell"), "level": ("1", "2", "3")},
    )  # fmt: skip


@case(
    "odd_sequences stale_cache",
    "Prefill and decode run on two machines. For one answer in 12 the handed-over keys and values "
    "are those of another prompt; only its last token is read anew.",
)
def cache_of_another_request(folder, rng):
    prompts, domains = ask(rng, 300, 24, 24)
    model, hit = load("tiny-lm"), rng.choice(300, 25, replace=False)

    def prefill(input_ids, **rest):
        return model(input_ids=input_ids.roll(1, 0), **rest)

    tokens, infer = play(model, prompts, 44, rng)
    tokens[hit], infer[hit] = play(model, [prompts[i] for i in hit], 44, rng, prefill=prefill)
    train = score(model, prompts, tokens, rng, 0.03)
    replica = [f"d{i}" for i in rng.integers(3, size=300)]
    record(folder, prompts, tokens, train, infer, 5, {"domain": domains, "replica": replica})


@case(
    "packing batch",
    "The trainer packs answers up to 200 tokens without their bounds: all but the first of a pack "
    "attend to those before them.",
)
def packs_without_bounds(folder, rng):
    prompts, domains = ask(rng, 240, 8, 36)
    model, width, steps = load("tiny-qwen3"), 40, 6
    tokens, infer = play(model, prompts, width, rng)
    length, before, pack, at = first_end(tokens), [], [], -1
    for s, p in enumerate(prompts):
        own = list(p) + list(tokens[s, : length[s]])
        if len(pack) + len(own) > 200 or s * steps // 240 != at:
            pack, at = [], s * steps // 240
        before.append(list(pack))
        pack += own
    read = [b + list(p) for b, p in zip(before, prompts, strict=True)]
    train = score(model, read, tokens, rng, 0.03)
    record(folder, prompts, tokens, train, infer, steps, {"domain": domains})


# ---- faults: contexts


@case(
    "positions",
    "The engine's table of rotary angles ends at position 64: later tokens all have the angle of "
    "the last entry.",
)
def table_of_angles_too_short(folder, rng):
    def served(model):
        def short(position_ids, **rest):
            return model(position_ids=position_ids.clamp(max=63), **rest)

        return short

    real(folder, rng, "tiny-lm", 140, 96, 4, served=served)


@case(
    "attention_window blocks",
    "The trainer's attention is chunked, as the config of a newer model says: a token sees only "
    "its own block of 32 places. The engine attends to all.",
)
def chunked_attention(folder, rng):
    def trained(model):
        def chunked(attention_mask, position_ids, **rest):
            block = position_ids // 32
            other = block[:, None, :, None] != block[:, None, None, :]
            mask = attention_mask.masked_fill(other, -1e9)
            return model(attention_mask=mask, position_ids=position_ids, **rest)

        return chunked

    real(folder, rng, "tiny-qwen3", 140, 90, 4, trained=trained, noise=0.025)


@case(
    "blocks",
    "The first token of each block of 16 places is computed before the engine's paged cache has "
    "the block before it.",
)
def block_not_yet_there(folder, rng):
    def served(model):
        def paged(input_ids, attention_mask, position_ids, **rest):
            if input_ids.shape[1] == 1:
                attention_mask = attention_mask.clone()
                attention_mask[position_ids[:, 0] % 16 == 0, -17:-1] = 0
            return model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                **rest,
            )  # fmt: skip

        return paged

    real(folder, rng, "tiny-lm", 180, 64, 5, served=served, noise=0.025)


@case(
    "template numerics",
    "The engine's chat template puts a default system prompt of 14 tokens before each prompt; the "
    "trainer's does not.",
)
def default_system_prompt(folder, rng):
    system = ask(rng, 1, 14, 14)[0][0]
    real(folder, rng, "tiny-qwen3", 240, 44, 6, sent=lambda p: system + list(p))


def talk(folder, rng, name, sent, *, count=140, width=24, turns=3, steps=7):
    """Answers of several turns; `sent` is what the engine reads for (history, tool)."""
    prompts, domains = ask(rng, count, 8, 24)
    model, out = load(name), Record()
    served, full = [list(p) for p in prompts], [list(p) for p in prompts]
    pieces = [[(p, None, None)] for p in prompts]
    for turn in range(1, turns + 1):
        tokens, infer = play(model, served, width, rng)
        train, length = score(model, full, tokens, rng, 0.03), first_end(tokens)
        tools = ask(rng, count, 6, 14)[0]
        for s, n in enumerate(length):
            pieces[s].append((tokens[s, :n], train[s, :n], infer[s, :n]))
            if turn < turns:
                pieces[s].append((tools[s], None, None))
                answer = list(tokens[s, :n])
                served[s] = sent(served[s] + answer, list(tools[s]))
                full[s] = full[s] + answer + list(tools[s])
    for s in range(count):
        out.add(1 + s * steps // count, f"g{s}", pieces[s], {"env": domains[s]})
    out.write(folder)


@case(
    "retokenised turns",
    "The engine reads a separator behind each tool result that the trainer's text loses: the first "
    "tokens of later turns follow another token.",
)
def separator_lost_after_a_tool(folder, rng):
    mark = ask(rng, 1, 2, 2)[0][0]
    talk(folder, rng, "tiny-lm", lambda past, tool: past + tool + mark)


@case(
    "turns",
    "To save tokens the client sends only the last 12 tokens of the conversation before each tool "
    "result; the trainer scores later turns after all of it.",
)
def client_forgets_the_conversation(folder, rng):
    talk(folder, rng, "tiny-qwen3", lambda past, tool: past[-12:] + tool, width=32)


# ---- faults: weights


@case(
    "stale_weights",
    "The sync leaves out the MLP weights of all layers, whose names were changed by fusing: the "
    "engine has those of the start in all 10 steps.",
)
def fused_names_left_out(folder, rng):
    first, steps, parts = load("tiny-lm"), 10, []
    prompts, domains = ask(rng, 280, 8, 30)
    each = len(prompts) // steps
    for k in range(steps):
        own, now = prompts[k * each : (k + 1) * each], moved(first, 0.04 * k, 3)
        served = copy.deepcopy(now)
        kept = dict(first.named_parameters())
        for name, p in served.named_parameters():
            if ".mlp." in name:
                p.copy_(kept[name])
        tokens, infer = play(served, own, 44, rng)
        parts.append((tokens, score(now, own, tokens, rng, 0.03), infer))
    tokens, train, infer = (np.concatenate(x) for x in zip(*parts, strict=True))
    record(folder, prompts, tokens, train, infer, steps, {"domain": domains})


@case(
    "old_weights stale_weights",
    "The pipeline keeps a queue of three steps, so each answer is three updates old (fewer at the "
    "start); nothing records it.",
)
def queue_of_three_steps(folder, rng):
    def engine(b, z):
        return z - min(3, b.step - 1) * b.move * b.moves

    chained(
        folder, rng, vocab=32_000, steps=12, answers=100, width=80, engine=engine, move=0.15,
        labels={"env": ("math", "code"), "replica": ("r0", "r1")},
    )  # fmt: skip


@case(
    "old_weights",
    "Weights are updated in flight: of an answer that began up to 4 updates ago, the tokens before "
    "some place are drawn by the old weights. The age of the oldest token is recorded.",
)
def updates_in_flight(folder, rng):
    def engine(b, z):
        if b.t == 0:
            b.until = rng.integers(20, 120, len(b.row))
        return z + b.move * of(b.lag * (b.t >= b.until)) * b.moves

    chained(
        folder, rng, vocab=48_000, steps=10, answers=100, width=120, ends=200, engine=engine,
        move=0.16, lag=lambda b: np.minimum(rng.integers(0, 5, len(b.row)), b.step - 1),
        labels={"env": ("math", "code", "chat")},
    )  # fmt: skip


@case(
    "vocabulary head",
    "The output head is split over 4 devices by token id, and one of them still has the weights "
    "from before many updates.",
)
def shard_of_the_head(folder, rng):
    def served(model):
        torch, other = torch_(), copy.deepcopy(model)
        noise = torch.Generator().manual_seed(5)
        rows = model.lm_head.weight.clone()
        rows[256:512] += 0.35 * rows.std() * torch.randn(rows[256:512].shape, generator=noise)
        other.lm_head = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False)
        other.lm_head.weight.copy_(rows)
        return other

    real(folder, rng, "tiny-lm", 220, 48, 5, served=served)


@case(
    "head numerics",
    "The engine computes the output head in FP4, with a scale for each 16 weights, and from hidden "
    "states in FP8.",
)
def head_in_four_bits(folder, rng):
    def served(model):
        torch, other = torch_(), copy.deepcopy(model)

        def eight(x):
            scale = x.abs().max() / 448
            return (x / scale).to(torch.float8_e4m3fn).float() * scale

        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        blocks = model.lm_head.weight.reshape(-1, 16)
        scale = blocks.abs().amax(1, keepdim=True) / 6
        near = ((blocks / scale).abs()[..., None] - values).abs().argmin(-1)
        rows = (values[near] * blocks.sign() * scale).reshape(model.lm_head.weight.shape)
        other.lm_head.forward = lambda h: eight(h) @ rows.T
        return other

    real(folder, rng, "tiny-qwen3", 240, 48, 4, served=served, noise=0.02)


@case(
    "replay routing",
    "The trainer replays the engine's routed experts, and the rows are one token late: each token "
    "passes the experts of the token before it.",
)
def routes_one_token_late(folder, rng):
    def trained(model):
        torch, other = torch_(), copy.deepcopy(model)
        routes, replay = [], [False]

        def route(gate, args, got):
            logits, _, chosen = got
            if not replay[0]:
                routes.append(chosen)
                return got
            chosen = routes.pop(0).roll(1, 0)
            weights = torch.softmax(logits, -1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)

        def both(**inputs):
            for replay[0] in (False, True):
                got = other(**inputs)
            return got

        return both

    real(folder, rng, "tiny-moe", 220, 44, 4, trained=trained)


# ---- healthy

PLAIN = {"vocab": 48_000, "steps": 6, "answers": 120, "width": 70}
ENVS = {"env": ("math", "code", "chat")}


def healthy(name, what, **chains):
    def write(folder, rng):
        chained(folder, rng, **PLAIN | {"noise": 0.02} | chains)

    write.__name__ = name
    case("", what, "healthy")(write)


def calm(what):
    return case("", what, "healthy")


healthy(
    "calm_and_sharp", "Sharp laws, as of mathematics after long training; up to 200 tokens.",
    vocab=150_000, answers=80, width=200, sharp=2.5, labels={"env": ("algebra", "geometry")},
)  # fmt: skip
healthy(
    "calm_and_flat", "Flat laws, as of poems at temperature 1, and a small noise.",
    sharp=0.4, noise=0.012, labels={"form": ("sonnet", "haiku", "ballad")},
)  # fmt: skip
healthy(
    "calm_one_token_answers", "Verdicts of a judge: each answer is one token out of few.",
    vocab=64, answers=600, width=1, ends=60, group=6, noise=0.015,
    labels={"judge": ("a", "b", "c")},
)  # fmt: skip
healthy(
    "calm_reasoning", "Reasoning with answers of up to 1,000 tokens, and few of them.",
    vocab=128_000, steps=3, answers=28, width=1000, sharp=1.4,
    labels={"env": ("proofs", "programs")},
)  # fmt: skip
healthy(
    "calm_one_sequence_a_step", "One sequence in each of 24 steps.",
    steps=24, answers=1, width=300, ends=600, group=1,
)  # fmt: skip
healthy(
    "calm_single_step", "A single step of 500 answers, whose errors differ by answer.",
    steps=1, answers=500, group=10, kind="by_answer",
    labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2", "r3")},
)  # fmt: skip
healthy(
    "calm_few_ids", "Eight moves and an end: a game with 9 token ids.",
    vocab=9, steps=8, answers=200, width=24, group=8, labels={"board": ("small", "large")},
)  # fmt: skip
healthy(
    "calm_with_rare_labels", "One environment in 60 and one replica in 30 are rare.",
    answers=160,
    labels={
        "env": ("math",) * 40 + ("code",) * 19 + ("legal",),
        "replica": ("r0",) * 15 + ("r1",) * 14 + ("r2",),
    },
)  # fmt: skip
healthy(
    "calm_with_many_labels", "Seven labels with up to 12 values, none of which matters.",
    steps=8, answers=144, kind="by_answer", ranks=4,
    labels={f"tag_{n}": tuple(f"v{i}" for i in range(n)) for n in (2, 3, 5, 8, 12)}
    | {"env": ("a", "b", "c", "d", "e"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip
healthy(
    "calm_with_tools", "Tools: six short turns each, with a heavy tail of the errors.",
    answers=80, width=20, turns=6, kind="heavy", labels={"tool": ("shell", "browser")},
)  # fmt: skip
healthy(
    "calm_with_age", "Answers of recorded age 0 to 3; updates are so small that age has no effect.",
    steps=10, move=0.003, lag=lambda b: b.rng.integers(0, 4, len(b.row)), labels=ENVS,
)  # fmt: skip
healthy(
    "calm_with_large_updates", "Large updates that both sides have at once, through 20 steps.",
    steps=20, answers=64, move=0.1, labels={"replica": ("r0", "r1", "r2")},
)  # fmt: skip
healthy(
    "calm_with_min_p", "Both sides apply min_p 0.05, and agree on what is left.",
    engine=lambda _, z: cut(z, min_p=0.05), trainer=lambda _, z: cut(z, min_p=0.05), labels=ENVS,
)  # fmt: skip
healthy(
    "calm_at_the_limit", "Nearly all answers stop at the length limit; 8 ranks, groups of 16.",
    steps=4, answers=256, ends=5000, group=16, ranks=8, labels=ENVS,
)  # fmt: skip
healthy(
    "calm_with_an_uncertain_kind",
    "One environment is far more uncertain than the other, so its small gap is larger.",
    noise=0.015, labels={"env": ("story", "sums")},
    engine=lambda b, z: z * of(np.where(b.labels["env"] == "story", 0.5, 2.0)),
    trainer=lambda b, z: z * np.where(b.labels["env"] == "story", 0.5, 2.0)[:, None, None],
)  # fmt: skip
healthy(
    "calm_in_float16", "The engine's numbers are stored as float16, which rounds them a little.",
    report=lambda _, r: setattr(r, "infer", r.infer.astype(np.float16).astype(float)),
    labels={"replica": ("r0", "r1")},
)  # fmt: skip


@calm("Almost certain laws in float32: many numbers of both sides are exactly 0.")
def calm_with_exact_zeros(folder, rng):
    def single(x):
        return np.log(np.exp(x).astype(np.float32)).astype(float)

    def report(b, r):
        r.infer, r.train = single(r.infer), single(r.train)

    chained(folder, rng, **PLAIN, noise=0.02, sharp=4.0, report=report, labels=ENVS)


@calm("The trainer's error wanders along an answer, as that of a cache does.")
def calm_with_wandering_errors(folder, rng):
    def trainer(b, z):
        e = 0.012 * rng.normal(size=z.shape)
        for t in range(1, z.shape[1]):
            e[:, t] += 0.8 * e[:, t - 1]
        return z + e

    chained(folder, rng, **PLAIN, noise=0.005, trainer=trainer, labels=ENVS)


@calm("Very uneven lengths: one environment answers with a word, the other with a page.")
def calm_with_uneven_lengths(folder, rng):
    def ending(b, z):  # both sides have it
        essay = (b.labels["env"] == "essay").reshape(-1, *[1] * (z.ndim - 1))
        return z - 13 * (b.ids == END) * essay

    world = PLAIN | {"width": 240, "ends": 9}
    chained(
        folder, rng, **world, noise=0.02, engine=ending, trainer=ending,
        labels={"env": ("quiz", "essay")},
    )  # fmt: skip


@calm("A model whose both sides cut the law at top_k 30.")
def calm_model_with_top_k(folder, rng):
    real(
        folder, rng, "tiny-qwen3", 200, 48, 5, draws=lambda z, *_: (cut(z, top_k=30),) * 2,
        scores=lambda z: cut(z, top_k=30), noise=0.02,
    )  # fmt: skip


@calm("Prompts from 8 to 160 tokens of a model, at temperature 0.6 on both sides.")
def calm_model_with_long_prompts(folder, rng):
    real(
        folder, rng, "tiny-lm", 120, 40, 3, draws=lambda z, *_: (z / 0.6,) * 2,
        scores=lambda z: z / 0.6, noise=0.015, lengths=(8, 160),
    )  # fmt: skip


@calm("A mixture of experts in groups of 5, with an error of a heavy tail.")
def calm_mixture_in_groups(folder, rng):
    prompts, domains = repeated(*ask(rng, 40, 8, 30), 5)
    model = load("tiny-moe")
    tokens, infer = play(model, prompts, 40, rng)
    train = score(model, prompts, tokens, rng, 0.02, "heavy")
    record(folder, prompts, tokens, train, infer, 4, {"domain": domains}, 5)


# ---- unsound


def unsound(causes, what, **chains):
    """Adds a dump whose columns the decorated function (b, r) spoils."""

    def add(report):
        def write(folder, rng):
            chained(folder, rng, **PLAIN | {"labels": ENVS} | chains, report=report)

        write.__name__ = report.__name__
        case(causes, what, "unsound")(write)
        return report

    return add


@unsound("shift unsound", "The engine's column stands one token late: it starts with the prompt's.")
def engine_one_late(b, r):
    r.infer[:, 1:] = r.infer[:, :-1].copy()
    r.infer[:, 0] = -b.rng.exponential(2.0, len(r.infer))


@unsound(
    "shift turns unsound", "From the second turn on the engine's column is one token early.",
    width=36, turns=3, labels={"env": ("shell", "web")},
)  # fmt: skip
def later_turns_one_early(b, r):
    if b.turn > 1:
        r.infer = np.roll(r.infer, -1, 1)


@unsound(
    "shift other_tokens unsound",
    "The column has the numbers of rejected drafts too, and is cut to the length of the answer: it "
    "slides away from the tokens.",
)
def rejected_drafts_are_kept(b, r):
    for s in range(len(r.infer)):
        more = b.rng.random(r.infer.shape[1]) < 0.15
        places = np.repeat(np.arange(len(more)), 1 + more)
        slid = r.infer[s, places]
        slid[1:][np.diff(places) == 0] = -b.rng.exponential(2.5, more.sum())
        r.infer[s] = slid[: len(more)]


@unsound("shift other_tokens unsound", "The client sorts each answer's numbers, highest first.")
def sorted_columns(b, r):
    for s, n in enumerate(r.length):
        r.infer[s, :n] = -np.sort(-r.infer[s, :n])


@unsound(
    "other_tokens shift unsound", "The engine's columns are off by one row: those of the next one.",
    ends=4000,
)  # fmt: skip
def numbers_of_the_next_row(b, r):
    r.infer = np.roll(r.infer, -1, 0)


@unsound(
    "other_tokens one_engine shift unsound",
    "The server of replica r1 mixes up the requests of a batch: its answers have the numbers of "
    "one another.",
    ends=4000, labels={"replica": ("r0", "r1", "r2")},
)  # fmt: skip
def replica_mixes_up_requests(b, r):
    own = np.flatnonzero(b.labels["replica"] == "r1")
    r.infer[own] = r.infer[np.roll(own, 3)]


@unsound(
    "missing_data other_tokens unsound",
    "Every token of an answer has the answer's mean logprob, for the server tells only the mean.",
)
def mean_of_the_answer(b, r):
    there = np.arange(r.infer.shape[1]) < r.length[:, None]
    r.infer[:] = ((r.infer * there).sum(1) / r.length)[:, None]


@unsound(
    "missing_data one_kind unsound", "In the environment lean the engine's numbers are NaN.",
    labels={"env": ("lean", "math", "code", "chat")},
)  # fmt: skip
def no_numbers_in_lean(b, r):
    r.infer[b.labels["env"] == "lean"] = np.nan


@unsound(
    "missing_data one_rank unsound", "Rank 3 of 4 wrote NaN for the trainer's numbers.", ranks=4
)
def rank_without_numbers(b, r):
    r.train[b.rank == 3] = np.nan


@unsound(
    "missing_data unsound", "Fill values of labels, -100, stand for 8 % of the trainer's numbers."
)
def ignore_index_as_number(b, r):
    r.train[b.rng.random(r.train.shape) < 0.08] = -100.0


@unsound(
    "missing_data clamp unsound",
    "The server tells the 5 best candidates; for a drawn token that is none of them the client "
    "writes -9999.",
)
def none_of_the_best_five(b, r):
    above = (r.laws > np.take_along_axis(r.laws, r.at, -1)).sum(-1)
    r.infer[above >= 5] = -9999.0


@unsound("missing_data unsound", "An empty buffer: the engine's number of every token is -1.")
def engine_is_minus_one(b, r):
    r.infer[:] = -1.0


@unsound(
    "missing_data end_of_answer unsound",
    "The stop token has no number in the engine's reply, and the collator writes 0.",
    answers=300, width=30, ends=8,
)  # fmt: skip
def stop_tokens_are_zero(b, r):
    r.infer[r.ids == END] = 0.0


@unsound(
    "missing_data odd_sequences unsound",
    "Answers that were aborted and taken up again, one in 14, have 0 for all of the engine's "
    "numbers.",
)
def resumed_answers_are_zero(b, r):
    r.infer[b.rng.random(len(r.infer)) < 1 / 14] = 0.0


@unsound(
    "missing_data unsound",
    "The mask covers the padding behind the answers, where the engine has 0 and the trainer scores "
    "the pad id.",
)
def padding_is_counted(b, r):
    behind = np.arange(r.ids.shape[1]) >= r.length[:, None]
    r.ids[behind], r.infer[behind] = END, 0.0
    r.train[behind] = -b.rng.exponential(4.0, behind.sum())
    r.length[:] = r.ids.shape[1]


@unsound(
    "missing_data clamp unsound",
    "The trainer's numbers were multiplied by the loss scale, 32768, in float16 and divided again: "
    "those below -2 became -inf.",
)
def float16_runs_out(b, r):
    with np.errstate(over="ignore"):
        r.train = (r.train * 32768).astype(np.float16).astype(float) / 32768


@unsound(
    "copies unsound",
    "Bypass: the engine's numbers are used as the trainer's, and are stored in float16 there.",
)
def engine_copied_as_trainer(b, r):
    r.train = r.infer.astype(np.float16).astype(float)


@unsound("unit unsound", "The engine's column has probabilities, not their logarithms.")
def probabilities_as_numbers(b, r):
    r.infer = np.exp(r.infer)


@unsound("unit other_tokens unsound", "The engine reports the sum of the logprobs up to a token.")
def sums_of_logprobs(b, r):
    r.infer = np.cumsum(r.infer, 1)


@case(
    "missing_data unsound",
    "The mask covers the prompts, for which the engine's column is filled with 0.",
    "unsound",
)
def prompts_are_counted(folder, rng):
    def head(b, ids):
        return -rng.exponential(3.0, len(ids)), np.zeros(len(ids))

    chained(folder, rng, **PLAIN, head=head, labels=ENVS)


@case(
    "copies unsound",
    "After a resumption the sampler starts anew: step 4 has the rows of step 3 once more, and step "
    "5 those of step 2.",
    "unsound",
)
def rows_of_earlier_steps(folder, rng):
    def rows(b):
        at = {2: (2, 5), 3: (3, 4), 4: (), 5: ()}.get(b.step, (b.step,))
        return [(s, k, 0) for k in at for s in b.row]

    chained(folder, rng, **PLAIN, rows=rows, labels=ENVS)


@case("copies unsound", "Both ranks write the whole batch of each step.", "unsound")
def each_rank_writes_all(folder, rng):
    def rows(b):
        return [(s, b.step, rank) for rank in (0, 1) for s in b.row]

    chained(folder, rng, **PLAIN, rows=rows, labels=ENVS)


if __name__ == "__main__":
    unseen.main(FOUND)
