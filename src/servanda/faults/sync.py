# Faults of a weight sync: what a trainer's update does not carry to the engine.
#
# They break a WeightSync, not an engine: nothing is wrong until weights change, so no check at
# equal weights sees them.  The sync drill does.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servanda.faults.base import Fault, Wrap
from servanda.faults.values import Between, OneOf, Switch, Takes
from servanda.registry import Registry

SYNC_FAULTS: Registry[Fault] = Registry("fault of a sync")


def sync_fault(name: str, summary: str, *, default: Any, takes: Takes, seen: str = "") -> Any:
    """Register a fault; the decorated function wraps a class of weight sync."""

    def decorate(wrap: Wrap) -> Wrap:
        SYNC_FAULTS.add(name, Fault(name, summary, "infer", default, takes, wrap, seen))
        return wrap

    return decorate


@sync_fault(
    "never_synced",
    "The sync returns, and nothing has reached the engine.",
    default=True,
    takes=Switch(),
    seen="huggingface/trl#5312: weights lost at sleep level 2",
)
def never_synced(base: Any, _: bool) -> Any:
    class Deaf(base):
        def __call__(self) -> None:
            return

    return Deaf


@sync_fault(
    "tied_head_stale",
    "The head is a copy of the embedding that the sync does not refresh.",
    default=True,
    takes=Switch(),
    seen="vLLM 0.32 on the CPU: reload_weights leaves the tied head behind",
)
def tied_head_stale(base: Any, _: bool) -> Any:
    class Stale(base):
        def __init__(self, module: Any, engine: Any) -> None:
            from torch import nn

            super().__init__(module, engine)
            head = engine.model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)

    return Stale


def _without(base: Any, left_out: Any) -> Any:
    class Partial(base):
        def _tensors(self) -> Iterator[tuple[str, Any]]:
            return ((name, t) for name, t in super()._tensors() if not left_out(name))

    return Partial


@sync_fault(
    "one_layer",
    "Layer `value` is left out of the sync.",
    default=1,
    takes=Between(0, 10_000, whole=True),
)
def one_layer(base: Any, value: int) -> Any:
    return _without(base, lambda name: f".layers.{value}." in name)


@sync_fault(
    "one_mlp",
    "The MLP of layer `value` is left out of the sync.",
    default=1,
    takes=Between(0, 10_000, whole=True),
)
def one_mlp(base: Any, value: int) -> Any:
    return _without(base, lambda name: f".layers.{value}.mlp." in name)


@sync_fault(
    "norms_stale", "The scales of the norms are left out of the sync.", default=True, takes=Switch()
)
def norms_stale(base: Any, _: bool) -> Any:
    return _without(base, lambda name: "norm" in name)


@sync_fault(
    "adapter_ignored",
    "The sync sends the base model, without the adapter that is trained.",
    default=True,
    takes=Switch(),
    seen="unslothai/unsloth#8701: every rollout came from the base model, the adapter ignored",
)
def adapter_ignored(base: Any, _: bool) -> Any:
    class Bare(base):
        def _merged(self, layer: Any, weight: Any) -> Any:
            return weight

    return Bare


@sync_fault(
    "wrong_cast",
    "Weights travel in the format `value`, with fewer digits than the engine's own.",
    default="float8_e4m3fn",
    takes=OneOf(("float8_e4m3fn", "float8_e5m2")),
)
def wrong_cast(base: Any, value: str) -> Any:
    class Coarse(base):
        def _cast(self, tensor: Any) -> Any:
            import torch

            return tensor.to(getattr(torch, value)).to(tensor.dtype)

    return Coarse
