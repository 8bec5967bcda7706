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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from servanda.contract.model import Contract
from servanda.errors import EvidenceError
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.clauses.loss_checks import LossSums
from servanda.judgement.evidence import Weighed
from servanda.judgement.field_rules import RuleSums
from servanda.judgement.plan import Plan
from servanda.rl.dumps.checks import Soundness, errors_of, of_step
from servanda.rl.dumps.checks.columns import FAR_NATS, Values, Zeros
from servanda.rl.dumps.checks.copies import UNSOUND
from servanda.rl.dumps.checks.pairs import IMPOSSIBLE, LIMIT_NATS
from servanda.rl.monitor.batch import Batch, DeviceBatch, agreement, is_clean
from servanda.rl.monitor.state_file import RunState
from servanda.rl.monitor.statistics import (
    StepStatistics,
    contributions,
    fits_joined,
    fits_of,
    lag_split,
    loss_metrics,
    loss_note,
    loss_problem,
    loss_problems,
    wrong_versions,
)
from servanda.rl.steps.contract import Counts, Labels
from servanda.rl.steps.drift import StepDrift, TokenSum
from servanda.rl.trend.changes import StepScalars
from servanda.theory.stats.agreement import Agreement
from servanda.theory.stats.bets import Coherence
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.theory.stats.lag_split import LagSplit
from servanda.theory.stats.tally import hosted, is_tensor, moved
from servanda.theory.stats.version_fit import VersionFit
from servanda.traces.rollouts import Array, Rollouts

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
        versions: the engine's logprobs under other versions, see `fits_of`.
        lags: sums of |log ratio| against staleness.
        scalars: sums that are followed over the run.
        gross: evidence that the mean weight is above 1, see `statistics`.
        rules: what the rules of other projects need.
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
    rules: RuleSums = field(default_factory=RuleSums)


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


# The part of this rank in a step: everything that a verdict needs of its tokens; and the parts of
# all ranks together.


def part_of(
    member: str,
    digest: str,
    contract: Contract,
    statistics: StepStatistics,
    batch: Batch,
    drafts: DraftCounts,
) -> Part:
    """Reduce a batch to what is sent to the other ranks.

    Args:
        digest: of the contract, which takes long to compute.
    """
    own = statistics.of(batch)
    names = batch.group_B or tuple(f"{b}@{member}" for b in range(batch.sequences))
    sums = StepDrift(batch.weights)
    drifts = zip(own.drift_B.tolist(), own.known_B.tolist(), strict=True)
    for name, drift, selected in zip(names, drifts, batch.selected_B.tolist(), strict=True):
        if selected:
            sums.add_groups({name: TokenSum(*drift)})
    return Part(
        member,
        digest,
        batch.weights,
        statistics=own.statistics,
        groups=tuple(sums.groups.items()),
        sequences=batch.selected,
        offered=batch.offered,
        tokens=batch.tokens,
        usable=own.usable,
        staleness=batch.staleness,
        contributions=contributions(batch, psi_of(contract)),
        unsound=(*data_problems(batch), *loss_problems(batch)),
        agreement=agreement(batch),
        drafts=drafts,
        loss=own.loss,
        versions=fits_of(batch),
        lags=lag_split(batch),
        scalars=own.scalars,
        gross=own.gross,
        rules=own.rules,
    )


def drafts_of(parts: Sequence[Part]) -> DraftCounts:
    """What the engines of all ranks counted."""
    return sum((part.drafts for part in parts), DraftCounts())


def weighed_of(plan: Plan, parts: Sequence[Part], groups: int) -> Weighed:
    """The parts of all ranks as one closed round, the scope of a step's verdict."""
    drafts = drafts_of(parts)
    by_cell = zip(plan.cells, zip(*(part.statistics for part in parts), strict=True), strict=True)
    return Weighed(
        tuple(drafts if c.kind.reads == "drafts" else c.kind.join(own) for c, own in by_cell),
        ((),) * len(plan.cells),  # a step has no noise floor
        sequences=sum(part.sequences for part in parts),
        tokens=sum(part.tokens for part in parts),
        groups=groups,
        agreement=sum((part.agreement for part in parts), Agreement()),
    )


