# What is measured once, beside the rounds: timed requests, batches, corners of the envelope.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servanda.clauses.base import Source
from servanda.evidence import Evidence, Weighed
from servanda.identity import EvidenceKey
from servanda.plan import Plan

Once = Mapping[Source, Any]  # source -> what its kinds of clause weigh


def weigh_once(plan: Plan, key: EvidenceKey, once: Once) -> Evidence:
    """What was measured once as evidence; pure."""
    return Evidence(key, plan.digest, once={s: _weighed(plan, s, run) for s, run in once.items()})


def _weighed(plan: Plan, source: Source, run: Any) -> Weighed:
    cells = [c if c.kind.source == source else None for c in plan.cells]
    return Weighed(
        tuple(c and c.kind.weigh(c, run) for c in cells),
        tuple(c and c.kind.noise(c, run) for c in cells),
    )
