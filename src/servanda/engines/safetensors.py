# Tensors as a checkpoint stores them, read without torch: the safetensors format, mapped.
#
# A file is the length of a header (8 bytes, little-endian), the header (JSON: name -> dtype,
# shape, data_offsets) and the bytes of all tensors.  A value is read when it is asked for.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import digest_of
from servanda.engines.folder import reading, tensor_header, values_digest, weight_files

_DTYPES = {
    "BOOL": "?",
    "BF16": "<u2",  # numpy has none: its bits
    **{f"U{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its dtype as safetensors names it, its shape, and its values where they lie."""

    dtype: str
    shape: tuple[int, ...]
    values: NDArray[Any]

    def float32(self) -> NDArray[np.float32]:
        """The values cast to float32, as torch casts them."""
        if self.dtype == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            return self.values.astype(np.float32)

    @property
    def digest(self) -> str:
        return values_digest(self.float32(), self.shape)


def read_stored(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by name.

    Raises:
        MeasurementError: a file is no safetensors, ends early, or has a dtype that is unknown.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        with reading(file):
            tensors |= _read_file(file)
    return tensors


def _read_file(file: Path) -> dict[str, StoredTensor]:
    data = np.memmap(file, dtype=np.uint8, mode="r")
    header, start = tensor_header(file)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name!r} is stored as {entry['dtype']}, which is not read")
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        first, last = entry["data_offsets"]
        if last - first != math.prod(shape) * dtype.itemsize or start + last > len(data):
            raise ValueError(f"the bytes of tensor {name!r} are not whole")
        values = data[start + first : start + last].view(dtype).reshape(shape)
        tensors[name] = StoredTensor(entry["dtype"], shape, values)
    return tensors


def weights_digest(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> str:
    """`Description.weights` of a checkpoint whose model has all its tensors but a tied head."""
    tied = bool(config.get("tie_word_embeddings")) and "model.embed_tokens.weight" in stored
    return digest_of(
        {
            name: tensor.digest
            for name, tensor in stored.items()
            if not (tied and name == "lm_head.weight")
        }
    )
