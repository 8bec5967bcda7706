# Which experts the routers of a mixture pick, as a model of Transformers runs; and a run in which
# they pick given ones.
#
# Transformers names the modules that route (`_can_record_outputs["router_logits"]`); of what one
# returns, the whole numbers are the experts, and the last numbers of the same shape their weights.
# Axes: S rows of a chunk, T columns that are fed, C columns that are kept, L layers, K experts.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from servanda.contract.model import Path
from servanda.engines.transformers_steps import steps_of
from servanda.errors import MeasurementError
from servanda.traces.expert_columns import gate_column, route_column
from servanda.traces.trace import Batch


class RouteRecorder:
    """Keeps the experts of each forward of a model, and their weights; empty without routers."""

    def __init__(self, model: Any) -> None:
        self._picked: list[tuple[Tensor, Tensor]] = []
        self.routers = [*_routers(model)]
        for router in self.routers:
            router.register_forward_hook(self._keep)

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        parts = [part for part in parts if isinstance(part, Tensor)]
        for expert in (part for part in parts if not part.is_floating_point()):
            # the scores of all experts have the same shape if each is picked; they come first
            same = (p for p in parts[::-1] if p.is_floating_point() and p.shape == expert.shape)
            unknown = torch.full_like(expert, torch.nan, dtype=torch.float32)
            self._picked.append((expert, next(same, unknown)))

    def taken(self, rows: int, kept_C: NDArray[np.integer]) -> NDArray[np.float32] | None:
        """The experts of the forward that has just run and their weights, [S, C, L, K, 2].

        Args:
            rows: S of that forward; kept_C: indexes of the columns.

        Returns:
            Sorted by expert, the weights NaN where the routers do not return them; None where they
            do not return their experts.
        """
        picked, self._picked = self._picked, []
        if not picked or len(picked) != len(self.routers):
            return None
        both_LSCK = [
            [part.reshape(rows, -1, part.shape[-1])[:, kept_C].float() for part in both]
            for both in picked
        ]
        route_LSCK, gate_LSCK = map(torch.stack, zip(*both_LSCK, strict=True))
        route_LSCK, order = route_LSCK.sort(dim=-1)
        route_LSCK2 = torch.stack([route_LSCK, gate_LSCK.gather(-1, order)], dim=-1)
        return route_LSCK2.permute(1, 2, 0, 3, 4).cpu().numpy()

    @contextmanager
    def replaying(
        self, route_SCLK: NDArray[np.integer] | None, device: torch.device
    ) -> Iterator[None]:
        """Let the routers of one forward pick these experts, with weights of their own scores.

        Args:
            route_SCLK: for each column that is fed; -1 where the router picks by itself.  None: it
                always does.

        Raises:
            MeasurementError: the model has other routers, or one that does not pick by one topk.
        """
        if route_SCLK is None:
            yield
            return
        if len(self.routers) != route_SCLK.shape[2]:
            raise MeasurementError(
                f"the recorded experts are of {route_SCLK.shape[2]} layers, and this model has "
                f"{len(self.routers)} routers",
                hint="replay the experts of the same mixture, or remove the key routes",
            )
        given_LRK = torch.from_numpy(route_SCLK).long().to(device).movedim(2, 0).flatten(1, 2)
        own = [vars(router).get("forward") for router in self.routers]  # if it was replaced before
        for router, given_RK in zip(self.routers, given_LRK, strict=True):
            router.forward = _picking(router, given_RK)
        try:
            yield
        finally:
            for router, forward in zip(self.routers, own, strict=True):
                del router.forward
                if forward is not None:
                    router.forward = forward


