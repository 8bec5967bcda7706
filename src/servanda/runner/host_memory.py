# Whether the kernels of a run fit into the memory of this machine, before one is loaded.

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from servanda.contract.model import Kernel
from servanda.engines import folder
from servanda.errors import MeasurementError

# dtype -> how files name it, which ends in its bits
_STORED = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def refuse_oversize(kernels: Mapping[str, Kernel]) -> None:
    """Refuse kernels in child processes whose weights alone do not fit at once.

    Raises:
        MeasurementError: they need more than `available_bytes`.  The need is of weights alone, and
            what is available an upper bound, so that such a run cannot fit.
    """
    need = {side: n for side, kernel in kernels.items() if (n := weight_bytes(kernel))}
    free = available_bytes() if need else None
    if free is None or sum(need.values()) <= free:
        return
    each = ", ".join(f"{side} ({kernels[side]}) {n / 2**30:,.2f} GB" for side, n in need.items())
    raise MeasurementError(
        f"the weights alone need {sum(need.values()) / 2**30:,.2f} GB of memory, {each}, and this "
        f"machine has {free / 2**30:,.2f} GB available",
        hint="use a smaller dtype, or that of the files, which are mapped; option.offload=layers; "
        "a machine with more memory; or a server by its URL",
    )


def weight_bytes(kernel: Kernel) -> int:
    """Memory that the weights of a kernel take, in bytes, without copies; 0 if that is unknown.

    Only what engine `transformers` converts to another dtype is allocated; the rest is mapped, and
    the system can drop it.  Tensors that a model drops, or keeps in float32, count as converted.
    """
    on_gpu = (kernel.device or "cpu") != "cpu"
    if kernel.engine != "transformers" or on_gpu or "offload" in (kernel.options or {}):
        return 0
    own = _STORED[kernel.dtype]
    with suppress(MeasurementError), folder.reading(Path()):  # its engine says what is wrong
        place = folder.checkpoint_folder(kernel.model)
        tied = folder.read_json(place / "config.json").get("tie_word_embeddings", True)
        headers = (folder.tensor_header(file)[0] for file in folder.weight_files(place))
        converted = (
            math.prod(entry["shape"])
            for header in headers
            for name, entry in header.items()
            if entry["dtype"] in {*_STORED.values()} - {own}
            and not (tied and name == "lm_head.weight")
        )
        return sum(converted) * int(own[-2:]) // 8
    return 0


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory and swap that a process can still get at most; None where Linux does not say.

    Of a control group's limit, what its processes hold counts as used, and files in memory do not.
    """
    try:
        machine = _numbers(root / "proc/meminfo")
        free = machine["MemAvailable"] * 1024
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError, KeyError):
        return None
    for _, controllers, path in (group.split(":", 2) for group in groups):
        place, limit, held = root / "sys/fs/cgroup", "memory.max", "anon"
        if controllers:
            place, limit, held = place / "memory", "memory.limit_in_bytes", "total_rss"
        if not controllers or "memory" in controllers.split(","):
            inner = place / path.strip("/")
            for each in (inner, *inner.parents):
                with suppress(OSError, ValueError, KeyError):  # no such group, or no limit
                    most = int((each / limit).read_text())
                    free = min(free, most - _numbers(each / "memory.stat")[held])
    return max(free, 0) + machine.get("SwapFree", 0) * 1024


def _numbers(file: Path) -> dict[str, int]:
    lines = map(str.split, file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines}
