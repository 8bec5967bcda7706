# The preflight sync test: the changes to the weights, their order, and how they are undone.

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import numpy as np

from servanda.judgement.verdict import BlindSpot
from servanda.report.format import count
from servanda.rl.sync_drill.diagnosis import CAUSES, cause_of
from servanda.rl.sync_drill.explanation import classes, scaled_by
from servanda.rl.sync_drill.held_weights import (
    exchanged,
    lost_share,
    order_held,
    seen_shares,
    shown_alone,
)
from servanda.rl.sync_drill.parallel.other_ranks import Restoration, follow, verbs
from servanda.rl.sync_drill.parallel.process_group import Ranks, ranks_of
from servanda.rl.sync_drill.parallel.weight_journal import Journal
from servanda.rl.sync_drill.perturbation import LATEST, PerturbationTests, is_mixed
from servanda.rl.sync_drill.plan import plan_of
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.response_slope import RESOLUTION, distance, response_slope
from servanda.rl.sync_drill.result import (
    DEAF,
    EXPLAINED,
    PLAIN,
    POISON_FLOORS,
    POISON_NATS,
    POISON_SHARE,
    Baseline,
    Mark,
    Outcome,
    PoisonResult,
    Response,
    Scale,
)
from servanda.rl.sync_drill.sides import Sides, error_line, with_state
from servanda.rl.sync_drill.signals import TIMEOUT_S, Alarm, Terminated, TimeLimit
from servanda.rl.sync_drill.sparse_update import sparse_updates
from servanda.rl.sync_drill.stream import StreamNames
from servanda.rl.sync_drill.trainee import Trainee, modes_kept, probes
from servanda.rl.sync_drill.trainer_response import Trials, cast_of
from servanda.rl.sync_drill.vocabulary import ranges_of, size_of
from servanda.rl.sync_drill.weight_groups import LAYER, blocks, weight_groups
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.runner.measurement import Watch, unwatched
from servanda.theory.sampling import Floats

# The outcome of a preflight sync test, from its measurements.


def conclude(
    baseline: Baseline,
    poison: PoisonResult,
    groups: Sequence[Response],
    *,
    returned: float,
    back_late: int,
    syncs: int,
    tokens: int,
    seconds: float,
    unprobed: int | None,
    updates: Sequence[Response] = (),
    stream: StreamNames | None = None,
) -> Preflight:
    """Judge the measurements; the arguments are those of Preflight.

    Args:
        unprobed: ids of the vocabulary that no probe contains; None if its size is unknown.
    """
    layers = len({group.layer for group in groups if group.layer is not None})
    adapted = any(group.kind == "adapter" for group in groups)
    back = returned <= baseline.near
    cause = cause_of(baseline, poison, groups, adapted=adapted, layers=layers, back=back)
    # an engine may want another layout: where it follows as it should, the stream is right
    if stream and stream.misplaced and cause in ("sync_moves", "unfaithful"):
        cause = "misplaced"
    if cause in ("", "unfaithful") and poison.cause:
        cause = poison.cause
    if not cause and any(update.mark == "violated" for update in updates):
        cause = "dropped" if updates[-1].late else "sparse_updates"
    if not cause and back_late:
        cause = "dropped" if back else "not_returned"
    unseen = [group.name for group in groups if group.mark == "unseen"]
    shaky = [each.name for each in (*groups, *updates) if each.mark == "warns"]
    outcome: Outcome = "violated" if cause else "holds"
    # noise that hardly changes the trainer is no evidence, also not against synced groups
    if not cause and (unseen or shaky or poison.mark == "violated"):
        outcome = "inconclusive"
    return Preflight(
        outcome=outcome,
        cause=cause,
        sentence=_violated(cause, baseline, poison, groups, updates, back_late if back else 0)
        if cause
        else _not_violated(outcome, groups, updates, unseen, shaky),
        found=baseline,
        poison=poison,
        groups=tuple(groups),
        updates=tuple(updates),
        returned=returned,
        back=back,
        back_late=back_late,
        syncs=syncs,
        tokens=tokens,
        seconds=seconds,
        warnings=tuple(_warnings(baseline, shaky, stream, cause)),
        blind_spots=tuple(_blind_spots(groups, updates, unprobed)),
        stream=stream,
    )


