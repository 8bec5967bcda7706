# Foreign code: what a contract makes run that is neither Servanda's nor a library's.
#
# A contract is data, but it may name code: a function of a file, an interpreter, an engine, a
# metric or a dialect of an installed package.  --no-code refuses all of them, for CI on pull
# requests from strangers; the package of a metric is not even imported.  It is passed on as the
# variable SERVANDA_NO_CODE, so that child processes refuse them as well.
# So is a key that a kernel names: a contract chooses both the variable and where it is sent.
# So are a server that --allow-host does not name, and a file outside the contract's repository;
# and no message repeats the words of a file or of a server.
#
# Never run, whatever a contract names: code in a model's folder (no remote code is trusted),
# pickles (weights are safetensors, GGUF or ONNX), and faults, which are Servanda's own.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from servanda.contract.kernel_string import DIALECTS
from servanda.contract.model import Contract, Kernel, Place
from servanda.engines.base import BUILTIN
from servanda.errors import ContractError, Problem, Where
from servanda.judgement.rewards import file_and_function
from servanda.theory.divergence.base import DIVERGENCES
from servanda.traces import json_fields

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks

NO_CODE, ALLOWED_HOSTS = "SERVANDA_NO_CODE", "SERVANDA_ALLOW_HOST"
_HINT = "look at it, then call without --no-code (without SERVANDA_NO_CODE); or remove it"
_INSIDE = "name a file of the repository, or its folder; or call without --no-code"
_ALLOW = "if this server may be asked, add --allow-host HOST, or --allow-host HOST:PORT"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Code:
    """One thing that runs, a key that is sent, or a server that is asked.

    Args:
        place: in the contract; text: what it is, such as "runs the interpreter .venvs/vllm".
        hint: the next move where it is refused.
    """

    place: Place
    text: str
    hint: str = _HINT

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place))} {self.text}"


def code_of(contract: Contract) -> tuple[Code, ...]:
    """Everything that measuring a contract would run of others' code."""
    reward = (contract.reward and contract.reward.of) or ""
    parts = file_and_function(reward)
    own = [Code(("reward", "of"), f"runs {parts[1]} of {parts[0]}")] if parts else []
    return (*_of_kernels(contract, code_of_kernel), *own, *metrics_of(contract))


def metrics_of(contract: Contract) -> Iterator[Code]:
    """The metrics of installed packages; these packages are not imported."""
    for _, place, clause in contract.clauses():
        if (package := DIVERGENCES.package_of(clause.metric)) is not None:
            text = f"runs metric {clause.metric!r} of the installed package {package!r}"
            yield Code((*place, "metric"), text)


def keys_of(contract: Contract) -> tuple[Code, ...]:
    """Every key of this machine's environment that measuring a contract would send."""
    return tuple(_of_kernels(contract, key_of_kernel))


def _of_kernels(
    contract: Contract, of: Callable[[Kernel, Place], Iterator[Code]]
) -> Iterator[Code]:
    return (code for place, kernel in kernels_of(contract) for code in of(kernel, place))


def kernels_of(contract: Contract) -> Iterator[tuple[Place, Kernel]]:
    """The kernels that a contract names, each with its place."""
    yield ("kernels", "train"), contract.kernels.train
    yield ("kernels", "infer"), contract.kernels.infer
    if contract.stable is not None:
        yield ("stable",), contract.stable


def key_of_kernel(kernel: Kernel, place: Place) -> Iterator[Code]:
    """The key that opening one kernel would send."""
    if kernel.key_env is not None:
        yield Code((*place, "key_env"), f"sends the key in {kernel.key_env} to {kernel.url}")


def is_allowed(url: str) -> bool:
    """Whether --allow-host names the server of a URL, by its host or by HOST:PORT."""
    hosts = os.environ.get(ALLOWED_HOSTS, "").lower().split()
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return False
    host = f"[{host}]" if ":" in host else host
    # beside these, libraries differ in where a host begins
    plain = url.isprintable() and not any(c in url for c in "@\\ ")
    return plain and (host in hosts or f"{host}:{port}" in hosts)


def _server_of_kernel(kernel: Kernel, place: Place) -> Iterator[Code]:
    """The server that opening one kernel would ask, unless --allow-host names it."""
    if kernel.url is not None and not is_allowed(kernel.url):
        yield Code((*place, "url"), f"asks {kernel.url}", _ALLOW)


