# Laws of scoring, of logits and best tokens, and of draws against their record.

from __future__ import annotations

from dataclasses import replace

import numpy as np

from servanda.contract.model import Path
from servanda.engines.conformance.base import (
    BY_CHANCE,
    COLD,
    CUT,
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
)
from servanda.engines.conformance.generate_laws import rows_match
from servanda.errors import EvidenceError
from servanda.theory.sampling import Sampling, log_softmax, processed_logprobs, uniforms
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio
from servanda.theory.stats.pit import Fidelity
from servanda.traces.trace import Array, Batch, Trace, answered

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
