# The trained weights of a module as the test changes them: whole, or in shards of several
# processes, each of which changes its own.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

from torch import nn

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.noise import Sums
from servanda.rl.sync_drill.parallel.local_weights import LocalWeights, Size
from servanda.rl.sync_drill.parallel.process_group import ALONE, Ranks


class Weights:
    """The trained parameters of a module: changed in place, and restored.

    Args:
        module, copy: as of LocalWeights.
        seed: seed of the noise.
        ranks: the processes that have a shard.

    Raises:
        MeasurementError: as of LocalWeights, or the processes have different modules.
    """

    def __init__(
        self, module: nn.Module, seed: int = 0, *, copy: bool = True, ranks: Ranks = ALONE
    ) -> None:
        self.local, self.ranks = LocalWeights(module, copy=copy), ranks
        self.parameters, self.aliases = self.local.parameters, self.local.aliases
        self.shapes = {name: place.shape for name, place in self.local.places.items()}
        self.places = self._places(seed)
        self.anchored = False
        self._sums: dict[str, Sums] = {}

    def _places(self, seed: int) -> dict[str, list[str]]:
        """tensor -> where each process has its shard."""
        layouts = self.ranks.call(self.local.layout, seed)
        for rank, layout in enumerate(layouts):
            for name in {*layout, *layouts[0]}:
                here, there = layouts[0].get(name, ("",))[0], layout.get(name, ("",))[0]
                if here != there:
                    raise MeasurementError(
                        f"rank {rank} trains {name} as {there or 'nothing'}, and rank 0 as "
                        f"{here or 'nothing'}",
                        hint="call preflight on every rank of the process group, each with its "
                        "shards of one module",
                    )
        return {name: [layout[name][1] for layout in layouts] for name in layouts[0]}

    def sums(self) -> dict[str, Sums]:
        """Of the whole of each tensor, as it was at the start."""
        if not self._sums:
            parts = self.ranks.call(self.local.sums)
            for name, places in self.places.items():
                owners = {place: rank for rank, place in reversed([*enumerate(places)])}
                each = (parts[rank][name] for rank in owners.values())
                self._sums[name] = reduce(Sums.plus, each, Sums())
        return self._sums

    def _moments(self, name: str) -> tuple[float, float]:
        return self.sums()[name].moments(self.shapes[name])

    def zeros(self) -> list[str]:
        """The matrices of zeros, such as an adapter's B at its start."""
        sums = self.sums()
        return [name for name, shape in self.shapes.items() if sums[name].is_zero_matrix(shape)]

    # changing

    def poison(self, names: Iterable[str] = ()) -> None:
        """Replace some tensors, or all, by noise with their mean and spread."""
        which = [*names] or [*self.parameters]
        self.ranks.post(self.local.poison, {name: self._moments(name) for name in which})

    def anchor(self) -> bool:
        """Fill matrices of zeros, which would hide other tensors; returns whether there are any."""
        scales = {name: self._moments(name)[1] / 4 for name in self.zeros()}
        self.ranks.post(self.local.fill, scales)
        for name, scale in scales.items():
            count = self._sums[name].count
            self._sums[name] = Sums(count, 0.0, count * scale * scale, count)
        self.anchored = bool(scales)
        return self.anchored

    def perturb(self, sizes: Mapping[str, Size], share: float = 1.0) -> None:
        """Add noise to a share of the values of some tensors, as a multiple of each one's spread.

        The values of a share are among those of a larger one.
        """
        scales: dict[str, Size] = {}
        for name, size in sizes.items():
            spread = self._moments(name)[1]
            each = isinstance(size, tuple)
            scales[name] = tuple(row * spread for row in size) if each else size * spread
        self.ranks.post(self.local.perturb, scales, share)

    def settle(self, names: Iterable[str]) -> None:
        """Return tensors to their values before the perturbation."""
        self.ranks.post(self.local.settle, [*names])

    def settle_rows(self, names: Iterable[str], low: int, high: int | None) -> None:
        self.ranks.post(self.local.settle_rows, [*names], low, high)

    def settle_share(self, name: str, axis: int, low: int, high: int) -> None:
        """Return rows or columns [low, high) of a matrix to their values before."""
        self.ranks.post(self.local.settle_share, name, axis, low, high)

    def settle_shard(self, names: Iterable[str], rank: int) -> None:
        """Return the shards that a process has, and copies of them, to their values before."""
        self.ranks.post_each(
            self.local.settle,
            [
                [name for name in names if self.places[name][at] == self.places[name][rank]]
                for at in range(self.ranks.size)
            ],
        )

    def scale(self, names: Iterable[str], factor: float) -> None:
        self.ranks.post(self.local.scale, [*names], factor)

    def cast(self, format_: str) -> None:
        """Round all tensors to a format."""
        self.ranks.post(self.local.cast, format_)

    def reorder(self, number: int) -> None:
        """Do to all tensors, which are whole, what an entry of ORDERS does."""
        self.ranks.post(self.local.reorder, number)

    def exchange(self, pairs: list[tuple[str, str]]) -> None:
        """Give each of two tensors, which are whole, the values of the other before changes."""
        self.ranks.post(self.local.exchange, pairs)

    def untie(self, use: str, name: str) -> None:
        """Exclude one use of a tied tensor from its perturbation."""
        self.ranks.call(self.local.untie, use, name)  # gathers one tensor

    def tie(self, use: str, name: str) -> None:
        self.ranks.post(self.local.tie, use, name)

    def restore(self) -> None:
        """Restore every tensor bit for bit.

        Raises:
            MeasurementError: a tensor does not read back as written.
        """
        self.ranks.forget()
        self.ranks.call(self.local.restore)
