# A checkpoint: a folder with config.json, safetensors and tokenizer.json; its digests, and
# the model it makes.
#
# Local folders only: nothing is downloaded, and a pickle is never opened.  Whatever is
# wrong with a folder is said with the file that is wrong and what to do about it.

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from servanda.contract import Kernel
from servanda.errors import MeasurementError, Where
from servanda.identity import digest_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SAVED_ANEW = "copy the folder again, or write it anew with save_pretrained"


def checkpoint_folder(model: str | None) -> Path:
    """The folder of a model, which has all the files that an engine reads.

    Raises:
        MeasurementError: no folder, or a file is not in it.
    """
    if not model:
        raise MeasurementError(
            "the kernel names no model",
            hint="add model: path/to/folder, a folder with config.json and model.safetensors",
        )
    folder = Path(model)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise MeasurementError(
            f"the model folder {str(folder)!r} {found}",
            hint=_nearest(folder) or "only local folders are read, nothing is downloaded",
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise MeasurementError(
                f"the model folder {str(folder)!r} has no {name}",
                hint="save model and tokenizer into this folder with save_pretrained",
            )
    weight_files(folder)
    return folder


def _nearest(folder: Path) -> str:
    """A folder beside the missing one whose name is close to it."""
    beside = sorted(p.name for p in folder.parent.glob("*/"))
    near = difflib.get_close_matches(folder.name, beside, n=1)
    return f"did you mean {str(folder.parent / near[0])!r}?" if near else ""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint."""
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        with reading(folder / INDEX):
            names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            other = sorted(p.name for p in folder.glob("*.bin"))
            raise MeasurementError(
                f"the model folder {str(folder)!r} has no {name}",
                hint=f"{other[0]} is a pickle and is not read: save it as safetensors"
                if other
                else SAVED_ANEW,
            )
    return [folder / name for name in names]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, at the precision it is stored in."""
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with reading(file):
            state |= load_file(file)
    return state


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; a syntax error is shown at its line."""
    with reading(file):
        text = file.read_text(encoding="utf-8")
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            line = (text.splitlines() or [""])[error.lineno - 1 : error.lineno]
            raise MeasurementError(
                f"this is not JSON: {error.msg}",
                where=Where(str(file), error.lineno, error.colno, *line),
                hint=SAVED_ANEW,
            ) from None
        if not isinstance(value, dict):
            raise MeasurementError(f"{str(file)!r} holds no JSON object", hint=SAVED_ANEW)
    return value


@contextmanager
def reading(file: Path, hint: str = SAVED_ANEW) -> Iterator[None]:
    """Whatever a library says about a file, said with the file's name and a next step."""
    try:
        yield
    except MeasurementError:
        raise
    except Exception as error:  # the readers raise anything, bare Exception included
        said = str(error).strip() or type(error).__name__
        raise MeasurementError(
            f"{str(file)!r} cannot be read: {said.splitlines()[0]}", hint=hint
        ) from error


def build_model(
    folder: Path, config: Any, state: Mapping[str, torch.Tensor], kernel: Kernel
) -> Any:
    """The model of a config with these tensors, in the kernel's dtype and attention.

    Raises:
        MeasurementError: no such architecture, or config and tensors do not belong together.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    hint = f"transformers {__version__} may not have this architecture, or not {kernel.attention}"
    with reading(folder, hint):
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, found = architecture.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=getattr(torch, kernel.dtype),
            attn_implementation=kernel.attention,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    for kind, says in (
        ("missing_keys", "lacks the tensor"),
        ("unexpected_keys", "has a tensor that config.json does not know,"),
        ("mismatched_keys", "has another shape than config.json for"),
    ):
        if found[kind]:
            first = min(key if isinstance(key, str) else key[0] for key in found[kind])
            raise MeasurementError(
                f"the checkpoint {str(folder)!r} {says} {first!r} ({len(found[kind])} such)",
                hint="config.json and weights must come from one save_pretrained",
            )
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


def end_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json first, then config.json."""
    file = folder / "generation_config.json"
    said = read_json(file).get("eos_token_id") if file.is_file() else None
    said = config.get("eos_token_id") if said is None else said
    return () if said is None else tuple(said) if isinstance(said, list) else (said,)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Of the shape and of the values as little-endian float32, 16 bytes in hex."""
    values = tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4", copy=False)
    digest = hashlib.blake2b(json.dumps(list(tensor.shape)).encode(), digest_size=16)
    digest.update(values.reshape(-1).view("u1").data)
    return digest.hexdigest()


def token_digest(ids: Mapping[str, int], tokenizer_json: Mapping[str, Any]) -> str:
    """Of the vocabulary, id by id, and of every other rule of tokenizer.json."""
    rules = {key: value for key, value in tokenizer_json.items() if key != "model"}
    model = tokenizer_json.get("model") or {}
    rules["model"] = {key: value for key, value in model.items() if key != "vocab"}
    return digest_of([sorted((i, token) for token, i in ids.items()), rules])
