"""A ninth set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run; several names are right where all their words are true, or a dump cannot tell them apart.

    python -m tests.field.ninth_unseen_causes NAME FOLDER [SEED]
"""

import copy
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from tests.field import third_unseen_causes as third
from tests.field import unseen_causes as u
from tests.field.fifth_unseen_causes import partly
from tests.field.more_unseen_causes import chained, of, real, talk
from tests.field.third_unseen_causes import trained_on

FOUND: list[u.Case] = []
case = partial(u.case, into=FOUND)
made = partial(third.made, into=FOUND)


def numbers(z, tokens):
    return np.take_along_axis(z, tokens[..., None], -1)[..., 0]


# ---- laws of a model


@case(
    "penalty",
    "By the model's generation config no pair of tokens comes twice. The engine bars what would "
    "repeat one, in prompt and answer, and reports the law that is left; the trainer does not.",
)
def no_pair_of_tokens_twice(folder, rng):
    def draws(z, past, seen):
        s, t = np.nonzero((past[:, :-1] == past[:, -1:]) & (seen[:, :-1] > 0))
        z = z.copy()
        z[s, past[s, t + 1]] = -np.inf
        return z, z

    real(folder, rng, "tiny-lm", 120, 44, 6, draws=draws, noise=0.02, lengths=(16, 40))


