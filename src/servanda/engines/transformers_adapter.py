# LoRA in a model of Transformers: PEFT's own layers, not merged, as a trainer runs them.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servanda.engines.adapter import (
    adapter_config,
    adapter_digests,
    adapter_folder,
    adapter_tensors,
)
from servanda.engines.checkpoint import quiet
from servanda.engines.folder import reading
from servanda.errors import MeasurementError

_WRAPPED = "base_model.model."  # how names begin in the file
_OWN = (".lora_", ".modules_to_save.")  # parts of names that are an adapter's


def add_adapter_(model: Any, adapter: str | None) -> dict[str, str]:
    """Put an adapter's layers around those of a model, in place; without one nothing is done.

    Returns:
        the digests of its tensors, by names of a description.

    Raises:
        MeasurementError: PEFT is not installed, or the adapter is not of this model.
    """
    if adapter is None:
        return {}
    folder = adapter_folder(adapter)
    adapter_config(folder)
    try:
        from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError:
        raise MeasurementError(
            "the key adapter needs PEFT, which is not installed",
            hint="pip install 'servanda[adapters]', or merge the adapter into the checkpoint",
        ) from None
    tensors = adapter_tensors(folder)
    with quiet(), reading(folder, "name the model that the adapter was trained on"):
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        inject_adapter_in_model(config, model)
        named = {name.removeprefix(_WRAPPED): tensor for name, tensor in tensors.items()}
        found = set_peft_model_state_dict(model, named)
    _refuse_misfit(folder, found.unexpected_keys, found.missing_keys)
    model.eval()
    return adapter_digests(tensors)


def _refuse_misfit(folder: Path, unexpected: Sequence[str], missing: Sequence[str]) -> None:
    """Refuse an adapter that leaves layers as they were initialised, which is without it."""
    own = [name for name in missing if any(part in name for part in _OWN)]
    for names, says in (
        (unexpected, "has tensors for layers that the model does not have:"),
        (own, "lacks tensors that its config names:"),
    ):
        if names:
            raise MeasurementError(
                f"the adapter {str(folder)!r} {says} {min(names)} ({len(names)} such)",
                hint="name the model that the adapter was trained on",
            )
