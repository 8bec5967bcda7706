# Ranks: the messages of a trainer's processes about a step, and their combination.
#
# Every rank sends one value and receives all of them, so all reach the same result.  A rank that
# cannot read its own arrays sends the reason instead: if it stopped alone, the others would wait
# forever.

from __future__ import annotations

import math
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from servanda.errors import EvidenceError
from servanda.judgement.clauses.loss_checks import LossSums
from servanda.rl.monitor.state_file import RunState
from servanda.rl.steps.contract import Counts, Labels
from servanda.rl.steps.drift import TokenSum
from servanda.rl.trend.step_scalars import StepScalars
from servanda.theory.stats.agreement import Agreement
from servanda.theory.stats.coherence import Coherence
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.theory.stats.lag_split import LagSplit
from servanda.theory.stats.version_fit import VersionFit
from servanda.traces.rollouts import Rollouts

Gather = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class RankMessage:
    """The common fields of messages.

    Args:
        member: unique name of the sending process.
        contract: digest of its contract; weights: its step, -1 if none.
        refused: why it cannot take part in the step.
    """

    member: str
    contract: str
    weights: int
    refused: str = ""


@dataclass(frozen=True)
class Opening(RankMessage):
    """The message before the first step: the data that defines the slices of the run.

    Args:
        labels: combinations of labels, in the order of the sequences.
        sample: some of its tokens, for causes.
        state: state of the run that is continued, from the first rank.
    """

    counts: Counts = field(default_factory=Counts)
    labels: tuple[Labels, ...] = ()
    sample: Sequence[Rollouts] = ()
    state: RunState = field(default_factory=RunState)


@dataclass(frozen=True)
class Part(RankMessage):
    """A rank's share of a step.

    Args:
        statistics: statistics of each cell.
        groups: prompt group -> sum of |log ratio|, and usable tokens.
        sequences: number of judged sequences, selected from `offered`.
        tokens, usable: number of trained tokens, and of those with both logprobs.
        staleness: (sum, tokens, largest), over known values.
        contributions: see `statistics.contributions`.
        unsound: problems of its data.
        agreement: whether its two columns could have disagreed.
        drafts: what its engines counted.
        loss: what the loss used; None if it is not recorded.
        versions: the engine's logprobs under other versions, see `versions.fits_of`.
        lags: sums of |log ratio| against staleness.
        scalars: sums that are followed over the run.
        gross: evidence that the mean weight is above 1, see `statistics`.
    """

    statistics: tuple[Any, ...] = ()
    groups: tuple[tuple[str, TokenSum], ...] = ()
    sequences: int = 0
    offered: int = 0
    tokens: int = 0
    usable: int = 0
    staleness: tuple[float, int, float] = (0.0, 0, 0.0)
    contributions: tuple[float, float, int] = (0.0, 0.0, 0)
    unsound: tuple[str, ...] = ()
    agreement: Agreement = field(default_factory=Agreement)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    loss: LossSums | None = None
    versions: Mapping[tuple[str, int], VersionFit] = field(default_factory=dict)
    lags: LagSplit = field(default_factory=LagSplit)
    scalars: StepScalars = field(default_factory=StepScalars)
    gross: Coherence = field(default_factory=Coherence)


@dataclass(frozen=True)
class Overlaps(RankMessage):
    """The message for a violated step.

    Args:
        atoms: the slices that tokens share, see `statistics.overlaps`.
        sample: some of its tokens, for causes.
    """

    atoms: tuple[tuple[int, int, float], ...] = ()
    sample: Sequence[Rollouts] = ()


M = TypeVar("M", bound=RankMessage)


def alone(message: Any) -> Sequence[Any]:
    """A gather for a single rank."""
    return [message]


def name_of_member() -> str:
    """The unique name of this process; a fork has another one."""
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"


def gathered(gather: Gather, mine: M) -> tuple[list[M], int]:
    """The messages of all ranks, in order, and the index of this one.

    Raises:
        EvidenceError: a rank cannot take part, ranks concern different steps or contracts, or
            one is there twice or not at all.
    """
    messages: list[M] = list(gather(mine))
    for i, message in enumerate(messages):
        if type(message) is not type(mine):
            raise EvidenceError(
                f"rank {i} sent {type(message).__name__}, and this one {type(mine).__name__}",
                hint="every rank has to observe every step, with its own gather",
            )
    for i, message in enumerate(messages):
        if message.refused:
            place = f"rank {i}: " if len(messages) > 1 else ""
            raise EvidenceError(f"{place}{message.refused}")
    ranks: dict[str, int] = {}
    for i, message in enumerate(messages):
        first = ranks.setdefault(message.member, i)
        if first != i:
            raise EvidenceError(
                f"ranks {first} and {i} are the same process: its tokens would count twice",
                hint="gather once from each rank, in the group that shares a step",
            )
    for what, values in (
        ("step", [message.weights for message in messages]),
        ("contract", [message.contract[:8] for message in messages]),
    ):
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise EvidenceError(
                f"rank 0 has {what} {values[0]}, and rank {other} has {values[other]}",
                hint="a verdict is of one step and one contract on all ranks",
            )
    if mine.member not in ranks:
        raise EvidenceError(
            f"gather returned {len(messages)} ranks, without this one",
            hint="return the objects of all ranks, this one included",
        )
    return messages, ranks[mine.member]


def groups_of(parts: Sequence[Part]) -> dict[str, TokenSum]:
    """Prompt groups of all ranks, in an order independent of the ranks' order."""
    sums: dict[str, list[TokenSum]] = {}
    for part in parts:
        for name, drift in part.groups:
            sums.setdefault(name, []).append(drift)
    added = [
        (name, TokenSum(math.fsum(s.total for s in own), sum(s.n for s in own)))
        for name, own in sums.items()
    ]
    return dict(sorted(added, key=lambda item: (item[1].n, item[1].total)))


def added(parts: Sequence[Overlaps]) -> dict[int, tuple[int, float]]:
    """The overlaps of all ranks: bits -> tokens, and the sum of their (1 - w)^+."""
    atoms: dict[int, list[tuple[int, float]]] = {}
    for part in parts:
        for bits, n, tv in part.atoms:
            atoms.setdefault(bits, []).append((n, tv))
    return {
        bits: (sum(n for n, _ in own), math.fsum(tv for _, tv in own))
        for bits, own in sorted(atoms.items())
    }
