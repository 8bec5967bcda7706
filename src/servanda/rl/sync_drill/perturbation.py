# One sync with some groups of weights perturbed: the response of the engine, and its cause.
#
# Axes: N scored tokens.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from servanda.rl.sync_drill.explanation import explain
from servanda.rl.sync_drill.response_slope import (
    distance,
    part_slopes,
    response_slope,
    tokens_of,
)
from servanda.rl.sync_drill.result import PLAIN, SEEN, Part, Response
from servanda.rl.sync_drill.sides import Sides
from servanda.rl.sync_drill.trainer_response import FEWEST, Family, Perturbation, Piece, Trials
from servanda.rl.sync_drill.weight_groups import WeightGroup, block_name
from servanda.theory.sampling import Floats

LATEST = 2  # further syncs of the same weights, after a wrong response
_FITTED = 4  # tokens needed per distinguishable part
_STILL = 1e-6  # largest change of an engine that received nothing, nats
_UNMOVED, _MOVED = 0.1, 0.25  # of the trainer's change: most for old weights, least for new ones


class PerturbationTests:
    """Tests groups by perturbation, starting from the scores `train_N` and `infer_N`.

    Args:
        noise: repeatability of the engine, nats.
        further: number of further syncs after a wrong response.
        damaged: whether a sync of unchanged weights moved the engine away.
        scales: whether a factor is searched; not if the two sides differed at the start.
    """

    def __init__(
        self,
        trials: Trials,
        sides: Sides,
        *,
        train_N: Floats,
        infer_N: Floats,
        floor: float,
        noise: float,
        further: int,
        damaged: bool,
        scales: bool,
    ) -> None:
        self.trials, self.sides = trials, sides
        self.train_N, self.infer_N = train_N, infer_N
        self.floor, self.noise, self.further = floor, noise, further
        self.damaged, self.scales, self._shifted = damaged, scales, False
        self._before_N = infer_N  # the engine's scores after the previous sync

    def responses(self, block: Sequence[WeightGroup]) -> list[Response]:
        """One sync with the groups of a block perturbed; each alone if that is unclear."""
        responses = self._once(block)
        if len(block) > 1 and _is_mixed(responses):
            self.sides.total += len(block)
            responses = [response for group in block for response in self._once((group,))]
        return responses

    def _once(self, block: Sequence[WeightGroup]) -> list[Response]:
        self.sides.stage = f"perturbing {block_name(block)}"
        perturbations = [
            self.trials.perturb_group(group, self.train_N, self.floor) for group in block
        ]
        sizes = {
            name: size
            for perturbation in perturbations
            for name, size in perturbation.sizes.items()
        }
        self.trials.weights.perturb(sizes)
        self.sides.sync()
        before_N, self._before_N = self._before_N, self.sides.infer()
        change_N = self._before_N - self.infer_N
        own_N = self.sides.train() - self.train_N if len(block) > 1 else perturbations[0].own_N
        responses = judged(perturbations, own_N, change_N, self.floor)
        if self.trials.shown and any(r.mark in ("violated", "warns") for r in responses):
            # which piece it is: of this block, and of all that follow
            self.trials.shown = frozenset()
            self.trials.weights.settle(sizes)
            perturbations = [self.trials.in_pieces(each, self.train_N) for each in perturbations]
            self.trials.weights.perturb(sizes)
            responses = judged(perturbations, own_N, change_N, self.floor)
        if any(response.mark == "violated" for response in responses):
            responses = self._again(perturbations, own_N, change_N, responses)
            still = distance(self._before_N, before_N) <= max(3 * self.noise, _STILL)
            if still and not any(r.explained or r.deaf_as_a_whole for r in responses):
                # it still has the weights of the last perturbation
                responses = [replace(r, stopped=r.mark == "violated") for r in responses]
            self._before_N = self._last_N
        self.trials.weights.settle(sizes)
        if len(block) > 1:
            return responses
        (response,) = responses
        unclear = response.mark in ("violated", "warns") and not response.explained
        if unclear and not response.deaf_as_a_whole:
            response = explain(
                self.trials,
                perturbations[0],
                response,
                train_N=self.train_N,
                infer_N=self.infer_N,
                change_N=change_N,
                floor=self.floor,
                damaged=self.damaged,
                scales=self.scales,
            )
        return [response]

    def _again(
        self,
        perturbations: Sequence[Perturbation],
        own_N: Floats,
        change_N: Floats,
        responses: list[Response],
    ) -> list[Response]:
        """Repeat a wrong response: by another call, and after another sync."""
        self._last_N = self.sides.infer()
        repeated_N = self._last_N - self.infer_N
        lengths = [len(row) - 1 for row in self.sides.rows]
        if is_mixed(own_N, [change_N, repeated_N], lengths, floor=self.floor, noise=self.noise):
            return [replace(r, mixed=True) if r.mark == "violated" else r for r in responses]
        for late in range(1, self.further + 1):
            self.sides.sync()
            self._last_N = self.sides.infer()
            later = judged(perturbations, own_N, self._last_N - self.infer_N, self.floor)
            if any(response.mark == "violated" for response in later):
                continue
            if late == 1 and not self._shifted:
                # if every other sync is dropped, the next one is not
                self._shifted = True
                self.sides.sync()
            return [replace(r, late=late) if r.mark == "violated" else r for r in responses]
        return responses


