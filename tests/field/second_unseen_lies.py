"""A second set of dumps that cannot be evidence about a mismatch while their numbers look healthy.

The interface and the terms are those of `unseen_lies`; the bugs are others, or sit at other places.
The comment above a lie says which contradiction of its columns reveals it. What is expected was
fixed before any run.

    python -m tests.field.second_unseen_lies NAME FOLDER [SEED]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer
from tests.field import unseen_lies
from tests.field.unseen_causes import END, ask, first_end, load, play, repeated, score
from tests.field.unseen_lies import (
    Lie,
    answered,
    answers_of,
    chains,
    mixture,
    rewarded,
    row,
    scan,
    spread,
    talked,
    write,
)

FOUND: list[Lie] = []
lie = partial(unseen_lies.lie, into=FOUND)
neighbour = partial(unseen_lies.neighbour, into=FOUND)


def half(x):
    """Rounded to bfloat16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    even = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (even & np.uint32(0xFFFF0000)).view(np.float32).astype(float)


def forced(ids, at, rows=slice(None)):
    """A law that puts `ids` at the places from `at` on in some rows, and reports the model's own
    numbers."""
    count = iter(range(1000))

    def law(z, *_):
        t, draws = next(count) - at, z
        if 0 <= t < len(ids):
            draws = z.copy()
            draws[rows, ids[t]] = 1e9
        return draws, z

    return law


def write_loss(folder, rows):
    """`write`, with the mask of the loss."""
    for step in sorted({r.step for r in rows}):
        some = [r for r in rows if r.step == step]
        columns = ([getattr(r, k) for r in some] for k in ("ids", "mask", "train", "infer"))
        labels = {k: [r.labels[k] for r in some] for k in some[0].labels}
        more = {"groups": [r.group for r in some], "loss_mask": [r.loss for r in some]}
        Writer(folder).step(step, *columns, labels=labels, **more)


# ---- numbers that were never measured


EQUAL = "equal identical same cop repeat constant duplicat coincid"
BEGIN = " prefix beginning context law"  # siblings with one beginning contradict each other


# On rank 1 each number of the engine is the trainer's rounded to bfloat16, to the last bit; on
# ranks 0 and 2 none is.
@lie(
    "refused", EQUAL + BEGIN + " round bfloat16 derived explained",
    "Rank 1 of 3 receives no logprobs from its engine, and a fallback fills the column with the "
    "trainer's, which went through a bfloat16 buffer.",
)  # fmt: skip
def rounded_copies_of_the_trainer(folder, rng):
    rows = chains(rng, 6, 48, 40, ranks=3, vocab=40_000)
    for r in rows:
        if r.rank == 1:
            r.infer = half(r.train)
    write(folder, rows)


@neighbour(
    "rounded_copies_of_the_trainer",
    "Rank 1 of 3 has an engine with the trainer's own kernels: its gap is a tenth of the others', "
    "and neither zero nor a rounding.",
)
def one_rank_with_closer_kernels(folder, rng):
    rows = chains(rng, 6, 48, 40, ranks=3, vocab=40_000, noise=0.025)
    for r in rows:
        if r.rank == 1:
            r.train = np.minimum(r.infer + 0.1 * (r.train - r.infer), 0)
    write(folder, rows)


# In a third of the rows an id that comes several times has one number, to the last bit, in both
# columns; in the others it never has. Siblings with one beginning differ in one number of 5.
@lie(
    "refused", EQUAL + BEGIN + " token dict collaps",
    "A streaming client keeps logprobs in a dictionary by token id, so the last place of an id in "
    "an answer wins; one answer in 3 comes this way, and the trainer's pass the same helper.",
)  # fmt: skip
def numbers_kept_by_token_id(folder, rng):
    rows = answered(rng, "tiny-lm", 5, 8, 4, 44)
    for r, own in answers_of(rows):
        if rng.random() < 1 / 3:
            for i in np.unique(r.ids[own]):
                at = own[r.ids[own] == i]
                r.train[at], r.infer[at] = r.train[at[-1]], r.infer[at[-1]]
    write(folder, rows)


