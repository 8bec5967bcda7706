# A snapshot of weights: the test copies them first, and restores them bit for bit.
#
# The copy is in host memory, and optionally in a journal: a safetensors file that is complete or
# absent, for a process that is killed before the restoration.

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.noise import filling, is_zero_matrix, moments, noise, poison

_ABOUT = "servanda"  # the key of the journal's metadata
_KIND = "preflight journal"


class Weights:
    """The trained parameters of a module: changed in place, and restored.

    Args:
        module: its parameters with requires_grad are used; buffers, gradients and modes are not
            touched.
        seed: seed of the noise.
        copy: whether the values are copied; counting needs no copy.

    Raises:
        MeasurementError: no trained parameter, or one that is not complete in this process.
    """

    def __init__(self, module: nn.Module, seed: int = 0, *, copy: bool = True) -> None:
        named: dict[str, nn.Parameter] = {}
        self.aliases: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            known = first.setdefault(id(parameter), name)
            named.setdefault(known, parameter)
            self.aliases.setdefault(known, []).append(name)
        if not named:
            raise MeasurementError(
                f"no parameter of {type(module).__name__} has requires_grad, so there is no weight "
                "to sync",
                hint="pass the module that the trainer updates",
            )
        for name, parameter in named.items():
            _refuse_part(name, parameter)
        self.module, self.seed = module, seed
        self.parameters = named
        own = named if copy else {}
        self.kept = {name: p.detach().to("cpu", copy=True) for name, p in own.items()}
        self._anchors: dict[str, Tensor] = {}

    # changing

    def poison(self) -> None:
        """Replace every tensor by noise with its mean and spread."""
        for name, parameter in self.parameters.items():
            self._write(parameter, poison(parameter.detach(), self.seed, name))

    def anchor(self) -> bool:
        """Fill matrices of zeros, which would hide other tensors; returns whether there are any."""
        for name, kept in self.kept.items():
            if is_zero_matrix(kept):
                self._anchors[name] = filling(kept, self.seed, name).to(kept.dtype)
        self.settle(self._anchors)
        return bool(self._anchors)

    @property
    def anchored(self) -> bool:
        return bool(self._anchors)

    def perturb(self, sizes: Mapping[str, float]) -> None:
        """Add noise to some tensors, as a multiple of each one's spread."""
        for name, size in sizes.items():
            parameter = self.parameters[name]
            start = self.start(name).to(parameter.device)
            step = size * moments(start)[1] * noise(start, self.seed, "nudge", name)
            self._write(parameter, start.to(step.dtype) + step)

    def settle(self, names: Iterable[str]) -> None:
        for name in names:
            self._write(self.parameters[name], self.start(name))

    def settle_rows(self, name: str, low: int, high: int | None) -> None:
        """Restore some rows of a tensor to their values before the perturbation."""
        parameter = self.parameters[name]
        self._write(parameter.detach()[low:high], self.start(name)[low:high])

    def scale(self, names: Iterable[str], factor: float) -> None:
        for name in names:
            parameter = self.parameters[name]
            self._write(parameter, factor * parameter.detach())

    def has_zeros(self) -> bool:
        """Whether there are matrices of zeros, such as an adapter's B at its start."""
        return any(is_zero_matrix(parameter) for parameter in self.parameters.values())

    def start(self, name: str) -> Tensor:
        """A tensor at the start of perturbations, in host memory."""
        return self._anchors.get(name, self.kept[name])

    def attach(self, alias: str, parameter: nn.Parameter) -> None:
        """Attach this parameter to one use."""
        path, _, leaf = alias.rpartition(".")
        self.module.get_submodule(path)._parameters[leaf] = parameter

    def _write(self, parameter: Tensor, values: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(values)

    # keeping

    def restore(self) -> None:
        """Restore every tensor bit for bit.

        Raises:
            MeasurementError: a tensor does not read back as written.
        """
        for name, parameter in self.parameters.items():
            self._write(parameter, self.kept[name])
            for alias in self.aliases[name]:
                self.attach(alias, parameter)
        wrong = [name for name, p in self.parameters.items() if not same(p, self.kept[name])]
        if wrong:
            raise MeasurementError(
                f"{wrong[0]} and {len(wrong) - 1} others do not read back as they were written",
                hint="load the weights of the last checkpoint before training goes on",
            )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise equal: NaN equals NaN, and -0.0 is not 0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _refuse_part(name: str, parameter: Tensor) -> None:
    hint = "gather the module first; the preflight test runs in one process, on whole tensors"
    if parameter.device.type == "meta" or not parameter.numel():
        raise MeasurementError(f"{name} has no values in this process", hint=hint)
    if hasattr(parameter, "to_local"):
        raise MeasurementError(f"{name} is a shard of a DTensor", hint=hint)
    if not parameter.is_floating_point():
        raise MeasurementError(
            f"{name} is of {str(parameter.dtype).removeprefix('torch.')}, and the preflight "
            "test adds noise to floating-point numbers",
            hint="freeze it with requires_grad_(False)",
        )


# the journal


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


def write_journal(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights to disk; the file appears once it is complete.

    Raises:
        MeasurementError: it cannot be written.
        FileExistsError: another test wrote one meanwhile; it is kept.
    """
    from safetensors.torch import save_file

    about = {"kind": _KIND, "version": 1, "process": os.getpid()}
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


def put_back(module: Any, weights: Mapping[str, Tensor]) -> None:
    """Restore the weights of a journal into a module, bit for bit.

    Raises:
        MeasurementError: a tensor is missing on one side, or has another shape or dtype; then the
            module is unchanged.
    """
    parameters = dict(module.named_parameters())
    for name, tensor in weights.items():
        mine = parameters.get(name)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            own = "no such parameter" if mine is None else f"{mine.dtype} {tuple(mine.shape)}"
            raise MeasurementError(
                f"the journal has {name} as {tensor.dtype} {tuple(tensor.shape)}, and the module "
                f"has {own}".replace("torch.", ""),
                hint="build the module as it was for the test; no weight was changed",
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    wrong = [name for name, tensor in weights.items() if not same(parameters[name], tensor)]
    if wrong:
        raise MeasurementError(
            f"{wrong[0]} does not read back as it was written",
            hint="load the weights of the last checkpoint before training goes on",
        )
