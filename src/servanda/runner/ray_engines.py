# Engines as actors of a Ray cluster: each on a node that has its resources, in its environment.
#
# An actor whose node or process is lost is started again elsewhere, and the verb that it owed is
# called again.  Samples are keyed by (seed, sequence, position), so they are the same, and a round
# is on disk only once.

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.engines.base import Engine
from servanda.engines.foreign_code import ALLOWED_HOSTS, NO_CODE
from servanda.engines.worker import Worker, spawn
from servanda.errors import MeasurementError
from servanda.runner.measurement import Open
from servanda.runner.ray_cluster import Cluster, connected, node_id
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Timing, Trace


class RemoteEngine:
    """An Engine whose verbs run in an actor.

    Args:
        options: of the actor, as Ray names them: num_gpus, resources, runtime_env, ...
    """

    def __init__(
        self, cluster: Cluster, kernel: Kernel, side: str, options: Mapping[str, Any]
    ) -> None:
        self._cluster = cluster
        # --no-code holds on every node
        refused = {k: os.environ[k] for k in (NO_CODE, ALLOWED_HOSTS) if k in os.environ}
        self._actor = cluster.actor(_Host, options, str(FilePath.cwd()), refused, kernel, side)

    def _call(self, verb: str, *arguments: Any) -> Any:
        return self._cluster.task(self._actor.call.remote(verb, *arguments)).result()

    def describe(self) -> Description:
        return self._call("describe")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._call("encode", texts)

    def vocabulary(self) -> list[str]:
        return self._call("vocabulary")

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self._call("decode", ids)

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        return self._call("generate", batch, sampling, seed)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        return self._call("score", batch, sampling, path)

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        """All pieces travel at once: those of a lost actor cannot be continued."""
        yield from self._call("logits", batch, path)

    def top(self, batch: Batch, path: Path) -> Trace:
        return self._call("top", batch, path)

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        return self._call("time", batch, sampling, seed, record)

    def close(self) -> None:
        self._cluster.kill(self._actor)


class _Host:
    """The actor: it keeps the engine in a child process, as this machine would."""

    def __init__(self, folder: str, refused: dict[str, str], kernel: Kernel, side: str) -> None:
        with suppress(OSError):
            os.chdir(folder)  # a relative path of a model means the same folder as here
        os.environ.update(refused)
        self._kernel, self._side = kernel, side
        self._engine: Worker | None = None

    def call(self, verb: str, *arguments: Any) -> tuple[str, float, Any]:
        began = time.monotonic()
        # not in __init__, whose errors Ray would report as the death of the actor
        self._engine = self._engine or spawn(self._kernel, self._side)
        value = getattr(self._engine, verb)(*arguments)
        value = [*value] if verb == "logits" else value
        return node_id(), time.monotonic() - began, value


@contextmanager
def engines_on(address: str | None, actors: Sequence[str] = ()) -> Iterator[Open]:
    """What opens engines: child processes of this one, or actors of a Ray cluster.

    Args:
        address: as of `connected`; None: no cluster.
        actors: SIDE=JSON of each actor that is not started as Ray does without options.

    Raises:
        MeasurementError: as `connected`; later, a cluster lacks the resources of an actor.
    """
    options = dict(map(actor_of, actors))
    if address is None:
        yield spawn
        return
    with connected(address) as cluster:

        def opened(kernel: Kernel, side: str) -> Engine:
            return RemoteEngine(cluster, kernel, side, options.get(side, {}))

        yield opened


def actor_of(text: str) -> tuple[str, dict[str, Any]]:
    """A side and the options of its actor, from SIDE=JSON.

    Raises:
        MeasurementError: the text has another form.

    >>> actor_of('infer={"num_gpus": 1}')
    ('infer', {'num_gpus': 1})
    """
    side, _, options = text.partition("=")
    try:
        parsed = json.loads(options)
        if side not in ("train", "infer", "stable", "format") or not isinstance(parsed, dict):
            raise ValueError
    except ValueError:
        raise MeasurementError(
            f"{text!r} does not say how to start an actor",
            hint="""write SIDE=JSON, such as 'infer={"num_gpus": 1}'; a side is train or infer""",
        ) from None
    return side, parsed