@neighbour(
    "numbers_kept_by_token_id",
    "Both columns travel as text with 4 decimals, and laws are sure: many numbers are equal in a "
    "row and on both sides.",
)
def four_decimals_of_sure_answers(folder, rng):
    rows = chains(rng, 6, 48, 40, sharp=2.0, noise=0.03, vocab=20_000)
    for r in rows:
        r.train, r.infer = np.round(r.train, 4) + 0.0, np.round(r.infer, 4) + 0.0
    write(folder, rows)


# In 13 % of the tokens both numbers lie exactly on the line through those before and behind.
@lie(
    "refused", "interpolat linear line fill straight missing between smooth exactly" + BEGIN,
    "Chunks of the stream get lost, 1 to 3 tokens each; the loader joins the columns by place, and "
    "the frame's interpolate() fills both.",
)  # fmt: skip
def lost_chunks_interpolated(folder, rng):
    rows = chains(rng, 6, 44, 44, vocab=50_000, noise=0.025)
    for r, own in answers_of(rows):
        lost = np.zeros(len(own), bool)
        for at in np.flatnonzero(rng.random(len(own)) < 0.07):
            lost[at : at + rng.integers(1, 4)] = True
        lost[[0, -1]] = False
        have = np.flatnonzero(~lost)
        for x in (r.train, r.infer):
            x[own] = np.interp(np.arange(len(own)), have, x[own[have]])
    write(folder, rows)


# In 3 rows of 4 the first two numbers of both columns are equal to the last bit, whatever the ids.
@lie(
    "refused", EQUAL + BEGIN + " first edge shift",
    "Sequences are packed 4 to a row, and the shift of labels crosses their borders; the first "
    "number of all but the first sequence of a pack is lost, and filled with the next one.",
)  # fmt: skip
def first_number_is_the_second(folder, rng):
    rows = answered(rng, "tiny-lm", 5, 9, 4, 36)
    for i, (r, own) in enumerate(answers_of(rows)):
        if i % 4 and len(own) > 1:
            r.train[own[0]], r.infer[own[0]] = r.train[own[1]], r.infer[own[1]]
    write(folder, rows)


# Neighbours correlate at 0.86 where raw numbers do at 0 to 0.3, and none behind token 20 is above
# -0.01, though half of the first ones are; different tokens of one place sum to up to 2.7.
@lie(
    "refused",
    "smooth average running mean cumulative autocorrel neighbour correlated sum above exceed law",
    "A shared helper divides the cumulative logprob by the count of tokens so far: both columns "
    "are running means of their answer.",
)  # fmt: skip
def running_means_of_both(folder, rng):
    rows = chains(rng, 6, 48, 42, vocab=50_000, noise=0.03)
    for r, own in answers_of(rows):
        for x in (r.train, r.infer):
            x[own] = np.cumsum(x[own]) / (1 + np.arange(len(own)))
    write(folder, rows)


@neighbour(
    "running_means_of_both",
    "The temperature falls from 1.2 to 0.35 behind token 16, on both sides: numbers are much alike "
    "in each part.",
)
def temperature_falls_in_the_answer(folder, rng):
    prompts, domains = repeated(*ask(rng, 40, 8, 26), 4)
    model, heat = load("tiny-lm"), np.where(np.arange(40) < 16, 1.2, 0.35)
    count = iter(heat)
    tokens, infer = play(model, prompts, 40, rng, lambda z, *_: (z / next(count),) * 2)
    train = score(model, prompts, tokens, rng, 0.025, law=lambda z: z / heat[:, None])
    write(folder, spread(prompts, tokens, train, infer, 5, domains, 4))


# ---- numbers of other places