def _not_violated(
    outcome: Outcome,
    groups: Sequence[Response],
    updates: Sequence[Response],
    unseen: Sequence[str],
    shaky: Sequence[str],
) -> str:
    if outcome == "holds":
        few = ", ".join(each.name.partition(" ")[0] for each in updates if each.mark == "holds")
        shares = f", and updates of {few} % of the values" if few else ""
        return f"all {len(groups)} groups of weights are synced{shares}"
    if unseen:
        which = f"{len(unseen)} of {count(len(groups), 'group')}"
        return f"{which} cannot be judged, they hardly change any logprob: {_few(unseen)}"
    if shaky:
        return f"response slope neither right nor clearly wrong: {_few(shaky)}"
    return (
        "each group alone is synced, but all of them randomised at once are not: a part of a "
        "tensor may be left out, such as a head, or a rank's shard"
    )


def _violated(
    cause: str,
    baseline: Baseline,
    poison: PoisonResult,
    groups: Sequence[Response],
    updates: Sequence[Response],
    back_late: int,
) -> str:
    wrong = [group for group in groups if group.mark == "violated"]
    sentence = CAUSES[cause]
    late = max([poison.late, back_late, *(each.late for each in (*wrong, *updates))])
    if cause in ("late", "dropped") and late:  # else no further sync delivered them
        sentence += f" ({count(late, 'sync')} later)"
    if held := baseline.exchanged or (poison.held if cause == poison.cause else ""):
        sentence += f": {held}"
    if cause == "sparse_updates":
        sentence += f": {updates[-1].name}"
    if cause in ("shard_stale", "experts_stale"):
        sentence += f": {_few([*dict.fromkeys(name for group in wrong for name in group.lost)])}"
    if cause == "scaled" and baseline.scale:
        sentence += f": {baseline.scale}"
    elif cause == "scaled":
        scales = [group.scale for group in wrong if group.scale]
        low, high = min(s.low for s in scales), max(s.high for s in scales)
        mean = sum(s.factor for s in scales) / len(scales)
        sentence += f": {mean:.3g} [{low:.3g}, {high:.3g}]"
    if cause == "sync_moves":
        sentence += (
            f" (mean |Δ logp| {baseline.distance:.2g} before, {baseline.idle:.2g} nats after)"
        )
    if wrong:
        which = [group.name for group in wrong]
        sentence += f" ({len(wrong)} of {count(len(groups), 'group')}: {_few(which)})"
    return sentence


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _warnings(
    baseline: Baseline, shaky: Sequence[str], stream: StreamNames | None, cause: str
) -> Iterator[str]:
    if shaky and cause:
        yield f"response slope neither right nor clearly wrong: {_few(shaky)}"
    if baseline.own_noise:
        yield (
            f"the trainer's own logprobs differ by {baseline.own_noise:.2g} nats from call to "
            f"call, and by {baseline.train_noise:.2g} in evaluation mode: randomness such as "
            "dropout is active where they are computed; the test used evaluation mode"
        )
    if baseline.distance > 2 * baseline.idle and not cause:
        yield "the engine had other weights before the first sync"
    if stream and stream.missing and not cause:
        yield (
            f"synced, though no name in the stream stands for them: {_few(stream.missing)}; pass "
            "their names as Stream(names=...)"
        )


def _blind_spots(
    groups: Sequence[Response], updates: Sequence[Response], unprobed: int | None
) -> Iterator[BlindSpot]:
    for update in updates:
        if update.mark == "unseen":
            yield BlindSpot("sample", f"an update of {update.name} hardly changes any logprob")
    if unprobed is None:
        text = "the vocabulary size is unknown, so vocabulary rows in no probe are not tested"
        yield BlindSpot("rows", text)
    elif unprobed > 0:
        yield BlindSpot(
            "rows",
            f"{unprobed:,} vocabulary ids occur in no probe: a single one of their rows that is "
            "not synced goes unnoticed",
        )
    unseen = [
        (f"{part.name} of {group.name}", part.moved > 0)
        for group in groups
        if group.mark == "holds" or group.lost
        for part in group.parts
        if part.unseen
    ]
    if faint := [name for name, moves in unseen if moves]:
        yield BlindSpot(
            "sample",
            "some parts change too few logprobs to be told from the rest of their group: "
            f"{_few(faint)}",
        )
    if idle := [name for name, moves in unseen if not moves]:
        yield BlindSpot(
            "sample",
            "no probe token changes with some parts, such as an expert that none is routed to: "
            f"{_few(idle)}; pass rows that reach them as tokens=",
        )


