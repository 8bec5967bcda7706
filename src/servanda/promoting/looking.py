# One look at a leg of a promotion: what was measured for it so far, and what that says.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servanda.contract import Contract
from servanda.course import Leg
from servanda.engines.worker import spawn
from servanda.identity import EvidenceKey
from servanda.measurement import Open, Watch
from servanda.plan import Plan
from servanda.verdict import Verdict


@dataclass(frozen=True)
class Looked:
    """What one look at a leg found.

    Args:
        key: whom the kernels that answered now make the evidence speak of; a caller that
            promotes another one has to say so, nothing here refuses it.
        groups: prompt groups of the closed rounds.
        waiting: what is missing, as a sentence; "" where nothing is.
        outside: why served requests were left out -> how many.
    """

    verdict: Verdict
    plan: Plan
    key: EvidenceKey
    groups: int
    waiting: str = ""
    outside: Mapping[str, int] = field(default_factory=dict)


def look(
    contract: Contract,
    leg: Leg,
    root: Path,
    *,
    attempt: int,
    run: str,
    served: Sequence[Path],
    now: float,
    open: Open = spawn,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
) -> Looked:
    """Measure what there is of a leg, and judge it.

    Args:
        root: the run directory; a live leg has a folder of its own in it.
        run: name of the promotion, as the log of served requests has it.
        served: files of that log, or folders of them, in the order of their names.
        now: unix seconds.

    Raises:
        ContractError, MeasurementError, EvidenceError, Interrupted: as `check` does.
    """
    raise NotImplementedError