class _Given(TorchFunctionMode):
    """Replaces what `topk` returns by the given experts, and their scores.

    A router that picks groups of experts first calls `topk` for them too; those calls stay.

    Args:
        given_RK: -1 where the router picks by itself.
        experts: of the layer; None if unknown.
    """

    def __init__(self, given_RK: Tensor, experts: int | None) -> None:
        super().__init__()
        self.given_RK, self.experts, self.picks = given_RK, experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        score, own = (args[0] if args else kwargs["input"]), found[1]
        same = own.shape[-1] == self.given_RK.shape[-1] and own.numel() == self.given_RK.numel()
        if not same or self.experts not in (None, score.shape[-1]):
            return found
        self.picks += 1
        if (most := int(self.given_RK.max())) >= score.shape[-1]:
            raise MeasurementError(
                f"expert {most} was recorded, and a layer of this model has {score.shape[-1]}",
                hint="replay the experts of the same mixture, or remove the key routes",
            )
        given = self.given_RK.reshape(own.shape)
        given = given.where(given >= 0, own)
        # in the order of topk, so that what is equal is equal in every bit
        value, order = score.gather(-1, given).sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((value, given.gather(-1, order)))


def _picking(router: Any, given_RK: Tensor) -> Callable[..., Any]:
    forward, weight = router.forward, getattr(router, "weight", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Given(given_RK, None if weight is None else len(weight)) as given:
            output = forward(*args, **kwargs)
        if given.picks != 1:
            raise MeasurementError(
                f"{given_RK.shape[-1]} experts a token were recorded, and a router "
                f"({type(router).__name__}) has {given.picks} calls of topk that pick as many",
                hint="replay the experts of the same mixture; if they are, its architecture is "
                "not supported: remove the key routes",
            )
        return output

    return run


def given_routes(
    chunk: Batch, path: Path, size: int | None, *, cached: bool
) -> list[NDArray[np.int16]]:
    """The routes of each forward that scores a chunk, [S, C, L, K]; -1 where none is given.

    Args:
        size: columns of each forward of a prefill; None: all at once.
        cached: whether the engine has a prefix cache.

    Raises:
        MeasurementError: it has.
    """
    if not chunk.routes:
        return []
    if cached:
        raise MeasurementError(
            "a prefix cache and routes=replayed exclude each other: no router runs for a cached "
            "token",
            hint="remove the key prefix_cache of the kernel that replays",
        )
    longest, shape = max(map(len, chunk.prompts)), chunk.routes[0].shape[1:]
    whole = np.full((len(chunk), longest + chunk.width, *shape), -1, dtype=np.int16)
    for row, (prompt, route) in enumerate(zip(chunk.prompts, chunk.routes, strict=True)):
        # the last column of a prompt predicts the first token; decoding pads prompts on the left
        first = (len(prompt) if path == "prefill" else longest) - 1
        whole[row, first : first + len(route)] = route
    fed = whole.shape[1] if path == "prefill" else longest
    steps = [*steps_of(fed, size), *(slice(at, at + 1) for at in range(fed, whole.shape[1]))]
    return [whole[:, step] for step in steps]


def route_columns(route_NLK2: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    """What `RouteRecorder.taken` returns as columns of a trace, [N] each."""
    _, layers, experts, _ = route_NLK2.shape
    names = (route_column, gate_column)
    if np.isnan(route_NLK2[..., 1]).all():  # the routers do not return weights
        names = names[:1]
    return {
        name(layer, k): route_NLK2[:, layer, k, part].astype(np.float64)
        for part, name in enumerate(names)
        for layer in range(layers)
        for k in range(experts)
    }


def _routers(model: Any) -> Iterator[Any]:
    """The modules that route, in the order in which they run."""
    named = [
        getattr(part, "_can_record_outputs", None) or {}
        for part in model.modules()
        if hasattr(part, "_can_record_outputs")
    ]
    recorders = [found["router_logits"] for found in named if "router_logits" in found]
    each = [one for of in recorders for one in (of if isinstance(of, list | tuple) else [of])]
    kinds = {getattr(one, "target_class", one) for one in each}
    yield from (part for part in model.modules() if type(part) in kinds)
