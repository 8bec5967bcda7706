# Laws of drawing: the shape of an answer, what is in it, and how long it took.

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from servanda.engines.conformance.base import (
    FEW,
    LAWS,
    PLAIN,
    Case,
    Skipped,
    place,
    require,
    require_none,
)
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace

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
