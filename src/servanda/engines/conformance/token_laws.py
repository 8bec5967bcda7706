# Laws of drawn and of scored tokens.

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from servanda.contract.model import Path
from servanda.engines.conformance.base import (
    BY_CHANCE,
    COLD,
    CUT,
    FEW,
    GREEDY,
    LAWS,
    PLAIN,
    Broken,
    Case,
    Skipped,
    apart,
    place,
    require,
    require_none,
    unlikely,
)
from servanda.errors import EvidenceError
from servanda.theory.sampling import Sampling, log_softmax, processed_logprobs, uniforms
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio
from servanda.theory.stats.pit import Fidelity
from servanda.traces.trace import Array, Batch, Trace, answered

# Laws of drawing: the shape of an answer, what is in it, and how long it took.


_MANY = 129  # sequences, more than most kernels run at once
_ONE = 1e-6  # a logprob above 0 by no more is rounding


@LAWS.register("rows_are_those_of_the_batch")
def rows_are_those_of_the_batch(case: Case) -> None:
    """A trace has the sequences of its batch, in its order, and none is longer than its width."""
    batch, trace = case.drawn()
    rows_match(batch, trace, "generate")
    # as a run asks: prompts of like length side by side, so indexes do not ascend
    order = sorted(range(FEW), key=lambda row: (-len(batch.prompts[row]), row))
    mixed = case.batch().take(order)
    rows_match(mixed, case.generate(mixed), "generate")


def rows_match(batch: Batch, trace: Trace, verb: str) -> None:
    """The sequences of a trace are those of its batch."""
    rows, sequences = trace.sequence_S.tolist(), list(batch.sequence_S)
    require(
        rows == sequences,
        f"{verb} was asked for sequences {sequences[:6]}... and answers with {rows[:6]}...",
        "one row a sequence, in the order of the batch, under its launch index",
    )
    lengths = [len(prompt) for prompt in batch.prompts]
    require(
        trace.prompt_tokens_S.tolist() == lengths,
        f"{verb} says that prompts of {lengths[:6]}... tokens have "
        f"{trace.prompt_tokens_S.tolist()[:6]}...",
        "prompt_tokens_S is the length of each prompt, in the order of the batch",
    )
    long = [s for s, n in zip(rows, trace.length_S, strict=True) if n > batch.width]
    require(
        not long,
        f"sequence {long[:1]} has more new tokens than the batch is wide ({batch.width})",
        "draw at most batch.width tokens",
    )


@LAWS.register("tokens_are_in_the_vocabulary")
def tokens_are_in_the_vocabulary(case: Case) -> None:
    """Every drawn id is one."""
    trace, size = case.drawn()[1], case.description.vocab_size
    require_none(
        (trace.token_N < 0) | (trace.token_N >= (size or np.inf)),
        lambda at: (
            f"{place(trace, at)} is the id {trace.token_N[at]}, and ids are 0 to {size - 1}"
            if size
            else f"{place(trace, at)} is the id {trace.token_N[at]}"
        ),
        "a token that the kernel could not have drawn makes its sequence a lost one",
    )


@LAWS.register("nothing_follows_the_end")
def nothing_follows_the_end(case: Case) -> str | None:
    """The end token is the last of its sequence; one that does not end is as wide as its batch."""
    ends = np.array(case.description.eos)
    if not len(ends):
        raise Skipped("it does not know which tokens end a sequence")
    batch, trace = case.drawn()
    ended = 0
    for sequence, tokens, lost in zip(
        batch.sequence_S, trace.continuations, trace.lost_S, strict=True
    ):
        at = np.flatnonzero(np.isin(tokens, ends))
        ended += len(at) > 0
        require(
            not len(at) or at[0] == len(tokens) - 1,
            f"sequence {sequence} goes on after its end token {tokens[at[0]] if len(at) else ''}",
            "the token that ends a sequence is its last, and is part of it",
        )
        require(
            lost or len(at) or len(tokens) == batch.width,
            f"sequence {sequence} has {len(tokens)} of {batch.width} tokens and no end token",
            "keep the end token: its step is evidence as well",
        )
    return f"{ended} of {len(batch)} sequences came to an end"


