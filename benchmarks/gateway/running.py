# Processes of a benchmark: started, pinned to a core, waited for, and ended.

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 120.0  # LiteLLM takes half a minute to import on a busy core


@dataclass(frozen=True)
class Running:
    """A process that listens."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def cores() -> tuple[int, int]:
    """The core of the proxy and that of everything else."""
    found = sorted(os.sched_getaffinity(0))
    return found[-1], found[0]


@contextmanager
def listening(
    command: Sequence[str],
    port: int,
    core: int | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Running]:
    """The process while it is needed; SIGTERM at the end, and SIGKILL ten seconds later.

    Raises:
        RuntimeError: it ended, or does not listen; with the end of what it wrote.
    """
    out = log.open("ab") if log else subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=out, stderr=out
    )
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        _wait(process, port, log)
        yield Running(process.pid, port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if log:
            out.close()  # type: ignore[union-attr]


def _wait(process: subprocess.Popen[bytes], port: int, log: Path | None) -> None:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as tried:
            tried.settimeout(0.2)
            if not tried.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    said = log.read_text(errors="replace")[-2000:] if log else ""
    raise RuntimeError(f"{process.args} does not listen on {port}\n{said}")


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gateway.{module}", *arguments]


def machine() -> str:
    """What the numbers were measured on, as a sentence."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "unknown")
    names = ("uvicorn", "uvloop", "httptools", "starlette", "aiohttp", "msgspec")
    parts = ", ".join(f"{name} {version(name)}" for name in names)
    load = os.getloadavg()[0]
    return (
        f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {parts}. "
        f"Load average at the end: {load:.1f}."
    )
