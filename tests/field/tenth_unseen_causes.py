"""A tenth set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run; several names are right where all their words are true, or a dump cannot tell them apart.

    python -m tests.field.tenth_unseen_causes NAME FOLDER [SEED]
"""

import copy
from functools import partial

import numpy as np

from tests.field import third_unseen_causes as third
from tests.field import unseen_causes as u
from tests.field.eighth_unseen_causes import attending
from tests.field.fifth_unseen_causes import partly
from tests.field.more_unseen_causes import chained, of, real
from tests.field.third_unseen_causes import trained_on

FOUND: list[u.Case] = []
case = partial(u.case, into=FOUND)
made = partial(third.made, into=FOUND)


# ---- laws of a model


@case(
    "temperature",
    "Both sides are set to temperature 0.8. The engine divides its logits by it, and the trainer "
    "multiplies them.",
)
def multiplied_by_the_temperature(folder, rng):
    real(
        folder, rng, "tiny-qwen3", 112, 40, 7, draws=lambda z, *_: (z / 0.8, z / 0.8),
        scores=lambda z: z * 0.8, noise=0.02,
    )  # fmt: skip


@case(
    "stale_weights",
    "The sync sends the parameters that have weight decay. Norms have none, so they are in no list "
    "of the sync, and the engine keeps those of the start.",
)
def norms_are_in_no_list_of_the_sync(folder, rng):
    torch = u.torch_()

    def sides(first, k):
        served, signs = u.moved(first, 0.03 * k, 101), torch.Generator().manual_seed(103)
        now = copy.deepcopy(served)
        for name, p in now.named_parameters():
            if "norm" in name:
                p.mul_(torch.exp(0.05 * k * torch.randn(p.shape, generator=signs)))
        return served, now

    trained_on(folder, rng, "tiny-lm", 128, 36, 8, sides, noise=0.02)


@case(
    "numerics",
    "The engine splits its layers over four machines with a slow link between them. From one to "
    "the next the hidden states travel in 4 bits, with one scale for a token.",
)
def hidden_states_travel_in_four_bits(folder, rng):
    def four(_, __, x):
        grid = x.abs().amax(-1, keepdim=True) / 7
        return (x / grid).round() * grid

    def served(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers[:-1]:
            layer.register_forward_hook(four)
        return other

    real(folder, rng, "tiny-lm", 112, 40, 7, served=served, noise=0.02)


@case(
    "stale_cache",
    "A session goes on through all steps of training, one turn in each. The engine keeps the keys "
    "and values of its history, which older weights have written, and reads the new tokens alone.",
)
def session_keeps_its_keys(folder, rng):
    prompts, domains = u.ask(rng, 20, 16, 16)
    first, out, past, parts = u.load("tiny-lm"), u.Record(), prompts, []
    for k in range(6):
        now = u.moved(first, 0.09 * k, 107)
        parts.append([now, len(past[0])])

        def prefill(input_ids, attention_mask, position_ids, **rest):
            store, at = None, 0
            for model, end in parts:  # an answer is read by the weights that draw it
                end = min(end, input_ids.shape[1])
                got = model(
                    input_ids=input_ids[:, at:end], attention_mask=attention_mask[:, :end],
                    position_ids=position_ids[:, at:end], past_key_values=store, **rest,
                )  # fmt: skip
                store, at = got.past_key_values, end
            return got

        tokens, infer = u.play(now, past, 20, rng, prefill=prefill)
        train = u.score(now, past, tokens, rng, 0.02)
        parts[-1][1] += 20
        for s, answer in enumerate(zip(tokens, train, infer, strict=True)):
            pieces = [(past[s], None, None), answer]
            out.add(1 + k, f"step{k}s{s}", pieces, {"domain": domains[s]})
        tools = u.ask(rng, 20, 8, 8)[0]
        past = [[*past[s], *tokens[s], *tools[s]] for s in range(20)]
    out.write(folder)


@case(
    "template beginning",
    "Prompts end with a begun answer, to be continued. The engine's template closes what was begun "
    "and writes the header of a new answer, 6 tokens that the trainer does not have.",
)
def begun_answer_is_closed(folder, rng):
    header = [0, *u.ask(rng, 1, 5, 5)[0][0]]
    real(folder, rng, "tiny-qwen3", 126, 30, 7, sent=lambda p: [*p, *header], noise=0.02)


@case(
    "one_engine",
    "Instance i0 of 3 is split over two cards, two heads of attention on each. In layer 1 the sum "
    "over the cards goes wrong, and what the second card adds is lost.",
)
def sum_over_the_cards_misses_one(folder, rng):
    prompts, domains = u.ask(rng, 126, 8, 28)
    model, instance = u.load("tiny-lm"), rng.choice(["i0", "i1", "i2"], 126)
    split = copy.deepcopy(model)
    split.model.layers[1].self_attn.o_proj.weight[:, 128:] = 0
    labels = {"instance": instance, "domain": domains}
    partly(folder, rng, model, prompts, instance == "i0", 7, labels, other=split)


@case(
    "one_kind",
    "A router in front of the engines sends requests of the level easy to a smaller model, which "
    "reports its own law. The trainer scores all answers by the policy.",
)
def easy_requests_go_to_a_smaller_model(folder, rng):
    prompts, domains = u.ask(rng, 128, 8, 28)
    model, level = u.load("tiny-lm"), rng.choice(["easy", "medium", "hard"], 128)
    labels, smaller = {"level": level, "domain": domains}, u.load("tiny-qwen3")
    partly(folder, rng, model, prompts, level == "easy", 8, labels, other=smaller)


@case(
    "blocks",
    "A draft model writes three tokens, which are verified as they should be. The fourth, which "
    "the engine adds itself, is taken from the law of the draft, and reported by it.",
)
def fourth_token_is_of_the_draft(folder, rng):
    prompts, domains = u.ask(rng, 126, 16, 16)
    model, kept = u.load("tiny-qwen3"), {"store": None}
    draft = u.moved(model, 0.25, 109)

    def both(past_key_values, **inputs):
        got = draft(past_key_values=kept["store"], **inputs)
        kept["store"], kept["law"] = got.past_key_values, got.logits[:, -1].double().numpy()
        return model(past_key_values=past_key_values, **inputs)

    tokens, infer = u.play(
        both, prompts, 40, rng,
        lambda z, past, _: (kept["law"] if past.shape[1] % 4 == 3 else z,) * 2,
    )  # fmt: skip
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "change routing",
    "Before step 5 of 8 one of the engine's devices dies, and with it experts 4 to 7 of each "
    "layer. The engine goes on without them: tokens take the best of those that are left.",
)
def experts_of_a_dead_device(folder, rng):
    def sides(first, k):
        torch, served = u.torch_(), copy.deepcopy(first)

        def route(_, __, got):
            scores = torch.softmax(got[0], -1)
            scores[:, 4:8] *= k < 4
            weights, chosen = scores.topk(4, -1)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in served.model.layers:
            layer.mlp.gate.register_forward_hook(route)
        return served, first

    trained_on(folder, rng, "tiny-moe", 128, 36, 8, sides, noise=0.01)


