# Names of quantised formats that a kernel may have.

from __future__ import annotations

from servanda.registry import did_you_mean

QUANTIZATIONS = (
    *("int8_weight_only", "int8_dynamic", "w8a8", "int4_g32", "w4a16_g128"),
    *("fp8_weight_only", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_e5m2_channel"),
    *("mxfp8", "mxfp4_weight_only", "nvfp4", "nvfp4_weight_only"),
    *("q8_0", "q4_0", "q4_k_m"),  # of GGUF
)


def quantization_hint(name: str) -> str:
    """Names are exact: two that begin alike are two kernels."""
    alike = [q for q in QUANTIZATIONS if name and q.startswith(name)]
    if len(alike) > 1:
        return f"which one: {' or '.join(alike)}? They are different kernels"
    return did_you_mean(name, QUANTIZATIONS)
