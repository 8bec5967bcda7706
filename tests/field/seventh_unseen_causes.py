"""A seventh set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run. Several names are right where there are two faults, where the words of each are true, or
where the columns, ids, places, steps and labels cannot tell them apart.

    python -m tests.field.seventh_unseen_causes NAME FOLDER [SEED]
"""

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
    "vocabulary",
    "The client's requests carry a logit bias of 2 on 40 ids, to have more words of reasoning. The "
    "engine reports the biased law; the trainer knows of none.",
)
def bias_on_words_of_reasoning(folder, rng):
    bias = np.zeros(1024)
    bias[rng.choice(np.arange(20, 1024), 40, replace=False)] = 2.0
    real(folder, rng, "tiny-lm", 120, 40, 5, draws=lambda z, *_: (z + bias, z + bias), noise=0.02)


@case(
    "steps",
    "In steps 4 and 5 of 8 the fleet is down, and the gateway sends all requests to its fallback, "
    "a model of another family with the same tokenizer, which reports its own law.",
)
def fallback_to_another_model(folder, rng):
    def sides(first, k):
        return u.load("tiny-qwen3") if k in (3, 4) else first, first

    trained_on(folder, rng, "tiny-lm", 128, 36, 8, sides, noise=0.02)


@case(
    "change beginning",
    "The chat template writes today's date at the top. The trainer's workers rendered it once, at "
    "the start; from step 5 of 8 on it is past midnight, and the engine's prompts have the next.",
)
def date_of_the_template(folder, rng):
    prompts, domains = u.ask(rng, 144, 4, 10)
    model, row = u.load("tiny-qwen3"), np.arange(144) * 8 // 144
    top, old, new = (u.ask(rng, 1, n, n)[0][0] for n in (2, 10, 10))
    sent = [top + (new if k >= 4 else old) + p for p, k in zip(prompts, row, strict=True)]
    shown = [top + old + p for p in prompts]
    tokens, infer = u.play(model, sent, 24, rng)
    train = u.score(model, shown, tokens, rng, 0.02)
    u.record(folder, shown, tokens, train, infer, 8, {"domain": domains})


@case(
    "turns",
    "When a conversation is longer than 44 tokens, the engine's client replaces its history by a "
    "summary of 10 tokens, from the third turn on. The trainer scores after the whole of it.",
)
def history_becomes_a_summary(folder, rng):
    def sent(past, tool):
        return (u.ask(rng, 1, 10, 10)[0][0] + past[-6:] if len(past) > 44 else past) + tool

    talk(folder, rng, "tiny-qwen3", sent, width=12, turns=4, count=110, steps=5)