@case(
    "raw_logprobs",
    "Requests carry a presence penalty of 1.5 on the tokens of the answer, which the trainer "
    "applies as well. The engine reports the numbers before the penalty.",
)
def numbers_before_the_penalty(folder, rng):
    prompts, domains = u.ask(rng, 112, 20, 20)
    model, laws = u.load("tiny-qwen3"), []

    def draws(z, past, _):
        used = np.zeros(z.shape, bool)
        np.put_along_axis(used, past[:, 20:], True, 1)
        return z - 1.5 * used, z

    tokens, infer = u.play(model, prompts, 40, rng, draws)
    u.score(model, prompts, tokens, rng, 0, law=lambda z: laws.append(z) or z)
    laws, row = np.concatenate(laws), np.arange(112)
    used = np.zeros(laws.shape, bool)
    for t in range(1, 40):
        used[:, t] = used[:, t - 1]
        used[row, t, tokens[:, t - 1]] = True
    train = numbers(u.log_softmax(u.noisy(laws - 1.5 * used, rng, 0.02, "gaussian")), tokens)
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "unit unsound",
    "The server was started so that it returns the logits of the drawn tokens, not yet logarithms "
    "of probabilities. The client writes them as they come.",
)
def logits_for_logprobs(folder, rng):
    prompts, domains = u.ask(rng, 112, 8, 30)
    model, laws = u.load("tiny-lm"), []
    tokens, _ = u.play(model, prompts, 40, rng, lambda z, *_: laws.append(z) or (z, z))
    train = u.score(model, prompts, tokens, rng, 0.02)
    infer = numbers(np.stack(laws, 1), tokens)
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "other_tokens shift odd_sequences",
    "The client keeps the text of an answer and the list of its logprobs. The trainer encodes the "
    "text anew and lays the list beside its tokens, which are fewer and others in one of 10.",
)
def answer_encoded_anew(folder, rng):
    tokenizer = Tokenizer.from_file(str(u.ROOT / "models/tiny-lm/tokenizer.json"))
    prompts, domains = u.ask(rng, 128, 8, 24)
    model, out, again = u.load("tiny-lm"), u.Record(), np.zeros((128, 48), int)
    tokens, infer = u.play(model, prompts, 48, rng)
    length = u.first_end(tokens)
    for s, n in enumerate(length):
        ids = tokenizer.encode(tokenizer.decode(list(tokens[s, :n]))).ids[:n]
        length[s], again[s, : len(ids)] = len(ids), ids
    train = u.score(model, prompts, again, rng, 0.02)
    for s, n in enumerate(length):
        answer, labels = (again[s, :n], train[s, :n], infer[s, :n]), {"domain": domains[s]}
        if n > 1:
            out.add(1 + s // 16, f"g{s}", [(prompts[s], None, None), answer], labels)
    out.write(folder)


@case(
    "stale_weights",
    "The sync packs weights into buckets and sends a bucket when it is full. The last one never "
    "is: the engine keeps the upper layer and the norm behind it from the start.",
)
def last_bucket_is_never_sent(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.08 * k, 91)
        served = copy.deepcopy(now)
        served.model.layers[2] = copy.deepcopy(first.model.layers[2])
        served.model.norm = copy.deepcopy(first.model.norm)
        return served, now

    trained_on(folder, rng, "tiny-qwen3", 128, 36, 8, sides, noise=0.02)


@case(
    "numerics",
    "The config names the size by which the model scales its queries, 256, and the engine follows "
    "it. The trainer's attention takes the size of a head, 64.",
)
def scale_of_the_queries(folder, rng):
    def served(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            layer.self_attn.scaling = 256**-0.5
        return other

    real(folder, rng, "tiny-lm", 112, 40, 7, served=served, noise=0.02)


@case(
    "numerics",
    "For speed the engine multiplies in the MLPs by inputs of 4 bits, with one scale for a token. "
    "The weights are whole.",
)
def inputs_in_four_bits(folder, rng):
    def four(_, args):
        grid = args[0].abs().amax(-1, keepdim=True) / 7
        return ((args[0] / grid).round() * grid,)

    def served(model):
        other = copy.deepcopy(model)
        for name, part in other.named_modules():
            if ".mlp." in name and name.endswith("_proj"):
                part.register_forward_pre_hook(four)
        return other

    real(folder, rng, "tiny-qwen3", 112, 40, 7, served=served, noise=0.02)


@case(
    "head numerics",
    "The output head has a bias, one number for each id of the vocabulary. The engine's class of "
    "the model has a head without one, and its loader skips what it does not know.",
)
def bias_of_the_head_not_loaded(folder, rng):
    bias = rng.normal(0, 0.6, 1024)
    real(folder, rng, "tiny-lm", 112, 40, 7, scores=lambda z: z + bias, noise=0.02)


@case(
    "vocabulary",
    "The engine splits the embedding by id over 16 devices. The ids 384 to 447 belong to one whose "
    "rows are zeros after loading; the output head is whole.",
)
def shard_of_the_embedding_is_empty(folder, rng):
    def served(model):
        other, rows = copy.deepcopy(model), model.lm_head.weight.clone()
        other.lm_head.weight = u.torch_().nn.Parameter(rows)  # no longer that of the embedding
        other.model.embed_tokens.weight[384:448] = 0
        return other

    real(folder, rng, "tiny-lm", 128, 40, 8, served=served, noise=0.02)


@case(
    "long_context positions",
    "Behind position 40, the length of the first training, the rotary embedding has other factors. "
    "The engine turns to them, with older keys in its cache; the trainer has the first ones only.",
)
def long_factors_behind_the_first_length(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        short = other.model.rotary_emb.inv_freq
        long = short / torch.linspace(1, 6, len(short))

        def forward(x, position_ids, *_, **__):
            at = position_ids[:, :, None]
            angles = at.float() * torch.where(at >= 40, long, short)
            both = torch.cat([angles, angles], -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

        other.model.rotary_emb.forward = forward
        return other

    real(folder, rng, "tiny-lm", 112, 48, 7, served=served, lengths=(8, 30), noise=0.02)


@case(
    "stale_cache odd_sequences",
    "The prefix cache finds a block by a hash that was cut to a few bits. For one prompt in 3 "
    "another prompt's block of 20 tokens is found, and taken for its own first one.",
)
def hash_of_a_few_bits(folder, rng):
    prompts, domains = u.ask(rng, 126, 26, 26)
    model, hit = u.load("tiny-lm"), rng.random(126) < 1 / 3

    def prefill(input_ids, **rest):
        first, others = input_ids[:, :20].roll(1, 0), input_ids[:, 20:]
        return model(input_ids=u.torch_().cat([first, others], 1), **rest)

    partly(folder, rng, model, prompts, hit, 7, {"domain": domains}, prefill=prefill)


@case(
    "blocks",
    "The trainer splits a row into parts of 16 tokens, whose keys go round in a ring of devices. "
    "The first hop is lost: no part attends to the one right before it.",
)
def first_hop_of_the_ring_is_lost(folder, rng):
    def trained(model):
        def ring(attention_mask, position_ids, **rest):
            part = position_ids // 16
            lost = part[:, None, :, None] - part[:, None, None, :] == 1
            mask = attention_mask.masked_fill(lost, -1e9)
            return model(attention_mask=mask, position_ids=position_ids, **rest)

        return ring

    real(folder, rng, "tiny-qwen3", 112, 44, 7, trained=trained, lengths=(8, 30), noise=0.02)


@case(
    "turns",
    "The server keeps the conversation of a session, and the client sends all of it once more with "
    "each result of a tool: in later turns the engine reads the history twice.",
)
def history_sent_to_a_server_that_has_it(folder, rng):
    talk(folder, rng, "tiny-qwen3", lambda past, tool: past + past + tool, count=112, width=16)


@case(
    "one_kind",
    "Requests of the mode plain switch thinking off: the engine's template ends their prompts with "
    "an empty thought, 6 tokens that the trainer's template does not write.",
)
def empty_thought_in_plain_mode(folder, rng):
    prompts, domains = u.ask(rng, 128, 8, 24)
    model, mode = u.load("tiny-lm"), rng.choice(["think", "plain"], 128)
    empty = u.ask(rng, 1, 6, 6)[0][0]
    sent = [p + empty * (m == "plain") for p, m in zip(prompts, mode, strict=True)]
    tokens, infer = u.play(model, sent, 28, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 8, {"mode": mode, "domain": domains})


@case(
    "replay routing",
    "The trainer replays the engine's routed experts. It sorts the rows of a batch by length, and "
    "leaves the routes in their order: each row passes the experts of another one.",
)
def routes_of_another_row(folder, rng):
    def trained(model):
        torch, other, rows = u.torch_(), copy.deepcopy(model), [0]

        def route(_, __, got):
            chosen = got[2].roll(len(got[2]) // rows[0], 0)
            weights = torch.softmax(got[0], -1).gather(1, chosen)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)

        def replaying(input_ids, **rest):
            rows[0] = len(input_ids)
            return other(input_ids=input_ids, **rest)

        return replaying

    real(folder, rng, "tiny-moe", 112, 40, 7, trained=trained, noise=0.01)


@case(
    "routing numerics",
    "By the config a token takes its experts from the best 2 of 8 groups. The engine does so; the "
    "trainer's port of the model chooses freely among all 16.",
)
def groups_of_experts(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)

        def route(_, __, got):
            scores = torch.softmax(got[0], -1).view(-1, 8, 2)
            best = scores.sum(-1).topk(2, -1).indices
            kept = torch.zeros(scores.shape[:2]).scatter(1, best, 1.0)
            weights, chosen = (scores * kept[..., None]).flatten(1).topk(4, -1)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)
        return other

    real(folder, rng, "tiny-moe", 112, 40, 7, served=served, noise=0.01)


# ---- synthetic laws


made(
    "gateway_drops_what_it_does_not_know", "temperature missing_data one_engine",
    "Two faults: the gateway drops the field of the temperature, so the engine samples at 1, and "
    "the trainer divides its logits by 0.65; and one server of 4 sends no numbers, which become 0.",
    chained, vocab=64_000, steps=7, answers=20, width=40, ends=90, group=2, sharp=0.8,
    trainer=lambda _, z: z / 0.65,
    report=lambda b, r: np.copyto(r.infer, 0.0, where=of(b.labels["url"] == "http://d:8000")),
    labels={"url": tuple(f"http://{c}:8000" for c in "abcd"), "env": ("math", "code")},
)  # fmt: skip


def twice_and_least(b, z):
    z = z + 0.45 * (b.step in (3, 6)) * b.moves
    return np.where(of(b.labels["server"] == "s2"), u.cut(z, min_p=0.12), z)


made(
    "difference_added_twice_and_a_deploy_file", "steps top_p one_engine",
    "Two faults: the syncs of steps 3 and 6 time out and are sent again, so the engines add the "
    "difference twice, until the next full one; and server s2 of 3 has min_p 0.12 from its deploy "
    "file, whose law it reports.",
    chained, vocab=100_000, steps=8, answers=18, width=42, ends=90, group=2, move=0.45, sharp=0.7,
    engine=twice_and_least, labels={"server": ("s0", "s1", "s2"), "env": ("math", "code")},
)  # fmt: skip


def once_more(b, r):
    for s in np.flatnonzero(b.rng.random(len(r.infer)) < 0.3):
        at = b.rng.integers(1, max(r.length[s] // 2, 2))
        r.infer[s, at + 1 :] = r.infer[s, at:-1].copy()


made(
    "number_repeated_behind_a_preemption", "shift odd_sequences",
    "Three answers in 10 are preempted and taken up again. The server sends the last number once "
    "more then, so all behind it stand one token late.",
    chained, vocab=48_000, steps=7, answers=20, width=44, ends=100, report=once_more,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "second_buffer_of_one_instance", "stale_replica one_engine old_weights",
    "Each engine loads a sync into one of two buffers and serves the other. Instance i1 of 3 "
    "changes them before it has loaded: it always serves the weights of the sync before.",
    chained, vocab=32_000, steps=8, answers=18, width=44, ends=100, group=2, move=0.5, sharp=0.7,
    engine=lambda b, z: z - 0.5 * (b.step > 1) * of(b.labels["instance"] == "i1") * b.moves,
    labels={"instance": ("i0", "i1", "i2"), "env": ("math", "code")},
)  # fmt: skip
made(
    "rank_scores_by_the_reference", "one_rank",
    "The trainer keeps a frozen reference next to the policy. Rank 2 of 4 gives the two the wrong "
    "names, and scores its answers by the reference, the weights of the start.",
    vocab=90_000, steps=8, answers=18, width=44, group=2, move=0.28,
    trainer=lambda b, z: z - 0.28 * (b.step - 1) * u.by(b.labels["dp_rank"] == "2") * b.moves,
    labels={"dp_rank": ("0", "1", "2", "3"), "env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def taken_up(b, z):
    if b.t == 0:
        late = b.rng.random(len(b.row)) < 0.3
        b.age = np.minimum(b.rng.integers(1, 5, len(b.row)), b.step - 1) * late
        b.until = b.rng.integers(b.width // 2, b.width, len(b.row))
    return z - b.move * of(b.age * (b.t < b.until)) * b.moves


made(
    "unfinished_answers_are_taken_up_again", "old_weights odd_sequences stale_cache",
    "What is unfinished at the end of a step is kept, and ended by newer weights: in 3 answers of "
    "10 the first half or more was drawn up to 4 updates ago, with its numbers. Nothing says so.",
    chained, vocab=128_000, steps=8, answers=18, width=44, ends=150, group=2, move=0.35, sharp=0.7,
    engine=taken_up, labels={"env": ("web", "math")},
)  # fmt: skip
made(
    "adapter_merged_and_loaded", "change rounding",
    "Two faults: from step 5 of 8 on the engine gets weights with the adapter merged into them and "
    "loads it on top as before, so it has it twice; and its numbers are printed with one decimal.",
    chained, vocab=32_000, steps=8, answers=18, width=44, ends=100, move=0.15,
    engine=lambda b, z: z + 0.15 * b.step * (b.step > 4) * b.moves,
    report=lambda _, r: setattr(r, "infer", np.round(r.infer, 1)),
    labels={"env": ("math", "code", "chat"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "halves_of_a_batch_overlap", "batch",
    "To hide its communication the engine runs the halves of a batch of 8 in turn. The second half "
    "reads its partial sums before all of them have come.",
    chained, vocab=50_000, steps=6, answers=24, width=40, ends=90, group=2,
    engine=lambda b, z: z + 0.6 * of(b.row % 8 >= 4) * b.rng.normal(size=z.shape),
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def wanders(b, z):
    b.walk = b.rng.normal(0, 0.14, len(b.row)) + (b.walk if b.t else 0)
    return z + of(b.walk) * b.other


made(
    "state_rounded_at_each_token", "positions",
    "The model's linear attention has one state for a sequence. At each token of the answer the "
    "engine reads it from 8 bits and writes it back to them, and the errors add up.",
    chained, vocab=64_000, steps=7, answers=18, width=48, ends=200, engine=wanders,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
