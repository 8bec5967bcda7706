# Faults of a weight sync: what a trainer's update does not carry to the engine.
#
# They break a WeightSync into a servanda.engines.transformers.TransformersEngine: nothing is wrong
# until weights change, so no check at equal weights sees them.  The sync drill does.  A fault
# that would break nothing in a model is refused: a drill that finds it healthy would be right.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from servanda.engines.faults.base import Between, Fault, OneOf, fault
from servanda.errors import MeasurementError
from servanda.registry import Registry

SYNC_FAULTS: Registry[Fault] = Registry("fault of a sync")


# decorates a function that wraps a class of weight sync
sync_fault = partial(fault, registry=SYNC_FAULTS)


@sync_fault(
    "never_synced",
    "The sync returns, and nothing has reached the engine.",
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
    seen="vLLM 0.32 on the CPU: reload_weights leaves the tied head behind",
)
def tied_head_stale(base: Any, _: bool) -> Any:
    class Stale(base):
        def __init__(self, module: Any, engine: Any) -> None:
            from torch import nn

            super().__init__(module, engine)
            head = engine.model.get_output_embeddings()
            if head.weight is not engine.model.get_input_embeddings().weight:
                raise _breaks_nothing("tied_head_stale", "a tied head")
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)

    return Stale


def _breaks_nothing(name: str, lacks: str) -> MeasurementError:
    return MeasurementError(
        f"fault {name!r} breaks nothing here: the model has not got {lacks}",
        hint="choose a fault of something that it has",
    )


def _place(model: Any, name: str) -> tuple[int | None, str]:
    """Where a tensor of a model is: its layer, None outside, and what of it.

    The classes of modules say so, in all architectures of Transformers; names do not (a norm
    is `ln_1` here and `input_layernorm` there).

    Returns:
        the layer, and "norm", "attention" or "mlp", which also is what the rest of a layer is;
        "" outside the layers.
    """
    layer, within, here = None, "", model
    for word in name.split(".")[:-1]:
        listed, here = type(here).__name__ == "ModuleList", getattr(here, word)
        kind = type(here).__name__.lower()
        if layer is None and listed:
            layer, within = int(word), "mlp"
        elif layer is not None and ("attention" in kind or "attn" in kind):
            within = "attention"
    return layer, "norm" if "norm" in type(here).__name__.lower() else within


def _without(base: Any, name: str, lacks: str, left_out: Callable[[Any, str], bool]) -> Any:
    """A sync that leaves some tensors out.

    Args:
        name: of the fault.
        left_out: whether a tensor is, by the model and the tensor's name.
    """

    class Partial(base):
        def _tensors(self) -> Iterator[tuple[str, Any]]:
            complete = True
            for weight, tensor in super()._tensors():
                if left_out(self.engine.model, weight):
                    complete = False
                else:
                    yield weight, tensor
            if complete:
                raise _breaks_nothing(name, lacks)

    return Partial


@sync_fault(
    "one_layer",
    "Layer `value` is left out of the sync.",
    default=1,
    takes=Between(0, 10_000, whole=True),
)
def one_layer(base: Any, value: int) -> Any:
    def left_out(model: Any, name: str) -> bool:
        return _place(model, name)[0] == value

    return _without(base, "one_layer", f"a layer {value}", left_out)


@sync_fault(
    "one_mlp",
    "The MLP of layer `value` is left out of the sync.",
    default=1,
    takes=Between(0, 10_000, whole=True),
)
def one_mlp(base: Any, value: int) -> Any:
    def left_out(model: Any, name: str) -> bool:
        return _place(model, name) == (value, "mlp")

    return _without(base, "one_mlp", f"an MLP in a layer {value}", left_out)


@sync_fault("norms_stale", "The scales of the norms are left out of the sync.")
def norms_stale(base: Any, _: bool) -> Any:
    def left_out(model: Any, name: str) -> bool:
        return _place(model, name)[1] == "norm"

    return _without(base, "norms_stale", "norms with scales", left_out)


def _adapted(base: Any, name: str) -> Any:
    """A sync that refuses a model without an adapter."""

    class Adapted(base):
        def __init__(self, module: Any, engine: Any) -> None:
            super().__init__(module, engine)
            if not any(hasattr(layer, "get_delta_weight") for layer in module.modules()):
                raise _breaks_nothing(name, "an adapter")

    return Adapted


