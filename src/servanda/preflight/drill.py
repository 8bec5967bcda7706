# The drill: what is done to the weights, in which order, and how all of it is undone.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from servanda.errors import Interrupted, MeasurementError
from servanda.measurement import Progress, Watch, unwatched
from servanda.preflight.concluding import concluded
from servanda.preflight.groups import Group, block_name, blocks, grouped
from servanda.preflight.keeping import Weights, put_back, read_journal, write_journal
from servanda.preflight.looking import cast_of, parts_of, sized
from servanda.preflight.nudging import apart, distance, following
from servanda.preflight.result import (
    DEAF,
    OFF,
    RESIDUAL_ERROR,
    RESIDUAL_WARNS,
    SEEN,
    AsFound,
    Part,
    Poisoned,
    Preflight,
    Response,
)
from servanda.preflight.signals import Signals, Terminated
from servanda.preflight.trainee import Trainee, flat, probes, train_scores
from servanda.sampling import Floats

# no two kernels are said to be nearer than this, nats: logprobs of -10 in float32 are not finer
RESOLUTION = 1e-5


def preflight(
    trainee: Trainee,
    *,
    journal: str | Path | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> Preflight:
    """Find out whether what the trainer updates reaches its engine.

    The weights are changed in place, and are back bit for bit when this returns or raises, also
    after Ctrl-C and SIGTERM.  A kill that cannot be caught leaves the journal.

    Args:
        trainee: the trainer's module, its sync, and what scores tokens on both sides.
        journal: where the weights are kept on disk until they are back; None keeps them in
            memory only.
        seed: of the probe tokens and of the noise.
        watch: is told how many syncs are done, of how many.

    Raises:
        MeasurementError: a side gives no usable logprobs, the sync throws, a journal is there
            already, or nothing is trained; the message says what state the engine is in.
        Interrupted: somebody stopped it.
    """
    place = Path(journal) if journal is not None else None
    return _Drill(trainee, place, seed, watch or unwatched).run()


def restore(trainee: Trainee, journal: str | Path) -> None:
    """Put back the weights that a killed drill left in its journal, sync once, remove it.

    Raises:
        MeasurementError: no such journal, it does not fit the module, or the sync throws; then
            the journal is kept.
    """
    path = Path(journal)
    put_back(trainee.module, read_journal(path))
    try:
        trainee.sync()
    except Exception as error:
        raise MeasurementError(
            f"the weights are restored, and the sync threw {_told(error)}",
            hint=f"the engine is as the drill left it; {path} is kept until a sync succeeds",
        ) from error
    path.unlink()


@dataclass(frozen=True)
class Plan:
    """What a drill will do.

    Args:
        groups: names, in the order of the drill.
        tensors, values: how much is trained, and so kept in host memory.
        least, most: how often the sync runs; the most where every block has to be taken apart.
    """

    groups: tuple[str, ...]
    tensors: int
    values: int
    least: int
    most: int

    def __str__(self) -> str:
        syncs = f"{self.least}" + (f" to {self.most}" if self.most > self.least else "")
        return (
            f"{len(self.groups)} groups in {self.tensors} tensors of {self.values:,} values; "
            f"{syncs} syncs"
        )


def planned(trainee: Trainee) -> Plan:
    """What `preflight` will do; nothing is run.

    Raises:
        MeasurementError: nothing is trained, or the probe tokens are too few.
    """
    probes(trainee, 0)
    return _plan(Weights(trainee.module, copy=False))


def _plan(weights: Weights) -> Plan:
    groups = grouped(weights.aliases)
    taken = blocks(groups)
    least = 3 + weights.has_zeros() + len(taken)
    values = sum(parameter.numel() for parameter in weights.parameters.values())
    apart = sum(len(block) for block in taken if len(block) > 1)
    names = tuple(group.name for group in groups)
    return Plan(names, len(weights.parameters), values, least, least + apart)


class _Drill:
    """One drill: the state of its few minutes."""

    def __init__(self, trainee: Trainee, journal: Path | None, seed: int, watch: Watch) -> None:
        self.trainee, self.journal, self.watch = trainee, journal, watch
        self.rows = probes(trainee, seed)
        self.weights = Weights(trainee.module, seed)
        self.groups = grouped(self.weights.aliases)
        self.total = _plan(self.weights).least
        self.syncs = 0
        self.stage = "as found"
        self.changed, self.whole = False, False
        self.signals = Signals()

    def run(self) -> Preflight:
        began = time.monotonic()
        with self.signals:
            if self.journal is not None:
                write_journal(self.journal, self.weights.kept)
            try:
                found, poison, groups, start_N = self._measured()
            except BaseException as error:
                stopped = self._abandoned(error)
                if stopped is error:
                    raise
                raise stopped from error
            finally:
                # whatever comes meanwhile: nobody leaves before the weights are back
                self._restored()
            returned = self._returned(start_N)
        return concluded(
            found,
            poison,
            groups,
            returned=returned,
            syncs=self.syncs,
            tokens=sum(len(row) - 1 for row in self.rows),
            seconds=time.monotonic() - began,
        )

    # the order of it all

    def _measured(self) -> tuple[AsFound, Poisoned, tuple[Response, ...], Floats]:
        found, train_N, infer_N = self._as_found()
        poison = self._poisoned(found, train_N, infer_N)
        base_train_N, base_infer_N = self._anchored(train_N, infer_N)
        groups = self._nudged(found.floor, base_train_N, base_infer_N)
        return found, poison, groups, infer_N

    def _as_found(self) -> tuple[AsFound, Floats, Floats]:
        train_N, again_N = self._train(), self._train()
        before_N, repeated_N = self._infer(), self._infer()
        self.stage = "sync of unchanged weights"
        self._sync()
        after_N = self._infer()
        train_noise, engine_noise = distance(train_N, again_N), distance(before_N, repeated_N)
        idle = distance(after_N, train_N)
        self.changed = True
        found = AsFound(
            distance=distance(before_N, train_N),
            idle=idle,
            moved=distance(after_N, before_N),
            engine_noise=engine_noise,
            train_noise=train_noise,
            floor=max(idle, train_noise, engine_noise, RESOLUTION),
            cast=cast_of(self.weights, after_N - train_N, train_N, self._train),
        )
        return found, train_N, after_N

    def _poisoned(self, found: AsFound, train_N: Floats, infer_N: Floats) -> Poisoned:
        self.stage = "poison"
        self.weights.poison()
        self._sync()
        there_N, here_N = self._infer(), self._train()
        change_N = here_N - train_N
        apart_by, moved = distance(there_N, here_N), distance(here_N, train_N)
        limit = RESIDUAL_ERROR * found.floor
        poison = Poisoned(
            distance=apart_by,
            moved=moved,
            follow=following(change_N, there_N - infer_N).follow if change_N.any() else np.nan,
            limit=limit,
            mark="unseen" if moved <= limit else "violated" if apart_by > limit else "holds",
        )
        if poison.mark == "violated" and poison.follow < DEAF:
            # the same tokens the other way round: no cache of prefixes knows them
            rows = [row[::-1] for row in self.rows]
            poison = replace(poison, fresh=distance(self._infer(rows), self._train(rows)))
        self.weights.restore()
        return poison

    def _anchored(self, train_N: Floats, infer_N: Floats) -> tuple[Floats, Floats]:
        """Both sides where nudges begin: the weights themselves, but for matrices of zeros."""
        if not self.weights.anchor():
            return train_N, infer_N
        self.stage = "filling matrices of zeros"
        self._sync()
        return self._train(), self._infer()

    def _nudged(self, floor: float, train_N: Floats, infer_N: Floats) -> tuple[Response, ...]:
        responses: dict[str, Response] = {}
        for block in blocks(self.groups):
            found = self._block(block, floor, train_N, infer_N)
            if len(block) > 1 and _is_mixed(found):
                self.total += len(block)
                found = [r for g in block for r in self._block((g,), floor, train_N, infer_N)]
            responses.update((response.name, response) for response in found)
        return tuple(responses[group.name] for group in self.groups)

    def _block(
        self, block: Sequence[Group], floor: float, train_N: Floats, infer_N: Floats
    ) -> list[Response]:
        """One sync with some groups nudged."""
        self.stage = f"nudge of {block_name(block)}"
        looks = [sized(self.weights, [g], train_N, self._train, floor) for g in block]
        for group, (size, _) in zip(block, looks, strict=True):
            self.weights.nudge(group.tensors, size)
        self._sync()
        change_N = self._infer() - infer_N
        own_N = self._train() - train_N if len(block) > 1 else looks[0][1]
        for group in block:
            self.weights.settle(group.tensors)
        responses = []
        fits = apart([own for _, own in looks], own_N, change_N) if len(block) > 1 else None
        whole = following(own_N, change_N) if own_N.any() else None
        for number, (group, (size, mine_N)) in enumerate(zip(block, looks, strict=True)):
            moved = float(np.abs(mine_N).mean()) / floor
            follow, spread = fits[number] if fits else (np.nan, np.inf)
            if not fits and whole is not None:
                follow, spread = whole.follow, whole.spread
            seen = moved >= SEEN
            response = Response(
                name=group.name,
                kind=group.kind,
                layer=group.layer,
                follow=float(follow) if seen else float("nan"),
                spread=float(spread),
                residual=whole.residual_nats / floor if whole and seen else 0.0,
                moved=moved,
                size=float(size),
                block=block_name(block),
            )
            if len(block) == 1 and response.mark in ("warns", "violated"):
                parts = self._parts(group, size, train_N, own_N, change_N)
                response = replace(response, parts=parts)
            responses.append(response)
        return responses

    def _parts(
        self, group: Group, size: float, train_N: Floats, own_N: Floats, change_N: Floats
    ) -> tuple[Part, ...]:
        looks = parts_of(self.weights, group, size, train_N, self._train)
        if len(looks) < 2:
            return ()
        fits = apart([*looks.values()], own_N, change_N)
        return tuple(Part(name, *fit) for name, fit in zip(looks, fits, strict=True))

    # the two sides

    def _train(self, rows: list[list[int]] | None = None) -> Floats:
        rows = rows or self.rows
        answer = self._called(lambda: train_scores(self.trainee, rows), "the trainer's logprobs")
        return flat(answer, rows, "the trainer", self.stage)

    def _infer(self, rows: list[list[int]] | None = None) -> Floats:
        rows = rows or self.rows
        # a copy: whoever scores may keep or change what it was given
        asked = [[*row] for row in rows]
        return flat(
            self._called(lambda: self.trainee.score(asked), "score"),
            rows,
            "the engine",
            self.stage,
        )

    def _sync(self) -> None:
        self.watch(Progress("preflight", self.syncs, self.total))
        self._called(self.trainee.sync, "the sync")
        self.syncs += 1
        self.watch(Progress("preflight", self.syncs, self.total))

    def _called(self, call: Callable[[], object], what: str) -> object:
        try:
            return call()
        except Exception as error:
            raise MeasurementError(f"{self.stage}: {what} threw {_told(error)}") from error

    # the way back

    def _restored(self) -> None:
        if self.whole:
            return
        self.signals.shield()
        self.weights.restore()
        self.whole = True
        if self.journal is not None:
            self.journal.unlink(missing_ok=True)

    def _returned(self, start_N: Floats) -> float:
        """Sync the restored weights; how far the engine is from where it was, nats."""
        self.stage = "sync of the restored weights"
        try:
            self.signals.expose()
            self._sync()
            return distance(self._infer(), start_N)
        except BaseException as error:
            raise _stopped(error, f"weights restored bit for bit; {_ENGINE_UNKNOWN}") from error

    def _abandoned(self, error: BaseException) -> BaseException:
        """Weights back, one more sync, and an error that says what became of both."""
        self._restored()
        if not self.changed:
            return _stopped(error, "no weight was changed")
        try:
            self.signals.expose()
            self.trainee.sync()
        except BaseException as again:
            return _stopped(
                error,
                f"weights restored bit for bit; the sync that followed threw {_told(again)}: "
                f"{_ENGINE_UNKNOWN}",
            )
        return _stopped(error, "weights restored bit for bit, and synced to the engine once more")


_ENGINE_UNKNOWN = (
    "the engine may hold weights of the drill, so draw nothing from it before a sync succeeds"
)


def _stopped(error: BaseException, state: str) -> BaseException:
    """The same error, which also says what state all is in."""
    if isinstance(error, MeasurementError):
        problem = error.problems[0]
        return MeasurementError(f"{problem.message}\n  state: {state}", hint=problem.hint)
    if isinstance(error, KeyboardInterrupt | Terminated):
        return Interrupted(f"preflight was stopped\n  state: {state}")
    return error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_mixed(found: Sequence[Response]) -> bool:
    """Whether a block has to be taken apart: something is wrong, and not all of it is deaf."""
    marks = {response.mark for response in found}
    if marks <= {"holds"}:
        return False
    deaf = all(r.follow < 1 - OFF and r.residual < RESIDUAL_WARNS for r in found)
    return not deaf
