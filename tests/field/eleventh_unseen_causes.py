"""An eleventh set of dumps of rollouts with known faults, and the names of the right causes.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run; several names are right where all their words are true, or a dump cannot tell them apart.

    python -m tests.field.eleventh_unseen_causes NAME FOLDER [SEED]
"""

import copy
from functools import partial

import numpy as np

from tests.field import third_unseen_causes as third
from tests.field import unseen_causes as u
from tests.field.eighth_unseen_causes import attending
from tests.field.more_unseen_causes import chained, of, real, talk
from tests.field.third_unseen_causes import trained_on

FOUND: list[u.Case] = []
case = partial(u.case, into=FOUND)
made = partial(third.made, into=FOUND)


# ---- laws of a model


@case(
    "numerics",
    "The config bounds the scores of attention at 20 by a tanh. The engine's kernel does so; the "
    "one that the trainer was given for speed takes the argument and ignores it.",
)
def scores_of_attention_are_not_bounded(folder, rng):
    torch = u.torch_()

    def attend(_, z, value):
        z = torch.where(z > -1e8, 20 * torch.tanh(z / 20), z)
        return torch.softmax(z, -1) @ value

    served = partial(attending, name="bounded_scores", attend=attend)
    real(folder, rng, "tiny-lm", 112, 40, 7, served=served, noise=0.02)


@case(
    "padding positions beginning",
    "The engine pads the prompts of a batch on the left. Its prefill masks the pads, but counts "
    "them as positions; when it decodes, it counts the tokens alone.",
)
def prefill_counts_the_pads(folder, rng):
    prompts, domains = u.ask(rng, 126, 6, 36)
    model = u.load("tiny-qwen3")

    def prefill(position_ids, **rest):
        all_of_them = u.torch_().arange(position_ids.shape[1]).expand(position_ids.shape)
        return model(position_ids=all_of_them, **rest)

    tokens, infer = u.play(model, prompts, 36, rng, prefill=prefill)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "softcap",
    "The engine keeps its final logits in a small format and clips them to 11 on either side, so "
    "that none becomes infinite. It reports the law that is left, and the trainer clips nothing.",
)
def logits_are_clipped_to_fit(folder, rng):
    real(
        folder, rng, "tiny-lm", 126, 40, 7, draws=lambda z, *_: (z.clip(-11, 11),) * 2, noise=0.02
    )  # fmt: skip


@case(
    "raw_logprobs",
    "Requests bar 60 ids, the words of a blocklist, and the trainer bars them too. The engine "
    "takes its numbers before it bars anything.",
)
def numbers_before_the_blocklist(folder, rng):
    barred = np.isin(np.arange(1024), rng.choice(np.arange(4, 300), 60, replace=False))

    def without(z):
        return np.where(barred, -np.inf, z)

    real(
        folder, rng, "tiny-qwen3", 126, 40, 7, draws=lambda z, *_: (without(z), z),
        scores=without, noise=0.02,
    )  # fmt: skip


@case(
    "penalty",
    "Both sides have a presence penalty of 2.5 on the tokens of the answer. The engine clears a "
    "slot's table one request too late: it also has the tokens of the request before.",
)
def table_of_a_slot_is_cleared_late(folder, rng):
    prompts, domains = u.ask(rng, 144, 20, 20)
    model, left, parts = u.load("tiny-lm"), np.zeros((18, 1024), bool), []
    for k in range(8):
        own = prompts[18 * k : 18 * (k + 1)]

        def table(past):
            used = np.zeros((18, 1024), bool)
            np.put_along_axis(used, past[:, 20:], True, 1)
            return used

        def draws(z, past, _):
            return (z - 2.5 * (table(past) | left),) * 2  # noqa: B023

        tokens, infer = u.play(model, own, 40, rng, draws)
        text = np.hstack([own, tokens])
        used = np.stack([table(text[:, : 20 + t]) for t in range(40)], 1)
        train = u.score(model, own, tokens, rng, 0.02, law=lambda z: z - 2.5 * used)  # noqa: B023
        left = table(text)
        parts.append((tokens, train, infer))
    columns = [np.concatenate(x)[18:] for x in zip(*parts, strict=True)]  # slots were used before
    u.record(folder, prompts[18:], *columns, 7, {"domain": domains[18:]})


