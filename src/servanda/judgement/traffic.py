# The traffic of one step: its requests that are evidence, and their prompt groups.
#
# Requests are excluded only by facts known at dispatch, never by their responses (law 5), and
# exclusions are counted.  Later requests do not change the status of earlier ones.

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
EARLY = "ended by its length before max_new_tokens"  # reason why a received response counts as lost
SEED = "asked for a seed that an earlier request had"
_NO_TOP_K = (None, 0, -1)  # values that mean no limit on some servers
_OF_ITS_OWN = ("max_new_tokens", "seed", *Sampling.model_fields)


@dataclass(frozen=True)
class Traffic:
    """The requests sent to infer on one step.

    Args:
        launched: every logged request of the step, in dispatch order.
        groups: requests that are evidence, by complete prompt group.
        outside: reason -> number of requests that are no evidence.
    """

    run: str
    leg: str
    launched: tuple[Request, ...] = ()
    groups: tuple[tuple[Request, ...], ...] = ()
    outside: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """The requests of complete groups, in dispatch order."""
        return tuple(request for group in self.groups for request in group)

    @property
    def file(self) -> str:
        """Its name in messages."""
        return f"requests of {self.leg}"


class Entrance:
    """Decides which requests are evidence, in dispatch order.

    Args:
        context: context length of the infer kernel, tokens; None: no limit.
        most: number of latest seeds to keep; None: all.
        seeds: seeds of earlier requests, oldest first.
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
        self.seeds = dict.fromkeys(seeds)  # ordered, unlike a set

    def outside(self, request: Request, *, prompt: bool = True) -> str:
        """The reason why a request is no evidence, from facts at dispatch; "" if it is.

        Args:
            prompt: whether its prompt is known.
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
            return SEED  # its random numbers are not independent
        self.seeds[seed] = None
        if self._most is not None and len(self.seeds) > self._most:
            del self.seeds[next(iter(self.seeds))]
        return ""


def within(request: Request, width: int) -> Request:
    """The part of a request that is evidence for a workload: its first `width` tokens.

    Their distribution does not depend on the requested length, so a longer request counts as one
    for `width` tokens.  A response that ended by length before that counts as lost, because its end
    is unexplained.

    Args:
        request: one that is evidence, so that infer's context has room for `width` tokens.
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
        finish="length",  # later tokens, and an omitted end token, are not part of it
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
    """The requests of one step of one run; others are skipped.

    A request is its own prompt group unless the one before it has the same `group`.

    Args:
        requests: all requests of the log, in order.
        context: context length of the infer kernel, tokens; None: no limit.
        fingerprint: reported by its server; "" if none.

    Raises:
        EvidenceError: a request is missing, repeated or out of order, or was served by another
            kernel.
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
        groups.pop()  # the next request may belong to this group
    whole = tuple(tuple(group) for group in groups if group)
    return Traffic(run, leg, launched, whole, dict(outside))


def _sampled(request: Request, workload: Workload) -> str:
    """The reason why a request's sampling differs from the workload's; "" if it does not."""
    sampling, declared = request.sampling, workload.sampling
    others = (v for name, v in sampling.items() if name not in _OF_ITS_OWN)
    if any(value is not None for value in others):
        return SAMPLING  # its effect on sampling is unknown
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
    """Refuse responses of another kernel than the promoted one."""
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
