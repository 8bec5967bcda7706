# Models of Transformers that do not fit: the layers are sharded over ranks, or stay in their files.
#
# Every rank runs every sequence, so that shapes are those of one process: ranks divide memory, not
# work.  The layers and the embeddings are sharded by FSDP2, which gathers one at a time; by rows,
# so that a rank's part of the head is its shard of the vocabulary.  A forward ends before the head,
# and logits exist of few rows at a time, each rank's own.
# Axes: N ranks, S rows of a chunk, C columns that are kept, R rows (positions), D hidden size,
# W tokens of a rank's shard of the vocabulary, V vocabulary.

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from servanda.contract.model import Kernel, Path
from servanda.engines import checkpoint
from servanda.engines.base import CHUNK_ELEMENTS
from servanda.engines.folder import SAVED_ANEW, reading, weight_files
from servanda.engines.rank_processes import MEETING, ranks_of
from servanda.engines.transformers import TransformersEngine
from servanda.errors import MeasurementError
from servanda.theory.sampling import Floats, Ints, Sampling
from servanda.theory.vocabulary_shards import columns_of_shards, summary_of, summed_up, sums_of
from servanda.traces.trace import Batch

# A checkpoint in parts, of which one is in memory at a time: each layer, the embeddings, the head,
# and the rest.
#
# The model is built without numbers, on torch's meta device; a part is filled from the files as
# Transformers would fill the whole, with its renamed and merged tensors, and may be emptied again.


REST = ""  # what belongs to no layer: norms, tables of positions


class CheckpointParts:
    """The empty model of a checkpoint, and what fills its parts.

    Args:
        device: where a part is filled, in the kernel's dtype.

    Raises:
        MeasurementError: no such architecture, or one without a list of layers.
    """

    def __init__(self, folder: FilePath, config: Any, kernel: Kernel, device: torch.device) -> None:
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

    def _places(self) -> dict[str, dict[FilePath, list[str]]]:
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
        found: dict[str, dict[FilePath, list[str]]] = {part: {} for part in self.modules}
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


_Whole: Any = TransformersEngine


def class_of(kernel: Kernel, whole: Callable[[Kernel], Any]) -> Callable[[Kernel], Any]:
    """The engine of a kernel by its options, in this process.

    Args:
        whole: the engine of a kernel without any.

    Raises:
        MeasurementError: options that exclude each other, or another key of the kernel.
    """
    options = kernel.options or {}
    if not options:
        return whole
    if options.get("offload", "layers") != "layers":
        raise MeasurementError(
            f"options.offload is {options['offload']!r}, and layers are what can be offloaded",
            hint="write options: {offload: layers}",
        )
    if len(options) > 1:
        raise MeasurementError(
            "options.ranks shards a model over processes, and options.offload is for one of them",
            hint="remove one of the two",
        )
    for key in ("adapter", "fault", "head_dtype", "quantization"):
        if getattr(kernel, key) is not None:
            raise MeasurementError(
                f"{key} needs the whole model in one process, and options.{min(options)} loads it "
                "in parts",
                hint=f"remove {key}, or options",
            )
    return RankEngine if "ranks" in options else OffloadedEngine


