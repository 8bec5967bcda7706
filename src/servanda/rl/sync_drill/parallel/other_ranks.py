# The parts of a preflight test that every process of a sharded trainer carries out: the calls of
# rank 0 on its own shard, and the restoration from a journal.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from servanda.errors import Interrupted, MeasurementError
from servanda.rl.sync_drill.parallel.local_weights import LocalWeights
from servanda.rl.sync_drill.parallel.process_group import Ranks
from servanda.rl.sync_drill.parallel.weight_journal import Journal, checked, own_path, put_back
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.sides import Sides, error_line
from servanda.rl.sync_drill.signals import TimedOut, TimeLimit
from servanda.rl.sync_drill.trainee import Trainee
from servanda.runner.measurement import unwatched

Verb = Callable[..., Any]


def follow(trainee: Trainee, journal: Path | None, limit: TimeLimit, ranks: Ranks) -> Preflight:
    """The test on a rank other than 0; its result.

    Raises:
        MeasurementError, Interrupted: as on rank 0.
    """

    def nothing() -> None:
        pass

    named, restore = _refusing("the test has not begun"), nothing
    try:
        weights = LocalWeights(trainee.module)
        named, restore = _verbs(trainee, weights, journal, limit, ranks), weights.restore
    except MeasurementError as error:
        named = _refusing(error)
    with ranks.signals:
        ranks.signals.shield()
        result = ranks.follow(named, restore)
        if ranks.signals.taken():  # after the last call; the weights are restored by then
            raise Interrupted(
                "preflight was stopped at its end\n  state: weights restored bit for bit"
            )
        return result


def _verbs(
    trainee: Trainee, weights: LocalWeights, journal: Path | None, limit: TimeLimit, ranks: Ranks
) -> Mapping[str, Verb]:
    sides = Sides(trainee, [], 0, unwatched, limit, ranks)
    kept = Journal(journal, weights, ranks.rank, ranks.size)

    own = (sides.names_here, sides.train_here, sides.sync_here, sides.again_here)
    calls = (*own, kept.write, kept.remove)
    return {**verbs(weights), **{call.__name__: call for call in calls}}


def verbs(of: object) -> Mapping[str, Verb]:
    """The public methods of an object by name."""
    names = (name for name in dir(of) if not name.startswith("_"))
    return {name: getattr(of, name) for name in names if callable(getattr(of, name))}


def _refusing(problem: MeasurementError | str) -> Mapping[str, Verb]:
    error = MeasurementError(problem) if isinstance(problem, str) else problem

    def refuse(*_: object) -> None:
        raise error

    return defaultdict(lambda: refuse)


class Restoration:
    """The restoration of the weights in a journal, in each process those of its own.

    Raises:
        MeasurementError: as of `servanda.rl.sync_drill.drill.restore`.
    """

    def __init__(self, trainee: Trainee, path: Path, limit: TimeLimit, ranks: Ranks) -> None:
        self.trainee, self.limit, self.ranks = trainee, limit, ranks
        self.path = own_path(path, ranks.rank, ranks.size)

    def run(self) -> None:
        for step in (self.check, self.put, self.sync, self.remove):
            self.ranks.call(step)

    def check(self) -> None:
        self.weights = checked(self.trainee.module, self.path)

    def put(self) -> None:
        put_back(self.trainee.module, self.weights)

    def sync(self) -> None:
        try:
            with self.limit():
                self.trainee.sync()
        except (Exception, TimedOut) as error:
            raise MeasurementError(
                f"the weights are restored, but the sync raised {error_line(error)}",
                hint="the engine still holds perturbed weights; "
                f"{self.path} is kept until a sync succeeds",
            ) from error

    def remove(self) -> None:
        self.path.unlink()