@LAWS.register("logprobs_are_logprobs")
def logprobs_are_logprobs(case: Case) -> None:
    """A drawn token has a logprob of at most 0; NaN says that none came back."""
    _, trace = case.drawn()
    require("logp" in trace.columns, "the trace has no column 'logp'", "record it, processed")
    logp_N = trace.columns["logp"]
    for odd_N, what in ((logp_N > _ONE, "above 0"), (np.isneginf(logp_N), "of a mass of 0")):
        require_none(
            odd_N,
            lambda at, what=what: f"{place(trace, at)} has a logprob of {logp_N[at]:g}, {what}",
            "record the log of the probability that the token was drawn with, nats",
        )
    missing = int(np.isnan(logp_N).sum())
    require(
        missing < len(logp_N) or not len(logp_N),
        f"none of the {missing} drawn tokens has a logprob",
        "an engine that draws records the logprob of each token",
    )


@LAWS.register("absent_is_not_zero")
def absent_is_not_zero(case: Case) -> str | None:
    """A logprob of exactly 0 is that of a certain token, and not of one that got lost."""
    batch, trace = case.drawn()
    columns, size = trace.columns, case.tolerance
    zero_N = columns["logp"] == 0
    if not zero_N.any():
        return "no logprob is 0"
    doubt_N = np.zeros(len(zero_N), dtype=bool)
    looked = []
    for name, doubtful in (
        ("entropy_nats", lambda v: v > size),
        ("p_max", lambda v: v < 1 - size),
        ("logp.0", lambda v: v < -size),
    ):
        if name in columns:
            looked.append(name)
            doubt_N |= doubtful(columns[name])
    for path in case.description.scores:
        full = replace(batch, continuations=trace.continuations)
        drawn_rows = [row for row, length in enumerate(trace.length_S) if length]
        looked.append(f"scores by {path}")
        scored_N = case.score(full.take(drawn_rows), path).columns["logp"]
        if len(scored_N) == len(zero_N):
            doubt_N |= scored_N < -max(size, case.prefill)
    if not looked:
        raise Skipped("nothing else that it records tells a certain token from a lost one")
    require_none(
        zero_N & doubt_N,
        lambda at: (
            f"{place(trace, at)} has a logprob of 0 and was not certain, by its "
            f"{' or '.join(looked)}: {int((zero_N & doubt_N).sum())} such tokens"
        ),
        "a value that did not come back is NaN",
    )
    return None


@LAWS.register("lost_rows_are_empty")
def lost_rows_are_empty(case: Case) -> str:
    """A sequence that was lost has no tokens; all others have one at least."""
    batch, trace = case.drawn()
    for sequence, lost, length in zip(batch.sequence_S, trace.lost_S, trace.length_S, strict=True):
        require(
            not (lost and length),
            f"sequence {sequence} is lost and has {length} tokens",
            "a lost sequence has length 0: what came of it is not evidence",
        )
        require(
            lost or length,
            f"sequence {sequence} has no token and is not lost",
            "say lost_S where nothing came back; a sequence draws its end token at least",
        )
    return f"{int(trace.lost_S.sum())} of {len(batch)} sequences were lost"


@LAWS.register("draws_say_how_they_were_made")
def draws_say_how_they_were_made(case: Case) -> None:
    """about names the path, decode, and the requested sampling (law 7)."""
    about = case.drawn()[1].about
    require(
        about.get("path") == "decode",
        f"about says that tokens were drawn by {about.get('path')!r}",
        'write about={"path": "decode", ...}: a prompt that is scored is not decoded',
    )
    try:
        sampling = Sampling(**json.loads(about.get("sampling", "")))
    except (ValueError, TypeError):
        sampling = None
    require(
        sampling == PLAIN,
        f"about says that tokens were drawn with {about.get('sampling')!r}",
        'write about={"sampling": sampling.model_dump_json(), ...}',
    )


