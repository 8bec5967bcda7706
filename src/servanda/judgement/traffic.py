# The traffic of one leg: which of its served requests are evidence, and of which prompt group.
#
# What is left out is left out by what was known when the request was launched, never by how
# it was answered (law 5); and it is counted.  What a request is, no later one changes: adding
# requests to a log moves no earlier one.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from servanda.contract.model import Contract
from servanda.contract.workload import Workload
from servanda.errors import EvidenceError
from servanda.theory.sampling import Sampling

if TYPE_CHECKING:
    from servanda.traces.request_log import Request

SAMPLING = "asked for another sampling than the workload's"
ENVELOPE = "prompt outside of runtime.envelope.prompt_tokens"
CONTEXT = "prompt that leaves infer no room for max_new_tokens"
SAMPLES = "beyond workload.samples rows of one prompt group"
EARLY = "ended by its length before max_new_tokens"  # why an answer that came is lost
SEED = "asked for a seed that an earlier request had"
_NO_TOP_K = (None, 0, -1)  # each is what some server calls no limit
_OF_ITS_OWN = ("max_new_tokens", "seed", *Sampling.model_fields)


@dataclass(frozen=True)
class Traffic:
    """What infer was sent on one leg.

    Args:
        launched: every request of the leg that is in the log, in launch order.
        groups: those that are evidence, by prompt group, as far as groups are complete.
        outside: why a request is none -> how many.
    """

    run: str
    leg: str
    launched: tuple[Request, ...] = ()
    groups: tuple[tuple[Request, ...], ...] = ()
    outside: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """Those of the complete groups, in launch order."""
        return tuple(request for group in self.groups for request in group)

    @property
    def file(self) -> str:
        """What messages call it."""
        return f"requests of {self.leg}"


class Entrance:
    """Which requests are evidence, one after another in launch order.

    Args:
        context: of the infer kernel, tokens; None where there is no limit.
        most: seeds that are remembered, the latest ones; None: all of them.
        seeds: that earlier requests had, oldest first.
    """

    def __init__(
        self,
        contract: Contract,
        context: int | None = None,
        *,
        most: int | None = None,
        seeds: Iterable[int] = (),
    ) -> None:
        workloads = contract.all_workloads.values()
        self.workload = next(iter(workloads), Workload())  # type: ignore[call-arg]
        envelope = contract.runtime.envelope
        self._span = (envelope and envelope.prompt_tokens) or (0, math.inf)
        width = self.workload.sampling.max_new_tokens
        self._room = math.inf if context is None else context - width
        self._most = most
        self.seeds = dict.fromkeys(seeds)  # in their order, which a set has not

    def outside(self, request: Request, *, prompt: bool = True) -> str:
        """Why a request is no evidence; "" where it is.  By what was known at its launch.

        Args:
            prompt: whether anybody knows its prompt.
        """
        low, high = self._span
        why = _sampled(request, self.workload)
        seed = request.sampling.get("seed")
        if not why and seed is not None:
            why = self._repeated(seed)
        if not why and prompt and not low <= len(request.prompt) <= high:
            why = ENVELOPE
        if not why and prompt and len(request.prompt) > self._room:
            why = CONTEXT
        return why

    def _repeated(self, seed: int) -> str:
        if seed in self.seeds:
            return SEED  # its noise is not its own
        self.seeds[seed] = None
        if self._most is not None and len(self.seeds) > self._most:
            del self.seeds[next(iter(self.seeds))]
        return ""


def within(request: Request, width: int) -> Request:
    """What of a request is evidence of a workload: its first `width` tokens.

    They have one law however many more it asked for, so it counts as if it had asked for no more.
    An answer that ended by its length before that is lost, for nothing explains its end.

    Args:
        request: one that is not outside, so that infer's context has room for `width` tokens.
    """
    most, n = request.sampling["max_new_tokens"], len(request.tokens)
    if request.finish == "length" and n < min(most, width):
        return replace(request, tokens=(), logp=(), best=(), finish="", lost=EARLY)
    if most <= width or n < width:
        return request
    return replace(
        request,
        tokens=request.tokens[:width],
        logp=request.logp[:width],
        best=request.best[:width],
        finish="length",  # what came later, a left-out end token too, is no part of it
    )


