# The shard of a parameter that this process has, and its place in the whole tensor.
#
# A plain parameter is whole.  A DTensor, of FSDP2 or of tensor parallelism, is one shard of
# several, and so is a parameter of ZeRO-3.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.parallel import zero3


class Place(NamedTuple):
    """Where the values of a shard lie in the whole tensor.

    Args:
        shape: of the whole tensor.
        at: for each dimension the indexes that the shard has, ascending; None for all of them.
    """

    shape: tuple[int, ...]
    at: tuple[Tensor | None, ...]

    @property
    def is_whole(self) -> bool:
        return all(index is None for index in self.at)

    def sizes(self) -> tuple[int, ...]:
        """The shape of the shard."""
        pairs = zip(self.shape, self.at, strict=True)
        return tuple(size if index is None else len(index) for size, index in pairs)

    def rows(self, low: int, high: int | None) -> slice:
        """The rows of the shard that are rows [low, high) of the whole tensor."""
        rows = self.at[0]
        if rows is None:
            return slice(low, high)
        ends = [low, self.shape[0] if high is None else high]
        first, last = torch.searchsorted(rows, torch.tensor(ends)).tolist()
        return slice(first, last)

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the shard, index of each of their values in the whole tensor, flattened)."""
        if not self.shape:
            yield slice(None), torch.zeros((), dtype=torch.int64, device=device)
            return
        sizes = self.sizes()
        first_I, *others = (
            torch.arange(size, device=device) if own is None else own.to(device)
            for size, own in zip(self.shape, self.at, strict=True)
        )
        step = max(1, zero3.at_once(device) // max(1, math.prod(sizes[1:])))
        for first in range(0, sizes[0], step):
            rows = slice(first, min(first + step, sizes[0]))
            index = first_I[rows]
            for size, here in zip(self.shape[1:], others, strict=True):
                index = index[..., None] * size + here
            yield rows, index

    def __str__(self) -> str:
        """The same text for the same place, such as `0:12, :`."""
        return ", ".join(_span(index) for index in self.at)


def _span(index: Tensor | None) -> str:
    if index is None:
        return ":"
    values = index.tolist()
    if values and len(values) == values[-1] - values[0] + 1:
        return f"{values[0]}:{values[-1] + 1}"
    return ",".join(map(str, values)) if values else "none"


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor, or one of ZeRO-3."""
    return hasattr(parameter, "to_local") or zero3.is_partitioned(parameter)


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of a module is a shard, after its shards are back in place."""
    reshard(module)
    return any(map(is_shard, module.parameters()))


def refuse_whole(module: nn.Module) -> None:
    """Raise MeasurementError for a module without shards in a process group."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise MeasurementError(
            "there is no process group",
            hint="call torch.distributed.init_process_group first; a whole module needs none: "
            "servanda.rl.Trainee",
        )
    if not is_sharded(module):
        raise MeasurementError(
            f"no parameter of {type(module).__name__} is a DTensor, or one of ZeRO-3",
            hint="apply FSDP2's fully_shard or deepspeed.initialize first; test the stream of "
            "another trainer: servanda.rl.Stream",
        )


def reshard(module: nn.Module) -> None:
    """Free the whole parameters that FSDP2 and ZeRO-3 keep after a forward pass.

    The next pass would use these, and ignore a change of the shards.
    """
    for part in module.modules():
        if hasattr(part, "reshard") and hasattr(part, "unshard"):
            part.reshard()  # pyright: ignore[reportCallIssue]
    for parameter in filter(zero3.is_partitioned, module.parameters()):
        zero3.release(parameter)


def local(parameter: Tensor) -> Tensor:
    """The values of a parameter that this process has; a change of them changes the parameter."""
    if zero3.is_partitioned(parameter):
        return zero3.part(parameter)
    if not hasattr(parameter, "to_local"):
        return parameter.detach()
    with torch.no_grad():
        shard: Any = parameter
        return shard.to_local().detach()


def place_of(name: str, parameter: Any) -> Place | zero3.FlatPlace:
    """The place of a parameter's shard.

    Raises:
        MeasurementError: the shards are partial sums, lie otherwise than their placements say, or
            are not the only copy.
    """
    if zero3.is_partitioned(parameter):
        zero3.refuse_unknown(name, parameter)
        return zero3.part_place(parameter)
    shape = tuple(parameter.shape)
    at: list[Tensor | None] = [None] * len(shape)
    if not hasattr(parameter, "to_local"):
        return Place(shape, tuple(at))
    mesh = parameter.device_mesh
    axes = zip(mesh.shape, mesh.get_coordinate(), parameter.placements, strict=True)
    for parts, here, placement in axes:
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise _unknown(name, parameter)
        index = at[dim]
        index = torch.arange(shape[dim]) if index is None else index
        pieces = [
            piece.chunk(parts) for piece in index.chunk(getattr(placement, "split_factor", 1))
        ]
        own = [piece[here] for piece in pieces if here < len(piece)]
        at[dim] = torch.cat(own) if own else index[:0]
    place = Place(shape, tuple(at))
    if place.sizes() != tuple(local(parameter).shape):
        raise _unknown(name, parameter)
    return place


def whole(parameter: Any, values: Tensor) -> Tensor:
    """The whole tensor of shards with other values than the parameter's; every process calls it."""
    if zero3.is_partitioned(parameter):
        return zero3.gathered(parameter, values)
    if not hasattr(parameter, "to_local"):
        return values
    from torch.distributed.tensor import DTensor

    shard = DTensor.from_local(
        values.to(local(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return shard.full_tensor()


def laid_out(values: Tensor, like: Any) -> Tensor:
    """A whole tensor in the type of another one, and sharded as it is."""
    values = values.to(like.dtype)
    if not hasattr(like, "to_local"):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


def _unknown(name: str, parameter: Any) -> MeasurementError:
    return MeasurementError(
        f"{name} is sharded as {parameter.placements}, which the preflight test does not know",
        hint="shard it by FSDP2's fully_shard or by Shard and Replicate of a device mesh",
    )