@LAWS.register("any_batch_can_be_drawn")
def any_batch_can_be_drawn(case: Case) -> None:
    """One token, one sequence, and more sequences than run at once."""
    batch_size = case.drawn()[1].about.get("batch_size", "")
    more = 2 * int(batch_size) + 1 if batch_size.isdigit() else _MANY
    for batch in (case.batch(width=1), case.batch(1), case.batch(min(more, _MANY), width=2)):
        rows_match(batch, case.generate(batch), f"generate of {len(batch)} sequences")


@LAWS.register("seconds_are_of_every_token")
def seconds_are_of_every_token(case: Case) -> None:
    """time gives a first token of every request, a gap of every other, and a wall around them."""
    if not case.description.timed:
        raise Skipped("it is not timed")
    batch, drawn = case.drawn(n=FEW)
    timing = case.engine.time(batch, PLAIN, case.seed, True)
    require(
        len(timing.first_S) == len(batch),
        f"time gives {len(timing.first_S)} first tokens of {len(batch)} requests",
        "first_S has one value a request",
    )
    gaps = int(np.maximum(drawn.length_S - 1, 0).sum())
    require(
        len(timing.gap_N) == gaps or not case.deterministic,
        f"time gives {len(timing.gap_N)} gaps, and generate draws {gaps} tokens after the first",
        "time serves the batch as generate does, with the same seed",
    )
    require(
        min(timing.first_S) > 0 and min(timing.gap_N, default=0.0) >= 0,
        "time gives a first token at once, or a gap below 0",
        "read a clock that never goes back, such as time.perf_counter",
    )
    last = max(timing.first_S)
    require(
        timing.wall >= last,
        f"time says that all was over after {timing.wall:.3g} s, and a first token came after "
        f"{last:.3g} s",
        "wall is from the launch to the last token of all",
    )


# Laws of scoring, of logits and best tokens, and of draws against their record.


_REJECTED = np.log(1000.0)  # evidence of 1000 to 1 against the record


@LAWS.register("draws_follow_the_record")
def draws_follow_the_record(case: Case) -> str:
    """Tokens are drawn from the distribution that their logprobs are of."""
    return _follows(case, PLAIN)


@LAWS.register("the_record_is_processed")
def the_record_is_processed(case: Case) -> str:
    """At temperature 0.5 the logprobs are those after it, by which the tokens were drawn."""
    notes = []
    batch, trace = case.drawn(COLD)
    if case.description.full_logits and "decode" in case.description.scores:
        given, _ = case.given(COLD)
        some, recorded = case.drawn(COLD, len(case.batch()))
        logp_NV = processed_logprobs(_logits(case, given, "decode"), COLD)
        own_N = logp_NV[np.arange(len(logp_NV)), [t for c in given.continuations for t in c]]
        _same(case, recorded, recorded.columns["logp"], own_N, "of the logits at temperature 0.5")
        notes.append(f"as {len(some)} sequences' logits at temperature 0.5 say")
    notes.append(_follows(case, COLD, batch, trace))
    return "; ".join(notes)


def _follows(
    case: Case, sampling: Sampling, batch: Batch | None = None, trace: Trace | None = None
) -> str:
    if batch is None or trace is None:
        batch, trace = case.drawn(sampling)
    columns = trace.columns
    if "mass_before" in columns:
        u_N = columns["mass_before"] + _fresh(case, trace) * np.exp(columns["logp"])
        known_N = np.isfinite(u_N)
        statistic, by = Fidelity.of(u_N[known_N], int((~known_N).sum())), "mass_before"
    elif (best := trace.best) is not None:
        statistic = LikelihoodRatio.of(*best, trace.token_N)
        by = f"the best {best[0].shape[1]}"
    else:
        raise Skipped("it records neither mass_before nor best tokens")
    require(
        statistic.log_e < _REJECTED,
        f"{statistic.n:,} tokens do not follow the probabilities they are recorded with, by {by}: "
        f"e = {np.exp(min(statistic.log_e, 99.0)):.2g}",
        "record processed logprobs, of the distribution that tokens are drawn from",
    )
    return f"{statistic.n:,} tokens by {by}, e = {np.exp(statistic.log_e):.2g}"


