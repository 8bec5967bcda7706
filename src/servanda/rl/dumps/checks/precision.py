# Precision: the format of each side's recorded logprobs, and the effect of its rounding.

from __future__ import annotations

from servanda.rl.dumps.checks.base import Finding, check
from servanda.theory.divergence.precision import CAPTURES, capture_floor, exact_in
from servanda.traces.rollouts import Rollouts

_BY_BITS = tuple(sorted(CAPTURES, key=CAPTURES.__getitem__))


@check("precision")
class Precision:
    """The formats that represent all logprobs of a side so far; the coarsest one counts."""

    def __init__(self) -> None:
        self.sides: dict[str, tuple[str, ...]] = {"train": (), "infer": ()}  # () without values

    def add(self, rollouts: Rollouts) -> None:
        for side, logp_K in (("train", rollouts.train_K), ("infer", rollouts.infer_K)):
            self._restrict(side, exact_in(logp_K, self.sides[side] or _BY_BITS))

    def join(self, later: Precision) -> None:
        for side, formats in later.sides.items():
            self._restrict(side, formats)

    def _restrict(self, side: str, formats: tuple[str, ...]) -> None:
        if formats:
            known = self.sides[side] or formats
            self.sides[side] = tuple(name for name in known if name in formats)

    def finding(self) -> Finding:
        train, infer = (next(iter(formats), "") for formats in self.sides.values())
        if not train or not infer:
            return Finding("precision", "warning", "no logprob to tell the precision by")
        numbers = {
            "train_bits": float(CAPTURES[train]),
            "infer_bits": float(CAPTURES[infer]),
        }
        text = f"logprobs recorded in {train} (trainer) and {infer} (sampler)"
        worse = min(train, infer, key=CAPTURES.__getitem__)
        if CAPTURES[worse] >= CAPTURES["float32"]:
            return Finding("precision", "ok", text, numbers)
        floor = capture_floor("k3_nats", worse)
        text += f": rounding to {worse} alone gives a k3 of {floor:.1e} nats"
        return Finding("precision", "warning", text, numbers)
