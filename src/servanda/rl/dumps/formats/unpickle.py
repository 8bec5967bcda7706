# A pickle read by a process that does nothing else: `python -I -S unpickle.py NAMES BYTES`.
#
# Standard input is the pickle.  Only the names below are looked up, each stands for an object of
# ours that stores what it is given, and anything else ends the process.  No module of the pickle
# is imported and no function of it is called.  What comes out on standard output is one line of
# JSON and the bytes of the columns that were asked for.

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import sys
from typing import Any

_SPARE = 1 << 28  # bytes beside the pickle's own
_CPU_S = 300
REFUSED = 3


class Batch:
    """Stands for the call that rebuilds a batch of SkyRL: gives the state back."""

    __slots__ = ()

    def __call__(self, cls: object, state: object) -> object:
        return state


class Inert:
    """Stands for whatever is not read: it takes everything and is nothing."""

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
    """Looks up nothing but what is admitted."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200]) from None

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it asks for objects from outside")


def limit(size: int) -> None:
    """Memory, processor time and files, so that a hostile pickle ends the child alone."""
    memory = 6 * size + _SPARE
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_FSIZE, size + (1 << 20)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 8),
    ):
        with contextlib.suppress(ValueError, OSError):  # some systems know fewer limits
            resource.setrlimit(kind, (most, most))


def main(names: str, size: str) -> None:
    limit(int(size))
    try:
        state = Restricted(sys.stdin.buffer).load()
        batch, metadata = state["batch_dict"], state.get("metadata") or {}
        columns = [(name, batch[name]) for name in names.split(",") if batch.get(name) is not None]
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
        }
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
        for _, column in columns:
            sys.stdout.buffer.write(bytes(column["data"]))
        sys.stdout.buffer.flush()
    except MemoryError:
        refuse("it takes more memory than its size allows")
    except Exception as error:  # whatever a hostile pickle comes to
        refuse(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def refuse(why: str) -> None:
    print(why[:500].replace("\n", " "), file=sys.stderr)
    raise SystemExit(REFUSED)


if __name__ == "__main__":
    main(*sys.argv[1:])