def _fresh(case: Case, trace: Trace) -> Array:
    parts = [
        uniforms(case.seed, "pit", int(s), int(n))
        for s, n in zip(trace.sequence_S, trace.length_S, strict=True)
    ]
    return np.concatenate(parts)


@LAWS.register("scores_repeat_the_record")
def scores_repeat_the_record(case: Case) -> str:
    """Decoding the drawn tokens once more gives the logprobs that were recorded."""
    notes = []
    for sampling in (PLAIN, CUT):
        batch, logp_N = case.given(sampling)
        scored = case.score(batch, "decode", sampling)
        rows_match(batch, scored, "score")
        scored = answered(scored, batch)
        notes.append(_same(case, scored, logp_N, scored.columns["logp"], "scored by decode"))
    return "; with top_p 0.5 ".join(notes)


def _same(case: Case, trace: Trace, told_N: Array, found_N: Array, what: str) -> str:
    """The largest difference of two records, which is no more than is tolerated."""
    gap_N = apart(told_N, found_N)
    if np.isnan(gap_N).all():
        raise Skipped("it records no logprob that could be compared")
    at = int(np.nanargmax(gap_N))
    require(
        gap_N[at] <= case.tolerance,
        f"{place(trace, at)} (id {trace.token_N[at]}) was recorded with {told_N[at]:.6g} nats, and "
        f"is {found_N[at]:.6g} {what}",
        "both are the processed logprob of the very token; if the kernel rounds so much, say "
        "how much: check_engine(..., tolerance=0.05)",
    )
    return f"at most {gap_N[at]:.2g} nats apart"


@LAWS.register("prefill_is_near")
def prefill_is_near(case: Case) -> str:
    """Scores by prefill are another kernel's (law 7): reported, and refused if far away."""
    batch, logp_N = case.given()
    scored = case.score(batch, "prefill")
    rows_match(batch, scored, "score")
    gap_N = apart(logp_N, answered(scored, batch).columns["logp"])
    if np.isnan(gap_N).all():
        raise Skipped("it records no logprob that could be compared")
    mean = float(np.nanmean(gap_N))
    message = (
        f"prefill is {mean:.2g} nats from the record on average, {np.nanmax(gap_N):.2g} at most"
    )
    require(
        mean <= case.prefill,
        message,
        "so far apart are other tokens, or values shifted by one: position i of a prompt "
        "predicts token i + 1",
    )
    return message


@LAWS.register("scores_are_of_what_was_given")
def scores_are_of_what_was_given(case: Case) -> None:
    """Scored rows are the given tokens, in the order of the batch, whatever that is."""
    batch, _ = case.given()
    for path in _paths(case):
        forth = case.score(batch, path)
        back = case.score(batch.take(range(len(batch))[::-1]), path)
        for trace, asked in ((forth, batch), (back, batch.take(range(len(batch))[::-1]))):
            rows_match(asked, trace, f"score by {path}")
            given = [c for c, lost in zip(asked.continuations, trace.lost_S, strict=True)]
            for sequence, lost, told, row in zip(
                asked.sequence_S, trace.lost_S, given, trace.continuations, strict=True
            ):
                require(
                    row == (() if lost else told),
                    f"score by {path} was given {list(told)[:8]} as sequence {sequence}, and "
                    f"answers of {list(row)[:8]}",
                    "token_N is the given tokens; a sequence that nothing came back for is lost",
                )
            require(
                trace.about.get("path", path) == path,
                f"score by {path} says path {trace.about.get('path')!r}",
                'write about={"path": path, ...}',
            )