# All weights randomised at once: whether, when and where the weights reach the engine.
#
# Axes: N scored tokens.


def poison_test(
    weights: Weights,
    sides: Sides,
    baseline: Baseline,
    train_N: Floats,
    infer_N: Floats,
    apart: bool = False,
) -> PoisonResult:
    """Randomise all weights and sync once; afterwards the trainer is restored, not the engine.

    Args:
        train_N, infer_N: scores of both sides before.
        apart: whether to look which tensors would be missed one by one.
    """
    sides.stage = "all weights randomised"
    weights.poison()
    sides.sync()
    there_N, here_N = sides.infer(), sides.train()
    own_N, change_N = here_N - train_N, there_N - infer_N
    apart_by, moved = distance(there_N, here_N), distance(here_N, train_N)
    limit = max(POISON_FLOORS * baseline.floor, POISON_SHARE * moved)
    answer = response_slope(own_N, change_N) if own_N.any() else None
    mark: Mark = "violated" if apart_by > limit else "holds"
    if moved < POISON_FLOORS * baseline.floor:
        mark = "unseen"
    if answer and moved > POISON_NATS and answer.follow + 3 * answer.spread < DEAF:
        # whatever the distance before: one changed, the other did not
        mark = "violated"
    poison = PoisonResult(
        distance=apart_by,
        moved=moved,
        follow=answer.follow if answer else np.nan,
        limit=limit,
        mark=mark,
        changed=float(np.abs(change_N).mean()),
    )
    if poison.mark == "violated":
        poison = _again(sides, baseline, poison, own_N, change_N, there_N)
        if not (poison.late or poison.mixed or poison.cached or poison.still):
            cause, held = order_held(weights, sides, there_N, limit)
            poison = replace(poison, cause=cause, held=held)
    elif poison.mark == "holds":
        poison = replace(poison, shares=seen_shares(weights, sides, here_N, limit))
        if apart:
            shown = shown_alone(weights, sides, here_N, limit)
            poison = replace(poison, shown=tuple(sorted(shown)))
    weights.restore()
    return poison


def _again(
    sides: Sides,
    baseline: Baseline,
    poison: PoisonResult,
    own_N: Floats,
    change_N: Floats,
    there_N: Floats,
) -> PoisonResult:
    """Repeat after random weights did not arrive: by another call, on other tokens, after syncs.

    Args:
        own_N: the trainer's change; change_N: the engine's; there_N: its scores.
    """
    due_N, start_N = sides.train(), there_N - change_N
    changes = [change_N, sides.infer() - start_N]
    lengths = [len(row) - 1 for row in sides.rows]
    if is_mixed(own_N, changes, lengths, floor=baseline.floor, noise=baseline.engine_noise):
        return replace(poison, mixed=True)
    if poison.follow < DEAF:
        # the same tokens in reverse order: unknown to prefix caches
        rows = [row[::-1] for row in sides.rows]
        poison = replace(poison, fresh=distance(sides.infer(rows), sides.train(rows)))
        if poison.cached:
            return poison
    # of a small distance that is violated by its slope, the limit would be no improvement
    enough = poison.distance / 2
    if poison.distance > poison.limit:
        enough = max(poison.limit, enough)
    for late in range(1, LATEST + 1):
        sides.sync()
        if distance(sides.infer(), due_N) <= enough:
            return replace(poison, late=late)
    return poison


_MOST = 0.7  # share of the distance at equal weights that a factor on the adapters may leave


