# A Ray cluster: tasks that run on any of its nodes.
#
# Ray runs a task again if its node or its process is lost.  The result is taken once, by the
# reference of the task, so a task that ran twice counts once.

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servanda._version import __version__
from servanda.errors import MeasurementError

LOCAL = "local"  # a cluster on this machine that ends with the command
_RETRIES = 5  # of a task whose node or process was lost
_REACHED_S = 10.0  # Ray itself waits for minutes for an address without a listener
_NO_NODE_S = 600.0  # longer than an autoscaler needs to start a node
_STORE_BYTES = 80_000_000  # of a local cluster; tasks return sums, which are small
_AHEAD = 2  # tasks per core that are begun before their turn
_CLIENT_PORT = 10001


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise MeasurementError(
            f"a cluster needs Ray, which cannot be imported: {error}",
            hint="pip install 'servanda[ray]'",
        ) from None


@dataclass
class Cluster:
    """A cluster that this process is connected to.

    Args:
        address: as in the command line.
        ahead: number of tasks to begin before their turn.
        spent: (node, seconds) of each task whose result was taken.
    """

    address: str
    ahead: int
    spent: list[tuple[str, float]] = field(default_factory=list)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Task:
        """Begin work on a node: a function of a module, and arguments that pickle."""
        options = {"max_retries": _RETRIES, "scheduling_strategy": "SPREAD", "num_cpus": 1}
        remote = _ray().remote(**options)(_on_node)
        return Task(self, remote.remote(__version__, str(Path.cwd()), work, *arguments))

    def task(self, reference: Any) -> Task:
        return Task(self, reference)

    def actor(self, host: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        """Start an actor, which is started again if it is lost.

        Args:
            options: of the actor, as Ray names them.

        Raises:
            MeasurementError: the cluster lacks the resources, or Ray does not know an option.
        """
        ray = _ray()
        options = {"num_cpus": 1, **options}
        needs = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
        found = ray.cluster_resources()
        for name, amount in {**needs, **options.get("resources", {})}.items():
            if amount > found.get(name, 0):
                raise MeasurementError(
                    f"an actor needs {amount} {name}, and {self.address} has "
                    f"{found.get(name, 0):.0f}",
                    hint="start a node that has it, or ask for less: --ray-actor SIDE=JSON",
                )
        # a call is tried again until the actor is back, which takes Ray seconds to notice
        again = {"max_restarts": _RETRIES, "max_task_retries": -1}
        try:
            return ray.remote(**again, **options)(host).remote(*arguments)
        except (ValueError, TypeError) as error:
            raise MeasurementError(
                f"Ray refuses the options of an actor: {error}", hint="see ray.remote"
            ) from None

    def kill(self, actor: Any) -> None:
        with suppress(Exception):  # the cluster may be gone
            _ray().kill(actor)

    def __str__(self) -> str:
        tasks, nodes = len(self.spent), len({node for node, _ in self.spent})
        return (
            f"{tasks:,} task{'s' * (tasks != 1)} on {nodes} node{'s' * (nodes != 1)} of "
            f"{self.address}, {sum(seconds for _, seconds in self.spent):,.0f} core-seconds"
        )


@dataclass(frozen=True)
class Task:
    """Work that was begun on a cluster."""

    cluster: Cluster
    reference: Any

    def result(self) -> Any:
        """Wait for the result.

        Raises:
            MeasurementError: the task was lost too often, or the cluster lost all of its nodes.
            Exception: the error that the work raised.
        """
        ray = _ray()
        try:
            while not ray.wait([self.reference], timeout=_NO_NODE_S)[0]:
                if not ray.cluster_resources().get("CPU"):
                    raise MeasurementError(
                        f"no node of {self.cluster.address} is left to run a task",
                        hint="start a node, and run the same command again",
                    )
            node, seconds, value = ray.get(self.reference)
        except ray.exceptions.RayTaskError as error:
            if "failed to import on the worker" in str(error.cause):
                raise _other(f"a node of the cluster lacks servanda {__version__}") from None
            raise error.cause from None
        except ray.exceptions.RayError as error:
            first = str(error).partition("\n")[0]
            raise MeasurementError(
                f"a task was lost {_RETRIES + 1} times on {self.cluster.address}: {first}",
                hint="a task may need more memory than its node has: give fewer tasks to a node",
            ) from None
        self.cluster.spent.append((node, seconds))
        return value

    def cancel(self) -> None:
        """End the work together with its process."""
        with suppress(Exception):  # the cluster may be gone
            _ray().cancel(self.reference, force=True)


def _other(message: str) -> MeasurementError:
    return MeasurementError(
        message, hint=f"every node needs the same release: pip install servanda=={__version__}"
    )


def _on_node(version: str, folder: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Do work on a node; returns the node, the seconds and the result."""
    if version != __version__:
        raise _other(f"{socket.gethostname()} has servanda {__version__}, and this is {version}")
    with suppress(OSError):  # a node without this folder can still read URLs
        os.chdir(folder)  # a relative path means the same file as here
    began = time.monotonic()
    value = work(*arguments)
    return node_id(), time.monotonic() - began, value


def node_id() -> str:
    """The node that this task or actor runs on."""
    return _ray().get_runtime_context().get_node_id()


@contextmanager
def connected(address: str, jobs: int | None = None) -> Iterator[Cluster]:
    """A connection to a cluster; one that this process already has is used and kept.

    Within the block of a new connection standard output is standard error, for Ray prints there.

    Args:
        address: "local" starts a cluster on this machine; "auto" is one that runs here;
            "ray://HOST:PORT" or "HOST:PORT" is any other.
        jobs: most tasks that run at once; None: as many as there are cores.

    Raises:
        MeasurementError: Ray is not installed, or the address does not answer.
    """
    ray = _ray()
    if ray.is_initialized():
        yield _sized(address, jobs)
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": jobs, "include_dashboard": False}
        options["object_store_memory"] = _STORE_BYTES
    else:
        _reach(address)
    with redirect_stdout(sys.stderr):  # where Ray says what became of a node
        try:
            ray.init(address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise _silent(address, str(error).partition("\n")[0]) from None
        try:
            yield _sized(address, jobs)
        finally:
            ray.shutdown()


def _sized(address: str, jobs: int | None) -> Cluster:
    cores = int(_ray().cluster_resources().get("CPU", 0))
    if jobs is None and not cores:
        raise MeasurementError(
            f"no node of {address} has a core for tasks",
            hint="start a node; if the cluster adds nodes on demand, say how many tasks: --jobs N",
        )
    return Cluster(address, jobs if jobs and address != LOCAL else _AHEAD * cores)


def _reach(address: str) -> None:
    """Refuse an address without a listener at once."""
    if address == "auto":
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        where = parts.hostname or "", parts.port or _CLIENT_PORT
        socket.create_connection(where, _REACHED_S).close()
    except (OSError, ValueError) as error:
        raise _silent(address, str(error)) from None


def _silent(address: str, why: str) -> MeasurementError:
    return MeasurementError(
        f"there is no Ray cluster at {address}: {why}",
        hint="local starts one on this machine; auto finds one that runs here; any other is "
        "ray://HOST:10001",
    )
