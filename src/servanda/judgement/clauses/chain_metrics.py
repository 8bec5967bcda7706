# Promises of the bound chain: metrics that a contract's own declarations define.
#
# A divergence is the same for everybody; how much reward it can cost, or how far it can bend
# a policy gradient, depends on what the contract says of rewards and advantages.  Each such
# metric is one class, which says what it needs and how it is certified.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from servanda.registry import Registry

if TYPE_CHECKING:
    from servanda.contract.clause import Clause
    from servanda.contract.model import Contract
    from servanda.judgement.clauses.base import Kind
    from servanda.judgement.slices.rules import Known


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
