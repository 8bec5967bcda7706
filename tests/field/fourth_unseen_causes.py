"""A fourth set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its two successors: a token is drawn
from the law that the engine really used, and both numbers come from logits. `causes` was fixed
before any run. Several names are right where there are two faults, where the words of each are
true, or where the columns, ids, places, steps and labels cannot tell them apart.

    python -m tests.field.fourth_unseen_causes NAME FOLDER [SEED]
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np

from tests.field import third_unseen_causes as third
from tests.field import unseen_causes as u
from tests.field.more_unseen_causes import chained, of, real, talk
from tests.field.third_unseen_causes import trained_on

FOUND: list[u.Case] = []
case = partial(u.case, into=FOUND)
made = partial(third.made, into=FOUND)


# ---- laws of a model


@case(
    "numerics",
    "The conversion of the checkpoint loses the base of the rotary embedding: the engine takes its "
    "own default of 50,000, the trainer has 10,000.",
)
def base_of_the_rotary_embedding_lost(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        other.model.rotary_emb.inv_freq = 5e4 ** -(torch.arange(0, 64, 2) / 64)
        return other

    real(folder, rng, "tiny-lm", 130, 60, 4, served=served, lengths=(8, 32), noise=0.02)


@case(
    "long_context other_tokens template",
    "The trainer cuts prompts on the left to 24 tokens, its own limit; the engine has read all of "
    "them. Prompts have 8 to 64 tokens, and those that were cut are recorded as the trainer's.",
)
def prompts_cut_on_the_left(folder, rng):
    prompts, domains = u.ask(rng, 240, 8, 64)
    model, cut = u.load("tiny-lm"), [p[-24:] for p in prompts]
    tokens, infer = u.play(model, prompts, 40, rng)
    train = u.score(model, cut, tokens, rng, 0.025)
    u.record(folder, cut, tokens, train, infer, 6, {"domain": domains})


@case(
    "one_kind positions",
    "Images take fewer positions than tokens, and the engine forgets the difference when it "
    "decodes: in requests with an image the answer stands 40 places too far behind its prompt.",
)
def decoding_forgets_the_offset_of_images(folder, rng):
    prompts, domains = u.ask(rng, 280, 20, 44)
    model, image = u.load("tiny-qwen3"), rng.random(280) < 0.45

    def engine(position_ids, **rest):
        if position_ids.shape[1] == 1:
            position_ids = position_ids + 40 * u.torch_().tensor(image)[:, None]
        return model(position_ids=position_ids, **rest)

    tokens, infer = u.play(engine, prompts, 40, rng)
    train = u.score(model, prompts, tokens, rng, 0.025)
    shown = [[2] * 16 + p[16:] if i else p for p, i in zip(prompts, image, strict=True)]
    labels = {"modality": np.where(image, "image", "text"), "domain": domains}
    u.record(folder, shown, tokens, train, infer, 5, labels)


@case(
    "routing numerics",
    "The engine quantises the routers' weights along with the experts', to 2 bits with a scale for "
    "each expert; where two experts are close this often chooses the other one.",
)
def router_in_two_bits(folder, rng):
    def served(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            grid = layer.mlp.gate.weight.abs().amax(1, keepdim=True)
            layer.mlp.gate.weight.copy_((layer.mlp.gate.weight / grid).round() * grid)
        return other

    real(folder, rng, "tiny-moe", 260, 44, 4, served=served, noise=0.01)


@case(
    "replay routing",
    "The engine's routed experts are stored without padding, and the trainer replays them in "
    "batches padded on the left: a token passes the experts of one that is as many places later as "
    "its row has pads.",
)
def routes_in_another_padding(folder, rng):
    def trained(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        routes, late = [], {"place": None}

        def route(_, __, got):
            if late["place"] is None:
                routes.append(got[2])
                return got
            chosen = routes.pop(0).view(*late["place"].shape, -1)
            chosen = chosen.gather(1, late["place"][..., None].expand_as(chosen)).flatten(0, 1)
            weights = torch.softmax(got[0], -1).gather(1, chosen)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)

        def both(position_ids, **rest):
            length = position_ids.shape[1]
            pads = length - 1 - position_ids[:, -1:]
            late["place"] = None
            other(position_ids=position_ids, **rest)
            late["place"] = (torch.arange(length) + pads).clamp(max=length - 1)
            return other(position_ids=position_ids, **rest)

        return both

    real(folder, rng, "tiny-moe", 220, 40, 5, trained=trained, lengths=(14, 20))


@case(
    "padding template",
    "The trainer pads prompts on the right to 40 tokens and puts the answers behind the pads, "
    "which its attention reads.",
)
def pads_between_prompt_and_answer(folder, rng):
    prompts, domains = u.ask(rng, 220, 6, 40)
    model = u.load("tiny-qwen3")
    tokens, infer = u.play(model, prompts, 40, rng)
    padded = [p + [0] * (40 - len(p)) for p in prompts]
    train = u.score(model, padded, tokens, rng, 0.025)
    u.record(folder, prompts, tokens, train, infer, 4, {"domain": domains})


@case(
    "blocks",
    "The trainer's fused head and loss works through a sequence in chunks of 16 tokens. A wrong "
    "stride makes it read the first hidden state of a chunk from the chunk before.",
)
def edge_of_the_fused_loss(folder, rng):
    def trained(model):
        def fused(position_ids, **rest):
            got = model(position_ids=position_ids, **rest)
            first = position_ids[:, -got.logits.shape[1] :] % 16 == 0
            got.logits = got.logits.where(~first[..., None], got.logits.roll(1, 1))
            return got

        return fused

    real(folder, rng, "tiny-lm", 260, 52, 5, trained=trained, noise=0.025)


@case(
    "positions numerics",
    "Speculative decoding: one draft in 16 is rejected, and the engine does not take its place "
    "back, so positions run further and further ahead.",
)
def rejected_drafts_keep_their_places(folder, rng):
    def served(model):
        torch, by = u.torch_(), np.zeros((140, 1), int)

        def ahead(position_ids, **rest):
            if position_ids.shape[1] == 1:
                by[:] += rng.random(by.shape) < 1 / 16
                position_ids = position_ids + torch.tensor(by)
            return model(position_ids=position_ids, **rest)

        return ahead

    real(folder, rng, "tiny-qwen3", 140, 110, 4, served=served, lengths=(8, 24), noise=0.02)


@case(
    "stale_cache odd_sequences other_tokens",
    "The prefix cache takes the placeholder ids of an image for its key, and they are the same for "
    "all images: one answer in 4 is drawn behind the cached image of another request.",
)
def images_of_one_key(folder, rng):
    prompts, domains = u.ask(rng, 320, 24, 30)
    model, hit = u.load("tiny-lm"), rng.choice(320, 80, replace=False)
    tokens, infer = u.play(model, prompts, 36, rng)
    wrong = [prompts[i - 1][:18] + prompts[i][18:] for i in hit]
    tokens[hit], infer[hit] = u.play(model, wrong, 36, rng)
    train = u.score(model, prompts, tokens, rng, 0.025)
    shown = [[3] * 18 + p[18:] for p in prompts]
    replica = [f"r{i}" for i in rng.integers(3, size=320)]
    u.record(folder, shown, tokens, train, infer, 8, {"domain": domains, "replica": replica})


@case(
    "turns retokenised",
    "The engine's client cuts the result of a tool to 3 tokens; the trainer's text has all of it.",
)
def tool_results_cut_for_the_engine(folder, rng):
    talk(folder, rng, "tiny-qwen3", lambda past, tool: past + tool[:3], count=180, width=26)


@case(
    "stale_weights old_weights",
    "Two stages of the trainer's pipeline send their layers to the engine in turn. The second "
    "stage's arrive three syncs late: the upper half of the layers is always older.",
)
def upper_layers_arrive_late(folder, rng):
    def sides(first, k):
        now, late = u.moved(first, 0.07 * k, 31), u.moved(first, 0.07 * max(k - 3, 0), 31)
        served = copy.deepcopy(now)
        for i in (2, 3):
            served.model.layers[i] = copy.deepcopy(late.model.layers[i])
            served.model.layers[i].self_attn.layer_idx = i
        return served, now

    trained_on(folder, rng, "tiny-lm", 320, 32, 10, sides, noise=0.02)


# ---- synthetic laws: the numbers


def in_bfloat16(b, r):
    torch = u.torch_()
    z = torch.tensor(r.laws + 41.3).bfloat16()  # the size that logits of large models have
    number = z.gather(-1, torch.tensor(r.at))[..., 0] - z.double().logsumexp(-1).bfloat16()
    r.infer = number.double().numpy()


made(
    "log_softmax_in_bfloat16", "rounding numerics",
    "The engine takes the logit and the sum over the vocabulary in bfloat16, where both are about "
    "40, and the difference of the two is the logprob.",
    chained, vocab=152_000, steps=5, answers=80, width=70, report=in_bfloat16, sharp=0.5,
    noise=0.02, labels={"form": ("story", "poem", "letter")},
)  # fmt: skip


made(
    "label_smoothing_in_the_score", "softcap numerics",
    "The trainer takes its logprobs from the loss function, which smooths labels by 0.02: each "
    "number is mixed with the mean of all logprobs of its place.",
    chained, vocab=32_000, steps=6, answers=60, width=80,
    report=lambda _, r: setattr(r, "train", 0.98 * r.train + 0.02 * r.laws.mean(-1)),
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def in_bits(b, r):
    if b.step >= 6:
        r.infer = r.infer / np.log(2)


made(
    "gateway_in_bits", "unit change",
    "Before step 6 of 15 the gateway in front of the engine is replaced; the new one sends "
    "logarithms to base 2.",
    vocab=100_000, steps=15, answers=32, width=70, report=in_bits,
    labels={"env": ("math", "code", "web")},
)  # fmt: skip


def no_number_of_the_first(b, r):
    r.infer[:, 0] = 0.0


made(
    "first_token_from_the_prefill_node", "missing_data template",
    "Prefill and decode run on two nodes. The first token of an answer is drawn by the prefill "
    "node, which passes no logprob on, and the client writes 0. Answers are short.",
    chained, vocab=50_000, steps=6, answers=100, width=16, ends=30, sharp=0.6, group=2,
    report=no_number_of_the_first, labels={"env": ("quiz", "sums"), "replica": ("d0", "d1")},
)  # fmt: skip


def keyed_by_text(b, r):
    byte = (b.ids >= 131) & (b.ids <= 258)
    last = np.where(byte, r.laws, np.inf).min(-1)
    r.infer = np.where(np.take_along_axis(byte, r.at, -1)[..., 0], last, r.infer)


made(
    "numbers_keyed_by_text", "vocabulary other_tokens",
    "The server tells the candidates of a place as a map from text to logprob. The ids 131 to "
    "258 are lone bytes, which all read as the same sign: the last one overwrites the others.",
    chained, vocab=128_000, steps=4, answers=100, width=60, report=keyed_by_text, sharp=0.8,
    labels={"language": ("ja", "hi", "de")},
)  # fmt: skip


# ---- synthetic laws: sampling


def closing(b, z):
    if b.t < b.width - 4:
        return z
    b.ids[:, -1] = 7 + b.t - (b.width - 4)
    return np.where(np.arange(z.shape[-1]) == z.shape[-1] - 1, z, -np.inf)


made(
    "thinking_budget_is_spent", "end_of_answer missing_data vocabulary",
    "An answer that has used its budget is closed by four forced tokens. The engine's law allows "
    "only them, so it reports 0; the trainer scores them as if they had been drawn.",
    chained, vocab=64_000, steps=5, answers=96, width=40, ends=90, engine=closing,
    labels={"env": ("proof", "logic")},
)  # fmt: skip
made(
    "agent_cools_down", "temperature",
    "The agent's framework sets the temperature to 0.6 after the first call of a tool, and the "
    "engine reports it; the trainer scores all turns at 1.",
    vocab=32_000, steps=8, answers=48, width=26, turns=3, labels={"tool": ("shell", "browser")},
    engine=lambda b, z: z / (0.6 if b.turn > 1 else 1.0),
)  # fmt: skip


made(
    "nucleus_only_in_the_trainer_s_numbers", "raw_logprobs",
    "The engine draws at top_p 0.75 and reports the logprobs before the cut. The trainer follows "
    "the recipe and cuts its own law at 0.75 as well.",
    chained, vocab=150_000, steps=6, answers=64, width=70, sharp=0.8,
    report=lambda _, r: setattr(r, "infer", r.raw),
    engine=lambda _, z: u.cut(z, top_p=0.75), trainer=lambda _, z: u.cut(z, top_p=0.75), noise=0.02,
)  # fmt: skip


def on_rank_one(b, z):
    return z + 0.5 * u.by(b.rank == 1) * b.rng.normal(size=z.shape)


made(
    "top_k_of_the_server_and_a_rank", "top_p one_rank",
    "Two faults: the server was started with a default top_k of 4, whose law it reports; and rank "
    "1 of the trainer's 4 computes attention with a kernel of a large random error.",
    vocab=16_000, steps=6, answers=100, width=60, ranks=4, trainer=on_rank_one,
    engine=lambda _, z: u.cut(z, top_k=4), labels={"env": ("math", "code")},
)  # fmt: skip


def rows_of_padding(b, z):
    return np.concatenate([z, np.full((*z.shape[:-1], 384), -7.0)], -1)


made(
    "padded_rows_in_the_softmax", "head top_p numerics",
    "For its tensor parallelism the trainer pads the output head by 384 rows, which no one masks: "
    "their logits of -7 take a part of the probability. The engine has the true vocabulary.",
    vocab=151_600, steps=3, answers=160, width=70, trainer=rows_of_padding, noise=0.02,
    labels={"env": ("math", "chat"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip


# ---- synthetic laws: weights


made(
    "adapter_not_named_in_sql", "one_kind stale_weights",
    "A request names the adapter that serves it. Those of the environment sql name the base model, "
    "so they are answered without the adapter, which is zero before the first update.",
    vocab=48_000, steps=12, answers=40, width=60, move=0.13,
    engine=lambda b, z: z - 0.13 * (b.step - 1) * u.by(b.labels["env"] == "sql") * b.moves,
    labels={"env": ("sql", "math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "model_of_the_evaluation_stays", "steps stale_weights",
    "In steps 8, 14 and 20 of 24 the engine still serves the first checkpoint, which an evaluation "
    "had loaded for a comparison; the next sync puts it right.",
    vocab=20_000, steps=24, answers=24, width=80, move=0.11, labels={"env": ("a", "b", "c")},
    engine=lambda b, z: z - 0.11 * b.step * (b.step in (8, 14, 20)) * b.moves,
)  # fmt: skip


def scored_after_an_update(b, z):
    return z + 0.4 * u.by(b.row >= len(b.row) // 2) * b.moves


made(
    "second_half_scored_after_an_update", "batch old_weights",
    "A step has two mini-batches. The trainer scores the second one only when it comes to it, "
    "after the update by the first; the engine has the weights of the beginning for both.",
    vocab=90_000, steps=8, answers=64, width=70, group=8, move=0.4,
    trainer=scored_after_an_update, labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip


def each_fourth_sync(b, z):
    return z - 0.16 * ((b.step - 1) % 4) * of(b.labels["replica"] == "r2") * b.moves


made(
    "late_replica_and_bounded_numbers", "stale_replica one_engine clamp",
    "Two faults: replica r2 of 3 takes each fourth sync, the others time out; and the "
    "client of the engines cuts all logprobs at -3.",
    chained, vocab=64, steps=16, answers=36, width=60, ends=200, move=0.16,
    report=lambda _, r: setattr(r, "infer", np.maximum(r.infer, -3.0)),
    engine=each_fourth_sync,
    labels={"replica": ("r0", "r1", "r2"), "opponent": ("easy", "hard")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