def traffic_of(
    requests: Iterable[Request],
    contract: Contract,
    *,
    run: str,
    leg: str,
    context: int | None = None,
    fingerprint: str = "",
) -> Traffic:
    """The requests of one leg of one run; those of others are passed over.

    A request is a prompt group of its own unless the one before it has the same `group`.

    Args:
        requests: of the whole log, in its order.
        context: of the infer kernel, tokens; None where there is no limit.
        fingerprint: that its server gives; "" where it gives none.

    Raises:
        EvidenceError: a request is missing, is there twice or in another order, or was
            answered by another kernel.
    """
    launched = tuple(r for r in requests if (r.run, r.leg) == (run, leg))
    _refuse_gaps(launched)
    _refuse_others(launched, fingerprint)
    entrance = Entrance(contract, context)
    samples, width = entrance.workload.samples, entrance.workload.sampling.max_new_tokens
    outside: Counter[str] = Counter()
    groups: list[list[Request]] = []
    last: str | None = None
    for request in launched:
        if request.group is None or request.group != last:
            groups.append([])
        last = request.group
        why = entrance.outside(request)
        if not why and len(groups[-1]) == samples:
            why = SAMPLES
        if why:
            outside[why] += 1
        else:
            groups[-1].append(within(request, width))
    if last is not None and len(groups[-1]) < samples:
        groups.pop()  # the next request may belong to it
    whole = tuple(tuple(group) for group in groups if group)
    return Traffic(run, leg, launched, whole, dict(outside))


def _sampled(request: Request, workload: Workload) -> str:
    """Why what a request asked for is not what the workload declares; "" where it is."""
    sampling, declared = request.sampling, workload.sampling
    others = (v for name, v in sampling.items() if name not in _OF_ITS_OWN)
    if any(value is not None for value in others):
        return SAMPLING  # nobody here knows what it does to the draw
    for name, default in Sampling().model_dump().items():  # type: ignore[call-arg]
        value, wanted = sampling.get(name), getattr(declared, name)
        if name == "top_k":
            value = None if value in _NO_TOP_K else value
        elif value is None:
            value = default
        if value != wanted:
            return SAMPLING
    return ""


def _refuse_gaps(launched: tuple[Request, ...]) -> None:
    served = 0
    for index, request in enumerate(launched):
        where = request.where
        if request.index != index:
            if request.index < index:
                message = (
                    f"request {request.index} of {request.leg} comes after request {index - 1}"
                )
                hint = "a request is logged once, in launch order"
            else:
                gap = index if request.index == index + 1 else f"{index} to {request.index - 1}"
                message = f"request {gap} of {request.leg} is not in the log"
                hint = "a dispatched request may not vanish: log one without a response as "
                hint += '{"lost": REASON}, and keep every file of the log during the step'
            raise EvidenceError(message, where=where, hint=hint)
        if request.served <= served:
            raise EvidenceError(
                f"'served' is {request.served} at request {index} of {request.leg}, and was "
                f"{served} before it",
                where=where,
                hint="count every request that was sent to the infer kernel on the step, this one "
                "included",
            )
        served = request.served


def _refuse_others(launched: tuple[Request, ...], fingerprint: str) -> None:
    """Answers that say to be of another kernel than the one that is promoted."""
    answered = [r for r in launched if not r.lost]
    known = fingerprint or next((r.fingerprint for r in answered), "")
    for request in answered:
        if request.fingerprint != known:
            whose = "infer is" if fingerprint else "the requests before it were answered by"
            raise EvidenceError(
                f"request {request.index} of {request.leg} was answered by "
                f"{request.fingerprint or 'a server that does not say what it is'!r}, and {whose} "
                f"{known or 'one that does not say what it is'!r}",
                where=request.where,
                hint="evidence of another kernel says nothing of this one: promote that build in a "
                "run of its own",
            )