@sync_fault(
    "adapter_ignored",
    "The sync sends the base model, without the adapter that is trained.",
    seen="unslothai/unsloth#8701: every rollout came from the base model, the adapter ignored",
)
def adapter_ignored(base: Any, _: bool) -> Any:
    class Bare(_adapted(base, "adapter_ignored")):
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


@sync_fault(
    "one_norm",
    "The first norm of layer `value` is left out of the sync.",
    default=1,
    takes=Between(0, 10_000, whole=True),
)
def one_norm(base: Any, value: int) -> Any:
    class Partial(base):
        def _tensors(self) -> Iterator[tuple[str, Any]]:
            lost = ""
            for name, tensor in super()._tensors():
                # not one of the attention's own: the layer is what it belongs to
                own = name.split(".")[-3:-2] == [str(value)]
                if not lost and own and _place(self.engine.model, name) == (value, "norm"):
                    lost = name
                else:
                    yield name, tensor
            if not lost:
                raise _breaks_nothing("one_norm", f"norms with scales in a layer {value}")

    return Partial


@sync_fault(
    "norm_class_stale",
    "The norms of this name are left out of the sync, in all layers.",
    default="post_attention_layernorm",
    takes=OneOf(("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")),
)
def norm_class_stale(base: Any, value: str) -> Any:
    def left_out(_: Any, name: str) -> bool:
        return name.split(".")[-2] == value

    return _without(base, "norm_class_stale", f"norms of the name {value}", left_out)


@sync_fault(
    "rows_stale",
    "The last `value` of the vocabulary's rows are left out of the sync, one row at least.",
    default=1 / 256,
    takes=Between(0, 1),
)
def rows_stale(base: Any, value: float) -> Any:
    class Partial(base):
        def _tensors(self) -> Iterator[tuple[str, Any]]:
            old = self.engine.model.get_input_embeddings().weight.detach()
            for name, tensor in super()._tensors():
                if tensor.shape == old.shape:
                    first = len(old) - max(1, round(value * len(old)))
                    tensor = tensor.clone()
                    tensor[first:] = old[first:].to(tensor.dtype)
                yield name, tensor

    return Partial


@sync_fault(
    "late",
    "A sync sends the weights of `value` syncs ago.",
    default=1,
    takes=Between(1, 100, whole=True),
)
def late(base: Any, value: int) -> Any:
    class Late(base):
        def __init__(self, module: Any, engine: Any) -> None:
            super().__init__(module, engine)
            self.sent: list[list[tuple[str, Any]]] = []

        def __call__(self) -> None:
            self.sent.append([(name, self._cast(t).clone()) for name, t in self._tensors()])
            if len(self.sent) > value:
                self.engine.load(iter(self.sent.pop(0)))

    return Late


@sync_fault(
    "dropped",
    "Every sync of a number that `value` divides is dropped.",
    default=2,
    takes=Between(2, 100, whole=True),
)
def dropped(base: Any, value: int) -> Any:
    class Dropped(base):
        def __init__(self, module: Any, engine: Any) -> None:
            super().__init__(module, engine)
            self.calls = 0

        def __call__(self) -> None:
            self.calls += 1
            if self.calls % value:
                super().__call__()

    return Dropped


@sync_fault(
    "scaled",
    "The last matrix of every MLP arrives times `value`.",
    default=0.9,
    takes=Between(0, 100),
)
def scaled(base: Any, value: float) -> Any:
    class Scaled(base):
        def _tensors(self) -> Iterator[tuple[str, Any]]:
            for name, tensor in super()._tensors():
                last = name.endswith(("down_proj.weight", "mlp.c_proj.weight", "fc2.weight"))
                yield name, value * tensor if last else tensor

    return Scaled


@sync_fault(
    "adapter_scaled",
    "An adapter is merged `value` times over: its alpha / r is applied again.",
    default=2.0,
    takes=Between(0, 100),
)
def adapter_scaled(base: Any, value: float) -> Any:
    class Scaled(_adapted(base, "adapter_scaled")):
        def _merged(self, layer: Any, weight: Any) -> Any:
            return weight + value * (super()._merged(layer, weight) - weight)

    return Scaled
