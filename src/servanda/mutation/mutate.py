# Mutating: limits moved, faults injected, and a kernel that has to pass; three questions, one score.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from servanda import loading
from servanda.contract import Contract
from servanda.drill import drill
from servanda.engines.worker import spawn
from servanda.errors import ContractError, Interrupted
from servanda.faults import FAULTS
from servanda.measurement import Open, Progress, Watch, unwatched
from servanda.mutation.conforming import against_itself, beyond_reach, conforming
from servanda.mutation.faults import inject, named
from servanda.mutation.limits import try_limits
from servanda.mutation.result import Conforming, Injected, Mutation, Part
from servanda.plan import draft, out_of_reach
from servanda.rehearsal import ContractTest, Recording, rehearse

PARTS: tuple[Part, ...] = ("limits", "faults")
Said = Callable[[str], None]


def unsaid(_: str) -> None:
    """Nobody listens."""


def never() -> bool:
    """The time is never over."""
    return False


def mutate(
    contract: Contract,
    tests: Sequence[ContractTest] = (),
    *,
    recorded: Mapping[str, Recording] | None = None,
    only: Part | None = None,
    faults: Sequence[str] = (),
    open: Open = spawn,
    watch: Watch = unwatched,
    deadline: Callable[[], bool] = never,
    say: Said = unsaid,
) -> Mutation:
    """Find out whether a contract and its tests tell good kernels from bad ones.

    Moved limits are held against the tests, which costs no kernel.  Then the train kernel is
    checked against itself, the contract as it is, and with each fault in it.  Ctrl-C ends it
    with what was found so far.

    Args:
        tests: that the contract passes; recorded: runs under the names that their cases give.
        only: one of the two parts; faults: of the catalogue, none is every one.
        deadline: whether the time is over; no round and no mutant starts after that.
        say: is told what the faults will cost, before the first.

    Raises:
        ContractError: the contract cannot be measured, or its tests do not pass as they are.
        MeasurementError: no such fault, or a check without a fault failed.
    """
    names = named(faults)
    asked = (only,) if only else PARTS
    run = _Run(contract, tests, recorded or {}, open, watch, deadline, say)
    result = Mutation(
        contract.metadata.name,
        contract.digest,
        asked,
        tests=len(tests),
        cases=sum(len(test.cases) for test in tests),
    )
    ...
