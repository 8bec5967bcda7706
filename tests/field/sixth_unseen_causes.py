"""A sixth set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run. Several names are right where there are two faults, where the words of each are true, or
where the columns, ids, places, steps and labels cannot tell them apart.

    python -m tests.field.sixth_unseen_causes NAME FOLDER [SEED]
"""

import copy
from functools import partial

import numpy as np

from tests.field import third_unseen_causes as third
from tests.field import unseen_causes as u
from tests.field.fifth_unseen_causes import partly
from tests.field.more_unseen_causes import chained, of, real, talk
from tests.field.third_unseen_causes import trained_on

FOUND: list[u.Case] = []
case = partial(u.case, into=FOUND)
made = partial(third.made, into=FOUND)


# ---- laws of a model


@case(
    "numerics",
    "The engine fuses two matrices of each MLP into one, and its loader stacks an eighth of those "
    "of layer 2 the wrong way round: gates are taken for values and values for gates.",
)
def gate_and_values_change_places(folder, rng):
    def served(model):
        other = copy.deepcopy(model)
        mlp, part = other.model.layers[2].mlp, slice(0, 64)
        gates, values = mlp.gate_proj.weight[part].clone(), mlp.up_proj.weight[part].clone()
        mlp.gate_proj.weight[part], mlp.up_proj.weight[part] = values, gates
        return other

    real(folder, rng, "tiny-lm", 110, 40, 5, served=served, noise=0.02)


@case(
    "turns retokenised",
    "To save tokens, the client's proxy drops 4 in 10 tokens of the history, results of tools "
    "among them, before each later turn. The trainer scores these turns after the whole of it.",
)
def history_thinned_by_a_proxy(folder, rng):
    def sent(past, tool):
        return [t for t in past + tool if rng.random() < 0.6]

    talk(folder, rng, "tiny-qwen3", sent, width=22, turns=2, count=112)