def preflight(
    trainee: Trainee,
    *,
    journal: str | Path | None = None,
    seed: int = 0,
    timeout_s: float | None = TIMEOUT_S,
    alarm: Alarm | None = None,
    watch: Watch | None = None,
) -> Preflight:
    """Test whether every weight that the trainer updates reaches its engine.

    The weights are changed in place, and restored bit for bit when this returns or raises, also
    after Ctrl-C and SIGTERM.  After SIGKILL the journal has them.

    Args:
        trainee: the trainer's module, its sync, and the scoring functions of both sides.
        journal: file that keeps the weights until they are restored; None keeps them in memory
            only.
        seed: seed of the probe tokens and of the noise.
        timeout_s: time limit of one sync or score, seconds; None for no limit.  After it the test
            ends, and the weights are restored.  See servanda.rl.sync_drill.signals.TimeLimit.
        alarm: the timer of that; the process's own by default.
        watch: called with the number of syncs done and planned.

    Raises:
        MeasurementError: a side gives no usable logprobs, the sync raises or exceeds its time
            limit, a journal is there already, or nothing is trained; the message gives the
            state of the engine.
        Interrupted: Ctrl-C or SIGTERM.
    """
    if trainee.replicas is not None:
        from servanda.rl.sync_drill.servers.replica_drill import preflight_of_replicas

        one = partial(
            preflight, journal=journal, seed=seed, timeout_s=timeout_s, alarm=alarm, watch=watch
        )
        return preflight_of_replicas(trainee, trainee.replicas, one, seed)
    place = Path(journal) if journal is not None else None
    limit = TimeLimit(timeout_s, alarm)
    with ranks_of(trainee.module, limit) as ranks, modes_kept(trainee.module):
        if ranks.rank:
            return follow(trainee, place, limit, ranks)
        return ranks.lead(
            lambda: _Drill(trainee, place, seed, watch or unwatched, limit, ranks).run()
        )


def restore(trainee: Trainee, journal: str | Path, *, timeout_s: float | None = TIMEOUT_S) -> None:
    """Put back the weights that a killed test left in its journal, sync once, remove it.

    Raises:
        MeasurementError: no such journal, it does not fit the module, or the sync raises; then
            the journal is kept.
    """
    limit = TimeLimit(timeout_s)
    with ranks_of(trainee.module, limit) as ranks, modes_kept(trainee.module):
        restoration = Restoration(trainee, Path(journal), limit, ranks)
        if ranks.rank:
            ranks.follow(verbs(restoration), lambda: None)
        else:
            ranks.lead(restoration.run)