def code_of_kernel(kernel: Kernel, place: Place) -> Iterator[Code]:
    """What opening one kernel would run of others' code."""
    if kernel.python is not None:
        yield Code((*place, "python"), f"runs the interpreter {kernel.python}")
    if kernel.engine not in (*BUILTIN, "external"):
        yield Code((*place, "engine"), f"runs engine {kernel.engine!r} of an installed package")
    if kernel.dialect is not None and (package := DIALECTS.package_of(kernel.dialect)) is not None:
        text = f"runs dialect {kernel.dialect!r} of the installed package {package!r}"
        yield Code((*place, "dialect"), text)


def code_is_refused() -> bool:
    """Whether --no-code was given, to this process or the one that started it."""
    return os.environ.get(NO_CODE, "0") not in ("", "0")


json_fields.hides_data = code_is_refused


@contextmanager
def exported(name: str, value: str) -> Iterator[None]:
    """A variable of this process, and of those that it starts, within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def refuse_code(contract: Contract) -> None:
    """Under --no-code, a contract that runs code, sends a key or asks a server; nothing was yet.

    Raises:
        ContractError: naming each place.
    """
    asked = _of_kernels(contract, _server_of_kernel)
    _refuse((*code_of(contract), *keys_of(contract), *asked), contract.where)


def refuse_outside(files: Iterable[tuple[str | Path, Where | None]], folder: Path) -> None:
    """Under --no-code, files that a text names and that are not those of its repository.

    The repository is the git top level above the folder of the text, else that folder. Refused are
    paths that leave it, by `..` or by a link, those into .git, which can hold a key, and pipes and
    devices; a folder, if anything in it is refused.

    Args:
        files: each with the place that names it; folder: of the text.

    Raises:
        ContractError: naming each place.
    """
    if not code_is_refused():
        return
    folder = Path.cwd() / folder
    tops = [above for above in (folder, *folder.parents) if (above / ".git").exists()] or [folder]
    # behind a link that was committed may lie another repository: that one is not the contract's
    top = next((top for top in tops if top == top.resolve()), tops[-1].resolve())
    found = [(next(_faults(Path(name), top), ""), where) for name, where in files]
    _raise([(fault, where, _INSIDE) for fault, where in found if fault])


def _faults(path: Path, top: Path) -> Iterator[str]:
    """Why a path, or what its folder holds, is none of a repository; each real place once.

    Taken one by one: what is behind a fault is not looked at before the next is asked for.
    """
    left, seen = [path], set[Path]()
    if path.suffix in (".onnx", ".gguf"):  # their engines also read files beside them
        left += [beside for beside in path.parent.glob("*") if not beside.is_dir()]
    while left:
        path = left.pop(0)
        real = Path(os.path.realpath(path))  # `resolve` raises at a loop of links
        if real in seen:
            continue
        seen.add(real)
        if top == top.parent or not real.is_relative_to(top):
            yield f"{path} leads out of the repository {top}"
        elif any(part.lower() == ".git" for part in real.relative_to(top).parts):
            yield f"{path} leads into .git of the repository {top}"
        elif real.is_dir():
            left += [inner for inner in path.iterdir() if inner.name.lower() != ".git"]
        elif real.exists() and not real.is_file():
            yield f"{path} is a pipe or a device"


def refuse_metrics(contract: Contract, marks: Marks) -> None:
    """Under --no-code, metrics of installed packages, before lint would import these.

    Raises:
        ContractError: naming each place.
    """
    _refuse(metrics_of(contract), lambda *place: marks.near(place))


def refuse_code_of_kernel(kernel: Kernel, name: str) -> None:
    """Under --no-code, a kernel that runs code, sends a key or asks a server; `name` is what
    messages call it.

    Raises:
        ContractError: naming each key.
    """
    parts = (code_of_kernel, key_of_kernel, _server_of_kernel)
    _refuse((code for of in parts for code in of(kernel, (name,))), lambda *_: None)


def _refuse(codes: Iterable[Code], where: Callable[..., Where | None]) -> None:
    if code_is_refused():
        _raise([(str(code), where(*code.place), code.hint) for code in codes])


def _raise(found: Sequence[tuple[str, Where | None, str]]) -> None:
    if found:
        raise ContractError.all(
            [Problem(f"{what}, and --no-code refuses it", at, hint) for what, at, hint in found]
        )
