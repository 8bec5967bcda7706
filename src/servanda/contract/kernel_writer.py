# Kernels written as strings: the inverse of `parse_kernel`.

from __future__ import annotations

import json
from collections.abc import Sequence

from servanda.contract.kernel_string import (
    KEYS,
    NEED_A_MODEL,
    OPTION,
    PACK,
    SERVER,
    SERVER_KEYS,
)
from servanda.contract.model import Kernel
from servanda.errors import ContractError


def kernel_string(kernel: Kernel) -> str:
    """The string of a kernel: `parse_kernel` gives the same kernel back.

    Raises:
        ContractError: the kernel has a sampling of its own, or no model.
    """
    if kernel.url is not None and kernel.sampling is None and kernel.engine == SERVER:
        plain = Kernel(engine=SERVER, url=kernel.url)  # type: ignore[call-arg]
        return kernel.url + _keys(kernel, plain, SERVER_KEYS)
    if kernel.sampling is not None or (kernel.model is None and kernel.engine in NEED_A_MODEL):
        what = "a sampling of its own" if kernel.sampling is not None else "no model"
        raise ContractError(
            f"a kernel with {what} has no kernel string", hint="write a contract for it"
        )
    if kernel.model is None:
        return kernel.engine + _keys(kernel, Kernel(engine=kernel.engine), KEYS)  # type: ignore[call-arg]
    plain = Kernel(engine=kernel.engine, model=kernel.model)  # type: ignore[call-arg]
    if kernel.engine == "pack" and kernel == plain and kernel.model.endswith(PACK):
        return kernel.model
    text = f"{kernel.engine}:{_written(kernel.model, marks=',@')}"
    if kernel.engine not in ("table", "pack") or kernel.dtype != plain.dtype or kernel.quantization:
        text += f"@{kernel.dtype}" + (f"+{kernel.quantization}" if kernel.quantization else "")
    return text + _keys(kernel, plain, KEYS)


def _keys(kernel: Kernel, plain: Kernel, keys: Sequence[str]) -> str:
    """The keys by which a kernel differs from the plain one."""
    text = ""
    for key in keys:
        value = getattr(kernel, key)
        if value == getattr(plain, key):
            continue
        if key == "fault":
            for fault, setting in value.items():
                text += f",fault={fault}"
                if setting is not True:
                    text += f":{_written(json.dumps(setting))}"
        else:
            text += f",{key}={_written(str(value))}"
    for option, value in (kernel.options or {}).items():
        text += f",{OPTION}{option}={_written(json.dumps(value))}"
    return text


def _written(value: str, marks: str = ",") -> str:
    """A value as it is, or as a JSON text where it holds a mark of the grammar."""
    plain = value and not any(c in value for c in '"' + marks) and value.isprintable()
    return value if plain and value == value.strip() else json.dumps(value)
