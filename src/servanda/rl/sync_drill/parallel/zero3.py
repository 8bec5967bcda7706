# A parameter that DeepSpeed's ZeRO-3 partitions: flattened, padded, and cut into equal parts, of
# which this process has one.  The attributes are those of DeepSpeed 0.19.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from servanda.errors import MeasurementError


class FlatPlace(NamedTuple):
    """Where the values of a part lie in the whole tensor, flattened: [first, stop).

    Args:
        shape: of the whole tensor.
    """

    shape: tuple[int, ...]
    first: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return False

    def rows(self, low: int, high: int | None) -> slice:
        """The values of the part that lie in rows [low, high) of the whole tensor."""
        step = math.prod(self.shape[1:])
        ends = (low * step, self.stop if high is None else high * step)
        first, last = (min(max(end, self.first), self.stop) - self.first for end in ends)
        return slice(first, last)

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """(values of the part, index of each in the whole tensor, flattened)."""
        step = at_once(device)
        for low in range(self.first, self.stop, step):
            high = min(low + step, self.stop)
            yield (
                slice(low - self.first, high - self.first),
                torch.arange(low, high, device=device),
            )

    def __str__(self) -> str:
        return f"values {self.first}:{self.stop}"


def at_once(device: torch.device) -> int:
    """Values that are computed at once: what a cache holds, or what is worth a launch."""
    return 1 << 20 if device.type == "cpu" else 1 << 26


def is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def part(parameter: Any) -> Tensor:
    """The values that this process has, without padding; a change of them changes the parameter."""
    place = part_place(parameter)
    return parameter.ds_tensor.detach()[: place.stop - place.first]


def part_place(parameter: Any) -> FlatPlace:
    shape, count = tuple(parameter.ds_shape), parameter.ds_numel
    size = parameter.partition_numel()
    first = min(torch.distributed.get_rank(parameter.ds_process_group) * size, count)
    return FlatPlace(shape, first, min(first + size, count))


def refuse_unknown(name: str, parameter: Any) -> None:
    """Raise MeasurementError for a parameter whose values do not all lie in its one part."""
    where = getattr(parameter.ds_tensor, "final_location", None)
    if parameter.ds_secondary_tensor is not None or hasattr(parameter.ds_tensor, "ds_quant_scale"):
        problem = "has second or quantised parts (ZeRO++)"
    elif getattr(where, "value", None) == "nvme":
        problem = "is offloaded to a disk"
    else:
        return
    raise MeasurementError(
        f"{name} {problem}, which the preflight test does not change",
        hint="test with zero_hpz_partition_size and zero_quantized_weights unset, and "
        "offload_param on the cpu or none",
    )


def release(parameter: Any) -> None:
    """Free the gathered values: small parameters stay gathered, and would hide a change."""
    if parameter.ds_status.name == "AVAILABLE":
        parameter.partition()


def gathered(parameter: Any, values: Tensor) -> Tensor:
    """The whole tensor of parts with other values than the parameter's; every process calls it."""
    from torch import distributed

    group, size = parameter.ds_process_group, parameter.partition_numel()
    padded = torch.zeros(size, dtype=values.dtype, device=parameter.device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, padded, group)
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
