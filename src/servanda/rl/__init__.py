# Python API for trainers: the preflight sync test before a run, the monitor during it, and the
# hooks of TRL and verl.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servanda.engines.http.draft_meter import DraftMeter
    from servanda.rl.follow.follow import Follow
    from servanda.rl.monitor.monitor import Monitor, Step
    from servanda.rl.sync_drill.stream import Stream
    from servanda.rl.sync_drill.trainee import Trainee
    from servanda.rl.trainer_drill import preflight
    from servanda.rl.watch.monitor_state import read_state
    from servanda.theory.stats.draft_counts import DraftCounts

# name -> module; imported on first use, so that `import servanda.rl` does not import torch
_HOME = {
    "DraftCounts": "theory.stats.draft_counts",
    "DraftMeter": "engines.http.draft_meter",
    "Follow": "rl.follow.follow",
    "Monitor": "rl.monitor.monitor",
    "Step": "rl.monitor.monitor",
    "Stream": "rl.sync_drill.stream",
    "Trainee": "rl.sync_drill.trainee",
    "preflight": "rl.trainer_drill",
    "read_state": "rl.watch.monitor_state",
}

__all__ = [
    "DraftCounts",
    "DraftMeter",
    "Follow",
    "Monitor",
    "Step",
    "Stream",
    "Trainee",
    "preflight",
    "read_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'servanda.rl' has no attribute {name!r}")
    return getattr(import_module(f"servanda.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
