# The journal of a preflight test: the weights on disk, for a process that is killed before it
# restores them.  A safetensors file that is complete or absent.

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.parallel.local_weights import LocalWeights, same
from servanda.rl.sync_drill.parallel.shards import local, place_of

_ABOUT = "servanda"  # the key of the journal's metadata
_KIND = "preflight journal"


class Journal:
    """The journal of one test in one process.

    Args:
        path: its file; None for none.
        weights: what it keeps.
        rank, size: of this process, and their number; each has a file of its own.
    """

    def __init__(
        self, path: Path | None, weights: LocalWeights, rank: int = 0, size: int = 1
    ) -> None:
        self.path = path if path is None else own_path(path, rank, size)
        self.weights, self._is_own = weights, False

    def write(self) -> None:
        """Keep the weights.

        Raises:
            MeasurementError: a journal is there already, or it cannot be written.
        """
        if self.path is None:
            return
        refuse_journal(self.path)
        # from here on the journal belongs to this test, complete or absent
        self._is_own = True
        places = {n: str(p) for n, p in self.weights.places.items() if not p.is_whole}
        try:
            write_journal(self.path, self.weights.kept, places)
        except FileExistsError:
            self._is_own = False
            self.write()

    def remove(self) -> None:
        if self.path is not None and self._is_own:
            self.path.unlink(missing_ok=True)


def own_path(path: Path, rank: int, ranks: int) -> Path:
    """The journal of one process of several; of a single one, the path itself."""
    return path if ranks == 1 else path.with_name(f"{path.name}.{rank}-of-{ranks}")


def refuse_journal(path: Path) -> None:
    """Refuse to overwrite a journal.

    Raises:
        MeasurementError: one exists, of a test that was killed or is still running.
    """
    if not path.exists():
        return
    back = f"servanda preflight FILE.py:NAME --restore {path}"
    writer = _writer_of(path)
    if writer is not None:
        raise MeasurementError(
            f"{path} is there already, and process {writer}, which wrote it, is alive",
            hint="wait for its test, or use another --journal; if the process is another one by "
            f"now, put the weights back: {back}",
        )
    raise MeasurementError(
        f"{path} is there already: an interrupted preflight test left it, with the original "
        "weights",
        hint=f"put them back: {back}; or remove it if you have reloaded the weights since",
    )


def _writer_of(path: Path) -> int | None:
    """The process that wrote a journal, if it is another one and alive."""
    if os.name != "posix":  # other systems lack the signal 0
        return None
    try:
        process = int(_about(path)["process"])
    except (MeasurementError, KeyError):
        return None
    if process == os.getpid():
        return None
    try:
        os.kill(process, 0)
    except PermissionError:
        return process  # of another user
    except OSError:
        return None
    return process


def write_journal(
    path: Path, weights: Mapping[str, Tensor], places: Mapping[str, str] | None = None
) -> None:
    """Write the weights to disk; the file appears once it is complete.

    Args:
        places: of each shard, where it lies in its tensor.

    Raises:
        MeasurementError: it cannot be written.
        FileExistsError: another test wrote one meanwhile; it is kept.
    """
    from safetensors.torch import save_file

    about: dict[str, Any] = {"kind": _KIND, "version": 1, "process": os.getpid()}
    if places:
        about["places"] = dict(places)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, part, metadata={_ABOUT: json.dumps(about)})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        _claim(part, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise MeasurementError(
            f"the journal {path} cannot be written: {error.strerror or error}",
            hint="no weight was changed; choose a path with room for the trained weights",
        ) from None
    finally:
        part.unlink(missing_ok=True)


def _claim(part: Path, path: Path) -> None:
    """Rename a file, unless the name exists."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        part.replace(path)
    else:
        part.unlink()  # here, because Ctrl-C may come at any line, also during the cleanup


def read_journal(path: Path) -> dict[str, Tensor]:
    """Read the weights of a journal.

    Raises:
        MeasurementError: no file, or not a journal.
    """
    from safetensors.torch import load_file

    if not path.is_file():
        raise MeasurementError(
            f"there is no journal {path}",
            hint="a completed test has put the weights back and removed its journal",
        )
    if _about(path).get("kind") != _KIND:
        raise _no_journal(path, "another kind of file")
    return load_file(path)


def _about(path: Path) -> dict[str, Any]:
    """Read the metadata of a journal.

    Raises:
        MeasurementError: not a journal.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {}).get(_ABOUT, "{}"))
    except (SafetensorError, ValueError, OSError) as error:
        raise _no_journal(path, error) from None


def _no_journal(path: Path, why: object) -> MeasurementError:
    return MeasurementError(
        f"{path} is not a preflight journal: {why}", hint="pass the file that --journal named"
    )


def checked(module: Any, path: Path) -> dict[str, Tensor]:
    """The weights of a journal that fits a module.

    Raises:
        MeasurementError: no journal, or a tensor is missing on one side, or has another shape,
            dtype or place.
    """
    weights, places = read_journal(path), _about(path).get("places", {})
    parameters = dict(module.named_parameters())
    for name, tensor in weights.items():
        parameter = parameters.get(name)
        if parameter is not None and places.get(name, "") != place_text(name, parameter):
            raise MeasurementError(
                f"the journal has {places.get(name) or 'all'} of {name}, and this process has "
                f"{place_text(name, parameter) or 'all'} of it",
                hint="use as many processes, and shard the module, as for the test; no weight was "
                "changed",
            )
        mine = None if parameter is None else local(parameter)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            own = "no such parameter" if mine is None else f"{mine.dtype} {tuple(mine.shape)}"
            raise MeasurementError(
                f"the journal has {name} as {tensor.dtype} {tuple(tensor.shape)}, and the module "
                f"has {own}".replace("torch.", ""),
                hint="build the module as it was for the test; no weight was changed",
            )
    return weights


def place_text(name: str, parameter: Any) -> str:
    """Where the shard of a parameter lies; "" for a whole one."""
    place = place_of(name, parameter)
    return "" if place.is_whole else str(place)


def put_back(module: Any, weights: Mapping[str, Tensor]) -> None:
    """Restore the weights of a journal into a module, bit for bit.

    Raises:
        MeasurementError: a tensor does not read back as written.
    """
    parameters = {name: local(parameter) for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    wrong = [name for name, tensor in weights.items() if not same(parameters[name], tensor)]
    if wrong:
        raise MeasurementError(
            f"{wrong[0]} does not read back as it was written",
            hint="load the weights of the last checkpoint before training goes on",
        )
