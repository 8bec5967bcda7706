# What goes into and out of every module of a Transformers engine, and two engines of one
# architecture with modules of the one in the place of those of the other.
#
# A run with `given` puts recorded tensors in the place of a module's inputs, and in that of its
# outputs once they are known.  So each module computes on the inputs of the other side, and a
# container on the outputs that its children have there: what differs is its own code.
# Axes: S rows, T columns that are fed, N real tokens, D the rest.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servanda.contract.model import Path
from servanda.engines.base import AROUND
from servanda.traces.trace import Batch

_MASK = "attention_mask"


class Key(NamedTuple):
    """A tensor of a run.

    Args:
        owner: the module whose code computes it: of an input, the one that passes it on.
        module: the module that it goes into or comes out of.
        call: the number of the module's call.
        name: of the argument; of an output, where it is in it.
    """

    owner: str
    module: str
    call: int
    kind: Literal["input", "output"]
    name: str


@dataclass
class Recording:
    """The tensors of a run in the order in which they were computed.

    Args:
        real_ST: of each, the columns that hold tokens of a text.
        logits_NV: of the given tokens.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    real_ST: dict[Key, Tensor] = field(default_factory=dict)
    logits_NV: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def take(self, rows: Sequence[int]) -> Recording:
        """Those rows; a tensor that all rows share stays as it is."""
        tensors, real = {}, {}
        for key, x in self.tensors.items():
            real_ST = self.real_ST[key]
            real[key] = real_ST[rows]
            if x.dim() and len(x) == len(real_ST):
                tensors[key] = x[rows]
            elif x.dim() and len(x) == real_ST.numel():
                tensors[key] = x.unflatten(0, tuple(real_ST.shape))[rows].flatten(0, 1)
            else:
                tensors[key] = x
        return Recording(tensors, real)


def record(engine: Any, batch: Batch, path: Path, given: Recording | None = None) -> Recording:
    """Run the given tokens of a batch through an engine.

    Args:
        batch: no more sequences than run together.
        given: tensors to compute on; the recording still has what the engine itself computed.
    """
    found = Recording()
    with ExitStack() as stack:
        hooks = _Hooks(found, given)
        stack.enter_context(_observed(engine, hooks))
        for name, module in engine.model.named_modules():
            stack.enter_context(hooks.of(name, module))
        found.logits_NV = np.concatenate([*engine.logits(batch, path)])
    return found


class _Hooks:
    """The hooks of one run."""

    def __init__(self, found: Recording, given: Recording | None) -> None:
        self.found, self.given = found, given.tensors if given is not None else {}
        self.calls: dict[str, int] = {}
        self.active: list[str] = []
        self.real_ST = torch.ones(0, dtype=torch.bool)

    @contextmanager
    def of(self, name: str, module: Any) -> Iterator[None]:
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            call = self.calls[name] = self.calls.get(name, -1) + 1
            owner = self.active[-1] if self.active else AROUND
            self.active.append(name)

            def taken(at: str, x: Tensor) -> Tensor:
                return self.taken(Key(owner, name, call, "input", at), x, at_root=name == "")

            return mapped(args, taken), mapped(kwargs, taken)

        def after(_: Any, __: Any, output: Any) -> Any:
            self.active.pop()
            call = self.calls[name]
            return mapped(
                output, lambda at, x: self.taken(Key(name, name, call, "output", at), x, False)
            )

        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            # after those of the engine, so that its input is the one that the module gets
            module.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def taken(self, key: Key, x: Tensor, at_root: bool) -> Tensor:
        """Record a tensor; the one to go on with."""
        self.found.tensors[key] = x.clone()
        self.found.real_ST[key] = self.real_ST
        given = self.given.get(key)
        if given is None or not (at_root or _alike(given, x)):
            return x
        dtype = x.dtype if given.is_floating_point() else given.dtype
        return given.to(x.device, dtype, copy=True)


def _alike(a: Tensor, b: Tensor) -> bool:
    both_float = a.is_floating_point() and b.is_floating_point()
    return a.shape == b.shape and (a.dtype == b.dtype or both_float)


@contextmanager
def _observed(engine: Any, hooks: _Hooks) -> Iterator[None]:
    """Records the logits as the engine has them, and which columns are real."""
    base: Any = type(engine)

    class Observed(base):
        def _forward(self, ids_ST: Tensor, mask_ST: Tensor, **options: Any) -> Tensor:
            hooks.real_ST = mask_ST[:, -ids_ST.shape[1] :].bool()
            logits = super()._forward(ids_ST, mask_ST, **options)
            call = hooks.calls[AROUND] = hooks.calls.get(AROUND, -1) + 1
            return hooks.taken(Key(AROUND, AROUND, call, "output", "logits"), logits, False)

    engine.__class__ = Observed
    try:
        yield
    finally:
        engine.__class__ = base


def mapped(value: Any, change: Callable[[str, Tensor], Tensor], at: str = "") -> Any:
    """A value with each of its tensors changed; `change` is given where the tensor is in it."""
    if isinstance(value, Tensor):
        return change(at, value)
    dot = f"{at}." if at else ""
    if isinstance(value, Mapping):
        items = {name: mapped(x, change, f"{dot}{name}") for name, x in value.items()}
        return type(value)(**items) if type(value) is not dict else items
    if isinstance(value, tuple | list):
        parts = [mapped(x, change, f"{dot}{i}") for i, x in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


# how far two recordings are apart


def errors(a: Recording, b: Recording) -> dict[Key, float]:
    """The largest error of a token at each tensor that both have, in b's order.

    Of numbers: the distance of b's vector from a's, in units of the root mean square length of a's;
    inf for another shape.  Of whole numbers and masks: the share that differs.  A mask that the
    sides keep in different forms is left out.
    """
    found = {}
    for key, y in b.tensors.items():
        x = a.tensors.get(key)
        if x is not None and (error := _error(key, x, y, b.real_ST[key])) is not None:
            found[key] = error
    return found


def _error(key: Key, a: Tensor, b: Tensor, real_ST: Tensor) -> float | None:
    if key.name.endswith(_MASK):
        if a.shape != b.shape and key.module:
            return None
        a, b = _seen(a), _seen(b)
    if a.shape != b.shape:
        return float("inf")
    real_ST, b = real_ST.to(a.device), b.to(a.device)
    a, b = (x.reshape(len(x), -1) for x in (_real(a, real_ST), _real(b, real_ST)))
    if not a.is_floating_point() or not b.is_floating_point():
        return float((a != b).float().mean()) if a.numel() else 0.0
    a, b = a.double(), b.double()
    length_N = a.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
    same = (a == b) | (a.isnan() & b.isnan())
    error_N = torch.where(same, 0.0, b - a).norm(dim=-1).nan_to_num(float("inf"))
    most = float(error_N.max()) if error_N.numel() else 0.0
    scale = float(length_N.square().mean().sqrt()) if most else 1.0
    return most / scale if scale else float("inf")


def _seen(mask: Tensor) -> Tensor:
    """Which keys a mask lets through."""
    return mask > torch.finfo(mask.dtype).min / 4 if mask.is_floating_point() else mask.bool()


def _real(x: Tensor, real_ST: Tensor) -> Tensor:
    """The values of real tokens, [N, D...]; all where it cannot be seen which are."""
    rows, columns = real_ST.shape
    if x.dim() == 4 and columns not in x.shape[1:3]:  # such as ALiBi, [S, heads, 1, T]
        return x
    if x.dim() == 4 and x.shape[0] == rows and x.shape[2] == columns and x.shape[1] != columns:
        x = x.transpose(1, 2)
    if x.dim() > 1 and x.shape[0] == rows and 0 < x.shape[1] <= columns:
        return x[real_ST[:, -x.shape[1] :]]
    if x.dim() and len(x) == real_ST.numel():
        return x[real_ST.flatten()]
    return x[None] if x.dim() < 2 else x


# modules of the one in the place of those of the other


def swapped(a: Any, b: Any, names: Collection[str], batch: Batch, path: Path) -> NDArray[Any]:
    """Logits of b's given tokens with the code and the weights of these modules of a.

    A container takes over its own code: its children stay those of b where they are not named too.
    With AROUND, the engine a runs the model of b.
    """
    sides = [_Side(engine.model) for engine in (a, b)]
    runner = a if AROUND in names else b
    common = sides[0].modules.keys() & sides[1].modules.keys()
    try:
        for name in common:
            code = sides[0] if name in names else sides[1]
            for side in sides:
                side.modules[name].forward = _crossed(name, caller=side, code=code)
        return np.concatenate([*runner.logits(batch, path)])
    finally:
        for side in sides:
            for name in common:
                side.modules[name].__dict__.pop("forward", None)
                if name in side.patched:
                    side.modules[name].forward = side.patched[name]


class _Side:
    """One model, with the forward of each of its modules as it was."""

    def __init__(self, model: Any) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.forward = {name: module.forward for name, module in self.modules.items()}
        own = ((name, vars(module)) for name, module in self.modules.items())
        self.patched = {name: values["forward"] for name, values in own if "forward" in values}
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.attention: str = model.config._attn_implementation


def _crossed(name: str, *, caller: _Side, code: _Side) -> Callable[..., Any]:
    """The forward of a module for the model of `caller`; numbers change precision on the way."""
    forward = code.forward[name]
    if caller is code:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if caller.attention != code.attention and "attention_mask" in kwargs:
            kwargs = _other_form(kwargs, code)
        into, back = _cast(caller, code), _cast(code, caller)
        return mapped(forward(*mapped(args, into), **mapped(kwargs, into)), back)

    return run


def _cast(source: _Side, target: _Side) -> Callable[[str, Tensor], Tensor]:
    return lambda _, x: x.to(target.device, target.dtype if x.dtype == source.dtype else x.dtype)


def _other_form(kwargs: dict[str, Any], code: _Side) -> dict[str, Any]:
    """A mask [S, 1, T, T] as the other implementation of attention adds or applies it."""
    mask, states = kwargs["attention_mask"], kwargs.get("hidden_states")
    if mask is None and states is not None:  # a causal one; of one column all keys are seen
        columns = states.shape[1]
        mask = torch.ones(1, 1, columns, columns, dtype=torch.bool, device=states.device).tril()
        mask = mask if columns > 1 else None
    if mask is None or mask.dim() != 4:
        return kwargs
    seen = _seen(mask)
    if code.attention == "eager":
        least = max(torch.finfo(code.dtype).min, torch.finfo(torch.float32).min) / 2
        allowed = torch.zeros(seen.shape, dtype=code.dtype, device=seen.device)
        seen = allowed.masked_fill(~seen, least)
    return {**kwargs, "attention_mask": seen}


def module_classes(engine: Any) -> dict[str, str]:
    """The class of each module by its name; the model itself is ""."""
    return {name: type(module).__name__ for name, module in engine.model.named_modules()}