class _Drill:
    def __init__(
        self,
        trainee: Trainee,
        journal: Path | None,
        seed: int,
        watch: Watch,
        limit: TimeLimit,
        ranks: Ranks,
    ) -> None:
        self.trainee, self.ranks, self.signals = trainee, ranks, ranks.signals
        self.weights = Weights(trainee.module, seed, ranks=ranks)
        self.journal = Journal(journal, self.weights.local, ranks.rank, ranks.size)
        self.groups = weight_groups(self.weights.aliases)
        rows = probes(trainee, seed)
        self.sides = Sides(trainee, rows, plan_of(self.weights).least, watch, limit, ranks)
        self.trials = Trials(self.weights, self.sides.train, ranges_of(trainee.module, rows))
        # further syncs: known to be needed, and tried if they might help
        self.late, self.further = 0, 1
        # largest distance of the restored engine from its state before, and the noise floor, nats
        self.near = self.floor = 0.0
        self.changed, self.whole = False, False
        self.stream: StreamNames | None = None
        self.updates: tuple[Response, ...] = ()

    def run(self) -> Preflight:
        began = time.monotonic()
        with self.signals:
            try:
                baseline, poison, groups, returned = self._there_and_back()
            except (KeyboardInterrupt, Terminated) as error:
                # between two lines of this module; no second one is raised until the end of the
                # shield
                self._restored()
                raise with_state(error, self._state()) from error
        size = size_of(self.trainee.module)
        return conclude(
            baseline,
            poison,
            groups,
            returned=returned[0],
            back_late=returned[1],
            syncs=self.sides.syncs,
            tokens=sum(len(row) - 1 for row in self.sides.rows),
            seconds=time.monotonic() - began,
            updates=self.updates,
            stream=self.stream,
            unprobed=None if size is None else size - len({*chain(*self.sides.rows)}),
        )

    def _there_and_back(
        self,
    ) -> tuple[Baseline, PoisonResult, tuple[Response, ...], tuple[float, int]]:
        self.stream = self.ranks.call(self.sides.names_here)[0]
        self.ranks.call(self.journal.write)
        try:
            baseline, poison, groups, start_N = self._measured()
        except BaseException as error:
            stopped = self._abandoned(error)
            if stopped is error:
                raise
            raise stopped from error
        finally:
            # whatever happens meanwhile: no return before the weights are restored
            self._restored()
        return baseline, poison, groups, self._returned(start_N)

    # the order of the test

    def _measured(self) -> tuple[Baseline, PoisonResult, tuple[Response, ...], Floats]:
        baseline, train_N, infer_N = self._baseline()
        many = len(blocks(self.groups)) < len(self.groups)
        poison = poison_test(self.weights, self.sides, baseline, train_N, infer_N, apart=many)
        self.trials.shown = frozenset(poison.shown)
        self.late = poison.late
        self.further = poison.late if poison.mark == "violated" else 1
        base_train_N, base_infer_N = self._anchored(train_N, infer_N)
        gap = distance(base_train_N, base_infer_N)
        if not baseline.scale and not poison.mixed and self.weights.anchored:
            # factors of zero matrices have an effect only once these are filled
            far = gap > PLAIN * baseline.floor
            limit = max(1.3 * baseline.floor, EXPLAINED * gap) if far else None
            baseline = replace(baseline, scale=self._scale(base_infer_N, gap, limit, far=far))
        groups = self._perturbed(baseline, base_train_N, base_infer_N)
        wrong = [group for group in groups if group.mark == "violated"]
        known = poison.late or poison.mixed or poison.cause
        if poison.mark == "violated" and not (known or any(g.explained or g.deaf for g in wrong)):
            share = lost_share(self.weights, self.sides, self.groups, groups)
            poison = replace(poison, cause="share_stale" if share else "", held=share)
        elif poison.mark != "violated" and not wrong:
            self.updates = sparse_updates(
                self.weights, self.sides, base_train_N, base_infer_N, baseline.floor
            )
        self.near, self.floor = baseline.near, baseline.floor
        return baseline, poison, groups, infer_N

    def _baseline(self) -> tuple[Baseline, Floats, Floats]:
        (train_N, again_N), own_noise = self._trained_twice()
        before_N, repeated_N = self.sides.infer(), self.sides.infer()
        self.sides.stage = "sync of unchanged weights"
        self.sides.sync()
        after_N = self.sides.infer()
        train_noise, engine_noise = distance(train_N, again_N), distance(before_N, repeated_N)
        mixed = engine_noise > RESOLUTION and self._two_answers(train_N, [before_N, repeated_N])
        idle = distance(after_N, train_N)
        self.changed = True
        baseline = Baseline(
            distance=distance(before_N, train_N),
            idle=idle,
            moved=distance(after_N, before_N),
            engine_noise=engine_noise,
            train_noise=train_noise,
            floor=max(idle, train_noise, engine_noise, RESOLUTION),
            cast=cast_of(self.weights, after_N - train_N, train_N, self.sides.train),
            mixed=mixed,
            own_noise=own_noise,
        )
        excess = baseline.idle - baseline.distance
        limit = baseline.distance + EXPLAINED * excess if baseline.moved_away else None
        scale = self._scale(after_N, idle, limit, far=baseline.moved_away)
        if scale is None and idle > POISON_NATS:
            # it need not have moved: an engine that was synced so before has the factor already
            scale = self._scale(after_N, idle, far=True)
        if scale is None and idle > RESOLUTION:
            # tensors outside of layers are few, and a factor on the last norm moves little
            outside = {name: (name,) for name in self.weights.parameters if not LAYER.search(name)}
            scores = partial(self.trials.without, {}, ())
            scale = scaled_by(scores, outside, after_N, limit=EXPLAINED * idle)
        far = scale is None and idle > POISON_NATS
        which = exchanged(self.weights, self.sides, after_N, idle) if far else ""
        return replace(baseline, scale=scale, exchanged=which), train_N, after_N

    def _trained_twice(self) -> tuple[tuple[Floats, Floats], float]:
        """The trainer's scores, twice, and the noise, nats, for which it is in evaluation mode."""
        twice = self.sides.train(), self.sides.train()
        noise = distance(*twice)
        if not self.sides.own_modes or noise <= RESOLUTION:
            return twice, 0.0
        self.sides.own_modes = False
        calm = self.sides.train(), self.sides.train()
        if distance(*calm) < noise / 4:
            return calm, noise
        self.sides.own_modes = True
        return twice, 0.0

    def _scale(
        self, infer_N: Floats, gap: float, limit: float | None = None, *, far: bool
    ) -> Scale | None:
        """The factor on some tensors that explains the engine's scores without a perturbation.

        Args:
            gap: mean |engine - trainer|, nats; limit: largest unexplained rest.
            far: whether any tensor may have a factor, not only adapters: an engine that applies one
                twice is as far away as one without it, so it need not have moved.
        """
        names = [*self.weights.parameters]
        second = tuple(name for name in names if "lora_B" in name)
        if not far and not second:
            return None
        tensors = classes(names) if far else {"lora_B": second}
        limit = limit or (EXPLAINED if far else _MOST) * gap
        return scaled_by(partial(self.trials.without, {}, ()), tensors, infer_N, limit=limit)

    def _two_answers(self, train_N: Floats, calls: list[Floats]) -> bool:
        """Whether a non-deterministic engine returns one of two results, as replicas with different
        weights do; noise would not repeat.
        """
        calls += [self.sides.infer(), self.sides.infer()]
        gaps = [distance(a, b) for a, b in combinations(calls, 2)]
        far = [distance(call, train_N) for call in calls]
        return min(gaps) < RESOLUTION / 10 and max(far) > 3 * min(far)

    def _anchored(self, train_N: Floats, infer_N: Floats) -> tuple[Floats, Floats]:
        """Both sides at the start of perturbations: original weights, with filled zero matrices."""
        if not self.weights.anchor():
            return train_N, infer_N
        self.sides.stage = "filling matrices of zeros"
        for _ in range(1 + self.late):
            self.sides.sync()
        return self.sides.train(), self.sides.infer()

    def _perturbed(
        self, baseline: Baseline, train_N: Floats, infer_N: Floats
    ) -> tuple[Response, ...]:
        tests = PerturbationTests(
            self.trials,
            self.sides,
            train_N=train_N,
            infer_N=infer_N,
            floor=baseline.floor,
            noise=baseline.engine_noise,
            further=self.further,
            damaged=baseline.damaged and not baseline.scale,
            scales=not baseline.moved_away and not baseline.scale,
        )
        responses = {r.name: r for block in blocks(self.groups) for r in tests.responses(block)}
        return tuple(responses[group.name] for group in self.groups)

    # restoring

    def _restored(self) -> None:
        if self.whole:
            return
        self.signals.shield()
        self.weights.restore()
        self.whole = True
        if not self.ranks.lost:  # else the weights of all ranks are needed together
            self.ranks.call(self.journal.remove)

    def _state(self) -> str:
        if not self.changed:
            return "no weight was changed"
        return f"weights restored bit for bit; {_ENGINE_UNKNOWN}"

    def _returned(self, start_N: Floats) -> tuple[float, int]:
        """Sync the restored weights; returns the engine's distance from its state before, nats, and
        the number of further syncs.

        An engine that applies weights late gets more syncs, so that it is restored.
        """
        self.sides.stage = "sync of the restored weights"
        try:
            self.signals.expose()
            found: list[float] = []
            while len(found) <= LATEST and (not found or found[-1] > self.near):
                self.sides.sync()
                found.append(float(distance(self.sides.infer(), start_N)))
            # a first distance below the floor is how the sync rounds a change, and is no delay
            in_time = found[-1] <= self.near and found[0] <= self.floor
            return found[-1], 0 if in_time else len(found) - 1
        except BaseException as error:
            raise with_state(error, self._state()) from error

    def _abandoned(self, error: BaseException) -> BaseException:
        """Restore the weights, sync once more, and return an error with the state of both."""
        self._restored()
        if not self.changed:
            return with_state(error, "no weight was changed")
        if self.ranks.lost:
            return with_state(error, self._state())
        try:
            self.signals.expose()
            became = next(filter(None, self.ranks.call(self.sides.again_here)), "")
        except BaseException as again:
            became = f"raised {error_line(again)}"
        if became:
            return with_state(
                error,
                f"weights restored bit for bit; the sync that followed {became}: {_ENGINE_UNKNOWN}",
            )
        return with_state(error, "weights restored bit for bit, and synced to the engine once more")


_ENGINE_UNKNOWN = (
    "the engine may hold perturbed weights, so do not sample from it before a sync succeeds"
)
