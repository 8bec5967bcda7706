# The scores of earlier syncs: all of the last ones, and a few of each age before.
#
# Axes: K kept syncs, N scored tokens.

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from servanda.theory.sampling import Floats

DENSE = 32  # syncs that are all kept


@dataclass(frozen=True)
class Scores:
    """The scores after one sync.

    Args:
        look: its number, from 0 on.
        version: number of updates of the trainer.
        train_N: the trainer's logprobs, nats; NaN for missing ones.
        infer: replica -> the same tokens' logprobs by that engine.
        violated: the engines that did not follow then.
        again: engine -> two earlier syncs, between which its scores were discarded, because it
            follows again.
    """

    look: int
    version: int
    train_N: Floats
    infer: Mapping[str, Floats]
    violated: tuple[str, ...] = ()
    again: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        return {
            "look": self.look,
            "version": self.version,
            "train": _text(self.train_N),
            "infer": {name: _text(infer_N) for name, infer_N in self.infer.items()},
            "violated": [*self.violated],
            "again": {name: [*looks] for name, looks in self.again.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Scores:
        infer = {str(name): _array(text) for name, text in plain["infer"].items()}
        return cls(
            int(plain["look"]),
            int(plain["version"]),
            _array(plain["train"]),
            infer,
            tuple(map(str, plain["violated"])),
            {str(name): (int(a), int(b)) for name, (a, b) in plain["again"].items()},
        )


@dataclass
class ScoreHistory:
    """Scores by the number of their sync; the first ones are never dropped."""

    kept: dict[int, Scores] = field(default_factory=dict)
    looks: int = 0

    def add(self, scores: Scores) -> None:
        self.kept[scores.look] = scores
        for name, (since, first) in scores.again.items():
            for look, old in self.kept.items():
                if since < look < first:
                    infer = {n: infer_N for n, infer_N in old.infer.items() if n != name}
                    self.kept[look] = replace(old, infer=infer)
        self.looks = scores.look + 1
        self.kept = {look: s for look, s in self.kept.items() if is_kept(look, scores.look)}

    def forget_from(self, version: int) -> int:
        """Discard the scores of a version and later ones, which a run that went back repeats."""
        later = [look for look, s in self.kept.items() if s.version >= version]
        for look in later:
            del self.kept[look]
        return len(later)


def is_kept(look: int, newest: int) -> bool:
    """Whether a sync's scores are kept: the sparser the older, and the first always.

    >>> [look for look in range(101) if is_kept(look, 100) and look < 64]
    [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62]
    """
    age = newest - look
    return age < DENSE or look % (1 << (2 * age // DENSE).bit_length() - 1) == 0


def ages(looks: Iterable[int], newest: int) -> list[int]:
    """Reference syncs: the oldest of each octave of age; [newest - 1, newest - 2, ... 0].

    >>> ages(range(11), 10)
    [9, 7, 3, 0]
    """
    oldest: dict[int, int] = {}
    for look in sorted(looks, reverse=True):
        if look < newest:
            oldest[(newest - look).bit_length()] = look
    return [*oldest.values()]


def _text(values_N: Floats) -> str:
    return base64.b64encode(values_N.astype("<f4").tobytes()).decode()


def _array(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float64)
