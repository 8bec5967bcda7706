# Lint of the kernels, of the texts they are compared on, and of the envelope they run in.

from __future__ import annotations

from collections.abc import Collection, Iterator

from servanda.contract import QUANTIZATIONS, Contract, Kernel
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
        if kernel.engine not in engines:
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


def workload(contract: Contract) -> Iterator[Finding]:
    """What this version can measure; what the sections need to be judged on."""
    if contract.workload is not None and contract.workload.mode == "score":
        message = "this version measures mode: rollout"
        hint = "remove mode: score; fixed texts are scored as golden"
        yield Finding(("workload", "mode"), message, hint)
    if contract.numerical and contract.golden is None:
        message = "numerical clauses are judged on golden texts, and there is no golden:"
        yield Finding(("numerical",), message, "add golden: {prompts: data/golden.jsonl}", key=True)
    if contract.statistical and contract.workload is None:
        message = "statistical clauses are judged on a workload, and there is no workload:"
        hint = "add workload: {prompts: data/prompts.jsonl}"
        yield Finding(("statistical",), message, hint, key=True)
    if contract.reward is not None and contract.reward.range[0] >= contract.reward.range[1]:
        yield Finding(("reward", "range"), "the range of the reward is empty", "write [low, high]")


def envelope(contract: Contract) -> Iterator[Finding]:
    """The envelope is an interval, and both kernels run inside it."""
    if contract.runtime.envelope is None:
        return
    envelope = contract.runtime.envelope
    for name in ("batch_size", "prompt_tokens"):
        low, high = getattr(envelope, name) or (0, 0)
        if low > high:
            message = f"the envelope's {name} is empty: {low:g} is more than {high:g}"
            yield Finding(("runtime", "envelope", name), message, f"write [{high:g}, {low:g}]")
    low, high = envelope.batch_size or (0, 0)
    if envelope.batch_size is None or low > high:
        return
    for side, kernel in (("train", contract.kernels.train), ("infer", contract.kernels.infer)):
        if not low <= kernel.batch_size <= high:
            message = f"{side} runs in batches of {kernel.batch_size}, outside the envelope "
            message += f"[{low:g}, {high:g}] that the contract speaks of"
            hint = "give the kernel a batch_size inside, or widen runtime.envelope.batch_size"
            yield Finding(("kernels", side, "batch_size"), message, hint)
