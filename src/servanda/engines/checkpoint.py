# A checkpoint as torch and Transformers have it: its tensors, their digests, the model they make,
# and its tokenizer.

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from servanda.contract.identity import Description
from servanda.contract.kernel_string import is_hub_name
from servanda.contract.model import Kernel
from servanda.engines.folder import cached_folder, read_json, reading, values_digest, weight_files
from servanda.errors import MeasurementError


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, at the precision it is stored in."""
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with reading(file):
            state |= load_file(file)
    return state


def read_config(folder: Path) -> Any:
    """The config of a checkpoint as Transformers reads it; no code of the folder is run."""
    from transformers import AutoConfig

    with quiet(), reading(folder / "config.json"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_tokenizer(folder: Path) -> Any:
    """Its tokenizer, likewise."""
    from transformers import AutoTokenizer

    with quiet(), reading(folder / "tokenizer.json"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def build_model(
    folder: Path, config: Any, state: Mapping[str, torch.Tensor], kernel: Kernel
) -> Any:
    """The model of a config with these tensors, in the kernel's dtype and attention.

    Raises:
        MeasurementError: no such architecture, or config and tensors do not belong together.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and (other := _besides_text(config)):
        raise MeasurementError(
            f"{str(folder)!r} is a model of {config.model_type} with {other}, and Transformers has "
            "no causal language model of it: texts alone are scored here",
            hint="save its text part by itself (model.language_model with the head), or let a "
            "server run it: its answers to texts can be judged",
        )
    hint = f"transformers {__version__} may not have this architecture, or not {kernel.attention}"
    with reading(folder, hint):
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = architecture.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=getattr(torch, kernel.dtype),
            attn_implementation=kernel.attention.partition("_")[0],
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    refuse_misfit(folder, report)
    return ready(model, kernel)


def _besides_text(config: Any) -> str:
    """The parts of a model that read no text, by their keys in config.json; "" if none."""
    names = ("vision_config", "audio_config", "image_config", "video_config", "thinker_config")
    return " and ".join(name for name in names if getattr(config, name, None) is not None)


def refuse_misfit(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse tensors that are not those of config.json.

    Args:
        report: of Transformers' loading; missing_keys, unexpected_keys and mismatched_keys.

    Raises:
        MeasurementError: with the first of them.
    """
    for kind, says in (
        ("missing_keys", "lacks the tensor"),
        ("unexpected_keys", "has a tensor that config.json does not know,"),
        ("mismatched_keys", "has another shape than config.json for"),
    ):
        if report[kind]:
            first = min(key if isinstance(key, str) else key[0] for key in report[kind])
            raise MeasurementError(
                f"the checkpoint {str(folder)!r} {says} {first!r} ({len(report[kind])} such)",
                hint="config.json and weights must come from one save_pretrained",
            )


def ready(model: Any, kernel: Kernel) -> Any:
    """A model that is to be evaluated, with masks that survive its dtype."""
    if kernel.attention == "eager" and kernel.dtype in ("float16", "float64"):
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(_keep_masks_finite, with_kwargs=True)
    return model.eval()


def _keep_masks_finite(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Raise the most negative number of an additive mask to one that survives the softmax.

    Eager attention masks with the least number of its dtype and takes the softmax in
    float32.  Added to a score in float16, or cast from float64, that number becomes -inf;
    a column of left padding sees nothing but masked keys, so it would turn NaN, and 0 * NaN
    would carry that into every real token.  A masked key has probability 0 either way.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None:
        least = max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min)
        kwargs["attention_mask"] = mask.clamp_min(least / 2)
    return args, kwargs


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers without progress bars and load reports: what matters is raised."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def tensor_digests(state: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, str]:
    """The digest of each tensor of a checkpoint, but of those that are tied to another in it.

    Args:
        tied: name -> the tensor it is, as a model's `all_tied_weights_keys` has it.
    """
    named = {name: tensor for name, tensor in state.items() if tied.get(name) not in state}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the lock
        return dict(zip(named, pool.map(tensor_digest, named.values()), strict=True))


def tensor_digest(tensor: torch.Tensor) -> str:
    """`values_digest` of a tensor, whatever the precision it is stored in."""
    return values_digest(tensor.detach().cpu().to(torch.float32).contiguous().numpy(), tensor.shape)


class Tokenized:
    """The verbs of texts, by the checkpoint's tokenizer as Transformers reads it."""

    _tokenizer: Any
    _description: Description

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # not verbose: a prompt that is too long is refused, by name, when it is run
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def vocabulary(self) -> list[str]:
        token = {i: token for token, i in self._tokenizer.get_vocab().items()}
        return [token.get(i, f"<{i}>") for i in range(self._description.vocab_size)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        # as it was drawn: blanks before punctuation are the kernel's own
        return [
            self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
            for tokens in ids
        ]


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A LoRA adapter in the layout of PEFT, beside the checkpoint that it was trained on.

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
