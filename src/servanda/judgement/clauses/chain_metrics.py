# Metrics of the bound chain, which a contract's declarations define.
#
# A divergence does not depend on the contract; its effect on a reward or a policy gradient depends
# on the declared rewards and advantages.  Each such metric is one class, with its requirements and
# its certificate.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import Cell, Kind
from servanda.judgement.clauses.statistical import Certificate, Feed
from servanda.judgement.slices.rules import Known
from servanda.registry import Registry
from servanda.theory.divergence.base import DIVERGENCES


class Lack(NamedTuple):
    """A problem of a clause, at one of its keys."""

    message: str
    hint: str
    key: str = "metric"


class ChainMetric(Kind):
    """A metric of the chain in the contract language.

    `meaning`: a phrase; `example`: an example clause; `takes`: keys of a clause besides the limit;
    `known`: the latest kind of slice on which it is defined; `nonnegative`: whether the mean of any
    two kernels is.  The contract's declarations may narrow all: see `under`.
    """

    meaning: ClassVar[str] = ""
    example: ClassVar[str] = ""
    takes: ClassVar[frozenset[str]] = frozenset()
    known: ClassVar[Known] = "context"
    nonnegative: ClassVar[bool] = True

    @property
    def phrase(self) -> str:
        return self.meaning

    @classmethod
    def under(cls, _: Contract, /) -> type[ChainMetric]:
        """The metric under this contract, whose declarations may change the unit."""
        return cls

    @classmethod
    def of(cls, contract: Contract, clause: Clause, /) -> Kind:
        """The kind of a complete clause."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChainCertificate(ChainMetric, Certificate, ABC):
    """A metric of the chain whose mean LogMoment certifies."""

    def unit(self, cell: Cell) -> str:
        return self.metric_unit

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause) -> Iterator[Lack]:
        """Missing or wrong declarations; then limits that can never hold, or never fail."""
        missing = [*cls.undeclared(contract), *cls.amiss(clause)]
        yield from missing
        if not missing:
            yield from cls.misplaced(cls.of(contract, clause).feed, clause)

    @classmethod
    def undeclared(cls, _: Contract, /) -> Iterator[Lack]:
        """Missing parts of the contract that the metric needs."""
        yield from ()

    @classmethod
    def amiss(cls, _: Clause, /) -> Iterator[Lack]:
        """Problems with the clause's keys for the metric."""
        yield from ()

    @classmethod
    @abstractmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:
        """The certificate of a complete clause."""

    @staticmethod
    def misplaced(feed: Feed, clause: Clause) -> Iterator[Lack]:
        """A limit outside the range of the metric."""
        least, most = feed.value(feed.best), feed.value(1.0)
        limit = feed.value(feed.limit)
        if feed.threshold is not None:
            return
        if feed.limit >= 1.0:
            message = f"{clause.metric} is at most {most:g} here: a limit of {limit:g} can never"
            yield Lack(f"{message} fail", f"write a limit below {most:g}", "at_most")
        elif feed.limit <= feed.best:
            message = f"no sample can show that {clause.metric} is {limit:g}"
            yield Lack(message, f"write a limit above {max(least, 0.0):g}", "at_most")


def between(limit: float, span: tuple[float, float], factor: float = 1.0) -> Feed:
    """The feed of a value within a span whose mean is never negative, in units of `factor`."""
    low, high = (factor * end for end in span)
    scale = high - low
    return Feed((limit - low) / scale, scale, low=low, best=max(-low, 0.0) / scale)


CHAIN: Registry[type[ChainMetric]] = Registry("metric", aside=DIVERGENCES)


def chain_metric(contract: Contract, clause: Clause) -> type[ChainMetric]:
    """The metric of a clause of the chain under its contract."""
    return CHAIN[clause.metric].under(contract)