@LAWS.register("nothing_scores_as_nothing")
def nothing_scores_as_nothing(case: Case) -> None:
    """A sequence without tokens has none in the trace, among others and alone."""
    batch, _ = case.given()
    for path in _paths(case):
        mixed = replace(batch, continuations=((), *batch.continuations[1:]))
        for given_batch in (mixed, replace(batch, continuations=((),) * len(batch))):
            trace = case.score(given_batch, path)
            rows_match(given_batch, trace, f"score by {path}")
            scored_lengths = trace.length_S.tolist()
            lengths = [len(given) for given in given_batch.continuations]
            require(
                all(
                    n == m or lost
                    for n, m, lost in zip(scored_lengths, lengths, trace.lost_S, strict=True)
                ),
                f"score by {path} of {lengths[:6]} tokens answers with {scored_lengths[:6]}",
                "a continuation may be empty: its sequence was lost when it was drawn",
            )


@LAWS.register("scores_know_the_filters")
def scores_know_the_filters(case: Case) -> str:
    """A token that top_k 1 takes away has a logprob of -inf, and the one it leaves has 0."""
    batch, _ = case.given()
    logp_N = np.zeros(0)
    for path in _paths(case):
        trace = case.score(batch, path, GREEDY)
        logp_N = trace.columns["logp"]
        require_none(
            ~(np.isneginf(logp_N) | np.isnan(logp_N) | (np.abs(logp_N) <= case.tolerance)),
            lambda at, trace=trace, path=path: (
                f"scored by {path} with top_k 1 {place(trace, at)} has "
                f"{trace.columns['logp'][at]:g} nats, neither 0 nor -inf"
            ),
            "processed logprobs: -inf outside the filters, and the rest shares all the mass; "
            "an engine that cannot raises a MeasurementError",
        )
    return f"{int(np.isneginf(logp_N).sum())} of {len(logp_N)} tokens lay outside"


@LAWS.register("logits_agree_with_scores")
def logits_agree_with_scores(case: Case) -> str:
    """The log-softmax of logits at the given tokens is their score, row after row."""
    if not case.description.full_logits:
        raise Skipped("it has no full logits")
    batch, _ = case.given()
    notes = []
    for path in _paths(case):
        scored = answered(case.score(batch, path), batch)
        logits_NV = _logits(case, batch, path)
        own_N = log_softmax(logits_NV)[np.arange(len(logits_NV)), scored.token_N]
        with_logits = _same(case, scored, scored.columns["logp"], own_N, f"in logits by {path}")
        notes.append(f"{path}: {with_logits}")
    return "; ".join(notes)


def _logits(case: Case, batch: Batch, path: Path) -> Array:
    """All pieces, [N, V]."""
    pieces = [np.array(piece) for piece in case.engine.logits(batch, path)]
    rows, size = sum(map(len, batch.continuations)), case.description.vocab_size
    shapes = [piece.shape for piece in pieces]
    require(
        all(len(s) == 2 and s[1] == (size or shapes[0][1]) for s in shapes)
        and sum(s[0] for s in shapes) == rows,
        f"logits come in pieces of {shapes[:4]} for {rows} tokens and {size} ids",
        "one row of all ids before each given token, sequence after sequence",
    )
    return np.concatenate(pieces).astype(np.float64)


@LAWS.register("top_is_the_head")
def top_is_the_head(case: Case) -> None:
    """top gives the top-k tokens, best first, raw, each once, as the logits have them."""
    description = case.description
    if not description.top:
        raise Skipped("it does not give the likeliest tokens of given texts")
    batch, _ = case.given()
    for path in _paths(case):
        trace = case.engine.top(batch, path)
        rows_match(batch, trace, "top")
        best = trace.best
        require(best is not None, "top has no column 'id.0'", "columns id.0, logp.0, id.1, ...")
        assert best is not None
        ids_NK, logp_NK = best
        require(
            ids_NK.shape[1] == description.top,
            f"top gives {ids_NK.shape[1]} tokens, and the description says {description.top}",
            "Description.top is how many",
        )
        _sorted(trace, ids_NK, logp_NK, "top")
        if description.full_logits:
            logp_NV = log_softmax(_logits(case, batch, path))
            head_NK = -np.sort(-logp_NV, axis=1)[:, : description.top]
            gap = float(np.nanmax(apart(head_NK, logp_NK)))
            require(
                gap <= case.tolerance,
                f"top by {path} is {gap:.2g} nats from the head of the logits",
                "top is raw: the log-softmax of the logits, before any temperature",
            )


