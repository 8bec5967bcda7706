# A checkpoint in parts, of which one is in memory at a time: each layer, the embeddings, the head,
# and the rest.
#
# The model is built without numbers, on torch's meta device; a part is filled from the files as
# Transformers would fill the whole, with its renamed and merged tensors, and may be emptied again.

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from servanda.contract.model import Kernel
from servanda.engines import checkpoint
from servanda.engines.folder import SAVED_ANEW, reading, weight_files
from servanda.errors import MeasurementError

REST = ""  # what belongs to no layer: norms, tables of positions


class CheckpointParts:
    """The empty model of a checkpoint, and what fills its parts.

    Args:
        device: where a part is filled, in the kernel's dtype.

    Raises:
        MeasurementError: no such architecture, or one without a list of layers.
    """

    def __init__(self, folder: Path, config: Any, kernel: Kernel, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.dtype: torch.dtype = getattr(torch, kernel.dtype)
        hint = f"Transformers may not have this architecture, or not {kernel.attention}"
        with reading(folder, hint), checkpoint.quiet():
            self.model: Any = _empty_model(copy.deepcopy(config), kernel)
        checkpoint.ready(self.model, kernel)
        self.tied: dict[str, str] = dict(self.model.all_tied_weights_keys)
        self.modules = self._parts()
        self._tensors = self._places()

    @property
    def layers(self) -> list[str]:
        """The parts that run in a forward by themselves."""
        return [part for part in self.modules if part != REST]

    def load(
        self, then: Callable[[str], None], mine: Callable[[int], bool] = lambda _: True
    ) -> dict[str, str]:
        """Fill each part once, and check the whole checkpoint.

        Args:
            then: what is done with a part that has been filled, before the next one is.
            mine: of which parts, by number, the digests are computed.

        Returns:
            name -> digest of the checkpoint's tensors, as `checkpoint.tensor_digests` has them.

        Raises:
            MeasurementError: config.json and tensors do not belong together.
        """
        digests: dict[str, str] = {}
        missing = {name for name in self.model.state_dict() if name not in self.tied}
        report: dict[str, set[Any]] = {"unexpected_keys": set(), "mismatched_keys": set()}
        for number, part in enumerate(self.modules):
            stored = self._read(part)
            if mine(number):
                digests |= checkpoint.tensor_digests(stored, {})
            found = self._fill(stored)
            del stored
            missing &= found.missing_keys
            report["unexpected_keys"] |= found.unexpected_keys
            report["mismatched_keys"] |= found.mismatched_keys
            checkpoint.refuse_misfit(self.folder, {"missing_keys": (), **report})
            then(part)
        checkpoint.refuse_misfit(self.folder, {"missing_keys": missing, **report})
        return digests

    def untied(self, digests: dict[str, str]) -> dict[str, str]:
        """Digests without those of tensors that are tied to another.

        Raises:
            MeasurementError: the checkpoint has other values for a tied tensor.
        """
        for name, source in self.tied.items():
            if digests.get(name, digests.get(source)) != digests.get(source):
                raise MeasurementError(
                    f"config.json ties {name!r} to {source!r}, and the checkpoint "
                    f"{str(self.folder)!r} has other values for it",
                    hint="set tie_word_embeddings to false in config.json, or save the model anew",
                )
        return {n: d for n, d in digests.items() if self.tied.get(n) not in digests}

    def fill(self, part: str) -> None:
        """Read a part's tensors from the files, in the kernel's dtype, on its device."""
        # whether a weight could have gradients decides how torch folds a product with it, and so
        # its last bits: as in a model that is loaded as a whole, it could
        with torch.inference_mode(False):
            for one in self._together(part):
                self._fill(self._read(one))

    def empty(self, part: str) -> None:
        """Forget a part's numbers; buffers stay."""
        for one in self._together(part):
            for module in self.modules[one].modules():
                for name, tensor in module._parameters.items():
                    if tensor is not None:
                        module._parameters[name] = _without_numbers(tensor)

    def _together(self, part: str) -> set[str]:
        """The part, and those whose tensors are tied to its own."""
        pairs = ({self.part_of(a), self.part_of(b)} for a, b in self.tied.items())
        return {part}.union(*(pair for pair in pairs if part in pair))

    def part_of(self, tensor: str) -> str:
        """The part that a tensor of the model belongs to."""
        return next((part for part in self.layers if tensor.startswith(f"{part}.")), REST)

    def _parts(self) -> dict[str, nn.Module]:
        model = self.model
        count = model.config.get_text_config().num_hidden_layers
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise MeasurementError(
                f"{type(model).__name__} has no list of {count} layers",
                hint="its layers cannot be loaded one at a time: leave out ranks and offload",
            )
        alone = [*lists[0], model.get_input_embeddings(), model.get_output_embeddings()]
        path = {module: name for name, module in model.named_modules()}
        return {path[m]: m for m in alone if m is not None} | {REST: model}

    def _places(self) -> dict[str, dict[Path, list[str]]]:
        """Part -> file -> the names of its tensors in it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        self._conversions: Any = get_model_conversion_mapping(self.model)
        renamed = [c for c in self._conversions if isinstance(c, WeightRenaming)]
        merged = [c for c in self._conversions if isinstance(c, WeightConverter)]
        known, prefix = self.model.state_dict(), self.model.base_model_prefix
        found: dict[str, dict[Path, list[str]]] = {part: {} for part in self.modules}
        for file in weight_files(self.folder):
            with reading(file), safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it cannot be iterated
                    target, _ = rename_source_key(name, renamed, merged, prefix, known)
                    found[self.part_of(target)].setdefault(file, []).append(name)
        return found

    def _read(self, part: str) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for file, names in self._tensors[part].items():
            with reading(file), safe_open(file, framework="pt") as tensors:
                stored |= {name: tensors.get_tensor(name) for name in names}
        return stored

    def _fill(self, stored: dict[str, Tensor]) -> Any:
        """Put tensors of the files into the model; Transformers' report of it."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        config = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=self._conversions,
        )
        own = {name: tensor for name, tensor in stored.items() if name not in self.tied}
        with reading(self.folder, SAVED_ANEW), checkpoint.quiet():
            report, _ = convert_and_load_state_dict_in_model(self.model, own, config)
        for name, source in self.tied.items():
            path, _, leaf = name.rpartition(".")
            self.model.get_submodule(path)._parameters[leaf] = self.model.get_parameter(source)
        return report


def _empty_model(config: Any, kernel: Kernel) -> Any:
    """The model of a config on the meta device; its buffers hold what their code computes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = kernel.attention.partition("_")[0]
    with _parameters_without_numbers():
        return architecture._from_config(
            config, dtype=getattr(torch, kernel.dtype), attn_implementation=attention
        )


@contextmanager
def _parameters_without_numbers() -> Iterator[None]:
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else _without_numbers(param))

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _without_numbers(tensor: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
