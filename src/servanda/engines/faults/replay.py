# Faults of a routing replay: the trainer does not use the experts that the sampler recorded.
#
# They break an engine that scores with given experts (`routes: replayed`), so they do nothing to a
# dense model, and no signature of them is kept.  `servanda check` of a dump that holds the experts
# of both sides names them.

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from servanda.engines.faults.base import Between, Fault, Switch, fault
from servanda.registry import Registry

REPLAY_FAULTS: Registry[Fault] = Registry("fault of a replay")

replay_fault = partial(fault, registry=REPLAY_FAULTS, side="train")


@replay_fault(
    "shifted_replay",
    "Each token is routed to the experts of the one `value` tokens before it.",
    default=1,
    takes=Between(1, 1024, whole=True),
    seen="NovaSky-AI/SkyRL#1908 and PrimeIntellect-ai/prime-rl#1807: rows of routed experts that "
    "are not those of their tokens",
)
def shifted_replay(base: Any, value: int) -> Any:
    return _changed(base, lambda route_TLK: np.roll(route_TLK, value, axis=0))


@replay_fault(
    "layer_not_replayed",
    "The router of layer `value` (from 0) picks its experts by itself.",
    default=1,
    takes=Between(1, 1024, whole=True),
    seen="verl-project/verl#7786: a replay that covers some layers only",
)
def layer_not_replayed(base: Any, value: int) -> Any:
    def without(route_TLK: Any) -> Any:
        own = route_TLK.copy()
        own[:, value] = -1
        return own

    return _changed(base, without)


@replay_fault(
    "dropped_replay",
    "The recorded experts are not used at all.",
    takes=Switch(),
    seen="verl-project/verl#7106: the replay is dropped, silently",
)
def dropped_replay(base: Any, _: bool) -> Any:
    return _changed(base, lambda route_TLK: np.full_like(route_TLK, -1))


def _changed(base: Any, change: Any) -> Any:
    class Replaying(base):
        def score(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            routes = tuple(map(change, batch.routes))
            return super().score(replace(batch, routes=routes), *args, **kwargs)

    return Replaying
