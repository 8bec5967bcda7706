"""A fifth set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run. Several names are right where there are two faults, where the words of each are true, or
where the columns, ids, places, steps and labels cannot tell them apart.

    python -m tests.field.fifth_unseen_causes NAME FOLDER [SEED]
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


def partly(folder, rng, model, prompts, hit, steps, labels, *, other=None, prefill=None, swap=True):
    """A dump whose answers of `hit` are those of another engine or prefill, or their numbers."""
    tokens, infer = u.play(model, prompts, 46, rng)
    own = [p for p, h in zip(prompts, hit, strict=True) if h]
    again, infer[hit] = u.play(other or model, own, 46, rng, prefill=prefill)
    if swap:
        tokens[hit] = again
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, steps, labels)


@case(
    "template numerics",
    "The template writes a token of beginning, and the engine's tokenizer adds its own before it: "
    "each prompt has one more token in front than the trainer's.",
)
def beginning_written_twice(folder, rng):
    real(folder, rng, "tiny-lm", 200, 48, 5, sent=lambda p: [0, *p], lengths=(4, 14))


@case(
    "turns retokenised",
    "The engine's template has no place for results of tools and renders them at the top, in front "
    "of the conversation; the trainer's has them where they came.",
)
def results_of_tools_at_the_top(folder, rng):
    talk(folder, rng, "tiny-lm", lambda past, tool: tool + past, width=22, count=104)


@case(
    "missing_data",
    "The loss mask of a conversation covers the results of tools. The trainer scores them like the "
    "answers around them; the engine never drew them, and the collator writes 0.",
)
def mask_covers_the_tool_results(folder, rng):
    prompts, domains = u.ask(rng, 120, 8, 24)
    model, out, past = u.load("tiny-qwen3"), u.Record(), [list(p) for p in prompts]
    pieces = [[(p, None, None)] for p in prompts]
    for turn in range(5):
        if turn % 2:
            tokens, infer = np.array(u.ask(rng, 120, 9, 9)[0]), np.zeros((120, 9))
        else:
            tokens, infer = u.play(model, past, 28, rng)
        train = u.score(model, past, tokens, rng)
        for s, n in enumerate(u.first_end(tokens)):
            pieces[s].append((tokens[s, :n], train[s, :n], infer[s, :n]))
            past[s] += list(tokens[s, :n])
    for s in range(120):
        out.add(1 + s // 24, f"g{s}", pieces[s], {"env": domains[s]})
    out.write(folder)


@case(
    "other_tokens odd_sequences",
    "One answer in 6 is aborted, for its server is full, and drawn anew from the start. The client "
    "keeps the tokens of the second attempt and the numbers of the first.",
)
def numbers_of_the_first_attempt(folder, rng):
    prompts, domains = u.ask(rng, 190, 8, 30)
    hit = rng.random(190) < 1 / 6
    partly(folder, rng, u.load("tiny-lm"), prompts, hit, 6, {"domain": domains}, swap=False)


@case(
    "one_kind penalty",
    "Requests of the domain json carry a frequency penalty of 1.5 for each time that the answer "
    "has a token already. The engine reports the penalised law; the trainer knows of none.",
)
def frequency_penalty_in_json(folder, rng):
    prompts, domains = u.ask(rng, 200, 24, 24)
    model, json = u.load("tiny-qwen3"), np.array(domains) == "json"

    def law(z, past, _):
        z = z.copy()
        for t in range(24, past.shape[1]):
            z[np.arange(200), past[:, t]] -= 1.5 * json
        return z, z

    tokens, infer = u.play(model, prompts, 50, rng, law)
    train = u.score(model, prompts, tokens, rng)
    u.record(folder, prompts, tokens, train, infer, 5, {"domain": domains})


@case(
    "numerics",
    "The engine's port of the model has other names for the norms of queries and keys, and skips "
    "what it does not know: their weights stay at one.",
)
def norms_of_queries_and_keys_not_loaded(folder, rng):
    def served(model):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            layer.self_attn.q_norm.weight.fill_(1)
            layer.self_attn.k_norm.weight.fill_(1)
        return other

    real(folder, rng, "tiny-qwen3", 180, 48, 4, served=served, noise=0.02)


@case(
    "one_engine",
    "Replica r2 of 4 is split over more devices than the others, and its queries meet the wrong "
    "heads of keys and values: two of the four heads of each layer.",
)
def heads_meet_the_wrong_keys(folder, rng):
    prompts, domains = u.ask(rng, 180, 8, 30)
    model, replica = u.load("tiny-lm"), rng.choice(["r0", "r1", "r2", "r3"], 180)
    split, order = copy.deepcopy(model), [0, 2, 1, 3]
    for layer in split.model.layers:
        q, o = layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight
        q.copy_(q.view(4, 64, -1)[order].reshape(q.shape).clone())
        o.copy_(o.view(-1, 4, 64)[:, order].reshape(o.shape).clone())
    labels = {"domain": domains, "replica": replica}
    partly(folder, rng, model, prompts, replica == "r2", 8, labels, other=split)


@case(
    "change routing",
    "Before step 6 of 10 the engine balances its experts anew over the devices, and the map of "
    "one layer is not written: two pairs of its 16 experts take one another's tokens.",
)
def experts_change_places(folder, rng):
    def sides(first, k):
        served, order = copy.deepcopy(first), [2, 5, 0, 3, 4, 1, *range(6, 16)]
        for p in served.model.layers[1].mlp.experts.parameters():
            p.copy_(p[order].clone() if k >= 5 else p)
        return served, first

    trained_on(folder, rng, "tiny-moe", 210, 46, 10, sides, noise=0.015)


@case(
    "replay odd_sequences",
    "The trainer replays the engine's routed experts. For answers that were preempted, one in 6, "
    "the buffer of routes is lost and comes as zeros, so every token passes expert 0 alone.",
)
def routes_of_preempted_answers(folder, rng):
    def trained(model):
        torch, other, at = u.torch_(), copy.deepcopy(model), {}

        def route(_, __, got):
            lost = at["lost"].repeat_interleave(len(got[2]) // len(at["lost"]))
            chosen = got[2] * ~lost[:, None]
            weights = torch.softmax(got[0], -1).gather(1, chosen)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)

        def replaying(input_ids, **rest):
            at["lost"] = torch.tensor(rng.random(len(input_ids)) < 1 / 6)
            return other(input_ids=input_ids, **rest)

        return replaying

    real(folder, rng, "tiny-moe", 200, 46, 4, trained=trained, noise=0.02)


@case(
    "precision_drift stale_weights",
    "The sync sends what all updates have added to the first weights, in 3 bits with one scale for "
    "a matrix. The sum grows through 10 steps, and with it what the rounding loses.",
)
def sum_of_updates_in_three_bits(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.05 * k, 41)
        served, start = copy.deepcopy(now), dict(first.named_parameters())
        for name, p in served.named_parameters():
            added = p - start[name]
            grid = added.abs().max() / 3 + 1e-12
            p.copy_(start[name] + (added / grid).round() * grid)
        return served, now

    trained_on(folder, rng, "tiny-lm", 200, 46, 10, sides, noise=0.02)


@case(
    "numerics positions",
    "The engine keeps keys and values in 3 bits, with one scale for all heads of a token.",
)
def cache_in_three_bits(folder, rng):
    from transformers import DynamicCache

    def coarse(x):
        grid = x.abs().amax((1, 3), keepdim=True) / 3
        return (x / grid).round() * grid

    class Coarse(DynamicCache):
        def update(self, keys, values, *rest, **more):
            return super().update(coarse(keys), coarse(values), *rest, **more)

    def engine(model, past_key_values, **rest):
        return model(past_key_values=past_key_values or Coarse(), **rest)

    real(folder, rng, "tiny-lm", 180, 56, 4, served=lambda m: partial(engine, m), noise=0.02)


@case(
    "long_context",
    "To save memory the engine drops the middle of its cache: a token attends to the first 4 "
    "places and the last 28. Prompts of 6 to 48 tokens are read in full.",
)
def middle_of_the_cache_is_dropped(folder, rng):
    def engine(model, input_ids, attention_mask, **rest):
        if input_ids.shape[1] == 1:
            place = attention_mask.cumsum(1)
            kept = (place <= 4) | (place > place[:, -1:] - 28)
            attention_mask = attention_mask * kept
        return model(input_ids=input_ids, attention_mask=attention_mask, **rest)

    served = {"served": lambda m: partial(engine, m)}
    real(folder, rng, "tiny-qwen3", 170, 68, 4, **served, lengths=(6, 48), noise=0.025)


@case(
    "stale_cache",
    "A third of the prompts are found in the cache of the host. Copying them back forgets the last "
    "block of 16 tokens that was found, whose keys and values are zeros.",
)
def last_found_block_is_empty(folder, rng):
    prompts, domains = u.ask(rng, 180, 20, 44)
    model, hit = u.load("tiny-lm"), rng.random(180) < 1 / 3
    found = np.array([(len(p) - 1) // 16 * 16 for p in prompts]) * hit

    def prefill(position_ids, attention_mask, **rest):
        got = model(position_ids=position_ids, attention_mask=attention_mask, **rest)
        end = u.torch_().tensor(found[hit])[:, None]
        empty = (attention_mask > 0) & (position_ids >= end - 16) & (position_ids < end)
        for layer in got.past_key_values.layers:
            for x in (layer.keys, layer.values):
                x.masked_fill_(empty[:, None, :, None], 0)
        return got

    labels = {"domain": domains, "cached_tokens": found}
    partly(folder, rng, model, prompts, hit, 6, labels, prefill=prefill)


@case(
    "padding",
    "Prompts of up to 16 tokens fit into one tile and take another prefill kernel of the engine, "
    "which takes all of their tokens to be at position 0.",
)
def short_prompts_without_positions(folder, rng):
    prompts, domains = u.ask(rng, 210, 6, 28)
    model, short = u.load("tiny-qwen3"), np.array([len(p) <= 16 for p in prompts])

    def prefill(position_ids, **rest):
        return model(position_ids=0 * position_ids, **rest)

    partly(folder, rng, model, prompts, short, 5, {"domain": domains}, prefill=prefill)


# ---- synthetic laws

made(
    "one_server_of_an_older_version", "raw_logprobs one_engine",
    "All requests have temperature 0.6, which the trainer applies too. Replica r1 of 3 was left at "
    "an older version of the server, which reports logprobs before the temperature.",
    chained, vocab=100_000, steps=6, answers=80, width=70, ends=120, sharp=0.8,
    report=lambda b, r: np.copyto(r.infer, r.raw, where=of(b.labels["replica"] == "r1")),
    engine=lambda _, z: z / 0.6, trainer=lambda _, z: z / 0.6,
    labels={"replica": ("r0", "r1", "r2"), "env": ("math", "code")},
)  # fmt: skip
made(
    "rank_with_another_image", "one_rank unit",
    "Rank 2 of the trainer's 4 was started from another image, whose loss is in bits: its numbers "
    "are logarithms to base 2.",
    vocab=20_000, steps=8, answers=64, width=90, ranks=4,
    report=lambda b, r: setattr(r, "train", r.train / of(np.where(b.rank == 2, np.log(2), 1.0))),
    labels={"env": ("math", "code", "chat"), "replica": ("r0", "r1")},
)  # fmt: skip


def one_digit(_, r):
    size = 10.0 ** np.floor(np.log10(np.maximum(-r.infer, 1e-12)))
    r.infer = np.round(r.infer / size) * size


made(
    "one_digit_that_counts", "rounding",
    "The client's log prints a logprob with one significant digit to save room, and the rollouts "
    "are read from that log.",
    chained, vocab=150_000, steps=5, answers=80, width=70, ends=120, sharp=0.5, report=one_digit,
    labels={"form": ("story", "essay", "poem")},
)  # fmt: skip


def one_step_late(b, r):
    if b.step >= 7:
        r.infer[:, 1:] = r.infer[:, :-1].copy()
        r.infer[:, 0] = -b.rng.exponential(2.0, len(r.infer))  # the last token of the prompt


made(
    "scheduler_that_overlaps", "shift change",
    "From step 7 of 12 on the engine runs with a scheduler that overlaps its steps, and the number "
    "that it sends with a token is that of the token before.",
    vocab=50_000, steps=12, answers=48, width=90, report=one_step_late,
    labels={"env": ("math", "code"), "replica": ("r0", "r1", "r2")},
)  # fmt: skip
made(
    "state_runs_through_a_row", "packing batch",
    "The trainer packs four sequences to a row and does not tell its recurrent layers where one "
    "begins: all but the first of a row start in the state that the one before left, which fades.",
    vocab=90_000, steps=6, answers=80, width=90, group=8,
    trainer=lambda b, z: z + 0.9 * u.by(b.row % 4 > 0) * 0.97 ** np.arange(90)[:, None] * b.other,
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def closing(b, z):
    b.ids[:, -1] = u.END
    more = 1.3 * max(b.t - (b.width - 11), 0)
    return z + more * (b.ids == u.END)


made(
    "end_is_raised_before_the_limit", "end_of_answer vocabulary",
    "To close answers in time, the engine raises the logit of the end token by 1.3 more at each of "
    "the last 10 places before the limit, and reports that law. The trainer does not.",
    chained, vocab=48_000, steps=6, answers=60, width=48, ends=500, engine=closing, sharp=1.2,
    labels={"env": ("math", "code"), "level": ("1", "2")},
)  # fmt: skip


def last_rows(b, z):
    row = b.starts[:, None] + np.arange(z.shape[1]) - 1
    return z + 1.8 * (row % 32 >= 28)[..., None] * b.rng.normal(size=z.shape)


made(
    "last_rows_of_each_tile", "blocks",
    "The trainer's attention kernel works in tiles of 32 rows, and a race of its threads spoils "
    "the last 4 rows of each.",
    chained, vocab=32_000, steps=6, answers=60, width=110, ends=250, trainer=last_rows,
    labels={"env": ("math", "code"), "level": ("1", "2", "3")},
)  # fmt: skip


def version(b):
    b.back = np.minimum(b.rng.integers(0, 6, b.group.max() + 1)[b.group], b.step - 1)
    return b.step - b.back


made(
    "versions_from_a_slow_queue", "old_weights",
    "Groups wait up to 5 updates in a queue before they are trained on. The version of the weights "
    "that drew an answer is recorded as a label, and nothing else.",
    chained, vocab=128_000, steps=14, answers=48, width=60, ends=120, move=0.15,
    engine=lambda b, z: z - 0.15 * of(b.back) * b.moves,
    labels={"weight_version": version, "env": ("web", "math")},
)  # fmt: skip


def by_entropy(_, z):
    lp = u.log_softmax(z)
    entropy = -(np.exp(lp) * lp).sum(-1, keepdims=True)
    return z / (0.4 + 1.2 * entropy / np.log(z.shape[-1]))


made(
    "temperature_by_entropy", "temperature",
    "The server's dynamic temperature is on: from 0.4 where the policy is sure to 1.6 where it is "
    "not. It reports the law that is left; the trainer scores at 1. A game with 64 tokens.",
    vocab=64, steps=5, answers=120, width=70, engine=by_entropy, group=8,
    labels={"opponent": ("easy", "hard")},
)  # fmt: skip


def bad_node_and_cool_search(b, z):
    z = z + (0.7 if b.step in (6, 7, 13) else 0.0) * b.rng.normal(size=z.shape)
    return z / u.by(np.where(b.labels["env"] == "search", 0.6, 1.0))


made(
    "bad_node_and_cool_search", "steps one_kind temperature",
    "Two faults: steps 6, 7 and 13 of 16 ran on a node whose cards compute with a large random "
    "error; and the environment search sets temperature 0.6, which the engine reports.",
    vocab=32_000, steps=16, answers=60, width=80, engine=bad_node_and_cool_search,
    labels={"env": ("search", "math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip
made(
    "cut_at_one_sigma", "top_p",
    "The server's defaults have a top-n-sigma of 1: only logits within one standard deviation of "
    "the largest are left. It reports that law, and the trainer has the whole one.",
    vocab=64_000, steps=6, answers=80, width=90,
    engine=lambda _, z: np.where(z < (z.max(-1) - z.std(-1))[..., None], -np.inf, z),
    labels={"env": ("math", "chat", "code")},
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