@LAWS.register("best_were_fixed_before_the_draw")
def best_were_fixed_before_the_draw(case: Case) -> str:
    """Best tokens are only the most likely ones, and the drawn one is not added to them."""
    _, trace = case.drawn()
    if trace.best is None:
        raise Skipped("it records no best tokens")
    ids_NK, logp_NK = trace.best
    try:
        LikelihoodRatio.of(ids_NK, logp_NK, trace.token_N)
    except EvidenceError as error:
        raise Broken(error.args[0], error.problems[0].hint) from None
    _sorted(trace, ids_NK, logp_NK, "generate")
    with np.errstate(invalid="ignore"):
        beyond_N = np.clip(1 - np.exp(logp_NK).sum(axis=1), 0.0, 1 - BY_CHANCE)
    beyond_N = np.where(np.isnan(beyond_N), 0.0, beyond_N)
    outside = int((ids_NK != trace.token_N[:, None]).all(axis=1).sum())
    require(
        outside or np.log1p(-beyond_N).sum() > np.log(BY_CHANCE),
        f"the drawn token is among the best {ids_NK.shape[1]} at each of {len(ids_NK):,} steps, "
        f"and {beyond_N.sum():.1f} draws should have fallen outside",
        "drop the appended token: report the k likeliest tokens, whichever was drawn",
    )
    return f"{outside} of {len(ids_NK):,} drawn tokens were not among the best {ids_NK.shape[1]}"


def _sorted(trace: Trace, ids_NK: Array, logp_NK: Array, verb: str) -> None:
    """Best first, and no id twice; what is missing is at the end."""
    there_NK = ids_NK >= 0
    for at, (ids, values, there) in enumerate(zip(ids_NK, logp_NK, there_NK, strict=True)):
        known = values[there & ~np.isnan(values)]
        require(
            not (np.diff(known) > 0).any(),
            f"{verb} gives the best tokens of {place(trace, at)} with {known[:4]} nats",
            "the likeliest first",
        )
        require(
            len(set(ids[there].tolist())) == there.sum(),
            f"{verb} gives an id twice among the best tokens of {place(trace, at)}",
            "each of the likeliest tokens once",
        )


def _paths(case: Case) -> tuple[Path, ...]:
    if not case.description.scores:
        raise Skipped("it does not score given tokens")
    return case.description.scores


# Laws of the noise: seeds, batch mates, and what filters leave of it.


_OTHER = 7919  # added to a seed, it is another


@LAWS.register("a_seed_repeats")
def a_seed_repeats(case: Case) -> str | None:
    """The same batch and seed give the same tokens, and their logprobs once more."""
    batch, first = case.drawn(n=FEW)
    again = case.generate(batch)
    differing = _share(first, again)
    if not case.deterministic:
        return f"of its tokens, {differing:.1%} were others when a seed was given again"
    require(
        not differing,
        f"the same seed drew other tokens ({differing:.1%} of those after equal ones)",
        'draw with uniforms(seed, "draw", sequence, width), or check with deterministic=False',
    )
    gap_N = apart(first.columns["logp"], again.columns["logp"])
    most = float(np.nanmax(gap_N, initial=0.0))
    require(
        most <= case.tolerance,
        f"the same seed drew the same tokens, and their logprobs moved by {most:.2g} nats",
        "if the kernel is not deterministic, give the tolerance that it needs",
    )
    return "bit for bit" if not most else f"logprobs moved by at most {most:.2g} nats"


