# The trained weights that this process has: copied first, changed in place, and restored bit for
# bit.  The copy is in host memory.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.noise import Sums, beyond, noise
from servanda.rl.sync_drill.parallel.orders import ORDERS
from servanda.rl.sync_drill.parallel.shards import (
    is_shard,
    laid_out,
    local,
    place_of,
    reshard,
    whole,
)

Size = float | tuple[float, ...]  # of a tensor, or of each row of one


class LocalWeights:
    """The trained parameters of a module, or this process's shards of them.

    Args:
        module: its parameters with requires_grad are used; buffers, gradients and modes are not
            touched.
        copy: whether the values are copied; counting needs no copy.

    Raises:
        MeasurementError: no trained parameter, or one whose values are not known to be here.
    """

    def __init__(self, module: nn.Module, *, copy: bool = True) -> None:
        named: dict[str, nn.Parameter] = {}
        self.aliases: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        reshard(module)
        _refuse_flat(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            known = first.setdefault(id(parameter), name)
            named.setdefault(known, parameter)
            self.aliases.setdefault(known, []).append(name)
        if not named:
            raise MeasurementError(
                f"no parameter of {type(module).__name__} has requires_grad, so there is no weight "
                "to sync",
                hint="pass the module that the trainer updates",
            )
        self.module, self.seed = module, 0
        self.parameters = named
        self.places = {name: place_of(name, parameter) for name, parameter in named.items()}
        for name, parameter in named.items():
            _refuse(name, parameter, self.places[name].shape)
        own = named if copy else {}
        self.kept = {name: local(p).to("cpu", copy=True) for name, p in own.items()}
        self._anchors: dict[str, Tensor] = {}
        self._untied: dict[str, list[torch.utils.hooks.RemovableHandle]] = {}

    def values(self, name: str) -> Tensor:
        """The current values of a parameter or shard."""
        return local(self.parameters[name])

    def start(self, name: str) -> Tensor:
        """The values at the start of perturbations, in host memory."""
        return self._anchors.get(name, self.kept[name])

    def sums(self) -> dict[str, Sums]:
        """Of each tensor's current values."""
        return {name: Sums.of(self.values(name)) for name in self.parameters}

    def layout(self, seed: int) -> dict[str, tuple[str, str]]:
        """name -> (what all processes must agree on, where the shard lies); sets the seed."""
        self.seed = seed
        return {
            name: (f"{aliases} {self.parameters[name].dtype} {self.places[name].shape}",
                   str(self.places[name]))
            for name, aliases in self.aliases.items()
        }  # fmt: skip

    # changing

    def poison(self, moments: Mapping[str, tuple[float, float]]) -> None:
        """Replace tensors by noise of a mean and scale."""
        for name, (mean, scale) in moments.items():
            self._write(name, mean + scale * self._noise("poison", name))

    def fill(self, scales: Mapping[str, float]) -> None:
        """Replace tensors by noise, from now on the start of perturbations."""
        for name, scale in scales.items():
            noise_ = scale * self._noise("filling", name)
            self._anchors[name] = noise_.to("cpu", self.kept[name].dtype)
        self.settle(scales)

    def perturb(self, scales: Mapping[str, Size], share: float = 1.0) -> None:
        """Add noise of a scale to the start of tensors, to a share of their values."""
        for name, scale in scales.items():
            step = self._noise("nudge", name)
            if share < 1:
                step *= self._noise("share", name).abs() > beyond(share)
            if isinstance(scale, tuple):
                for row, own in enumerate(scale):
                    step[self.places[name].rows(row, row + 1)] *= own
            else:
                step *= scale
            self._write(name, self.start(name).to(step.device, step.dtype) + step)

    def cast(self, format_: str) -> None:
        """Round all tensors to a format."""
        for name, own in self.kept.items():
            self._write(name, own.to(getattr(torch, format_)).to(own.dtype))

    def reorder(self, number: int) -> None:
        """Do to all tensors what an entry of ORDERS does."""
        for name in self.parameters:
            self._write(name, ORDERS[number][2](self.values(name).clone(), self.start(name)))

    def exchange(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Give each of two tensors the start of the other."""
        for one, other in pairs:
            self._write(one, self.start(other))
            self._write(other, self.start(one))

    def settle(self, names: Iterable[str]) -> None:
        """Return tensors to the start of perturbations."""
        for name in names:
            self._write(name, self.start(name))

    def settle_rows(self, names: Iterable[str], low: int, high: int | None) -> None:
        """Return rows [low, high) of whole tensors to the start."""
        for name in names:
            rows = self.places[name].rows(low, high)
            with torch.no_grad():
                self.values(name)[rows].copy_(self.start(name)[rows])

    def settle_share(self, name: str, axis: int, low: int, high: int) -> None:
        """Return rows of a tensor, or columns of a whole one, [low, high) to the start."""
        if axis == 0:
            self.settle_rows([name], low, high)
        else:
            with torch.no_grad():
                self.values(name)[:, low:high].copy_(self.start(name)[:, low:high])

    def scale(self, names: Iterable[str], factor: float) -> None:
        for name in names:
            self._write(name, factor * self.values(name))

    def untie(self, use: str, name: str) -> None:
        """Give one use of a tied tensor the values of the start."""
        tied = self.parameters[name]
        path, _, leaf = use.rpartition(".")
        owner = self.module.get_submodule(path)
        own = whole(tied, self.start(name)).to(self.values(name).device)
        if not is_shard(tied):
            owner._parameters[leaf] = nn.Parameter(own, requires_grad=False)
            return
        # FSDP2 and ZeRO-3 set the attribute before each forward pass of the parent, and ZeRO-3
        # reads it after the pass: it is replaced after the one, and put back before the other
        given: list[nn.Parameter | None] = []

        def before(*_: object) -> None:
            now = owner._parameters[leaf]
            given.append(now)
            owner._parameters[leaf] = nn.Parameter(laid_out(own, now), requires_grad=False)

        def after(*_: object) -> None:
            if given:
                owner._parameters[leaf] = given.pop()

        self._untied[use] = [
            owner.register_forward_pre_hook(before),
            owner.register_forward_hook(after, always_call=True, prepend=True),
        ]

    def tie(self, use: str, name: str) -> None:
        """Tie one use again."""
        for hook in self._untied.pop(use, ()):
            hook.remove()
        path, _, leaf = use.rpartition(".")
        self.module.get_submodule(path)._parameters[leaf] = self.parameters[name]

    def restore(self) -> None:
        """Restore every tensor bit for bit.

        Raises:
            MeasurementError: a tensor does not read back as written.
        """
        reshard(self.module)
        for name in self.parameters:
            self._write(name, self.kept[name])
            for alias in self.aliases[name]:
                self.tie(alias, name)
        wrong = [name for name, kept in self.kept.items() if not same(self.values(name), kept)]
        if wrong:
            raise MeasurementError(
                f"{wrong[0]} and {len(wrong) - 1} others do not read back as they were written",
                hint="load the weights of the last checkpoint before training goes on",
            )

    def _noise(self, purpose: str, name: str) -> Tensor:
        return noise(self.values(name), self.places[name], f"{self.seed}/{purpose}/{name}")

    def _write(self, name: str, values: Tensor) -> None:
        with torch.no_grad():
            self.values(name).copy_(values)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise equal: NaN equals NaN, and -0.0 is not 0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


_NOT_TAKEN = (
    "the preflight test takes whole tensors, and shards of FSDP2, of a device mesh (DTensors) or "
    "of ZeRO-3; gather those of FSDP1 or Megatron first, or test their stream of names and "
    "tensors: see servanda.rl.Stream"
)


def _refuse_flat(module: nn.Module) -> None:
    """FSDP1 keeps a part of each parameter in one flat tensor, which looks like a whole one."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise MeasurementError(f"{type(module).__name__} is sharded by FSDP1", hint=_NOT_TAKEN)


def _refuse(name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
    if local(parameter).device.type == "meta" or not math.prod(shape):
        raise MeasurementError(f"{name} has no values in this process", hint=_NOT_TAKEN)
    if getattr(parameter, "tensor_model_parallel", False):
        raise MeasurementError(
            f"{name} is a part of Megatron's tensor parallelism", hint=_NOT_TAKEN
        )
    if not parameter.is_floating_point():
        raise MeasurementError(
            f"{name} is of {str(parameter.dtype).removeprefix('torch.')}, and the preflight "
            "test adds noise to floating-point numbers",
            hint="freeze it with requires_grad_(False)",
        )
