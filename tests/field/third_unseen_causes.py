"""A third set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and `more_unseen_causes`: a token is drawn
from the law that the engine really used, and both numbers come from logits. `causes` was fixed
before any run. Several names are right where there are two faults, or where the two columns, the
ids, the places, the steps and the labels cannot tell them apart.

    python -m tests.field.third_unseen_causes NAME FOLDER [SEED]
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np

from tests.field import unseen_causes as u
from tests.field.more_unseen_causes import chained, of, real, talk

FOUND: list[u.Case] = []


case = partial(u.case, into=FOUND)


def made(name, causes, what, make=u.drawn, into=FOUND, **world):
    """Adds a synthetic dump to the cases of a file."""

    def write(folder, rng):
        make(folder, rng, **world)

    write.__name__ = name
    u.case(causes, what, into=into)(write)


def at(b, *replicas):
    return u.by(np.isin(b.labels["replica"], replicas))


def trained_on(folder, rng, name, count, width, steps, sides, noise=0.03, lengths=(8, 30)):
    """A run: `sides` gives (engine, trainer) of a step, counted from 0, for the first model."""
    first, parts = u.load(name), []
    prompts, domains = u.ask(rng, count, *lengths)
    each = count // steps
    for k in range(steps):
        own = prompts[k * each : (k + 1) * each]
        engine, trainer = sides(first, k)
        tokens, infer = u.play(engine, own, width, rng)
        parts.append((tokens, u.score(trainer, own, tokens, rng, noise), infer))
    columns = [np.concatenate(x) for x in zip(*parts, strict=True)]
    u.record(folder, prompts, *columns, steps, {"domain": domains})


# ---- laws of a model


@case(
    "numerics",
    "The trainer's framework has a default dropout of 0.1 behind attention and MLP, which stays on "
    "while it scores; the engine serves the same weights without.",
)
def dropout_while_scoring(folder, rng):
    torch = u.torch_()
    torch.manual_seed(int(rng.integers(1 << 31)))

    def trained(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            for end in (layer.self_attn.o_proj, layer.mlp.down_proj):
                end.register_forward_hook(lambda _, __, x: torch.dropout(x, 0.1, True))
        return other

    real(folder, rng, "tiny-lm", 200, 48, 5, trained=trained, noise=0.02)


@case(
    "long_context positions",
    "The engine follows the config's dynamic scaling of rotary embeddings: from position 64 on, "
    "their base grows with the position. The trainer leaves the scaling out.",
)
def dynamic_scaling_in_the_engine(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)

        def forward(x, position_ids, *_, **__):
            at = position_ids[:, :, None].double()
            base = 1e4 * (8 * at / 64 - 7).clamp(min=1) ** (64 / 62)
            angles = at / base ** (torch.arange(0, 64, 2) / 64)
            both = torch.cat([angles, angles], -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

        other.model.rotary_emb.forward = forward
        return other

    real(folder, rng, "tiny-qwen3", 160, 120, 4, served=served, lengths=(8, 60), noise=0.025)


@case(
    "routing stale_weights",
    "Experts are balanced by a bias on the choice of experts, which the trainer updates at each "
    "step. It is a buffer, no parameter, so the sync leaves it out: the engine has none.",
)
def expert_bias_left_out(folder, rng):
    torch = u.torch_()
    bias, load_of = torch.zeros(3, 16), torch.zeros(3, 16)

    def sides(first, k):
        bias.add_(0.06 * torch.sign(load_of.mean(1, keepdim=True) - load_of))
        load_of.zero_()
        now = u.moved(first, 0.01 * k, 9)
        trainer = copy.deepcopy(now)
        for i, layer in enumerate(trainer.model.layers):

            def route(gate, args, got, i=i):
                scores = torch.softmax(got[0].float(), -1)
                chosen = (scores + bias[i]).topk(4, -1).indices
                load_of[i] += torch.bincount(chosen.flatten(), minlength=16)
                weights = scores.gather(1, chosen)
                return got[0], weights / weights.sum(-1, keepdim=True), chosen

            layer.mlp.gate.register_forward_hook(route)
        return now, trainer

    trained_on(folder, rng, "tiny-moe", 220, 30, 5, sides, noise=0.02)


@case(
    "turns retokenised",
    "A turn calls two tools at once. The client puts their results in the order in which they "
    "return, and the trainer's text has the order of the calls: they differ in 3 turns of 4.",
)
def results_in_another_order(folder, rng):
    def sent(past, tool):
        half = len(tool) // 2
        return past + (tool[half:] + tool[:half] if rng.random() < 0.75 else tool)

    talk(folder, rng, "tiny-lm", sent, count=140, width=20, steps=7)


@case(
    "blocks long_context template",
    "Chunked prefill: a prompt is read in pieces of 16 tokens, and a piece does not attend to the "
    "pieces before it. Prompts of up to 16 tokens are read at once.",
)
def prefill_in_pieces(folder, rng):
    prompts, domains = u.ask(rng, 240, 8, 64)
    model, torch = u.load("tiny-qwen3"), u.torch_()

    def prefill(attention_mask, position_ids, **rest):
        piece, place = position_ids // 16, torch.arange(position_ids.shape[1])
        sees = (piece[:, :, None] == piece[:, None, :]) & (place[:, None] >= place)
        sees = sees & (attention_mask[:, None, :] > 0) | (place[:, None] == place)
        mask = torch.where(sees[:, None], 0.0, -1e9)
        return model(attention_mask=mask, position_ids=position_ids, **rest)

    tokens, infer = u.play(model, prompts, 40, rng, prefill=prefill)
    train = u.score(model, prompts, tokens, rng, 0.025)
    u.record(folder, prompts, tokens, train, infer, 5, {"domain": domains})


@case(
    "raw_logprobs",
    "Speculative decoding with three drafted tokens. Rejection sampling is right, but for an "
    "accepted token the engine reports the number of the draft model, which is some updates old.",
)
def numbers_of_the_draft(folder, rng):
    prompts, domains = u.ask(rng, 220, 8, 30)
    model = u.load("tiny-lm")
    draft, kept = u.moved(model, 0.22, 21), {"store": None}
    row, run = np.arange(220), np.zeros(220, int)

    def both(past_key_values, **inputs):
        got = draft(past_key_values=kept["store"], **inputs)
        kept["store"], kept["law"] = got.past_key_values, got.logits[:, -1].double().numpy()
        return model(past_key_values=past_key_values, **inputs)

    def law(z, *_):
        lp, lq = u.log_softmax(z), u.log_softmax(kept["law"])
        guess = (lq + rng.gumbel(size=z.shape)).argmax(1)
        drafted = run < 3
        good = drafted & (np.log(rng.random(220)) < lp[row, guess] - lq[row, guess])
        rest = np.maximum(np.exp(lp) - np.exp(lq) * drafted[:, None], 0) + 1e-300
        token = np.where(good, guess, (np.log(rest) + rng.gumbel(size=z.shape)).argmax(1))
        run[:] = np.where(good, run + 1, 0)
        only = np.full(z.shape, -np.inf)
        only[row, token] = 0.0
        return only, np.where(good[:, None], lq, lp)

    tokens, infer = u.play(both, prompts, 48, rng, law)
    train = u.score(model, prompts, tokens, rng, 0.025)
    u.record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


@case(
    "head stale_weights",
    "Embedding and output head are tied, and the engine keeps two copies: the sync writes the "
    "embedding and every layer, and the head stays that of the start.",
)
def tied_head_not_written(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.035 * k, 13)
        served, head = copy.deepcopy(now), first.lm_head.weight
        served.lm_head = u.torch_().nn.Linear(head.shape[1], head.shape[0], bias=False)
        served.lm_head.weight.copy_(head)
        return served, now

    trained_on(folder, rng, "tiny-qwen3", 320, 44, 8, sides)


@case(
    "stale_cache batch",
    "The first answer of each group of 4 reads its prompt; the others find the prefix in a cache "
    "on the host, and start before its upper layers are there: the slots hold another prompt's.",
)
def prefix_not_yet_loaded(folder, rng):
    prompts, domains = u.repeated(*u.ask(rng, 60, 28, 28), 4)
    model, hit = u.load("tiny-lm"), np.flatnonzero(np.arange(240) % 4)

    def prefill(**inputs):
        got = model(**inputs)
        for layer in got.past_key_values.layers[2:]:  # three hits of a prompt lie together
            layer.keys, layer.values = layer.keys.roll(3, 0), layer.values.roll(3, 0)
        return got

    tokens, infer = u.play(model, prompts, 36, rng)
    tokens[hit], infer[hit] = u.play(model, [prompts[i] for i in hit], 36, rng, prefill=prefill)
    train = u.score(model, prompts, tokens, rng, 0.03)
    u.record(folder, prompts, tokens, train, infer, 5, {"domain": domains}, 4)


@case(
    "precision_drift",
    "At each sync the engine rounds a matrix to 5 bits with one scale, that of its largest weight. "
    "A few weights grow through the 10 steps, so the grid becomes coarser for all others.",
)
def outliers_widen_the_grid(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.01 * k, 17)
        for name, p in now.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                flat = p.view(-1)
                flat[flat.abs().topk(4).indices] *= 1 + 0.2 * k
        served = copy.deepcopy(now)
        for name, p in served.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                grid = p.abs().max() / 15
                p.copy_((p / grid).round() * grid)
        return served, now

    trained_on(folder, rng, "tiny-lm", 300, 32, 10, sides, noise=0.02)


@case(
    "end_of_answer vocabulary",
    "The engine stops at the end token of the pre-training; the trainer renders answers by the "
    "chat template, which closes them by another token, and scores that one.",
)
def closed_by_another_token(folder, rng):
    prompts, domains = u.ask(rng, 480, 8, 24)
    model, out, close = u.load("tiny-qwen3"), u.Record(), 1
    tokens, infer = u.play(model, prompts, 60, rng)
    length, closed = u.first_end(tokens), np.where(tokens == 0, close, tokens)
    train = u.score(model, prompts, closed, rng, 0.03)
    for s, n in enumerate(length):
        answer = (closed[s, :n], train[s, :n], infer[s, :n])
        label = {"domain": domains[s]}
        out.add(1 + s // 120, f"g{s // 2}", [(prompts[s], None, None), answer], label)
    out.write(folder)


# ---- synthetic laws: weights

made(
    "adapter_at_half_scale", "stale_weights",
    "The adapter's alpha is read as its rank by the engine, which so adds half of the adapter; the "
    "trainer adds all of it. The adapter is zero before the first update.",
    vocab=32_000, steps=14, answers=40, width=40, turns=2, move=0.09,
    engine=lambda b, z: z - 0.5 * 0.09 * (b.step - 1) * b.moves, labels={"env": ("math", "code")},
)  # fmt: skip
made(
    "leaves_of_the_relay_tree", "stale_replica one_engine",
    "Weights reach the replicas through a tree of relays, and the two at its leaves are always two "
    "syncs behind.",
    vocab=64_000, steps=12, answers=48, width=70, move=0.2,
    engine=lambda b, z: z - 0.2 * min(2, b.step - 1) * at(b, "leaf-0", "leaf-1") * b.moves,
    labels={"replica": ("root", "mid-0", "mid-1", "leaf-0", "leaf-1"), "env": ("web", "sql")},
)  # fmt: skip
made(
    "rank_skips_its_updates", "one_rank",
    "Rank 3 of the trainer's 6 finds an overflow in its gradients from step 4 of 16 on and skips "
    "the updates that the others make; the engine has the weights of rank 0.",
    vocab=100_000, steps=16, answers=36, width=80, ranks=6, group=2, move=0.1,
    trainer=lambda b, z: z - 0.1 * max(b.step - 4, 0) * u.by(b.rank == 3) * b.moves,
    labels={"replica": ("r0", "r1", "r2"), "env": ("math", "code")},
)  # fmt: skip


def replayed(b, z):
    again = b.rng.random(b.group.max() + 1)[b.group] < 1 / 7
    return z - 0.18 * min(7, b.step - 1) * u.by(again) * b.moves


made(
    "groups_from_a_replay_buffer", "odd_sequences old_weights",
    "One prompt group in 7 comes from a replay buffer, with the answers and numbers of up to 7 "
    "updates ago; no field says so.",
    vocab=48_000, steps=10, answers=60, width=60, engine=replayed, move=0.18,
    labels={"env": ("math", "code", "chat"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "damaged_shard_of_a_shared_machine", "one_machine one_rank",
    "Engine and trainer share their machines, and each rank scores the answers of its own engine. "
    "A shard of the weights was damaged on the way into the engine of rank 1 of 4; only the rank "
    "is recorded.",
    vocab=16_000, steps=5, answers=96, width=60, ranks=4, kind="heavy",
    engine=lambda b, z: z + 0.55 * u.by(b.rank == 1) * b.other, labels={"env": ("math", "logic")},
)  # fmt: skip
made(
    "rows_of_added_ids", "vocabulary",
    "Eight ids were added for tool calls, with rows of embedding and head that are trained in "
    "full. The sync sends the adapter alone, so the engine has the first rows of these ids.",
    chained, vocab=40_000, steps=6, answers=90, width=60,
    engine=lambda b, z: z + 1.3 * ((b.ids >= 5) & (b.ids <= 12)) * b.other,
    labels={"tool": ("shell", "search", "none")},
)  # fmt: skip


# ---- synthetic laws: sampling

made(
    "rising_temperature", "temperature",
    "The sampler's temperature rises from 1 to 1.45 through 20 steps to keep the entropy up, and "
    "the engine reports it; the trainer reads the temperature once.",
    vocab=150_000, steps=20, answers=28, width=80,
    engine=lambda b, z: z / (1 + 0.45 * (b.step - 1) / 19), labels={"env": ("math", "proof")},
)  # fmt: skip
made(
    "defaults_after_a_resume", "top_p change",
    "A run is resumed at step 8 of 14 with a newer client, whose requests take top_k 12 and top_p "
    "0.8 from the model's defaults; the engine reports the law that is left.",
    vocab=128_000, steps=14, answers=40, width=80,
    engine=lambda b, z: u.cut(z, top_p=0.8, top_k=12) if b.step >= 8 else z,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def under_a_grammar(b, z):
    barred = (b.ids % 4 == b.t % 4) & (b.ids > 0) & of(b.labels["env"] == "tools")
    return np.where(barred, -np.inf, z)


made(
    "grammar_of_tool_calls", "one_kind top_p",
    "Requests of the environment tools are decoded under a grammar: at each place it forbids a "
    "quarter of the ids. The engine reports the law that is left; the trainer knows no grammar.",
    chained, vocab=50_000, steps=6, answers=80, width=30, turns=2, engine=under_a_grammar,
    labels={"env": ("tools", "chat", "math", "code"), "level": ("1", "2")},
)  # fmt: skip
made(
    "temperature_of_the_evaluation", "steps temperature",
    "After each evaluation, at every fifth step, its temperature of 0.6 stays in the engine for "
    "the next step of training: steps 6, 11 and 16 of 18. The engine reports it.",
    vocab=24_000, steps=18, answers=32, width=70, labels={"replica": ("r0", "r1", "r2")},
    engine=lambda b, z: z / (0.6 if b.step in (6, 11, 16) else 1.0),
)  # fmt: skip
made(
    "even_moves_to_explore", "softcap",
    "To explore, one move in 8 of a board game is drawn evenly from the legal ones. The engine "
    "reports the mixture, and the trainer scores the policy alone.",
    vocab=64, steps=4, answers=150, width=32, group=6,
    engine=lambda _, z: np.log(7 / 8 * np.exp(u.log_softmax(z)) + 1 / 8 / z.shape[-1]),
    labels={"opponent": ("easy", "hard", "self")},
)  # fmt: skip


def lowest_listed(b, r):
    r.infer = np.maximum(r.infer, -np.sort(-r.laws, -1)[..., 3])


made(
    "lowest_of_the_best_four", "other_tokens missing_data clamp softcap",
    "The server tells the 4 best candidates of each place. For a drawn token that is none of them "
    "the client takes the lowest number of the list.",
    chained, vocab=100_000, steps=5, answers=100, width=60, report=lowest_listed, sharp=0.6,
    labels={"form": ("story", "essay")},
)  # fmt: skip


# ---- synthetic laws: arithmetic


def small_batch(b, z):
    return z + 0.55 * u.by(b.row >= len(b.row) * 5 // 6) * b.rng.normal(size=z.shape)


made(
    "small_batch_at_the_end_of_a_step", "batch",
    "The last requests of a step, one in 6, run in a batch that has become small, for which the "
    "engine takes another kernel with a large random error.",
    vocab=32_000, steps=8, answers=72, width=90, engine=small_batch,
    labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip


def eight_bits(b, r):
    r.infer = u.torch_().tensor(r.infer).to(u.torch_().float8_e5m2).double().numpy()


made(
    "eight_bit_buffer_and_a_hot_server", "rounding one_engine temperature",
    "Two faults: the buffer between engine and trainer keeps the engine's logprobs in 8 bits with "
    "2 of mantissa; and one server of 3 was started with temperature 1.3, which it reports.",
    vocab=90_000, steps=6, answers=84, width=70, report=eight_bits,
    engine=lambda b, z: z / np.where(at(b, "s2"), 1.3, 1.0),
    labels={"replica": ("s0", "s1", "s2"), "env": ("math", "code")},
)  # fmt: skip
made(
    "newer_build_and_lost_images", "change one_kind",
    "Two faults: from step 10 of 18 on the engine is a newer build with a larger random error; and "
    "the trainer drops the images of the environment charts, whose answers it scores without them.",
    chained, vocab=152_000, steps=18, answers=32, width=40, turns=2,
    engine=lambda b, z: z + (0.4 if b.step >= 10 else 0.0) * b.rng.normal(size=z.shape),
    trainer=lambda b, z: z + 0.6 * u.by(b.labels["env"] == "charts") * b.other,
    labels={"env": ("charts", "text", "web"), "replica": ("r0", "r1")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
