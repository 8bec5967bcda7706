# Laws of the noise: seeds, batch mates, and what filters leave of it.

from __future__ import annotations

import numpy as np

from servanda.engines.conformance.base import (
    CUT,
    FEW,
    GREEDY,
    LAWS,
    Case,
    Skipped,
    apart,
    place,
    require,
    require_none,
    unlikely,
)
from servanda.engines.conformance.generate_laws import rows_match
from servanda.traces.trace import Trace

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
