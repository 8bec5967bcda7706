# Promises of the bound chain: metrics that a contract's own declarations define.
#
# A divergence is the same for everybody; how much reward it can cost, or how far it can bend
# a policy gradient, depends on what the contract says of rewards and advantages.  Each such
# metric is one class, which says what it needs and how it is certified.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import Cell, Kind
from servanda.judgement.clauses.scaling import Feed
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.slices.rules import Known
from servanda.registry import Registry


class Lack(NamedTuple):
    """What stands against a clause: found at one of its keys."""

    message: str
    hint: str
    key: str = "metric"


class ChainMetric(Protocol):
    """A metric of the chain, as the language sees it.

    `meaning`: the middle of a sentence; `example`: the clause as one would write it;
    `takes`: keys of a clause besides the limit; `known`: the latest kind of slice that it is
    defined on.  What the contract declares may narrow both: see `under`.
    """

    meaning: ClassVar[str]
    metric_unit: ClassVar[str]
    example: ClassVar[str]
    takes: ClassVar[frozenset[str]]
    known: ClassVar[Known]

    @classmethod
    def under(cls, contract: Contract, /) -> type[ChainMetric]:
        """The metric as this contract means it: what its parts declare may change the unit."""
        ...

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause, /) -> Iterator[Lack]:
        """Why the clause cannot be judged; nothing where it can."""
        ...

    @classmethod
    def of(cls, contract: Contract, clause: Clause, /) -> Kind:
        """The kind that judges a clause which lacks nothing."""
        ...


CHAIN: Registry[type[ChainMetric]] = Registry("metric")


def chain_metric(contract: Contract, clause: Clause) -> type[ChainMetric]:
    """The metric of a clause of the chain, as its contract means it."""
    return CHAIN[clause.metric].under(contract)


@dataclass(frozen=True)
class ChainCertificate(Certificate, ABC):
    """A metric of the chain whose mean LogMoment certifies."""

    meaning: ClassVar[str] = ""
    metric_unit: ClassVar[str] = ""
    example: ClassVar[str] = ""
    takes: ClassVar[frozenset[str]] = frozenset()
    known: ClassVar[Known] = "context"

    def unit(self, cell: Cell) -> str:
        return self.metric_unit

    @property
    def said(self) -> str:
        """The metric as the middle of a sentence, with what this contract makes of it."""
        return self.meaning

    @classmethod
    def under(cls, _: Contract, /) -> type[ChainMetric]:
        return cls

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause) -> Iterator[Lack]:
        """What is not declared, or said amiss; then a limit that can never hold, or never fail."""
        missing = [*cls.undeclared(contract), *cls.amiss(clause)]
        yield from missing
        if not missing:
            yield from cls.misplaced(cls.of(contract, clause).feed, clause)

    @classmethod
    def undeclared(cls, _: Contract, /) -> Iterator[Lack]:
        """Parts of the contract that the metric is not defined without."""
        yield from ()

    @classmethod
    def amiss(cls, _: Clause, /) -> Iterator[Lack]:
        """What is wrong with the keys of the clause that the metric takes."""
        yield from ()

    @classmethod
    @abstractmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:
        """The certificate of a clause which lacks nothing."""

    @staticmethod
    def misplaced(feed: Feed, clause: Clause) -> Iterator[Lack]:
        """A limit outside of what the metric can be."""
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


def limit_of(clause: Clause) -> float:
    """The limit of a clause of the chain; lint refuses anything but a number."""
    limit = clause.at_most
    assert isinstance(limit, float)
    return limit


def between(limit: float, span: tuple[float, float], factor: float = 1.0) -> Feed:
    """The feed of a value within a span whose mean is never negative, in units of `factor`."""
    low, high = (factor * end for end in span)
    scale = high - low
    return Feed((limit - low) / scale, scale, low=low, best=max(-low, 0.0) / scale)