def extras_of(
    plan: Plan, parts: Sequence[Part], weights: int
) -> tuple[list[str], list[str], dict[str, float]]:
    """What the logprobs of all ranks say together, what the loss used, which versions sampled.

    Returns:
        The problems, the notes, and the metrics to log.
    """
    gross = sum((part.gross for part in parts), Coherence())
    # no mean of growths exceeds the largest, so that most steps need no mean
    likely = max(gross.growth, default=0.0) >= LIMIT_NATS
    problems = [IMPOSSIBLE] if likely and gross.log_e >= LIMIT_NATS else []
    notes: list[str] = []
    metrics: dict[str, float] = {}
    sums = [part.loss for part in parts if part.loss is not None]
    if sums:
        whole = LossSums.joined(sums)
        problems += filter(None, [loss_problem(whole, plan.contract)])
        notes += filter(None, [loss_note(whole, plan.contract)])
        metrics |= loss_metrics(whole, plan.contract)
    fits = fits_joined([part.versions for part in parts])
    if fits:
        wrong = wrong_versions(fits, weights, plan.alpha)
        problems += wrong.values()
        metrics["servanda/version/wrong_replicas"] = float(len(wrong))
    line = sum((part.lags for part in parts), LagSplit()).line
    if line is not None:
        metrics["servanda/lag/gap_nats"] = line.gap
        metrics["servanda/lag/per_update_nats"] = line.slope
        for name, at in (("low", 0), ("high", 1)):
            metrics[f"servanda/lag/per_update_nats/{name}"] = line.slope_interval[at]
    return problems, notes, metrics


# Data quality checks of a step, before it is judged.


CHECKED_TOKENS = 8192  # of a rank's step, for the checks that a dump has
_ON_ALL = ("values", "zeros", "coverage", "coherence", "copies")  # judged on every token
_RARE_NATS = -14.0  # probability of a whole response: one in a million
# for example, verl's bypass mode uses the rollout engine's logprobs for the trainer's
_COPY = "logp_train and logp_infer are one array: the trainer's own logprobs were not computed"


def some_rows(batch: Batch, tokens: int, *, mixed: bool = False) -> Array:
    """Sequences with so many judged tokens or a few more: their indices, in order.

    Args:
        mixed: not the first ones, but the first in an order that the step alone determines.
    """
    order_B = np.arange(batch.sequences)
    if mixed:
        order_B = np.random.default_rng(batch.weights).permutation(order_B)
    n_B = hosted(batch.mask_BT.sum(1))[order_B]
    return np.sort(order_B[: 1 + int(np.searchsorted(n_B.cumsum(), tokens))])


def rollouts_of(batch: Batch, member: str = "", rows: Array | None = None) -> Rollouts:
    """A step in the form of a dump; every column of the arrays is a token of its sequence.

    Args:
        member: name of this rank, for sequences without a prompt group.
        rows: only these sequences; of an accelerator's arrays, no others are copied.
    """
    width = batch.mask_BT.shape[1]
    row_R = np.arange(batch.sequences) if rows is None else rows

    def taken(values: Any) -> Array:
        own = values[moved(row_R, values)] if is_tensor(values) else values[row_R]
        return hosted(own) if is_tensor(own) else own

    token_RT = np.full((len(row_R), width), -1)
    if batch.token_BT is not None:
        token_RT = taken(batch.token_BT)[:, -width:]
    stale = {}
    if batch.staleness_BT is not None:
        stale_RT = np.broadcast_to(taken(batch.staleness_BT), (len(row_R), width))
        stale["staleness"] = stale_RT.ravel().astype(np.float64)
    names = [batch.group_B[b] if batch.group_B else f"{b}@{member}" for b in row_R.tolist()]
    return Rollouts(
        batch.weights,
        np.full(len(row_R), width),
        token_RT.ravel(),
        taken(batch.mask_BT).ravel(),  # all are copies, for the trainer may change its arrays
        taken(batch.logp_train_BT).ravel().astype(np.float64),
        taken(batch.logp_infer_BT).ravel().astype(np.float64),
        tuple(names),
        tuple(f"sequence {b}" for b in row_R.tolist()),
        {name: tuple(values[b] for b in row_R) for name, values in batch.labels.items()},
        {},
        stale,
    )