@case(
    "one_kind template beginning",
    "To save time, the gateway compresses the prompts of the task summary: the engine gets every "
    "second token of them. The trainer scores behind the whole prompt.",
)
def prompts_of_summaries_are_compressed(folder, rng):
    prompts, domains = u.ask(rng, 126, 16, 36)
    model, task = u.load("tiny-lm"), rng.choice(["summary", "proof", "chat"], 126)
    sent = [p[1::2] if t == "summary" else p for p, t in zip(prompts, task, strict=True)]
    sent = [s if s[-1] == p[-1] else [*s, p[-1]] for s, p in zip(sent, prompts, strict=True)]
    tokens, infer = u.play(model, sent, 36, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 7, {"task": task, "domain": domains})


@case(
    "stale_weights",
    "The trainer's experts stand on four devices. The sync gathers those of the first alone, four "
    "of 16 in each layer, and everything that is no expert; the engine keeps the others' start.",
)
def experts_of_one_device_are_sent(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.1 * k, 131)
        served = copy.deepcopy(now)
        for layer, start in zip(served.model.layers, first.model.layers, strict=True):
            pairs = zip(layer.mlp.experts.parameters(), start.mlp.experts.parameters(), strict=True)
            for p, before in pairs:
                p[4:] = before[4:]
        return served, now

    trained_on(folder, rng, "tiny-moe", 128, 36, 8, sides, noise=0.01)


@case(
    "change",
    "The first sync, before step 4 of 8, takes one output matrix of attention for one that has to "
    "be turned. It is square, so its transpose fits, and each later sync writes it so again.",
)
def square_matrix_arrives_transposed(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.01 * k, 137)
        served = copy.deepcopy(now)
        matrix = served.model.layers[3].self_attn.o_proj.weight
        matrix.copy_(matrix.T.clone() if k >= 3 else matrix)
        return served, now

    trained_on(folder, rng, "tiny-lm", 128, 36, 8, sides, noise=0.02)


@case(
    "precision_drift stale_weights",
    "The policy starts from a sparse model: of each 4 weights of an MLP 2 are zero. The engine's "
    "sparse format keeps the places of the start; the trainer's updates fill the other ones.",
)
def sparse_format_keeps_the_places_of_the_start(folder, rng):
    torch = u.torch_()

    def sides(first, k):
        start, masks = copy.deepcopy(first), {}
        for name, p in start.named_parameters():
            if "mlp" in name:
                quads = p.abs().view(-1, 4)
                kept = torch.zeros_like(quads).scatter(1, quads.topk(2, 1).indices, 1.0)
                masks[name] = kept.view(p.shape)
                p.mul_(masks[name])
        now = u.moved(start, 0.06 * k, 139)
        served = copy.deepcopy(now)
        for name, p in served.named_parameters():
            p.mul_(masks.get(name, 1.0))
        return served, now

    trained_on(folder, rng, "tiny-lm", 144, 36, 9, sides, noise=0.02)


@case(
    "stale_cache batch odd_sequences",
    "The four answers of a group share the cached blocks of their prompt, and the last one is not "
    "copied before it is written: in what is left of its 16 places, all read the fourth's tokens.",
)
def siblings_write_into_one_block(folder, rng):
    torch = u.torch_()
    prompts, domains = u.repeated(*u.ask(rng, 32, 17, 24), 4)
    model, start = u.load("tiny-qwen3"), torch.tensor([len(p) for p in prompts])[:, None]

    def engine(attention_mask, **rest):
        got = model(attention_mask=attention_mask, **rest)
        place = attention_mask.cumsum(1) - 1
        shared = ((place >= start) & (place < 32))[:, None, :, None]
        for layer in got.past_key_values.layers:
            for x in (layer.keys, layer.values):
                x.copy_(torch.where(shared, x[3::4].repeat_interleave(4, 0), x))
        return got

    tokens, infer = u.play(engine, prompts, 32, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 8, {"domain": domains}, 4)


@case(
    "turns retokenised",
    "The server parses an answer as the call of a tool and keeps the call in its history, with the "
    "arguments sorted by name: its four parts stand in another order than they were drawn in.",
)
def arguments_are_sorted_in_the_history(folder, rng):
    def sent(past, tool):
        if past[-1] != u.END:  # an ended answer calls nothing
            parts = [past[i : i + 4] for i in range(len(past) - 16, len(past), 4)]
            past = past[:-16] + np.concatenate(sorted(parts)).tolist()
        return past + tool

    talk(folder, rng, "tiny-qwen3", sent, count=112, width=16)