@case(
    "replay routing",
    "The trainer replays the engine's routed experts, which come sorted by their number. Their "
    "weights are still in the order of size, so experts get the weights of one another.",
)
def weights_of_routes_in_another_order(folder, rng):
    def trained(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(
                lambda _, __, got: (got[0], got[1], got[2].sort(-1).values)
            )
        return other

    real(folder, rng, "tiny-moe", 112, 40, 7, trained=trained, noise=0.01)


@case(
    "long_context",
    "Behind 32 tokens the engine's attention becomes sparse: each head attends to the 6 keys of "
    "the highest scores. The trainer attends to all.",
)
def few_keys_behind_a_length(folder, rng):
    torch = u.torch_()

    def attend(_, z, value):
        place = (z > -1e8).sum(-1, keepdim=True)
        least = z.topk(min(6, z.shape[-1]), -1).values[..., -1:]
        z = z.masked_fill((z < least) & (place > 32), -1e9)
        return torch.softmax(z, -1) @ value

    served = partial(attending, name="few_keys", attend=attend)
    real(folder, rng, "tiny-qwen3", 112, 48, 7, served=served, lengths=(6, 28), noise=0.02)


@case(
    "packing odd_sequences",
    "The trainer fills rows of 256 tokens. A sequence that does not fit is cut: the rest of it "
    "begins the next row, and is scored without what came before.",
)
def rest_begins_the_next_row(folder, rng):
    prompts, domains = u.ask(rng, 126, 8, 24)
    model, at = u.load("tiny-lm"), 0
    tokens, infer = u.play(model, prompts, 40, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    for s, n in enumerate(u.first_end(tokens)):
        own, start = [*prompts[s], *tokens[s, :n]], len(prompts[s])
        at = 0 if s % 18 == 0 else at
        if at + len(own) > 256:
            cut = 256 - at
            t = max(cut - start, 0)  # the first token of the answer in the next row
            if t + 1 < n:  # a row begins with the last token of the row before
                read = own[max(cut - 1, 0) : start + t]
                train[s, t:n] = u.score(model, [read], tokens[s : s + 1, t:n], rng, 0.02)[0]
            at -= 256
        at += len(own)
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "padding template",
    "The engine's graphs are compiled for prompts of 32 and 64 tokens. It fills a prompt up in "
    "front by token 5, and its attention reads the filling.",
)
def prompts_filled_up_to_a_bucket(folder, rng):
    def sent(p):
        return [5] * (-len(p) % 32) + list(p)

    real(folder, rng, "tiny-qwen3", 126, 36, 7, sent=sent, lengths=(5, 40), noise=0.02)


@case(
    "vocabulary head",
    "The engine has the output head in 8 bits with a scale for 16 weights of a row. In the second "
    "of four tiles, ids 256 to 511, the scales of a row stand the other way round.",
)
def scales_of_the_head_the_wrong_way_round(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        rows = model.lm_head.weight.view(1024, 16, 16)
        scale = rows.abs().amax(-1, keepdim=True) / 127
        turned = scale.clone()
        turned[256:512] = scale[256:512].flip(1)
        other.lm_head.weight = torch.nn.Parameter(((rows / scale).round() * turned).flatten(1))
        return other

    real(folder, rng, "tiny-qwen3", 126, 40, 7, served=served, noise=0.02)


@case(
    "copies old_weights odd_sequences",
    "The gateway keeps answers in a cache. A prompt that is asked again, 5 of 16 in a step, gets "
    "the answer and the numbers of up to 4 updates ago once more.",
)
def gateway_answers_from_a_cache(folder, rng):
    prompts, domains = u.ask(rng, 128, 8, 28)
    first, tokens, infer = u.load("tiny-qwen3"), np.zeros((128, 36), int), np.zeros((128, 36))
    train, fresh = np.zeros((128, 36)), np.ones(128, bool)
    for k in range(8):
        now, n = u.moved(first, 0.13 * k, 113), np.arange(16 * k, 16 * k + 16)
        own = [prompts[s] for s in n]
        tokens[n], infer[n] = u.play(now, own, 36, rng)
        for s in rng.choice(n, 5, replace=False) if k else ():
            since = 16 * max(k - 4, 0)
            old, fresh[s] = rng.choice(since + np.flatnonzero(fresh[since : 16 * k])), False
            for column in (prompts, domains, tokens, infer):
                column[s] = column[old]
        train[n] = u.score(now, [prompts[s] for s in n], tokens[n], rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 8, {"domain": domains})


@case(
    "precision_drift",
    "The engine has its weights on a grid of 5 bits, set before training. A sync sends the "
    "difference of a step; the engine adds it and rounds at random, and the errors stay.",
)
def differences_are_added_on_a_grid(folder, rng):
    torch = u.torch_()
    noise, kept = torch.Generator().manual_seed(int(rng.integers(1 << 31))), {}

    def sides(first, k):
        now, before = u.moved(first, 0.03 * k, 127), u.moved(first, 0.03 * max(k - 1, 0), 127)
        served, last = copy.deepcopy(now), dict(before.named_parameters())
        for name, p in served.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                if k == 0:
                    grid = p.abs().amax(1, keepdim=True) / 15
                    kept[name] = [(p / grid).round() * grid, grid]
                else:
                    has, grid = kept[name]
                    some = torch.rand(p.shape, generator=noise)
                    kept[name][0] = ((has + p - last[name]) / grid + some).floor() * grid
                p.copy_(kept[name][0])
        return served, now

    trained_on(folder, rng, "tiny-lm", 160, 36, 10, sides, noise=0.02)


@case(
    "penalty missing_data other_tokens",
    "Two faults: a processor of the engine raises the tokens of the prompt by a factor of 1.25, "
    "and the law with it is reported; and one in 8 chunks of 4 tokens loses its numbers on the "
    "way, for which the client writes the last one before.",
)
def raised_prompt_tokens_and_lost_chunks(folder, rng):
    prompts, domains = u.ask(rng, 126, 8, 28)
    model, width = u.load("tiny-qwen3"), max(map(len, prompts))

    def law(z, past, seen):
        asked = np.zeros(z.shape, bool)
        s, t = np.nonzero(seen[:, :width])
        asked[s, past[s, t]] = True
        return (np.where(asked, np.where(z > 0, z * 1.25, z / 1.25), z),) * 2

    tokens, infer = u.play(model, prompts, 40, rng, law)
    train = u.score(model, prompts, tokens, rng, 0.02)
    lost = (rng.random((126, 10)) < 1 / 8).repeat(4, 1)
    for t in range(4, 40):
        infer[lost[:, t], t] = infer[lost[:, t], t - 1]
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


# ---- synthetic laws


made(
    "small_number_inside_the_logarithm", "clamp softcap",
    "Lest a logarithm be infinite, the trainer adds 0.04 to each probability before it takes it. "
    "No number is below -3.2, and all are a little too high.",
    chained, vocab=128_000, steps=6, answers=20, width=44, ends=100, sharp=0.5,
    report=lambda _, r: setattr(r, "train", np.log(np.exp(r.train) + 0.04)),
    labels={"env": ("story", "essay"), "replica": ("r0", "r1")},
)  # fmt: skip


def rounded_sums(_, r):
    torch = u.torch_()
    sums = torch.tensor(np.cumsum(r.infer, 1)).bfloat16().double().numpy()
    r.infer = np.diff(sums, axis=1, prepend=0.0)


made(
    "differences_of_rounded_sums", "rounding positions",
    "The server tells the sum of the logprobs of an answer so far, in bfloat16. The client takes "
    "the differences, whose grid becomes coarser the longer an answer is.",
    chained, vocab=64_000, steps=6, answers=18, width=72, ends=400, sharp=0.5, report=rounded_sums,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def skipped(_, r):
    for s, n in enumerate(r.length):
        left = r.infer[s, :n][~np.isin(r.ids[s, :n], (6, 7))]
        if len(left):
            r.infer[s, :n] = np.append(left, np.repeat(left[-1], n - len(left)))


made(
    "numbers_of_special_tokens_are_skipped", "shift odd_sequences other_tokens",
    "The server leaves special tokens, ids 6 and 7, out of its list of numbers, but not out of the "
    "answer. Behind each of them all numbers stand one token early; the last one fills the end.",
    chained, vocab=32_000, steps=7, answers=20, width=40, ends=100, report=skipped,
    labels={"env": ("math", "code", "chat")},
)  # fmt: skip


def flushed(_, r):
    place, last = np.arange(r.ids.shape[1]), r.length[:, None] - 1
    r.infer = np.take_along_axis(r.infer, np.where(place > last - 5, last, place), 1)


made(
    "held_back_tokens_come_at_once", "end_of_answer other_tokens",
    "Lest a stop string be shown, the server holds the last 5 tokens back. At the end of an answer "
    "they come at once, all with the number of the last.",
    chained, vocab=50_000, steps=7, answers=36, width=30, ends=40, sharp=0.7, report=flushed,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "captured_graph_reads_the_first_weights", "stale_replica one_machine one_engine one_rank",
    "Each node has a server and a rank of the trainer, which takes its answers. On node 3 of 4 the "
    "sync puts weights into new memory, and the server's captured graph reads those of the start.",
    chained, vocab=90_000, steps=8, answers=20, width=44, ends=100, ranks=4, move=0.25,
    engine=lambda b, z: z - 0.25 * (b.step - 1) * of(b.rank == 3) * b.moves,
    labels={"server": lambda b: [f"node-{i}" for i in b.rank], "env": ("math", "code")},
)  # fmt: skip


def cool_agents(b):
    return np.where(b.labels["env"] == "agent", 0.5, 1.0)


made(
    "raw_numbers_of_cool_requests", "raw_logprobs one_kind",
    "Requests of the environment agent have temperature 0.5, all others 1, and the trainer scores "
    "each at its own. The engine reports the logprobs before the temperature.",
    chained, vocab=100_000, steps=7, answers=20, width=44, ends=100, group=2, sharp=0.8,
    engine=lambda b, z: z / of(cool_agents(b)), report=lambda _, r: setattr(r, "infer", r.raw),
    trainer=lambda b, z: z / u.by(cool_agents(b)), labels={"env": ("agent", "math", "code")},
)  # fmt: skip


def typical(_, z):
    lp = u.log_softmax(z)
    far = np.abs(lp + (np.exp(lp) * lp).sum(-1, keepdims=True))
    order = np.argsort(far, -1, kind="stable")
    p = np.take_along_axis(np.exp(lp), order, -1)
    kept = np.empty(z.shape, bool)
    np.put_along_axis(kept, order, np.cumsum(p, -1) - p < 0.8, -1)
    return np.where(kept, z, -np.inf)


made(
    "typical_tokens_and_a_rank_of_its_own", "top_p one_rank",
    "Two faults: the server's defaults have typical_p 0.8, and it reports the law that is left; "
    "and the gradients of rank 1 of the trainer's 4 are not averaged with the others': its "
    "weights go their own way.",
    vocab=48_000, steps=8, answers=20, width=44, ranks=4, group=2, engine=typical,
    trainer=lambda b, z: z + 0.2 * (b.step - 1) * u.by(b.rank == 1) * b.other,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def in_percent(b, r):
    r.infer = r.infer + np.log(100) * of(b.labels["server"] == "s2")


made(
    "each_third_sync_and_a_server_of_percents", "steps old_weights unit one_engine unsound",
    "Two faults: weights are sent with every third update, in steps 1, 4 and 7 of 9; and server s2 "
    "of 3 has another interface, which tells probabilities in percent: the client takes their "
    "logarithm.",
    chained, vocab=20_000, steps=9, answers=18, width=44, ends=100, group=2, move=0.4, sharp=0.8,
    engine=lambda b, z: z - 0.4 * ((b.step - 1) % 3) * b.moves, report=in_percent,
    labels={"server": ("s0", "s1", "s2"), "env": ("math", "code")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