# Siblings with one beginning have other numbers for the same first token, and numbers of prompts
# (very low) stand in answers; short texts have neither.
@lie(
    "refused", "prefix same law differ belong order permut context chunk place position align",
    "Context parallelism of 2 cuts a text of more than 48 tokens in 4 chunks; ranks hold 0 and 3, "
    "1 and 2, and the gathered numbers of both passes stay in that order.",
)  # fmt: skip
def chunks_in_the_order_of_ranks(folder, rng):
    rows = answered(rng, "tiny-lm", 5, 8, 4, 34, lengths=(16, 36))
    model, texts = load("tiny-lm"), [r.ids for r in rows]
    both = scan(model, texts, rng, 0.025), scan(model, texts, rng)
    for r, train, infer in zip(rows, *both, strict=True):
        if len(r.ids) > 48:
            for x in (train, infer):
                a, b, c, d = np.array_split(x[1:].copy(), 4)
                x[1:] = np.concatenate([a, d, b, c])
        r.train, r.infer = train, infer
    write(folder, rows)


# ---- laws that are none, or that nobody drew from


# Different first tokens of one prompt's answers have probabilities whose sum is up to 1.4, at one
# place in 9; a law has 1.
@lie(
    "refused", "sum above exceed normal probability law total more calibr frequen drawn often",
    "Both sides divide by the temperature of 1.6 behind the softmax in place of before it: the "
    "tokens are drawn from the right law, and its numbers are too high.",
)  # fmt: skip
def temperature_behind_the_softmax(folder, rng):
    prompts, domains = repeated(*ask(rng, 22, 8, 26), 8)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 36, rng, lambda z, *_: (z / 1.6, z))
    train = score(model, prompts, tokens, rng, 0.035)
    write(folder, spread(prompts, tokens, train / 1.6, infer / 1.6, 4, domains, 8))


@neighbour(
    "temperature_behind_the_softmax",
    "Groups of 16 at temperature 0.6 draw nearly all that a law has: probabilities of one place "
    "sum to almost 1, and to a little more on the trainer's noisy side.",
)
def sums_near_one(folder, rng):
    write(folder, answered(rng, "tiny-lm", 5, 2, 16, 36, heat=0.6, noise=0.03))


# Siblings with one beginning agree on the next token more often than its probability says: the
# share of equal pairs should be the mean probability, and is higher by 0.07 to 0.09 (z above 5).
@lie(
    "not green",
    "calibr frequen often drawn sampl temperature law collision agree probability alike sibling",
    "Tokens are drawn at temperature 0.4; the engine's column comes from a second request for "
    "prompt logprobs, at 1, as the trainer's does: nobody drew from either.",
)  # fmt: skip
def scored_at_another_temperature(folder, rng):
    prompts, domains = repeated(*ask(rng, 22, 8, 26), 8)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 38, rng, lambda z, *_: (z / 0.4, z))
    train = score(model, prompts, tokens, rng, 0.025)
    write(folder, spread(prompts, tokens, train, infer, 4, domains, 8))


