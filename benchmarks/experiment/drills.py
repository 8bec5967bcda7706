# drills.json: one preflight sync test for each fault of a sync, on the model of the experiment.

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DRILLS = Path(__file__).parent / "drills.json"


@dataclass(frozen=True)
class Drilled:
    """One preflight sync test.

    Args:
        found, poison: mean |d| at equal weights, and after all weights were randomised and synced,
            nats; limit: of the latter.
        deaf: names of the groups that are not synced.
        score_seconds: of one scoring of the probe tokens by the engine, beside it.
        restored: whether every tensor of the trainer has the bits it had before.
    """

    fault: str
    outcome: str
    cause: str
    sentence: str
    found: float
    poison: float
    limit: float
    deaf: list[str]
    syncs: int
    tokens: int
    seconds: float
    score_seconds: float
    restored: bool


def read_drills() -> list[Drilled]:
    return [Drilled(**raw) for raw in json.loads(DRILLS.read_text())]
