# What a GGUF file of a kernel holds, by the names of contracts and by those of llama.cpp.

from __future__ import annotations

from pathlib import Path

from servanda.contract.model import Kernel
from servanda.errors import MeasurementError

KIND_OF = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
QUANTIZED = ("q8_0", "q4_0", "q4_k_m")


def kind_of(kernel: Kernel) -> str:
    """The kind of file that a kernel runs: its quantization, or else its dtype.

    Raises:
        MeasurementError: GGUF, or this engine, does not have it.
    """
    if kernel.quantization is not None:
        if kernel.quantization not in QUANTIZED:
            raise MeasurementError(
                f"engine 'llamacpp' has no quantization {kernel.quantization!r}",
                hint=f"it has {', '.join(QUANTIZED)}; leave the key out for none",
            )
        return kernel.quantization
    if kernel.dtype not in KIND_OF:
        raise MeasurementError(
            f"engine 'llamacpp' has no dtype {kernel.dtype!r}", hint=f"it has {', '.join(KIND_OF)}"
        )
    return KIND_OF[kernel.dtype]


def name_of_kind(said: str) -> str:
    """`q4_k_m` of what llama.cpp calls 'Q4_K - Medium', `f32` of 'all F32'.

    >>> name_of_kind("Q4_K - Medium"), name_of_kind("all F32"), name_of_kind("Q8_0")
    ('q4_k_m', 'f32', 'q8_0')
    """
    kind, _, size = said.removeprefix("all ").partition(" - ")
    return (kind + (f"_{size[0]}" if size else "")).lower()


def refuse_other_kind(file: Path, found: str, kind: str) -> None:
    """A file that holds something else than its kernel says.

    Raises:
        MeasurementError: with what to write for this file.
    """
    if found == kind:
        return
    right = {k: f"dtype: {dtype}" for dtype, k in KIND_OF.items()}
    right |= {k: f"quantization: {k}" for k in QUANTIZED}
    said = "quantization" if kind in QUANTIZED else "dtype"
    raise MeasurementError(
        f"{str(file)!r} holds {found or 'an unknown kind'}, and the kernel's {said} says {kind}",
        hint=f"write {right[found]} for this file, or name one that holds {kind}"
        if found in right
        else f"engine 'llamacpp' runs files of {', '.join(right)}",
    )