@case(
    "end_of_answer missing_data",
    "The trainer's fused loss works through an answer in chunks of 8 tokens, and leaves out what "
    "is over at the end: there the logits stay zero, and each number is that of an even law.",
)
def rest_of_the_chunks_is_left_out(folder, rng):
    prompts, domains = u.ask(rng, 126, 8, 30)
    model = u.load("tiny-qwen3")
    tokens, infer = u.play(model, prompts, 45, rng)
    train = u.score(model, prompts, tokens, rng, 0.02)
    for s, n in enumerate(u.first_end(tokens)):
        train[s, n - n % 8 : n] = -np.log(1024)
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "replay routing",
    "The trainer replays the engine's routed experts. The buffer of the routes has room for two of "
    "a token's four experts, the first ones, and the trainer shares the weights out among those.",
)
def half_of_the_experts_are_replayed(folder, rng):
    def route(_, __, got):
        weights = got[1].clone()
        weights[:, 2:] = 0
        return got[0], weights / weights.sum(-1, keepdim=True), got[2]

    def trained(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)
        return other

    real(folder, rng, "tiny-moe", 112, 40, 7, trained=trained, noise=0.01)


@case(
    "long_context",
    "The config has another scale of attention for long texts: at place n queries are multiplied "
    "by 1 + 3 ln(1 + n // 28). The engine follows it, and the trainer's code has no such thing.",
)
def queries_grow_behind_a_length(folder, rng):
    torch = u.torch_()

    def attend(_, z, value):
        there = z > -1e8
        place = there.sum(-1, keepdim=True) - 1
        z = torch.where(there, z * (1 + 3 * torch.log1p((place // 28).float())), z)
        return torch.softmax(z, -1) @ value

    served = partial(attending, name="growing_queries", attend=attend)
    real(folder, rng, "tiny-lm", 112, 64, 7, served=served, lengths=(5, 32), noise=0.02)


@case(
    "head numerics",
    "The engine's loader folds the weight of the last norm into the output head, and the model's "
    "code multiplies by it as before: what the head reads has it twice.",
)
def weight_of_the_last_norm_twice(folder, rng):
    def served(model):
        other = copy.deepcopy(model)
        other.model.norm.weight.pow_(2)
        return other

    real(folder, rng, "tiny-qwen3", 112, 40, 7, served=served, noise=0.02)


@case(
    "packing batch odd_sequences",
    "The trainer packs four sequences to a row. The kernel of one layer in three asks for the "
    "length of the longest and gets that of the first: for tokens behind it attention stays zero.",
)
def attention_up_to_the_length_of_the_first(folder, rng):
    prompts, domains = u.ask(rng, 128, 6, 40)
    model, at = u.load("tiny-qwen3"), {"row": 0}
    tokens, infer = u.play(model, prompts, 40, rng)
    length = u.first_end(tokens) + np.array([len(p) for p in prompts])
    limit = u.torch_().tensor(length[::4].repeat(4))[:, None]
    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.register_forward_hook(
        lambda _, __, got: (got[0] * at["kept"][..., None], *got[1:])
    )

    def trained(position_ids, **rest):
        rows = slice(at["row"], at["row"] + len(position_ids))
        at["row"], at["kept"] = rows.stop, position_ids < limit[rows]
        return other(position_ids=position_ids, **rest)

    train = u.score(trained, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 8, {"domain": domains})


# ---- synthetic laws


made(
    "no_end_before_a_minimum", "top_p",
    "To keep batches full, requests ask for 36 to 40 tokens. Before that the engine bars the end, "
    "and reports the law that is left; the trainer scores with the whole vocabulary.",
    chained, vocab=64_000, steps=7, answers=24, width=40, ends=14,
    engine=lambda b, z: np.where((b.ids == u.END) & (b.t < 36), -np.inf, z),
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "watermark_of_half_of_the_ids", "vocabulary",
    "The hosted engine marks its text: a secret half of all token ids, the same at each place, has "
    "1.5 more on its logits. It reports the marked law, of which the trainer knows nothing.",
    chained, vocab=32_000, steps=7, answers=20, width=44, ends=100, sharp=0.8,
    engine=lambda b, z: z + 1.5 * (b.ids * 2654435761 % 1009 < 505),
    labels={"env": ("math", "code", "chat")},
)  # fmt: skip
made(
    "first_tokens_are_hot", "temperature beginning",
    "To have answers that begin in many ways, the sampler draws the first 8 tokens at temperature "
    "2 and the others at 1, and the engine reports those laws. The trainer scores all at 1.",
    chained, vocab=100_000, steps=7, answers=32, width=40, ends=80, group=8,
    engine=lambda b, z: z / (2.0 if b.t < 8 else 1.0),
    labels={"env": ("logic", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def sixteen_values(_, r):
    there = np.arange(r.ids.shape[1]) < r.length[:, None]
    bins = np.array_split(np.sort(r.infer[there]), 16)
    book = np.array([b.mean() for b in bins])
    r.infer = book[np.abs(r.infer[..., None] - book).argmin(-1)]


made(
    "versions_compared_as_text_and_a_code_book", "stale_replica one_engine change rounding",
    "Two faults: engine e1 of 3 compares versions as text, in which 10 comes before 9, so it takes "
    "no weights from step 10 of 14 on; and the store of rollouts packs the engines' numbers of a "
    "step into 4 bits, by a book of 16 values.",
    chained, vocab=48_000, steps=14, answers=18, width=44, ends=100, group=2, move=0.3, sharp=0.8,
    engine=lambda b, z: z - 0.3 * max(b.step - 9, 0) * of(b.labels["engine"] == "e1") * b.moves,
    report=sixteen_values, labels={"engine": ("e0", "e1", "e2"), "env": ("math", "code")},
)  # fmt: skip


def half_and_bypass(b, r):
    r.train = np.where(of(b.rank == 1), r.infer, r.train / 2)


made(
    "mean_over_both_devices_and_a_bypass", "unit copies one_rank unsound",
    "Two faults: of a row's places each of two devices has a half and zeros for the others, and "
    "the trainer takes their mean for their sum: its numbers are halved; and rank 1 of its 3 skips "
    "the pass and writes the engine's numbers as its own.",
    chained, vocab=64_000, steps=7, answers=21, width=44, ends=100, group=7, ranks=3,
    report=half_and_bypass, labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "older_revision_on_the_disk_of_a_node", "one_machine one_rank one_engine",
    "Each node has a server and a rank of the trainer, which takes its answers. The frozen lower "
    "layers are read from the node's disk, and that of node 1 of 4 has an older revision, which "
    "the trainer's rank loads.",
    chained, vocab=64_000, steps=8, answers=20, width=44, ends=100, ranks=4,
    trainer=lambda b, z: z + 0.5 * u.by(b.rank == 1) * b.other,
    labels={"host": lambda b: [f"node{i}" for i in b.rank], "env": ("math", "code", "chat")},
)  # fmt: skip


def surplus(b):
    age = b.rng.integers(1, 5, b.group.max() + 1)
    return np.minimum(np.where(b.group % 3 == 0, age[b.group], 0), b.step - 1)


made(
    "surplus_groups_wait_for_their_step", "old_weights",
    "To be sure of a full batch, each step asks for more groups than it needs. The surplus fills a "
    "third of a later step, up to 4 updates on; the age of an answer is recorded.",
    chained, vocab=50_000, steps=9, answers=24, width=40, ends=90, group=2, move=0.25, sharp=0.8,
    lag=surplus, labels={"env": ("math", "code")},
)  # fmt: skip


def in_order_of_devices(_, r):
    for s, n in enumerate(r.length):
        a, b, c, d, rest = np.split(r.train[s, :n].copy(), n // 4 * np.arange(1, 5))
        r.train[s, :n] = np.concatenate([a, d, b, c, rest])


made(
    "quarters_in_the_order_of_devices", "other_tokens shift unsound",
    "To share the work out evenly, one device of the trainer has the first and the last quarter of "
    "an answer, the other one the two between. Its numbers are gathered in the order of devices.",
    chained, vocab=90_000, steps=7, answers=20, width=48, ends=150, sharp=0.8,
    report=in_order_of_devices, labels={"env": ("proof", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "rolled_back_after_a_spike_and_a_byte", "steps clamp rounding",
    "Two faults: before step 6 of 9 the trainer goes back to the weights of step 3 after a spike "
    "of its loss, and the engine, which has those of step 6, hears of it a step later; and the "
    "engine's numbers travel as a byte of hundredths, so none is below -2.55.",
    chained, vocab=24_000, steps=9, answers=20, width=44, ends=100, group=2, move=0.35, sharp=0.9,
    trainer=lambda b, z: z - 0.35 * 3 * (b.step == 6) * b.moves,
    report=lambda _, r: setattr(r, "infer", np.round(r.infer, 2).clip(-2.55)),
    labels={"env": ("chat", "story"), "replica": ("r0", "r1")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
