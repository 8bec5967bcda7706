# Lint of the kernels: names that they use, and where their sampling is declared.

from __future__ import annotations

from collections.abc import Collection, Iterator

from servanda.contract import EXTERNAL, QUANTIZATIONS, Contract, Kernel
from servanda.lint.finding import Finding, nearest, quoted
from servanda.marks import Path


def kernels(
    contract: Contract, engines: Collection[str], faults: Collection[str]
) -> Iterator[Finding]:
    """Names that a kernel uses; where its sampling is declared."""
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
            yield Finding(
                (*path, "quantization"), message, _exact_quantization(kernel.quantization)
            )
        if kernel.sampling is not None and path[-1] != "train":
            message = f"{path[-1]} samples as workload.sampling says"
            hint = "declare it there; kernels.train.sampling is for a trainer's own transform"
            yield Finding((*path, "sampling"), message, hint, key=True)
        yield from _fault(path, kernel, faults)


def _exact_quantization(name: str) -> str:
    """Names are exact: two that begin alike are two kernels."""
    alike = [q for q in QUANTIZATIONS if name and q.startswith(name)]
    if len(alike) > 1:
        return f"which one: {' or '.join(alike)}? They are different kernels"
    return nearest(name, QUANTIZATIONS)


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