def data_problems(batch: Batch) -> tuple[str, ...]:
    """The reasons why a step cannot be evidence.

    Over all tokens: both logprobs are one array, some are above 0, missing ones were filled with 0,
    or responses repeat.  Over the tokens of some sequences: every check of a dump that needs no
    more than logprobs and the mask.
    """
    problems = [_COPY] if batch.one_array else []
    if not (isinstance(batch, DeviceBatch) and is_clean(batch, _RARE_NATS)):
        problems += _repeated(batch.on_host)
        if _suspicious(batch.on_host):
            rollouts, checks = rollouts_of(batch.on_host), (Values(), Zeros())
            for check in checks:
                check.add(rollouts)
            problems += errors_of(check.finding() for check in checks)
    if not problems and batch.tokens:
        rows = some_rows(batch, CHECKED_TOKENS, mixed=True)
        problems += sample_problems([rollouts_of(batch, rows=rows)], but=_ON_ALL)
    return tuple(problems)


def sample_problems(parts: Iterable[Rollouts], but: Sequence[str] = ()) -> tuple[str, ...]:
    """The reasons why a step is no evidence: a dump's checks, on some of its tokens.

    Args:
        but: names of checks that are left out.
    """
    sound = Soundness(alone=True, but=but)
    for part in parts:
        sound.add(part)
    return errors_of(map(of_step, sound.findings()))


def _repeated(batch: Batch) -> list[str]:
    """Repeated responses that are too unlikely to be sampled twice.

    Two samples with bitwise equal logprobs are one response.  Its probability of being sampled
    again is its own probability, so a nearly certain response may repeat.
    """
    infer_BT = np.where(batch.mask_BT, batch.logp_infer_BT, 0.0)
    sum_B = infer_BT.sum(axis=1, dtype=np.float64)
    rare_R = np.flatnonzero(sum_B < _RARE_NATS)  # -inf and NaN are not sampled responses
    rare_R = rare_R[np.isfinite(sum_B[rare_R])]
    if len(rare_R) == len(np.unique(sum_B[rare_R])):
        return []
    firsts: dict[bytes, int] = {}
    repeated, elsewhere = 0, 0
    for row in rare_R.tolist():
        first = firsts.setdefault(infer_BT[row][batch.mask_BT[row]].tobytes(), row)
        if first != row:
            repeated += 1
            elsewhere += batch.group_B is not None and batch.group_B[first] != batch.group_B[row]
    if repeated <= UNSOUND * len(rare_R):
        return []
    return [
        f"{repeated:,} of {batch.selected:,} sequences repeat the logprobs of another to the last "
        f"bit ({elsewhere:,} under another prompt group), and none was likely to be sampled twice: "
        "the sampler repeats itself (deterministic, or seeded alike for every sample of a prompt), "
        "or rows were copied; they are not independent samples"
    ]


def _suspicious(batch: Batch) -> bool:
    """Whether a detailed check is needed; untrained tokens may be the reason."""
    train_BT, infer_BT = batch.logp_train_BT, batch.logp_infer_BT
    highest = (np.fmax.reduce(logp, axis=None, initial=0.0) for logp in (train_BT, infer_BT))
    filled = (
        ((own == 0) & (other < FAR_NATS)).any()
        for own, other in ((train_BT, infer_BT), (infer_BT, train_BT))
    )
    return any(high > 0 for high in highest) or any(filled)
