# The drill: what is done to the weights, in which order, and how all of it is undone.

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from servanda.errors import Interrupted, MeasurementError
from servanda.measurement import Watch, unwatched
from servanda.preflight.concluding import concluded
from servanda.preflight.groups import Group, block_name, blocks, grouped
from servanda.preflight.keeping import (
    Weights,
    put_back,
    read_journal,
    refuse_journal,
    write_journal,
)
from servanda.preflight.looking import cast_of, parts_of, sized
from servanda.preflight.nudging import apart, distance, following
from servanda.preflight.planning import plan_of
from servanda.preflight.result import (
    DEAF,
    OFF,
    PLAIN,
    POISON_FLOORS,
    POISON_NATS,
    POISON_SHARE,
    SEEN,
    AsFound,
    Mark,
    Part,
    Poisoned,
    Preflight,
    Response,
)
from servanda.preflight.sides import Sides, told
from servanda.preflight.signals import Signals, Terminated
from servanda.preflight.trainee import Trainee, probes
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
            f"the weights are restored, and the sync threw {told(error)}",
            hint=f"the engine is as the drill left it; {path} is kept until a sync succeeds",
        ) from error
    path.unlink()


class _Drill:
    """One drill: the state of its few minutes."""

    def __init__(self, trainee: Trainee, journal: Path | None, seed: int, watch: Watch) -> None:
        self.trainee, self.journal = trainee, journal
        self.weights = Weights(trainee.module, seed)
        self.groups = grouped(self.weights.aliases)
        self.sides = Sides(trainee, probes(trainee, seed), plan_of(self.weights).least, watch)
        self.changed, self.whole, self.journals = False, False, False
        self.signals = Signals()

    def run(self) -> Preflight:
        began = time.monotonic()
        with self.signals:
            try:
                found, poison, groups, returned = self._there_and_back()
            except (KeyboardInterrupt, Terminated) as error:
                # between two lines of ours; no second one is raised until it waits no more
                self._restored()
                raise _stopped(error, self._state()) from error
        return concluded(
            found,
            poison,
            groups,
            returned=returned,
            syncs=self.sides.syncs,
            tokens=sum(len(row) - 1 for row in self.sides.rows),
            seconds=time.monotonic() - began,
        )

    def _there_and_back(self) -> tuple[AsFound, Poisoned, tuple[Response, ...], float]:
        self._journalled()
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
        return found, poison, groups, self._returned(start_N)

    # the order of it all

    def _measured(self) -> tuple[AsFound, Poisoned, tuple[Response, ...], Floats]:
        found, train_N, infer_N = self._as_found()
        poison = self._poisoned(found, train_N, infer_N)
        base_train_N, base_infer_N = self._anchored(train_N, infer_N)
        groups = self._nudged(found.floor, base_train_N, base_infer_N)
        return found, poison, groups, infer_N

    def _as_found(self) -> tuple[AsFound, Floats, Floats]:
        train_N, again_N = self.sides.train(), self.sides.train()
        before_N, repeated_N = self.sides.infer(), self.sides.infer()
        self.sides.stage = "sync of unchanged weights"
        self.sides.sync()
        after_N = self.sides.infer()
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
            cast=cast_of(self.weights, after_N - train_N, train_N, self.sides.train),
        )
        return found, train_N, after_N

    def _poisoned(self, found: AsFound, train_N: Floats, infer_N: Floats) -> Poisoned:
        self.sides.stage = "poison"
        self.weights.poison()
        self.sides.sync()
        there_N, here_N = self.sides.infer(), self.sides.train()
        change_N = here_N - train_N
        apart_by, moved = distance(there_N, here_N), distance(here_N, train_N)
        limit = max(POISON_FLOORS * found.floor, POISON_SHARE * moved)
        answer = following(change_N, there_N - infer_N) if change_N.any() else None
        mark: Mark = "violated" if apart_by > limit else "holds"
        if moved < POISON_FLOORS * found.floor:
            mark = "unseen"
        if answer and moved > POISON_NATS and answer.follow + 3 * answer.spread < DEAF:
            # however far apart the two were to begin with: one changed, the other did not
            mark = "violated"
        poison = Poisoned(
            distance=apart_by,
            moved=moved,
            follow=answer.follow if answer else np.nan,
            limit=limit,
            mark=mark,
        )
        if poison.mark == "violated" and poison.follow < DEAF:
            # the same tokens the other way round: no cache of prefixes knows them
            rows = [row[::-1] for row in self.sides.rows]
            poison = replace(poison, fresh=distance(self.sides.infer(rows), self.sides.train(rows)))
        self.weights.restore()
        return poison

    def _anchored(self, train_N: Floats, infer_N: Floats) -> tuple[Floats, Floats]:
        """Both sides where nudges begin: the weights themselves, but for matrices of zeros."""
        if not self.weights.anchor():
            return train_N, infer_N
        self.sides.stage = "filling matrices of zeros"
        self.sides.sync()
        return self.sides.train(), self.sides.infer()

    def _nudged(self, floor: float, train_N: Floats, infer_N: Floats) -> tuple[Response, ...]:
        responses: dict[str, Response] = {}
        for block in blocks(self.groups):
            found = self._block(block, floor, train_N, infer_N)
            if len(block) > 1 and _is_mixed(found):
                self.sides.total += len(block)
                found = [r for g in block for r in self._block((g,), floor, train_N, infer_N)]
            responses.update((response.name, response) for response in found)
        return tuple(responses[group.name] for group in self.groups)

    def _block(
        self, block: Sequence[Group], floor: float, train_N: Floats, infer_N: Floats
    ) -> list[Response]:
        """One sync with some groups nudged."""
        self.sides.stage = f"nudge of {block_name(block)}"
        looks = [sized(self.weights, [g], train_N, self.sides.train, floor) for g in block]
        for group, (size, _) in zip(block, looks, strict=True):
            self.weights.nudge(group.tensors, size)
        self.sides.sync()
        change_N = self.sides.infer() - infer_N
        own_N = self.sides.train() - train_N if len(block) > 1 else looks[0][1]
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
            due = response.doubtful or group.kind == "tied"
            if len(block) == 1 and due and not response.deaf_as_a_whole:
                parts = self._parts(group, size, train_N, own_N, change_N)
                response = replace(response, parts=parts)
            responses.append(response)
        return responses

    def _parts(
        self, group: Group, size: float, train_N: Floats, own_N: Floats, change_N: Floats
    ) -> tuple[Part, ...]:
        looks = parts_of(self.weights, group, size, train_N, self.sides.train)
        if len(looks) < 2:
            return ()
        fits = apart([*looks.values()], own_N, change_N)
        return tuple(Part(name, *fit) for name, fit in zip(looks, fits, strict=True))

    # the way back

    def _journalled(self) -> None:
        if self.journal is None:
            return
        refuse_journal(self.journal)
        self.journals = True  # from here on the file is ours, whole or not there
        try:
            write_journal(self.journal, self.weights.kept)
        except FileExistsError:
            self.journals = False
            self._journalled()

    def _restored(self) -> None:
        if self.whole:
            return
        self.signals.shield()
        self.weights.restore()
        self.whole = True
        if self.journal is not None and self.journals:
            self.journal.unlink(missing_ok=True)

    def _state(self) -> str:
        if not self.changed:
            return "no weight was changed"
        return f"weights restored bit for bit; {_ENGINE_UNKNOWN}"

    def _returned(self, start_N: Floats) -> float:
        """Sync the restored weights; how far the engine is from where it was, nats."""
        self.sides.stage = "sync of the restored weights"
        try:
            self.signals.expose()
            self.sides.sync()
            return distance(self.sides.infer(), start_N)
        except BaseException as error:
            raise _stopped(error, self._state()) from error

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
                f"weights restored bit for bit; the sync that followed threw {told(again)}: "
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


def _is_mixed(found: Sequence[Response]) -> bool:
    """Whether a block has to be taken apart: something is wrong, and not all of it is deaf."""
    if not any(response.doubtful for response in found):
        return False
    deaf = all(r.follow < 1 - OFF and r.residual < PLAIN for r in found)
    return not deaf