@neighbour(
    "scored_at_another_temperature",
    "A search tree: 3 of the 4 answers of a prompt branch off the first behind 6 to 14 of its "
    "tokens; the trunk is masked in them, and they agree on it entirely.",
)
def branches_of_a_trunk(folder, rng):
    prompts, domains = ask(rng, 40, 8, 24)
    model, rows = load("tiny-lm"), []
    first, infer = play(model, prompts, 34, rng)
    train, length = score(model, prompts, first, rng, 0.025), first_end(first)
    trunk = [max(1, min(int(rng.integers(6, 15)), n - 1)) for n in length]
    past = [list(p) + list(first[s, : trunk[s]]) for s, p in enumerate(prompts) for _ in range(3)]
    tokens, late = play(model, past, 26, rng)
    mine, ends = score(model, past, tokens, rng, 0.025), first_end(tokens)
    for s, p in enumerate(prompts):
        n, m, own = length[s], trunk[s], ({"domain": domains[s]},)
        begin = (p, None, None, 0)
        all_of_it = (first[s, :n], train[s, :n], infer[s, :n], 1)
        rows.append(row(1 + s // 8, f"g{s}", [begin, all_of_it], *own))
        for i in range(3 * s, 3 * s + 3):
            e = ends[i]
            shared = (first[s, :m], train[s, :m], infer[s, :m], 0)
            branch = (tokens[i, :e], mine[i, :e], late[i, :e], 1)
            rows.append(row(1 + s // 8, f"g{s}", [begin, shared, branch], *own))
    write(folder, rows)


FORCED = (407, 258)


# Half of the answers begin with the same two ids; the numbers of the first, about -12, do not allow
# one draw of it in 180.
@lie(
    "refused",
    "forced first opening drawn sampl often frequen calibr probability begin improbable template",
    "In half of the prompts the template opens the answer with two fixed tokens (a thinking tag), "
    "which count as the answer's: they are in the mask, and both sides score them.",
)
def forced_opening_in_the_mask(folder, rng):
    prompts, domains = repeated(*ask(rng, 45, 8, 26), 4)
    model, thinks = load("tiny-lm"), np.arange(len(prompts)) // 4 % 2 == 0
    tokens, infer = play(model, prompts, 36, rng, forced(FORCED, 0, thinks))
    train = score(model, prompts, tokens, rng, 0.025)
    rows = spread(prompts, tokens, train, infer, 5, domains, 4)
    for r, own in zip(rows, thinks, strict=True):
        r.labels["mode"] = "think" if own else "plain"
    write(folder, rows)


@neighbour(
    "forced_opening_in_the_mask",
    "A budget of thought: behind 12 tokens two fixed ones are put into each answer; they are "
    "scored, improbable, and left out of the mask.",
)
def forced_tokens_outside_the_mask(folder, rng):
    prompts, domains = repeated(*ask(rng, 42, 8, 26), 4)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 38, rng, forced(FORCED, 12))
    train = score(model, prompts, tokens, rng, 0.025)
    rows = spread(prompts, tokens, train, infer, 6, domains, 4)
    for r, own in answers_of(rows):
        r.mask[own[12:14]] = False
    write(folder, rows)


# ---- masks


HEADER = 900


# In a third of the rows the mask has the header that ends tools' texts: its numbers of about -14
# allow no draw in 5,000, and there are some 60. Behind a header the other rows begin their turns.
@lie(
    "refused",
    "mask turn boundar tool sampled template header prompt drawn often improbable calibr role",
    "Roles are taken by the parity of a message. A failing tool sends two messages, and the second "
    "counts as the assistant's: the mask covers the end of a tool's text in a third of the rows.",
)
def second_message_of_a_tool(folder, rng):
    rows = talked(rng, 100, 5, 16, 3, header=HEADER)
    for r in rows:
        if rng.random() < 1 / 3:
            for (_, stop), (start, _) in zip(r.spans[:-1], r.spans[1:], strict=True):
                r.mask[stop + (start - stop) // 2 : start] = True
    write(folder, rows)


# Some 230 tokens stand in the mask behind the id that ends every answer, all of that id; their
# numbers of about -12 allow none of 7,000.
@lie(
    "refused", "end eos pad behind drawn sampl often stop mask trailing",
    "Answers that end are padded to a multiple of 8 with the end token, and a collator takes the "
    "attention mask for the mask of answers: the pads are in it, and both sides score them.",
)  # fmt: skip
def pads_behind_the_end(folder, rng):
    rows = answered(rng, "tiny-lm", 5, 10, 4, 40)
    texts = [np.r_[r.ids, [END] * (-len(r.ids) % 8 if r.ids[-1] == END else 0)] for r in rows]
    model = load("tiny-lm")
    both = scan(model, texts, rng, 0.025), scan(model, texts, rng)
    for i, (text, train, infer) in enumerate(zip(texts, *both, strict=True)):
        n = np.flatnonzero(rows[i].mask)[0]
        pieces = [(text[:n], None, None, 0), (text[n:], train[n:], infer[n:], 1)]
        rows[i] = row(rows[i].step, rows[i].group, pieces, rows[i].labels)
    write(folder, rows)


@neighbour(
    "pads_behind_the_end",
    "The engine ignores the end token: answers go on behind it to the limit, and all their tokens "
    "are drawn.",
)
def answers_go_on_behind_the_end(folder, rng):
    prompts, domains = repeated(*ask(rng, 40, 8, 26), 4)
    model = load("tiny-lm")
    tokens, infer = play(model, prompts, 40, rng)
    train = score(model, prompts, tokens, rng, 0.025)
    length = np.full(len(prompts), 40)
    write(folder, spread(prompts, tokens, train, infer, 5, domains, 4, length=length))


# The loss used a token of each tool's text, which the mask says is not trained, and never the
# first token of a turn.
@lie(
    "not green", "loss mask outside tool shift turn boundar sampled late",
    "The mask of the loss is shifted once too often: it stands one token late, so it leaves out "
    "the first token of each turn and has the first one of the tool's reply.",
)  # fmt: skip
def loss_mask_one_late(folder, rng):
    rows = chains(rng, 6, 28, 18, turns=3, env=("shell", "web"), noise=0.025)
    for r in rows:
        r.loss = np.r_[False, r.mask[:-1]]
    write_loss(folder, rows)


@neighbour(
    "loss_mask_one_late",
    "The loss leaves out sampled tokens whose two numbers differ by more than 0.05; the mask and "
    "the columns have them all.",
)
def loss_mask_of_a_filter(folder, rng):
    rows = chains(rng, 6, 48, 40, noise=0.025, kind="heavy", vocab=50_000)
    for r in rows:
        r.loss = r.mask & ~(np.abs(r.train - r.infer) > 0.05)
    write_loss(folder, rows)


# ---- joined with the outcome


# The gap has the sign of the advantage: answers with a positive one lie above those with a negative
# one by 0.007 a token (12 standard errors). Numbers from before an update know no advantage.
@lie(
    "not green", "advantage update after trained learned reward outcome sign correlat",
    "The trainer's numbers are taken after its update of the step: tokens of good answers went up "
    "a little, those of bad ones down.",
)  # fmt: skip
def scored_after_the_update(folder, rng):
    rows = rewarded(chains(rng, 6, 48, 40, group=8, noise=0.02, vocab=40_000), rng, 8)
    for r, own in answers_of(rows):
        up = 0.012 * r.advantages[own] * (1 - np.exp(r.train[own]))
        r.train[own] = np.minimum(r.train[own] + up, 0)
    write(folder, rows)


@neighbour(
    "scored_after_the_update",
    "Hard answers are wrong more often and have a larger gap: its size goes with the advantage, "
    "its sign does not.",
)
def wrong_answers_are_noisier(folder, rng):
    rows = chains(rng, 6, 48, 40, group=8, noise=0.03, kind="by_answer", vocab=40_000)
    for s in range(0, len(rows), 8):
        own = rows[s : s + 8]
        gap = np.array([np.abs(r.train - r.infer)[r.mask].mean() for r in own])
        reward = (rng.random(8) < np.where(gap > np.median(gap), 0.2, 0.8)).astype(float)
        for r, x in zip(own, reward, strict=True):
            r.rewards, r.advantages = x, r.mask * (x - reward.mean()) / (reward.std() + 1e-6)
    write(folder, rows)


# Answers of one group with one reward have advantages of both signs, and groups without a
# difference of rewards have some; sums in groups are not 0.
@lie(
    "noted", "advantage reward group order sum sign",
    "Rows are balanced by length after rewards are set, and advantages come back in the order of "
    "before.",
)  # fmt: skip
def advantages_in_the_old_order(folder, rng):
    rows = rewarded(chains(rng, 6, 48, 44, group=8, ends=50, noise=0.025), rng, 8)
    for s in range(0, len(rows), 48):
        some = rows[s : s + 48]
        old = [r.advantages[r.mask][0] for r in some]
        order = np.argsort([len(r.ids) for r in some], kind="stable")
        for r, i in zip(some, order, strict=True):
            r.advantages = r.mask * old[i]
    write(folder, rows)


@neighbour(
    "advantages_in_the_old_order",
    "Advantages count a penalty for long answers that the recorded reward leaves out: answers of "
    "one reward differ, the short ones are better off, and sums in groups are 0.",
)
def advantages_with_a_penalty(folder, rng):
    rows = chains(rng, 6, 48, 44, group=8, ends=50, noise=0.025)
    for s in range(0, len(rows), 8):
        own = rows[s : s + 8]
        reward = (rng.random(8) < rng.choice([0.2, 0.5, 0.8])).astype(float)
        shaped = reward - np.array([r.mask.sum() for r in own]) / 100
        shaped = (shaped - shaped.mean()) / (shaped.std() + 1e-6)
        for r, x, a in zip(own, reward, shaped, strict=True):
            r.rewards, r.advantages = x, r.mask * a
    write(folder, rows)


# ---- versions


def aged(rng, steps, shares, move, noise, first=0, **more):
    """Chains whose answers have an age each, with the true versions."""
    ages = (rng.choice(len(shares), size=(36, 1), p=shares) for _ in range(steps))
    past = [np.minimum(x.repeat(40, 1), first + k) for k, x in enumerate(ages, 1)]
    rows = chains(rng, steps, 36, 40, move=move, noise=noise, age=lambda k: past[k - 1], **more)
    for i, r in enumerate(rows):
        r.step += first
        r.versions, r.labels["replica"] = r.step - int(r.late[0]), f"r{i % 2}"
    return rows


# A third of the answers claim weights that the trainer of their step does not have yet, with the
# age of 0 that other versions have in that step.
@lie(
    "refused", "version future newer ahead negative later greater above stale exceed after",
    "The client asks for the engine's version when an answer is put into the queue; one in 3 waits "
    "there for a sync first, and its version is that of the next step. Ages are cut at 0.",
)  # fmt: skip
def versions_ahead_of_the_trainer(folder, rng):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(folder, aged(rng, 8, (0.7, 0.3), 0.008, 0.025))
    for path in sorted(Path(folder).glob("**/*.parquet")):
        table = pq.read_table(path)
        step, late = int(table.schema.metadata[b"step"]), rng.random(len(table)) < 1 / 3
        for name, value in (("token.weight_version", step + 1.0), ("token.staleness", 0.0)):
            at = table.schema.get_field_index(name)
            column = [
                [value] * len(x) if hit else x
                for x, hit in zip(table[name].to_pylist(), late, strict=True)
            ]
            table = table.set_column(at, table.schema.field(at), pa.array(column, table[name].type))
        pq.write_table(table, path)


@neighbour(
    "versions_ahead_of_the_trainer",
    "A resumed run: steps count on from 501 and versions from 500, with an age of 0 or 1.",
)
def resumed_run_counts_on(folder, rng):
    write(folder, aged(rng, 8, (0.6, 0.4), 0.008, 0.025, first=500))


# The newest version of r1 falls from 5 to 0 between two steps, and its age of 6 and 7 has the gap
# of an age of 0 or 1, which is twice as large at 1 as at 0. Siblings from r0 and r1 with one
# beginning have the same numbers at versions that are 6 apart.
@lie(
    "not green", "version back decreas older fall drop descend earlier restart stale age counter",
    "Replica r1 of 2 is started again at step 6 of 9 with the newest weights, and its counter of "
    "syncs begins at 0: versions jump back, and weights do not.",
)  # fmt: skip
def counter_of_syncs_restarts(folder, rng):
    rows = aged(rng, 9, (0.6, 0.4), 0.03, 0.02)
    for r in rows:
        if r.step >= 6 and r.labels["replica"] == "r1":
            r.versions = max(r.versions - 6, 0)
    write(folder, rows)


@neighbour(
    "counter_of_syncs_restarts",
    "Slow answers arrive late: some rows of a step have versions below those of earlier steps, by "
    "up to 3, and the newest version never falls.",
)
def slow_answers_arrive_late(folder, rng):
    write(folder, aged(rng, 9, (0.6, 0.25, 0.1, 0.05), 0.006, 0.025))


# ---- recorded experts


EXPERTS = "expert route routes routing"
SMALL = {"steps": 4, "groups": 9, "group": 4, "width": 28}


# In a quarter of the rows the two records agree by chance in two layers of three, and nearly
# always once the engine's layers are turned; in the others they agree as they stand.
@lie(
    "refused", "layer order permut misalign agree differ chance swap " + EXPERTS,
    "Engines with pipeline stages append the experts of the last stage first: in one answer of 4 "
    "the layers stand in reverse. The trainer routes by itself, and records its experts.",
)  # fmt: skip
def layers_in_reverse(folder, rng):
    rows = mixture(rng, **SMALL)
    for r in rows:
        if rng.random() < 0.25:
            r.routes = r.routes[:, ::-1].copy()
    write(folder, rows)


@neighbour(
    "layers_in_reverse",
    "The engine lists a token's experts by their number and the trainer by their weight; the first "
    "layer is not recorded (-1) on both sides.",
)
def experts_in_another_order(folder, rng):
    rows = mixture(rng, **SMALL)
    for r in rows:
        r.routes = np.sort(r.routes, -1)
        r.routes[:, 0] = r.routes_train[:, 0] = -1
    write(folder, rows)


# A token has an expert twice among its 4, in most tokens of half the answers and never in others.
@lie(
    "refused", "twice duplicat distinct repeat same range unique " + EXPERTS,
    "One engine of two spreads its experts over 2 ranks and records their number within a rank: 8 "
    "to 15 become 0 to 7. The trainer's are not recorded.",
)  # fmt: skip
def experts_numbered_within_a_rank(folder, rng):
    rows = mixture(rng, **SMALL)
    for r in rows:
        del r.routes_train
        if rng.random() < 0.5:
            r.routes = np.where(r.routes < 0, r.routes, r.routes % 8)
    write(folder, rows)


# ---- two at once


# In the moved rows the tag that is sure at the opening of each turn has the low number of a tool's
# text, on both sides; in others half of the engine's numbers are the trainer's to the last bit.
@lie(
    "refused", EQUAL + " shift misalign place late order belong align overwrit",
    "Retokenized tool calls gain a token, and behind the first one both columns stand one token "
    "late, in 3 rows of 10; in 3 others the engine's column is the trainer's from halfway on, "
    "where an answer was preempted.",
    "mixture",
)  # fmt: skip
def late_behind_a_tool_and_filled_from_the_trainer(folder, rng):
    rows = chains(rng, 5, 32, 18, turns=3, opening=14.0, env=("shell", "web"), noise=0.025)
    for r, own in answers_of(rows):
        u, start = rng.random(), own[0] + np.flatnonzero(r.mask[own[0] :] == 0)[0]
        if u < 0.3:
            at = start + np.flatnonzero(r.mask[start:])[0]
            for x in (r.train, r.infer):
                x[at:] = x[at - 1 : -1].copy()
        elif u < 0.6:
            late = own[len(own) // 2 :]
            r.infer[late] = r.train[late]
    write(folder, rows)


# Each answer is there twice, with one engine's column, and differences pile up at exactly 0.02 on
# both sides with none beyond.
@lie(
    "refused", EQUAL + " twice again clip bound pile limit cap clamp ratio rank",
    "Tensor-parallel peers count as data-parallel ranks: 2 and 3 write the answers of 0 and 1 "
    "again, scored a second time; and log ratios are clipped at 0.02 before the trainer's column "
    "is set up from them.",
    "mixture",
)  # fmt: skip
def peers_as_ranks_and_clipped_ratios(folder, rng):
    prompts, domains = repeated(*ask(rng, 24, 8, 26), 4)
    model, rows = load("tiny-lm"), []
    tokens, infer = play(model, prompts, 36, rng)
    for copy in range(2):
        train = score(model, prompts, tokens, rng, 0.025)
        train = infer + np.clip(train - infer, -0.02, 0.02)
        some = spread(prompts, tokens, train, infer, 4, domains, 4, 2)
        for r in some:
            r.rank += 2 * copy
        rows += some
    write(folder, rows)


@neighbour(
    "peers_as_ranks_and_clipped_ratios",
    "At temperature 0.3 many of the 8 short answers to a prompt are alike, with the same numbers "
    "of the engine, as often as their probabilities say.",
)
def siblings_alike_at_low_temperature(folder, rng):
    write(folder, answered(rng, "tiny-lm", 5, 4, 8, 14, heat=0.3, noise=0.025, ranks=2))


if __name__ == "__main__":
    unseen_lies.main(FOUND)
