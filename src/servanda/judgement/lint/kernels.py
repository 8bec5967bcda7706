# Lint of the kernels: names that they use, and where their sampling is declared.

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from servanda.contract.fields import VARIABLE
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import EXTERNAL, Contract, Kernel
from servanda.contract.quantizations import QUANTIZATIONS, quantization_hint
from servanda.contract.server_dialects import dialect_hint, is_dialect
from servanda.registry import nearest, quoted

_SERVER = "openai_http"
URL = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
_ADDRESS = "write url: http://127.0.0.1:8000"
_OF_SERVERS = (
    *("url", "served", "dialect", "logprobs", "sampling_defaults", "timeout_s", "key_env"),
)


def kernels(
    contract: Contract, engines: Collection[str], faults: Collection[str]
) -> Iterator[Finding]:
    """Check the names that a kernel uses, and the place of its sampling parameters."""
    sides: list[tuple[Path, Kernel | None]] = [
        (("kernels", "train"), contract.kernels.train),
        (("kernels", "infer"), contract.kernels.infer),
        (("stable",), contract.stable),
    ]
    for path, kernel in sides:
        if kernel is None:
            continue
        external = kernel.engine == EXTERNAL and path != ("stable",)
        if kernel.engine not in engines and not external:
            message = f"no engine is named {quoted(kernel.engine)}"
            hint = nearest(kernel.engine, engines) if engines else "install an engine first"
            yield Finding((*path, "engine"), message, hint)
        if kernel.quantization is not None and kernel.quantization not in QUANTIZATIONS:
            message = f"no quantization is named {quoted(kernel.quantization)}"
            hint = quantization_hint(kernel.quantization)
            yield Finding((*path, "quantization"), message, hint)
        if kernel.sampling is not None and path[-1] != "train":
            message = f"{path[-1]} samples as workload.sampling says"
            hint = "declare it there; kernels.train.sampling is for a trainer's own transform"
            yield Finding((*path, "sampling"), message, hint, key=True)
        if kernel.routes is not None and path[-1] != "train":
            message = f"{path[-1]} draws, and has no experts to replay"
            hint = "declare it of kernels.train, which scores what infer drew"
            yield Finding((*path, "routes"), message, hint, key=True)
        if kernel.dialect is not None and not is_dialect(kernel.dialect):
            message = f"no dialect is named {quoted(kernel.dialect)}"
            yield Finding((*path, "dialect"), message, dialect_hint(kernel.dialect))
        yield from _server(path, kernel)
        yield from _fault(path, kernel, faults)


def _server(path: Path, kernel: Kernel) -> Iterator[Finding]:
    """Check the url and the keys about its server."""
    if kernel.engine == _SERVER:
        if kernel.url is None:
            yield Finding(path, "engine openai_http needs the url of a server", _ADDRESS)
        elif URL.fullmatch(kernel.url) is None:
            message = f"{quoted(kernel.url)} is not the address of a server"
            yield Finding((*path, "url"), message, _ADDRESS)
        if kernel.model is not None:
            message = "a server has loaded its model already"
            hint = "remove model; which one of several is named by served"
            yield Finding((*path, "model"), message, hint, key=True)
        if kernel.key_env is not None and VARIABLE.fullmatch(kernel.key_env) is None:
            message = "key_env is no name of a variable"
            hint = "write key_env: INFER_KEY; a key itself stands in no contract"
            yield Finding((*path, "key_env"), message, hint, bare=True)
        return
    for name in _OF_SERVERS:
        if getattr(kernel, name) is not None:
            message = f"engine {kernel.engine} runs its model itself and takes no {name}"
            hint = "write engine: openai_http, or remove it"
            yield Finding((*path, name), message, hint, key=True)


def _fault(path: Path, kernel: Kernel, faults: Collection[str]) -> Iterator[Finding]:
    if kernel.fault is None:
        return
    if len(kernel.fault) != 1:
        message = f"a kernel is given one fault at a time, found {len(kernel.fault)}"
        yield Finding((*path, "fault"), message, "write fault: {name: {...}}")
    for name in kernel.fault:
        if name not in faults:
            hint = nearest(name, faults) if faults else "no fault can be injected here"
            yield Finding(
                (*path, "fault", name), f"no fault is named {quoted(name)}", hint, key=True
            )
