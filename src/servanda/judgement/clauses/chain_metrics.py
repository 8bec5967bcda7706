# Metrics of the bound chain, which a contract's declarations define.
#
# A divergence does not depend on the contract; its effect on a reward or a policy gradient depends
# on the declared rewards and advantages.  Each such metric is one class, with its requirements and
# its certificate.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from servanda.registry import Registry
from servanda.theory.divergence.base import DIVERGENCES

if TYPE_CHECKING:
    from servanda.contract.clause import Clause
    from servanda.contract.model import Contract
    from servanda.judgement.clauses.base import Kind
    from servanda.judgement.slices.rules import Known


class Lack(NamedTuple):
    """A problem of a clause, at one of its keys."""

    message: str
    hint: str
    key: str = "metric"


class ChainMetric(Protocol):
    """A metric of the chain in the contract language.

    `meaning`: a phrase; `example`: an example clause; `takes`: keys of a clause besides the limit;
    `known`: the latest kind of slice on which it is defined.  The contract's declarations may
    narrow both: see `under`.
    """

    meaning: ClassVar[str]
    metric_unit: ClassVar[str]
    example: ClassVar[str]
    takes: ClassVar[frozenset[str]]
    known: ClassVar[Known]

    @classmethod
    def under(cls, contract: Contract, /) -> type[ChainMetric]:
        """The metric under this contract, whose declarations may change the unit."""
        ...

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause, /) -> Iterator[Lack]:
        """The problems that prevent a judgement of the clause."""
        ...

    @classmethod
    def of(cls, contract: Contract, clause: Clause, /) -> Kind:
        """The kind of a complete clause."""
        ...


CHAIN: Registry[type[ChainMetric]] = Registry("metric", aside=DIVERGENCES)


def chain_metric(contract: Contract, clause: Clause) -> type[ChainMetric]:
    """The metric of a clause of the chain under its contract."""
    return CHAIN[clause.metric].under(contract)