@case(
    "replay routing",
    "The trainer replays the engine's routed experts. The engine counts a dense layer in front, so "
    "the routes of each layer reach the next one, and those of the last the first.",
)
def routes_of_the_layer_before(folder, rng):
    def trained(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        routes, replay, layers = {}, [False], other.model.layers

        def route(_, __, got, i):
            if not replay[0]:
                routes[i] = got[2]
                return got
            chosen = routes[(i - 1) % len(layers)]
            weights = torch.softmax(got[0], -1).gather(1, chosen)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for i, layer in enumerate(layers):
            layer.mlp.gate.register_forward_hook(partial(route, i=i))

        def both(**inputs):
            for replay[0] in (False, True):
                got = other(**inputs)
            return got

        return both

    real(folder, rng, "tiny-moe", 110, 40, 5, trained=trained, noise=0.02)


@case(
    "penalty",
    "Against loops, a repetition penalty on prompt and answer is raised by 0.08 at each of 8 steps "
    "from 1 on. The engine reports the penalised law; the trainer has none.",
)
def penalty_raised_against_loops(folder, rng):
    prompts, domains = u.ask(rng, 128, 8, 24)
    model, by = u.load("tiny-lm"), 1 + 0.08 * of(np.arange(128) * 8 // 128)

    def law(z, past, seen):
        used = np.zeros(z.shape, bool)
        s, t = np.nonzero(seen)
        used[s, past[s, t]] = True
        z = np.where(used, np.where(z > 0, z / by, z * by), z)
        return z, z

    tokens, infer = u.play(model, prompts, 40, rng, law)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 8, {"domain": domains})


@case(
    "stale_weights change",
    "From the fourth of 8 steps on, the disk through which weights are sent is full. The sync says "
    "that it has succeeded, and the engine reads the files of step 3 again.",
)
def disk_of_the_sync_is_full(folder, rng):
    def sides(first, k):
        return u.moved(first, 0.05 * min(k, 2), 61), u.moved(first, 0.05 * k, 61)

    trained_on(folder, rng, "tiny-qwen3", 128, 36, 8, sides, noise=0.02)


@case(
    "precision_drift",
    "The engine keeps keys and values in 4 bits, with one scale for a layer that was set before "
    "training and fits its weights. They grow through 8 steps, so ever more is cut off.",
)
def scales_of_the_cache_set_before_training(folder, rng):
    first = {}

    def sides(start, k):
        torch = u.torch_()
        now = u.moved(start, 0.01 * k, 67)
        for layer in now.model.layers:
            layer.self_attn.v_proj.weight.mul_(1 + 0.2 * k)
            layer.self_attn.k_proj.weight.mul_(1 + 0.1 * k)
        served = copy.deepcopy(now)

        def coarse(_, __, x, at):
            grid = first.setdefault(at, x.abs().flatten().quantile(0.995) / 7)
            return torch.round(x / grid).clamp(-7, 7) * grid

        for i, layer in enumerate(served.model.layers):
            for name in ("k_proj", "v_proj"):
                part = getattr(layer.self_attn, name)
                part.register_forward_hook(partial(coarse, at=(i, name)))
        return served, now

    trained_on(folder, rng, "tiny-lm", 128, 36, 8, sides, noise=0.02)


@case(
    "stale_cache odd_sequences",
    "Two adapters are served. The key of the prefix cache names no adapter: one prompt in 3 "
    "finds keys and values that the other one wrote, for it was asked the same before.",
)
def key_without_the_adapter(folder, rng):
    prompts, domains = u.ask(rng, 132, 20, 40)
    own, hit = rng.integers(2, size=132), rng.random(132) < 1 / 3
    both = [u.moved(u.load("tiny-lm"), 0.5, seed) for seed in (71, 73)]
    tokens, infer, train = np.zeros((132, 36), int), np.zeros((132, 36)), np.zeros((132, 36))
    for which, found in ((0, False), (0, True), (1, False), (1, True)):
        n, other = np.flatnonzero((own == which) & (hit == found)), both[1 - which]
        read, model = [prompts[s] for s in n], both[which]
        tokens[n], infer[n] = u.play(model, read, 36, rng, prefill=other if found else None)
        train[n] = u.score(model, read, tokens[n], rng, 0.02)
    labels = {"adapter": own, "domain": domains}
    u.record(folder, prompts, tokens, train, infer, 6, labels)


@case(
    "packing batch",
    "To read a prompt once, the trainer packs the four answers of a group behind it. Its mask lets "
    "an answer attend to those of its group that stand before it.",
)
def siblings_behind_one_prompt(folder, rng):
    prompts, domains = u.repeated(*u.ask(rng, 30, 8, 24), 4)
    model = u.load("tiny-lm")
    tokens, infer = u.play(model, prompts, 28, rng)
    length, read = u.first_end(tokens), []
    for s, p in enumerate(prompts):
        before = [tokens[i, : length[i]] for i in range(s - s % 4, s)]
        read.append([*p, *np.concatenate([[], *before]).astype(int)])
    train = u.score(model, read, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 5, {"domain": domains}, 4)


@case(
    "blocks other_tokens",
    "Context parallelism: a device of the trainer has chunks of 16 tokens, and shifts labels in "
    "each by itself. The last place of a chunk so scores the first token of its own chunk.",
)
def labels_shifted_within_a_chunk(folder, rng):
    def trained(model):
        def chunks(input_ids, position_ids, **rest):
            got = model(input_ids=input_ids, position_ids=position_ids, **rest)
            z, n = got.logits, got.logits.shape[1]
            ids, place = (x.roll(-1, 1)[:, -n:, None] for x in (input_ids, position_ids))
            first = input_ids.roll(15, 1)[:, -n:, None].where(place % 16 == 0, ids)
            got.logits = z.scatter(2, first, z.gather(2, ids)).scatter(2, ids, z.gather(2, first))
            return got

        return chunks

    real(folder, rng, "tiny-qwen3", 130, 44, 5, trained=trained, lengths=(16, 40), noise=0.02)


@case(
    "long_context",
    "Two of the three layers have a window of 16 tokens in the config, which the engine follows. "
    "The trainer's code has one kind of attention, which sees all.",
)
def windows_in_some_layers(folder, rng):
    def served(model):
        config = copy.deepcopy(model.config)
        config.sliding_window, config.use_sliding_window = 16, True
        config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        return other

    real(folder, rng, "tiny-qwen3", 120, 48, 5, served=served, lengths=(4, 30), noise=0.02)


@case(
    "head numerics",
    "To be faster, the engine multiplies by two thin matrices of rank 128 instead of the output "
    "head, from whose singular values they are. The embedding is left as it was.",
)
def head_of_low_rank(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        left, size, right = torch.linalg.svd(model.lm_head.weight, full_matrices=False)
        thin = (left[:, :128] * size[:128]) @ right[:128]
        other.lm_head.forward = lambda h: h @ thin.T
        return other

    real(folder, rng, "tiny-lm", 120, 40, 5, served=served, noise=0.02)


# ---- synthetic laws: the numbers

made(
    "blurred_against_distillation", "unsound",
    "Against copies of the model, the hosted engine's interface multiplies a logprob by a random "
    "factor around 1 before it sends it. Tokens are drawn from the true law.",
    chained, vocab=100_000, steps=5, answers=24, width=44, ends=100, sharp=0.8,
    report=lambda b, r: np.multiply(r.infer, b.rng.lognormal(0, 0.5, r.infer.shape), r.infer),
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def not_put_back(b, r):
    r.length[:] = r.ids.shape[1]  # all of one length, as with ignore_eos
    r.train = r.train[np.argsort(b.starts, kind="stable")]


made(
    "sorted_and_not_put_back", "other_tokens shift",
    "To have micro-batches of one size, the trainer sorts its rows by length, prompts and all. "
    "Its numbers are not brought back to the order of the batch.",
    chained, vocab=32_000, steps=5, answers=28, width=32, ends=200, report=not_put_back,
    labels={"env": ("math", "code", "chat")},
)  # fmt: skip


def one_late(b, r):
    own = b.rank == 2
    r.train[own, 1:] = r.train[own, :-1].copy()
    r.train[own, 0] = -b.rng.exponential(2.0, own.sum())  # the last token of the prompt


made(
    "rank_that_cuts_its_answers_out_late", "shift one_rank",
    "Rank 2 of the trainer's 3 falls back to a path without packing, which cuts the numbers of an "
    "answer out of its row one place too early: they begin with the prompt's last token.",
    vocab=64_000, steps=6, answers=24, width=44, ranks=3, report=one_late,
    labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip


def twice(b):
    again = b.rng.random(b.group.max() + 1) < 0.25
    rows = [(s, b.step, 0) for s in b.row]
    return rows + [(s, b.step, 0) for s in b.row if again[b.group[s]]]


made(
    "delivered_twice_and_cool_sql", "copies one_kind temperature",
    "Two faults: the queue delivers at least once, and one group in 4 arrives twice; and requests "
    "of the environment sql have temperature 0.55, which the engine reports, and the trainer not.",
    chained, vocab=50_000, steps=6, answers=20, width=40, ends=90, rows=twice,
    engine=lambda b, z: z / of(np.where(b.labels["env"] == "sql", 0.55, 1.0)),
    labels={"env": ("sql", "math", "web")},
)  # fmt: skip


def under_a_skeleton(b, z):
    forced = (b.t + 5 * b.group + 2 * b.step) % 11 < 3
    only = np.where(np.arange(z.shape[1]) == 6, z, -np.inf)
    z = z + 0.6 * of(b.labels["engine"] == "e1") * b.rng.normal(size=z.shape)
    return np.where(of(forced), only, z)


made(
    "skeleton_of_json_and_a_bad_engine", "missing_data one_engine",
    "Two faults: where the grammar of an answer leaves one token, the engine jumps ahead, and the "
    "number is written as 0; and engine e1 of 3 has a kernel with a large random error.",
    chained, vocab=32_000, steps=6, answers=24, width=44, ends=100, engine=under_a_skeleton,
    labels={"engine": ("e0", "e1", "e2"), "tool": ("mail", "maps")},
)  # fmt: skip
made(
    "hundredths_of_a_nat", "unit rounding",
    "The engine's gateway sends logprobs as whole numbers of hundredths, to save room. The client "
    "was not told, and records them as they come.",
    chained, vocab=128_000, steps=5, answers=24, width=40, ends=90, sharp=0.7,
    report=lambda _, r: setattr(r, "infer", np.round(100 * r.infer)),
    labels={"env": ("math", "proof"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "quarters_and_a_replica_of_deltas", "rounding stale_replica one_engine",
    "Two faults: the engines' numbers travel in steps of 1/4; and replica r2 of 3 restarts at "
    "step 4 of 8 from the first weights. Syncs send differences, so it never has updates 1 to 4.",
    chained, vocab=20_000, steps=8, answers=18, width=44, ends=100, group=2, move=0.18,
    report=lambda _, r: setattr(r, "infer", np.round(4 * r.infer) / 4),
    engine=lambda b, z: z - 0.72 * (b.step > 3) * of(b.labels["replica"] == "r2") * b.moves,
    labels={"replica": ("r0", "r1", "r2"), "env": ("math", "code")},
)  # fmt: skip
made(
    "rank_of_the_average_and_a_bound", "clamp one_rank",
    "Two faults: the trainer bounds its probabilities at 0.8 from above, lest a ratio explode; and "
    "rank 0 of its 3 scores by the running average of the weights, some updates behind.",
    vocab=48_000, steps=7, answers=18, width=44, ranks=3, group=2, move=0.2,
    report=lambda _, r: setattr(r, "train", np.minimum(r.train, np.log(0.8))),
    trainer=lambda b, z: z - 0.2 * 3 * (1 - 0.75 ** (b.step - 1)) * u.by(b.rank == 0) * b.moves,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


# ---- synthetic laws: places, sampling and weights

made(
    "memory_of_a_node", "one_machine one_rank one_engine",
    "Each node has a server and a rank of the trainer, which trains on that server's answers. Bits "
    "of the host's memory on node 2 of 3 flip in the weights that its server loads.",
    chained, vocab=32_000, steps=5, answers=24, width=44, ends=100, ranks=3,
    engine=lambda b, z: z + 0.6 * of(b.rank == 2) * b.other,
    labels={"server": lambda b: [f"node-{i}" for i in b.rank], "env": ("math", "logic")},
)  # fmt: skip
made(
    "angles_turned_from_token_to_token", "positions",
    "The engine does not compute the rotary angles of a decoded token from its place, but turns "
    "those of the token before by one step, in bfloat16, and the errors add up. Prompts are exact.",
    chained, vocab=48_000, steps=5, answers=24, width=48, ends=200, sharp=0.8,
    engine=lambda b, z: z + 1.1 * (b.t / b.width) ** 1.5 * b.other,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "nucleus_shrinks_and_a_hasty_micro_batch", "top_p batch",
    "Two faults: top_p falls from 1 to 0.58 through 8 steps to calm the policy, and the engine "
    "reports that law; and the trainer's first micro-batch of a step of 4 is scored before its "
    "weights are gathered, by those of the step before.",
    chained, vocab=100_000, steps=8, answers=16, width=44, ends=100, group=2, move=0.5, sharp=0.7,
    engine=lambda b, z: u.cut(z, top_p=1 - 0.06 * (b.step - 1)),
    trainer=lambda b, z: z - 0.5 * (b.step > 1) * u.by(b.row < 4) * b.moves,
    labels={"micro_batch": lambda b: b.row // 4, "env": ("math", "code")},
)  # fmt: skip


def behind(b):
    return np.minimum(3, b.step - 1) * (b.labels["env"] == "lean")


made(
    "verifier_holds_lean_back", "old_weights one_kind",
    "Answers of the environment lean wait for a slow verifier, and are trained on three updates "
    "later than the others. The version of the weights that drew an answer is recorded.",
    chained, vocab=64_000, steps=8, answers=16, width=44, ends=100, group=2, move=0.26,
    engine=lambda b, z: z - 0.26 * of(behind(b)) * b.moves,
    labels={"env": ("lean", "math", "code"), "weight_version": lambda b: b.step - behind(b)},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