def judged(
    perturbations: Sequence[Perturbation], own_N: Floats, change_N: Floats, floor: float
) -> list[Response]:
    """The response of the engine to groups that were perturbed together, and to each part.

    Args:
        own_N: the trainer's change by all of them; change_N: the engine's.
    """
    fits = (
        part_slopes([perturbation.own_N for perturbation in perturbations], own_N, change_N)
        if len(perturbations) > 1
        else None
    )
    whole = response_slope(own_N, change_N) if own_N.any() else None
    parts = _parts(perturbations, own_N, change_N, floor)
    responses = []
    for number, perturbation in enumerate(perturbations):
        moved = float(np.abs(perturbation.own_N).mean()) / floor
        is_seen = moved >= SEEN
        follow, spread = fits[number] if fits else (np.nan, np.inf)
        if not fits and whole is not None:
            follow, spread = whole.follow, whole.spread
        responses.append(
            Response(
                name=perturbation.group.name,
                kind=perturbation.group.kind,
                layer=perturbation.group.layer,
                follow=float(follow) if is_seen else float("nan"),
                spread=float(spread),
                residual=whole.residual_nats / floor if whole and is_seen else 0.0,
                moved=moved,
                size=float(perturbation.size),
                block=block_name([each.group for each in perturbations]),
                parts=tuple(part for at, part in parts if at == number),
            )
        )
    return responses


def _parts(
    perturbations: Sequence[Perturbation], own_N: Floats, change_N: Floats, floor: float
) -> Iterator[tuple[int, Part]]:
    """(perturbation, part): tensors, uses, and ranges of vocabulary rows are separate."""
    families: tuple[tuple[Family, ...], ...] = (("tensor", "use"), ("rows",))
    for family in families:
        placed: list[tuple[int, Piece, Floats]] = [
            (number, piece, piece_N)
            for number, perturbation in enumerate(perturbations)
            for piece, piece_N in perturbation.pieces.items()
            if piece.family in family
        ]
        pieces = [piece_N for _, _, piece_N in placed]
        if not pieces:
            continue
        fits = part_slopes(pieces, own_N, change_N) if len(pieces) * _FITTED <= own_N.size else ()
        if not fits or all(np.isnan(follow) for follow, _ in fits):
            fits = tuple(part_slopes([piece_N], own_N, change_N)[0] for piece_N in pieces)
        for (number, piece, piece_N), (follow, spread) in zip(placed, fits, strict=True):
            total = float(np.abs(piece_N).sum())
            moved = float(piece_N @ piece_N) / total / floor if total else 0.0
            if piece.is_expert and tokens_of(piece_N) < FEWEST:
                # an engine that routes these otherwise would not use the expert at all
                follow, spread = np.nan, np.inf
            yield number, Part(piece.name, follow, spread, moved)


def is_mixed(
    own_N: Floats,
    changes: Sequence[Floats],
    lengths: Sequence[int],
    *,
    floor: float,
    noise: float,
) -> bool:
    """Whether some rows or calls were scored with new weights, and others with the old ones.

    Each row of each call must be entirely old or new: a lost layer changes all of them a little.

    Args:
        own_N: the trainer's change; changes: the engine's, call by call, after one sync.
        lengths: lengths of the rows.
    """
    cuts = np.cumsum(lengths)[:-1]
    old = new = 0
    for change_N in changes:
        for own_T, change_T in zip(np.split(own_N, cuts), np.split(change_N, cuts), strict=True):
            moved = float(np.abs(own_T).mean())
            if float(np.abs(change_T).mean()) <= max(_UNMOVED * moved, 3 * noise):
                old += 1
            elif distance(change_T, own_T) <= max(_MOVED * moved, PLAIN * floor):
                new += 1
            else:
                return False
    return old > 0 and new > 0


def _is_mixed(responses: Sequence[Response]) -> bool:
    """Whether a block must be split: its response is wrong, and some part of it is synced."""
    if all(response.mark in ("holds", "unseen") for response in responses):
        return False
    if all(response.explained for response in responses if response.mark == "violated"):
        return any(response.mark == "warns" for response in responses)
    return not all(response.deaf and response.residual < PLAIN for response in responses)