@LAWS.register("another_seed_draws_anew")
def another_seed_draws_anew(case: Case) -> None:
    """Another seed gives other tokens."""
    batch, first = case.drawn(n=FEW)
    if not unlikely(first.columns["logp"]):
        raise Skipped("its draws are nearly certain: another seed may well draw the same")
    require(
        _share(first, case.generate(batch, seed=case.seed + _OTHER)),
        f"the seeds {case.seed} and {case.seed + _OTHER} drew the same tokens",
        "every draw is keyed by the seed, so that a fresh attempt is independent of the last",
    )


@LAWS.register("sequences_have_noise_of_their_own")
def sequences_have_noise_of_their_own(case: Case) -> None:
    """Sequences of one prompt in one batch are independent draws."""
    batch = case.batch(same=True)
    trace = case.generate(batch)
    answers = trace.continuations
    logp_N = trace.columns["logp"][int(trace.length_S[0]) :]
    if not unlikely(logp_N):
        raise Skipped("its draws are nearly certain: two sequences may well be the same")
    require(
        len(set(answers)) > 1,
        f"{len(batch)} sequences of one prompt drew the same {len(answers[0])} tokens",
        "key the noise by the sequence as well as by the seed, or send a seed for each request",
    )


@LAWS.register("batch_mates_do_not_matter")
def batch_mates_do_not_matter(case: Case) -> str:
    """What a sequence draws is its own, whatever runs beside it, up to rounding."""
    batch, together = case.drawn(n=FEW)
    order = [row for part in (range(0, FEW, 3), range(1, FEW, 3)) for row in part][::-1]
    apart_ = case.generate(batch.take(order))
    rows = {
        int(s): tokens for s, tokens in zip(apart_.sequence_S, apart_.continuations, strict=True)
    }
    first, tokens = 0, 0
    for row in order:
        one, other = together.continuations[row], rows[batch.sequence_S[row]]
        same = _agreed(one, other)
        first += same < max(len(one), len(other))
        tokens += same + 1
    share = first / tokens
    note = f"in another batch, {first} of {tokens} tokens were others ({share:.1%})"
    require(
        not case.deterministic or share <= case.flips,
        f"{note}, and {case.flips:.1%} are allowed",
        "key the noise by the sequence, and not by its row of the batch; mask what is padded",
    )
    return note


@LAWS.register("top_k_of_one_is_greedy")
def top_k_of_one_is_greedy(case: Case) -> None:
    """With top_k 1 the most likely token is drawn, with certainty, whatever the seed."""
    batch, trace = case.drawn(GREEDY, FEW)
    again = case.generate(batch, GREEDY, case.seed + _OTHER)
    require(
        _share(trace, again) <= (0 if case.deterministic else case.flips),
        "with top_k 1 another seed drew other tokens",
        "hand top_k to the sampler",
    )
    logp_N = trace.columns["logp"]
    require_none(
        np.abs(logp_N) > case.tolerance,
        lambda at: f"with top_k 1 {place(trace, at)} has {logp_N[at]:g} nats, and it was certain",
        "record processed logprobs: after temperature and filters",
    )


@LAWS.register("filtered_tokens_are_not_drawn")
def filtered_tokens_are_not_drawn(case: Case) -> None:
    """With top_p 0.5 no token is drawn that the filter took away, and what is left is all."""
    batch, trace = case.drawn(CUT, FEW)
    require_none(
        np.isneginf(trace.columns["logp"]),
        lambda at: f"with top_p 0.5 {place(trace, at)} was drawn, and its logprob is -inf",
        "draw from the distribution that is recorded",
    )
    rows_match(batch, trace, "generate")


def _agreed(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two answers share before they part."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _share(one: Trace, other: Trace) -> float:
    """Of the tokens that follow equal ones, how many are others."""
    pairs = zip(one.continuations, other.continuations, strict=True)
    agreed = [(_agreed(a, b), max(len(a), len(b))) for a, b in pairs]
    tokens = sum(same + (same < length) for same, length in agreed)
    return sum(same < length for same, length in agreed) / max(tokens, 1)