class _InParts(_Whole):
    """A model that is never whole in memory."""

    _parts: CheckpointParts

    def load(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        raise MeasurementError(
            "a kernel that is loaded in parts takes over no weights",
            hint="remove options.ranks and options.offload, or write a checkpoint and open it",
        )

    def _load_model(self) -> dict[str, str]:
        self._parts = CheckpointParts(self.folder, self._config, self.kernel, self._device)
        self.model = self._parts.model
        return self._parts.untied(self._digests())

    @abstractmethod
    def _digests(self) -> dict[str, str]:
        """Those of the checkpoint's tensors, once each part is where it stays."""

    def _place(self) -> None:
        """Move what code computes, not what files hold, to the device."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)


class OffloadedEngine(_InParts):
    """The weights stay in their files; a layer is read when it runs, and then forgotten."""

    def _digests(self) -> dict[str, str]:
        parts = self._parts
        digests = parts.load(lambda part: None if part == REST else parts.empty(part))
        for part in parts.layers:
            run = parts.modules[part]
            run.register_forward_pre_hook(lambda *_, part=part: parts.fill(part))
            run.register_forward_hook(lambda *_, part=part: parts.empty(part), always_call=True)
        return digests


class _Kept(nn.Module):
    """In the place of a head: hands on the hidden states, and keeps them."""

    hidden_SCD: Tensor

    def forward(self, hidden_SCD: Tensor) -> Tensor:
        self.hidden_SCD = hidden_SCD
        return hidden_SCD


class RankEngine(_InParts):
    """One rank of a kernel; all of them are called with the same arguments.

    What the base class calls logits are hidden states here, until `_numpy` or `_columns`.

    Raises:
        MeasurementError: another number of processes, too few GPUs, or an architecture whose
            logits are not those of its head.
    """

    _without_gradients = torch.no_grad  # FSDP2 gathers into tensors whose versions it counts

    def __init__(self, kernel: Kernel) -> None:
        self._rank, self._ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self._ranks != ranks_of(kernel):
            raise MeasurementError(
                f"{self._ranks} processes are ranks of a kernel with {ranks_of(kernel)}",
                hint=f"give the kernel options: {{ranks: {self._ranks}}}",
            )
        device = kernel.device
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        elif device not in (None, "cpu"):
            raise MeasurementError(
                f"the kernel asks for device {device}, and each of its ranks has one of its own",
                hint="write device: cuda",
            )
        distributed.init_process_group(
            "nccl" if device is not None and device != "cpu" else "gloo",
            init_method=os.environ[MEETING],
            rank=self._rank,
            world_size=self._ranks,
        )
        super().__init__(kernel.model_copy(update={"device": device}))

    def close(self) -> None:
        super().close()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    # loading

    def _digests(self) -> dict[str, str]:
        parts, model = self._parts, self._parts.model
        mesh = init_device_mesh(self._device.type, (self._ranks,))
        head = model.get_output_embeddings()
        if head is None:
            raise MeasurementError(
                f"{type(model).__name__} has no head to shard", hint="remove options.ranks"
            )
        tied = any(parts.modules.get(parts.part_of(name)) is head for name in parts.tied)
        self._head, self._hidden = head, _Kept()
        self._table = model.get_input_embeddings() if tied else head

        def shard(part: str) -> None:
            module = parts.modules[part]
            if part == REST:
                model.set_output_embeddings(self._hidden)
                fully_shard(module, mesh=mesh)
            elif module is not head or not tied:
                fully_shard(module, mesh=mesh, reshard_after_forward=True)

        own = parts.load(shard, lambda number: number % self._ranks == self._rank)
        found: list[Any] = [None] * self._ranks
        distributed.all_gather_object(found, own)
        return {name: digest for each in found for name, digest in each.items()}

    def _fingerprint(self, config_json: Any) -> dict[str, str]:
        return {**super()._fingerprint(config_json), "ranks": str(self._ranks)}

    # running

    def _forward(self, ids_ST: Tensor, mask_ST: Tensor, **options: Any) -> Tensor:
        ended_SCD = super()._forward(ids_ST, mask_ST, **options)
        hidden_SCD = self._hidden.hidden_SCD
        known_SCD = self._after_head(hidden_SCD)
        if not torch.allclose(known_SCD.double(), ended_SCD.double(), 0, 0, equal_nan=True):
            raise MeasurementError(
                f"{self._config.model_type} changes the logits of its head in a way that is not "
                "known here, so they cannot be had of a shard",
                hint="write options: {offload: layers}, or run it in one process",
            )
        return hidden_SCD

    def _after_head(self, logits: Tensor) -> Tensor:
        """What an architecture does to logits: the soft cap of Gemma, scales of Cohere, Granite."""
        config = self._config.get_text_config()
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        return logits

    def _given_logits(self, chunk: Batch, path: Path) -> Iterator[Tensor]:
        rows = max(1, CHUNK_ELEMENTS // self._description.vocab_size)
        for hidden_RD in super()._given_logits(chunk, path):
            yield from hidden_RD.split(rows)

    def _shard(self, hidden_RD: Tensor) -> tuple[Tensor, int]:
        """Logits of this rank's tokens, [R, W], and the id of the first."""
        weight: Any = self._table.weight
        size = -(-len(weight) // self._ranks)  # FSDP2 cuts as `Tensor.chunk` does
        start = min(self._rank * size, len(weight))
        bias: Any = self._head.bias
        if bias is not None:
            bias = bias.to_local() if hasattr(bias, "to_local") else bias[start : start + size]
        # products of one shape round a row alike, whatever rows are asked for beside it, so that
        # given tokens have the bits they were drawn with; of eight: elsewhere, the place counts
        block = 8 * -(-self.kernel.batch_size // 8)
        padded_RD = F.pad(hidden_RD, (0, 0, 0, -len(hidden_RD) % block))
        with self._without_gradients():
            parts = [F.linear(rows, weight.to_local(), bias) for rows in padded_RD.split(block)]
            return self._after_head(torch.cat(parts)[: len(hidden_RD)]), start

    def _numpy(self, logits: Tensor) -> NDArray[np.floating]:
        """Logits [R, V] of hidden states [R, D]: of few rows, on every rank."""
        shard_RW = super()._numpy(self._shard(logits)[0])
        size = len(self._table.weight)
        width = -(-size // self._ranks)
        padded_RW = np.pad(shard_RW, ((0, 0), (0, width - shard_RW.shape[1])))
        return np.concatenate(list(self._gathered(padded_RW)), axis=1)[:, :size]

    def _columns(self, logits_RV: Tensor, token_R: Ints, sampling: Sampling) -> dict[str, Floats]:
        if not sampling.filters:  # a filter sorts the whole vocabulary
            shard_RW, start = self._shard(logits_RV)
            logit_RW = super()._numpy(shard_RW).astype(np.float64) / sampling.temperature
            whole = summed_up(self._gathered(summary_of(logit_RW, token_R, start)))
            if np.isfinite(whole.log_z_R).all():
                sums_NRC = self._gathered(sums_of(logit_RW, token_R, start, whole))
                return columns_of_shards(whole, sums_NRC.sum(axis=0))
        return super()._columns(logits_RV, token_R, sampling)

    def _draw(self, logp_SV: Floats, uniform_S: Floats) -> Ints:
        """What rank 0 draws: machines of other kinds may round the same logits otherwise."""
        token_S = torch.from_numpy(super()._draw(logp_SV, uniform_S)).to(self._device)
        distributed.broadcast(token_S, 0)
        return token_S.cpu().numpy()

    def _gathered(self, mine: NDArray[Any]) -> NDArray[Any]:
        """The arrays of all ranks, [N, ...], which have one shape."""
        own = torch.from_numpy(np.ascontiguousarray(mine)).to(self._device)
        each = [torch.empty_like(own) for _ in range(self._ranks)]
        distributed.all_gather(each, own)
        return torch.stack(each).cpu().numpy()
