# A LoRA adapter in the layout of PEFT, beside the checkpoint that it was trained on.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from servanda.contract.hub_name import is_hub_name
from servanda.engines.checkpoint import tensor_digests
from servanda.engines.folder import cached_folder, read_json, reading
from servanda.errors import MeasurementError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF = "adapter."  # its tensors begin so in a description


def adapter_folder(adapter: str) -> Path:
    """The folder of an adapter, which has its config and its weights.

    Args:
        adapter: a folder, or a name of the Hub (hf://) that its cache has.

    Raises:
        MeasurementError: no folder, or a file is not in it.
    """
    folder = cached_folder(adapter) if is_hub_name(adapter) else Path(adapter)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            other = "adapter_model.bin is a pickle and is not read: save it as safetensors"
            raise MeasurementError(
                f"the adapter {str(folder)!r} has no {name}",
                hint=other
                if (folder / "adapter_model.bin").is_file()
                else "name the folder that PEFT's save_pretrained wrote",
            )
    return folder


def adapter_config(folder: Path) -> dict[str, Any]:
    """What adapter_config.json says.

    Raises:
        MeasurementError: it is no LoRA.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise MeasurementError(
            f"the adapter {str(folder)!r} is of type {kind!r}, and only LORA is supported",
            hint="merge it into the checkpoint, and name that as model",
        )
    return config


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Its tensors, by their names in the file."""
    with reading(folder / WEIGHTS):
        return load_file(folder / WEIGHTS)


def adapter_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor, by names of a description."""
    return tensor_digests({f"{_OF}{name}": tensor for name, tensor in tensors.items()}, {})
