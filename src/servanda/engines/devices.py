# Where a model of torch runs, and which implementation of attention runs there.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from servanda.errors import MeasurementError

_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def usable_device(name: str | None) -> torch.device:
    """The device of a kernel; None is the CPU.

    Raises:
        MeasurementError: torch does not see it.
    """
    device = torch.device(name or "cpu")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = "is built for CPUs alone" if torch.version.cuda is None else "sees no GPU"
        raise MeasurementError(
            f"the kernel asks for device {name}, and torch {torch.__version__} {built}",
            hint="remove the key device to run on the CPU, or install a CUDA build of torch on a "
            "machine with a GPU",
        )
    if (device.index or 0) >= count:
        raise MeasurementError(
            f"the kernel asks for device {name}, and torch sees {count} of them",
            hint=f"the last is cuda:{count - 1}",
        )
    return device


def device_facts(device: torch.device) -> dict[str, str]:
    """What of a device, and of how torch computes on it, changes the last bits of a result."""
    if device.type == "cpu":
        return {"device": "cpu", "cpu": torch.backends.cpu.get_cpu_capability()}
    major, minor = torch.cuda.get_device_capability(device)
    matmul = torch.backends.cuda.matmul
    return {
        "device": torch.cuda.get_device_name(device),
        "compute capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        # float32 products by TF32 keep 10 bits of the mantissa, and reductions in half precision
        # fewer than float32 ones
        "tf32": str(matmul.allow_tf32),
        "reduced_precision_reduction": str(
            matmul.allow_bf16_reduced_precision_reduction
            or matmul.allow_fp16_reduced_precision_reduction
        ),
    }


@contextmanager
def sdpa_backend(attention: str) -> Iterator[None]:
    """Runs `scaled_dot_product_attention` by the backend of this name alone.

    Args:
        attention: the key of a kernel; eager and sdpa leave the choice to torch.

    Raises:
        MeasurementError: torch has no such backend for these shapes, masks, dtype and device.
    """
    backend = _BACKENDS.get(attention)
    if backend is None:
        yield
        return
    try:
        with sdpa_kernel(backend):
            yield
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        raise MeasurementError(
            f"torch {torch.__version__} has no {attention} for this kernel: its dtype, device or "
            "mask is not taken",
            hint="on a CPU there are sdpa_math and sdpa_flash; on a GPU, sdpa_efficient, "
            "sdpa_cudnn (float16, bfloat16) and sdpa_math take masks, and sdpa_flash does not",
        ) from error
