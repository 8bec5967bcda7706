# What a child process that runs a kernel is started with: its interpreter and its environment.

from __future__ import annotations

import os
import sys
from pathlib import Path

from servanda.contract.model import Kernel
from servanda.errors import MeasurementError

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # keep freed activations: handing each back to the system costs a tenth of the time
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# weights that come and go are handed back, or the heap keeps them in pieces
_IN_PARTS = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 20))


def environment_of(kernel: Kernel) -> dict[str, str]:
    """The variables of a kernel's child: those of this process, and its own."""
    own = dict(_ENVIRONMENT)
    if {"ranks", "offload"} & (kernel.options or {}).keys():
        own |= _IN_PARTS
    return {**os.environ, **own}


def interpreter_of(python: str | None) -> str:
    """The interpreter of a virtual environment, or the one that is named; default this one."""
    if python is None:
        return sys.executable
    place = Path(python)
    executable = place / "bin" / "python" if place.is_dir() else place
    if not os.access(executable, os.X_OK) or executable.is_dir():
        raise MeasurementError(
            f"{Path(python).resolve()} is no virtual environment and no Python interpreter",
            hint="the kernel's `python` names a folder with bin/python in it, or an interpreter",
        )
    return str(executable)