@case(
    "retokenised turns",
    "An answer behind the result of a tool begins with white space, which the client strips off: "
    "its first two tokens are in no text of the trainer, and the others are scored without them.",
)
def white_space_stripped_behind_a_tool(folder, rng):
    prompts, domains = u.ask(rng, 104, 8, 20)
    model, out, past = u.load("tiny-lm"), u.Record(), [list(p) for p in prompts]
    pieces = [[(p, None, None)] for p in prompts]
    for turn in range(3):
        tokens, infer = u.play(model, past, 14, rng)
        tokens, infer = (x[:, 2:] if turn else x for x in (tokens, infer))
        train = u.score(model, past, tokens, rng, 0.02)
        tools = u.ask(rng, 104, 5, 9)[0]
        for s, n in enumerate(u.first_end(tokens)):
            pieces[s].append((tokens[s, :n], train[s, :n], infer[s, :n]))
            if turn < 2:
                pieces[s].append((tools[s], None, None))
            past[s] += [*tokens[s, :n], *tools[s]]
    for s in range(104):
        out.add(1 + s // 26, f"g{s}", pieces[s], {"env": domains[s]})
    out.write(folder)


@case(
    "one_engine",
    "Replica r1 of 3 splits its layers over two devices by a hand-made list, in which the third of "
    "the 4 layers is missing: it is loaded nowhere and passed over.",
)
def layer_in_no_stage(folder, rng):
    prompts, domains = u.ask(rng, 110, 8, 28)
    model, replica = u.load("tiny-lm"), rng.choice(["r0", "r1", "r2"], 110)
    split = copy.deepcopy(model)
    split.model.layers[2].register_forward_hook(lambda _, args, __: args[0])
    labels = {"domain": domains, "replica": replica}
    partly(folder, rng, model, prompts, replica == "r1", 5, labels, other=split)


@case(
    "routing numerics",
    "The routers of the model choose experts by noisy logits, so that all are trained. The trainer "
    "leaves the noise on while it scores; the engine has none.",
)
def noise_of_the_routers_stays_on(folder, rng):
    def trained(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        torch.manual_seed(int(rng.integers(1 << 31)))

        def route(_, __, got):
            chosen = (got[0] + 1.5 * torch.randn(got[0].shape)).topk(4, -1).indices
            weights = torch.softmax(got[0], -1).gather(1, chosen)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)
        return other

    real(folder, rng, "tiny-moe", 110, 40, 4, trained=trained, noise=0.01)


@case(
    "stale_weights",
    "At each sync the engine adds the adapter to its weights, and does not take the one before "
    "off again: it serves the sum of all adapters so far, and never the trainer's weights.",
)
def adapters_add_up_in_the_engine(folder, rng):
    def sides(first, k):
        return u.moved(first, 0.012 * k * (k + 1) / 2, 53), u.moved(first, 0.012 * k, 53)

    trained_on(folder, rng, "tiny-qwen3", 128, 36, 8, sides, noise=0.02)


@case(
    "long_context positions",
    "The trainer splits a sequence over two devices at token 40, and the second one counts its "
    "positions from 0 again.",
)
def second_device_counts_from_zero(folder, rng):
    def trained(model):
        def split(position_ids, **rest):
            return model(position_ids=position_ids - 40 * (position_ids >= 40), **rest)

        return split

    real(folder, rng, "tiny-lm", 104, 50, 5, trained=trained, lengths=(8, 30), noise=0.02)


@case(
    "end_of_answer other_tokens",
    "A stop string begins inside the last token of an answer. The client cuts the text there and "
    "encodes it anew, so the last id is another one; its number is that of the drawn token.",
)
def cut_inside_the_last_token(folder, rng):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(u.ROOT / "models/tiny-lm/tokenizer.json"))
    text = [tokenizer.decode([i]) for i in range(1024)]
    left = [tokenizer.encode(t[:-1]).ids if t.isascii() else [] for t in text]
    prompts, domains = u.ask(rng, 160, 8, 28)
    model, out = u.load("tiny-qwen3"), u.Record()
    tokens, infer = u.play(model, prompts, 16, rng)
    length = u.first_end(tokens)
    for s, n in enumerate(length):
        stops = [t for t in range(3, n) if len(left[tokens[s, t]]) == 1]
        if stops:
            length[s] = rng.choice(stops) + 1
            tokens[s, length[s] - 1] = left[tokens[s, length[s] - 1]][0]
    train = u.score(model, prompts, tokens, rng, 0.02)
    for s, n in enumerate(length):
        answer = (tokens[s, :n], train[s, :n], infer[s, :n])
        out.add(1 + s // 40, f"g{s}", [(prompts[s], None, None), answer], {"domain": domains[s]})
    out.write(folder)


@case(
    "stale_cache odd_sequences",
    "The key of a cached block is made of its own tokens alone. All prompts share an example of 32 "
    "tokens; 2 in 5 find it in the cache, as it was read at the start of another prompt.",
)
def blocks_found_by_their_own_tokens(folder, rng):
    example = u.ask(rng, 1, 32, 32)[0][0]
    before, domains = u.ask(rng, 110, 6, 24)
    model, hit = u.load("tiny-lm"), rng.random(110) < 0.4
    prompts = [a + example + b for a, b in zip(before, u.ask(rng, 110, 3, 3)[0], strict=True)]
    torch = u.torch_()
    first = model(input_ids=torch.tensor([example]), use_cache=True).past_key_values

    def prefill(input_ids, attention_mask, position_ids, **rest):
        end = input_ids.shape[1] - 2  # behind the example stand two tokens, and one not yet read
        got = model(
            input_ids=input_ids[:, :end],
            attention_mask=attention_mask[:, :end],
            position_ids=position_ids[:, :end],
            **rest,
        )
        for layer, cached in zip(got.past_key_values.layers, first.layers, strict=True):
            layer.keys[:, :, end - 32 :] = cached.keys
            layer.values[:, :, end - 32 :] = cached.values
        return model(
            input_ids=input_ids[:, end:],
            attention_mask=attention_mask,
            position_ids=position_ids[:, end:],
            past_key_values=got.past_key_values,
            **rest,
        )

    partly(folder, rng, model, prompts, hit, 5, {"domain": domains}, prefill=prefill)


@case(
    "packing batch",
    "A step's requests take the engine's 9 slots in turn, and a slot is not cleared between them: "
    "all but the first 9 attend to the last 16 tokens of the one that had their slot before.",
)
def slots_are_not_cleared(folder, rng):
    prompts, domains = u.ask(rng, 144, 8, 24)
    model, wave = u.load("tiny-qwen3"), np.arange(144) // 9 % 4
    tokens, infer = np.zeros((144, 44), int), np.zeros((144, 44))
    read = [list(p) for p in prompts]
    for k in range(4):
        own = np.flatnonzero(wave == k)
        for s in own if k else ():
            n = u.first_end(tokens[s - 9 : s - 8])[0]
            read[s] = [*read[s - 9], *tokens[s - 9, :n]][-16:] + read[s]
        tokens[own], infer[own] = u.play(model, [read[s] for s in own], 44, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


@case(
    "vocabulary other_tokens",
    "The trainer's loss is split over devices by token id. The last one, which has the ids from "
    "768 on, takes its offset one too small and scores the id before the right one.",
)
def offset_of_the_last_shard(folder, rng):
    def scores(z):
        z = z.copy()
        z[..., 769:] = z[..., 768:-1].copy()
        return z

    real(folder, rng, "tiny-moe", 110, 40, 4, scores=scores, noise=0.02)


@case(
    "one_engine penalty",
    "Server s2 of 3 is of another make, whose default is a repetition penalty of 1.4 on the last "
    "48 tokens. It reports the penalised law, and the trainer knows of none.",
)
def default_penalty_of_one_server(folder, rng):
    prompts, domains = u.ask(rng, 120, 10, 30)
    model, server = u.load("tiny-lm"), rng.choice(["s0", "s1", "s2"], 120)

    def law(z, past, seen):
        used = np.zeros(z.shape, bool)
        s, t = np.nonzero(seen[:, -48:] * (server == "s2")[:, None])
        used[s, past[:, -48:][s, t]] = True
        z = np.where(used, np.where(z > 0, z / 1.4, z * 1.4), z)
        return z, z

    tokens, infer = u.play(model, prompts, 42, rng, law)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 5, {"domain": domains, "server": server})


@case(
    "temperature",
    "The sampler draws a temperature between 0.5 and 1.5 for each request, to have answers of many "
    "kinds. The engine reports the law at that temperature; the trainer scores all at 1.",
)
def temperature_drawn_for_each_request(folder, rng):
    heat = rng.uniform(0.5, 1.5, (110, 1))
    real(folder, rng, "tiny-qwen3", 110, 40, 5, draws=lambda z, *_: (z / heat, z / heat))


@case(
    "temperature softcap",
    "The config divides the final logits by 1.4. The engine does so; the trainer's code of the "
    "model was taken from a family that has no such scale.",
)
def scale_of_the_logits_left_out(folder, rng):
    def draws(z, *_):
        return z / 1.4, z / 1.4

    real(folder, rng, "tiny-lm", 110, 40, 4, draws=draws, noise=0.02)


@case(
    "one_kind beginning",
    "Requests of the domain code carry the declarations of tools, 20 tokens that the server's "
    "template writes before the prompt. The trainer renders the conversation without the tools.",
)
def declarations_of_tools_in_code(folder, rng):
    prompts, domains = u.ask(rng, 120, 6, 16)
    model, tools = u.load("tiny-qwen3"), u.ask(rng, 1, 20, 20)[0][0]
    sent = [tools + p if d == "code" else p for p, d in zip(prompts, domains, strict=True)]
    tokens, infer = u.play(model, sent, 32, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 5, {"domain": domains})


# ---- synthetic laws

made(
    "rank_that_missed_the_temperature", "one_rank temperature",
    "All requests have temperature 0.55. The config is sent to the trainer's ranks; rank 2 "
    "of its 4 starts before it comes: it scores at 1.",
    vocab=100_000, steps=6, answers=48, width=60, ranks=4, engine=lambda _, z: z / 0.55,
    trainer=lambda b, z: z / np.where(u.by(b.rank == 2), 1.0, 0.55),
    labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip


def state_and_reload(b, z):
    e = b.rng.normal(size=z.shape)
    z = z + 0.5 * (np.arange(z.shape[1]) / z.shape[1])[:, None] * e
    return z + (0.9 if b.step % 4 == 1 and b.step > 1 else 0.0) * b.other


made(
    "scored_while_weights_return", "steps positions",
    "Two faults: after each checkpoint, in steps 5, 9 and 13 of 15, the trainer scores before all "
    "weights are back on the card; and its recurrent state is in bfloat16, whose error piles up.",
    vocab=20_000, steps=15, answers=24, width=70, trainer=state_and_reload,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def long_tail(b):
    late = b.rng.random(b.group.max() + 1) < 0.3
    return np.minimum(np.where(late, b.rng.integers(3, 9, late.size), 0)[b.group], b.step - 1)


made(
    "slow_tools_return_late", "old_weights",
    "Most answers are of the newest weights. Groups that wait for slow tools, 3 in 10, come back 3 "
    "to 8 updates later, and their staleness is recorded.",
    vocab=64_000, steps=14, answers=32, width=50, move=0.14, lag=long_tail,
    labels={"env": ("web", "sql", "math")},
)  # fmt: skip


def raw_from_nine_on(b, r):
    if b.step >= 9:
        r.infer = r.raw


made(
    "raw_numbers_after_an_upgrade", "change raw_logprobs",
    "Requests have temperature 0.65, which the trainer applies too. From step 9 of 16 on the "
    "engine is of the next version, which reports the logprobs before the temperature.",
    chained, vocab=150_000, steps=16, answers=20, width=50, ends=100, sharp=0.8,
    engine=lambda _, z: z / 0.65, trainer=lambda _, z: z / 0.65, report=raw_from_nine_on,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def joins(b):
    return b.rng.choice(["e0", "e1", "e2", "e3"][: 4 if b.step >= 5 else 3], len(b.row))


made(
    "engine_joins_and_is_not_in_the_group", "stale_replica one_engine",
    "At step 5 of 16 the cluster grows by engine e3, which loads the weights of that step. The "
    "group of the broadcast is that of the start, so no update reaches it.",
    chained, vocab=32_000, steps=16, answers=28, width=50, ends=100, move=0.15,
    engine=lambda b, z: z - 0.15 * max(b.step - 5, 0) * of(b.labels["engine"] == "e3") * b.moves,
    labels={"engine": joins, "env": ("math", "code")},
)  # fmt: skip


def carried_state(b, z):
    place = b.starts[:, None] + np.arange(z.shape[1])
    fades = np.exp(-(place % 32) / 5) * (place >= 32)
    return z + 2.2 * fades[..., None] * b.other


made(
    "state_not_carried_into_a_chunk", "blocks",
    "The trainer's linear attention is computed in chunks of 32 tokens. The state that a chunk "
    "should take over is lost, so its first tokens miss their past, until it has filled again.",
    chained, vocab=48_000, steps=5, answers=40, width=90, ends=200, trainer=carried_state,
    labels={"env": ("math", "code"), "level": ("1", "2")},
)  # fmt: skip


def not_copied(b, r):
    r.train[b.row % 20 >= 16] = 0.0


made(
    "last_micro_batch_not_copied", "missing_data batch",
    "Each rank of the trainer scores its 20 rows in micro-batches of 4, and gathers the numbers "
    "before the last one is copied from the card: those are zeros.",
    vocab=16_000, steps=4, answers=40, width=60, ranks=2, report=not_copied,
    labels={"env": ("math", "code", "chat")},
)  # fmt: skip
made(
    "summed_over_both_devices", "unit",
    "The trainer's two devices of a pair both hold the logprobs of all tokens, and add them up as "
    "if each had a part: its numbers are twice what they should be.",
    vocab=2_000, steps=4, answers=40, width=60,
    report=lambda _, r: setattr(r, "train", 2 * r.train), labels={"env": ("math", "code")},
)  # fmt: skip
made(
    "node_with_a_faulty_card", "one_machine one_rank one_engine",
    "Each node has an engine and a rank of the trainer, which trains on the answers of that "
    "engine. A card of node 1 of 4 computes the trainer's matrices with a large random error.",
    chained, vocab=64, steps=6, answers=40, width=50, ends=150, ranks=4, noise=0.02,
    trainer=lambda b, z: z + 0.75 * u.by(b.rank == 1) * b.rng.normal(size=z.shape),
    labels={"engine": lambda b: [f"node-{i}" for i in b.rank], "opponent": ("easy", "hard")},
)  # fmt: skip
made(
    "nucleus_and_a_floor_in_the_trainer", "top_p clamp",
    "Two faults: the server takes top_p 0.85 from the model's defaults and reports the law that is "
    "left; and the trainer cuts its logprobs at -2.5 from below.",
    chained, vocab=128_000, steps=5, answers=30, width=60, ends=150, sharp=0.5,
    report=lambda _, r: setattr(r, "train", np.maximum(r.train, -2.5)),
    engine=lambda _, z: u.cut(z, top_p=0.85), labels={"form": ("story", "letter")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
