# What swapped modules show: each module's error, and the ones that explain the difference.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servanda.contract.model import Path
from servanda.runner.bisect.weight_layout import TensorOrigin

BEYOND = 2.0  # times its own noise: what differs by more differs
_FEW = 8  # modules of several kinds that are still a cause
_APART = 5.0  # an outlier, in local errors of its place in other layers; rounding varies up to 2.5


@dataclass(frozen=True)
class Module:
    """One module of B beside that of A.

    Args:
        name: its path in the model; "" is the model itself, AROUND what the engine does around it.
        tensor: where the local error is largest: "output", or an input of a child as
            "child.argument".
        error: local error, on the inputs of A; NaN if the sides share no tensor of it.
        noise: the error of the same tensor between runs of one side in other batches.
        run_error: error of its output in a run of B, where errors before it arrive as well.
        share: of KL(B || A) that the module of A removes in its place; None: not measured.
        differs: whether some tensor has an error beyond its noise.
    """

    name: str
    kind: str
    tensor: str
    error: float
    noise: float
    run_error: float
    share: float | None
    differs: bool


@dataclass(frozen=True)
class ModuleBisection:
    """What makes the logits of B differ, by modules in the order of execution.

    Args:
        tokens: given tokens, all drawn by B.
        kl_nats: mean KL(B || A) of a token.
        floor_nats: the same between runs of A in other batches.
        first: the first tensor that differs beyond its noise, as Module.tensor.
        cause: the fewest modules, by their shares, that explain nine tenths together.
        explained: the share that they explain.
        joint: the share that all modules explain that differ.
        weights: origins of the parameters of the cause in those of A, where they are not equal.
    """

    a: str
    b: str
    path: Path
    sequences: int
    tokens: int
    kl_nats: float
    floor_nats: float
    first: tuple[str, str] | None
    modules: tuple[Module, ...]
    cause: tuple[str, ...]
    explained: float | None
    joint: float | None
    weights: tuple[TensorOrigin, ...] = ()

    @property
    def suspects(self) -> tuple[Module, ...]:
        return tuple(module for module in self.modules if module.differs)

    @property
    def moved(self) -> bool:
        """Whether the logits differ beyond their noise."""
        return self.kl_nats > BEYOND * self.floor_nats

    @property
    def outliers(self) -> tuple[tuple[Module, float], ...]:
        """Modules whose local error is far above that of the same place in all other layers.

        Each with its ratio to the largest of these, which are two at least.  Rounding is spread
        over the layers; a fault that is hidden in it is not.
        """
        found = []
        for module in self.suspects:
            kind = place(module.name)
            others = [
                m.error for m in self.modules if m.name != module.name and place(m.name) == kind
            ]
            if len(others) > 1 and module.error > _APART * max(others) > 0.0:
                found.append((module, module.error / max(others)))
        return tuple(sorted(found, key=lambda pair: -pair[1]))

    @property
    def outcome(self) -> Literal["same", "below noise", "named", "spread", "unexplained"]:
        """spread: as another precision does it, with many modules of several kinds."""
        if not self.moved:
            return "below noise" if self.suspects else "same"
        kinds = {place(name) for name in self.cause}
        if len(self.cause) > _FEW and len(kinds) > 1:
            return "spread"
        return "named" if self.cause else "unexplained"


def place(name: str) -> str:
    """The place of a module in its layer.

    >>> place("model.layers.0.mlp.up_proj"), place("model.layers.0"), place("")
    ('up_proj', 'layer', '')
    """
    last = name.rpartition(".")[2]
    return "layer" if last.isdigit() else last
