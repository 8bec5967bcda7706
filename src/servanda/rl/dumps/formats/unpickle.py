# Reads a pickle in a separate process: `python -I -S unpickle.py NAMES BYTES`.
#
# Standard input is the pickle.  Only the names below are resolved, each to an inert object that
# stores its arguments; any other name ends the process.  No module of the pickle is imported and no
# function of it is called.  Standard output is one line of JSON and the bytes of the requested
# columns.

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import sys
from typing import Any

_SPARE = 1 << 28  # memory in addition to the pickle's own bytes
_CPU_S = 300
REFUSED = 3


class Batch:
    """Replaces the call that rebuilds a batch of SkyRL: returns the state."""

    __slots__ = ()

    def __call__(self, cls: object, state: object) -> object:
        return state


class Inert:
    """Replaces objects that are not read: accepts any call and does nothing."""

    __slots__ = ()

    def __call__(self, *args: object) -> Inert:
        return self

    def __setstate__(self, state: object) -> None:
        pass


BATCHES = ("skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch")
ADMITTED: dict[tuple[str, str], object] = {
    **{(module, "_rebuild_tensor_batch"): Batch() for module in BATCHES},
    **{(module, "TrainingInputBatch"): Inert() for module in BATCHES},
    ("torch", "device"): Inert(),
    ("numpy", "dtype"): Inert(),
    ("numpy", "ndarray"): Inert(),
    **{
        (f"numpy.{core}.multiarray", name): Inert()
        for core in ("core", "_core")
        for name in ("scalar", "_reconstruct")
    },
}


class Restricted(pickle.Unpickler):
    """Resolves only accepted names."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200]) from None

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it asks for objects from outside")


def limit(size: int) -> None:
    """Limit memory, CPU time and files, so that a hostile pickle ends only the child."""
    memory = 6 * size + _SPARE
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_FSIZE, size + (1 << 20)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 8),
    ):
        with contextlib.suppress(ValueError, OSError):  # some systems support fewer limits
            resource.setrlimit(kind, (most, most))


def main(names: str, size: str) -> None:
    limit(int(size))
    try:
        state = Restricted(sys.stdin.buffer).load()
        batch, metadata = state["batch_dict"], state.get("metadata") or {}
        held = {name: batch[name] for name in names.split(",") if batch.get(name) is not None}
        # newer versions pack a ragged column, whose form is another
        columns = [(name, column) for name, column in held.items() if "data" in column]
        head = {
            "columns": [
                {
                    "name": name,
                    "format": str(column.get("format", "numpy")),
                    "dtype": str(column.get("dtype", "")),
                    "shape": [int(size) for size in column.get("shape", ())],
                    "bytes": len(bytes(column["data"])),
                }
                for name, column in columns
            ],
            "padding": int(metadata.get("pad_size", 0)),
            "unread": [name for name, column in held.items() if "data" not in column],
        }
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
        for _, column in columns:
            sys.stdout.buffer.write(bytes(column["data"]))
        sys.stdout.buffer.flush()
    except MemoryError:
        refuse("it takes more memory than its size allows")
    except Exception as error:  # any error of a hostile pickle
        refuse(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def refuse(why: str) -> None:
    print(why[:500].replace("\n", " "), file=sys.stderr)
    raise SystemExit(REFUSED)


if __name__ == "__main__":
    main(*sys.argv[1:])
