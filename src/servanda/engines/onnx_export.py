# A checkpoint folder as an ONNX file: exported once, kept in a cache folder, and quantised.
#
# One graph serves prefill and decode: it takes the keys and values of what went before, which
# may be none, and gives them back with those of the new tokens.  `columns` says for which of
# the new tokens logits are wanted.  The names of its inputs and outputs are those below.
# Axes: S sequences, T new tokens, P tokens before them, C columns, V vocabulary; keys and
# values are [S, heads, P, width of a head].

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from servanda.contract.identity import digest_of
from servanda.contract.model import Kernel
from servanda.engines.cache import alone, cache_folder
from servanda.engines.folder import file_digest, reading, weight_files
from servanda.errors import MeasurementError

INSTALL = "pip install 'servanda[onnx,transformers]'"
QUANTIZED = ("int8_dynamic",)
FIXED_INPUTS = ("input_ids", "attention_mask", "position_ids", "columns")
_GRAPH = 1  # raised when this file writes another graph for the same model
_MODEL, _ABOUT = "model.onnx", "about.json"
_EXPORTERS = ("torch", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True)
class OnnxFile:
    """A model in the cache.

    Args:
        path: of the graph; large tensors lie beside it.
        about: what was known when it was written: `tensors` (digests of the checkpoint's),
            `vocab_size`, `context`, `eos_token_id`, `architecture`, `made_by` (versions).
    """

    path: Path
    about: Mapping[str, Any]


def past_names(layers: int) -> list[str]:
    """What goes before, layer by layer: inputs past.k.0, past.v.0, ..., outputs present.k.0 ..."""
    return [f"{kind}.{layer}" for layer in range(layers) for kind in "kv"]


@contextmanager
def needing(what: str) -> Iterator[None]:
    """A library that is not installed, said with the line that installs it."""
    try:
        yield
    except ImportError as error:
        raise MeasurementError(f"{what} needs more libraries: {error}", hint=INSTALL) from error


def onnx_file(folder: Path, config_json: Mapping[str, Any], kernel: Kernel) -> OnnxFile:
    """The ONNX file of a checkpoint folder, from the cache or made now.

    Args:
        folder: as of `folder.checkpoint_folder`.
        config_json: its config.json.
        kernel: of engine onnxruntime; its attention and quantization say which file.

    Raises:
        MeasurementError: a library that exports is missing, the model cannot be exported, or
            the cache folder cannot be written.
    """
    cache, exporters = cache_folder("onnx"), _versions(_EXPORTERS)
    of = f"{_weights_digest(folder)[:16]}-{digest_of(dict(config_json))[:16]}"

    def place(versions: dict[str, str], kind: str) -> Path:
        by = digest_of([_GRAPH, versions])[:8]
        return cache / f"{of}-{by}-{kernel.attention}-{kind}"

    def export(into: Path) -> dict[str, Any]:
        return {**_export(folder, kernel, into / _MODEL), "made_by": exporters}

    def plain() -> OnnxFile:
        return _cached(place(exporters, "float32"), export)

    if kernel.quantization is None:
        return plain()
    both = exporters | _versions(("onnxruntime",))

    def quantize(into: Path) -> dict[str, Any]:
        source = plain()
        _quantize(source.path, into / _MODEL)
        return {**source.about, "made_by": both}

    return _cached(place(both, kernel.quantization), quantize)


def _versions(libraries: tuple[str, ...]) -> dict[str, str]:
    with needing("exporting a model to ONNX"):
        return {name: metadata.version(name) for name in libraries}


def _weights_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(folder):
        with reading(file):
            digest.update(file_digest(file).encode())
    return digest.hexdigest()


# the cache


def _cached(place: Path, make: Callable[[Path], dict[str, Any]]) -> OnnxFile:
    """What lies in `place` if it is whole, or else what `make` writes into a folder."""
    with alone(place):
        about = _intact(place)
        if about is None:
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as temporary:
                about = _build(Path(temporary), place, make)
    return OnnxFile(place / _MODEL, about)


def _intact(place: Path) -> dict[str, Any] | None:
    """What is known of the files in `place`; None where they are not there, or not as written."""
    try:
        about = json.loads((place / _ABOUT).read_text(encoding="utf-8"))
        digests = {name: file_digest(place / name) for name in about["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return about if digests == about["files"] else None


def _build(temporary: Path, place: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    new = temporary / "new"
    new.mkdir()
    about = make(new)
    about["files"] = {file.name: file_digest(file) for file in sorted(new.iterdir())}
    (new / _ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    if place.exists():
        place.rename(temporary / "damaged")
    new.rename(place)
    return about


# writing


@contextmanager
def _silent() -> Iterator[None]:
    """The exporter and the quantiser tell their own developers a lot: errors are raised."""
    handlers, level = logging.root.handlers[:], logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
            logging.root.handlers[:] = handlers  # logging.warning() adds one


def _export(folder: Path, kernel: Kernel, file: Path) -> dict[str, Any]:
    """Write the graph of a checkpoint; returns what is known of the model."""
    with needing("exporting a model to ONNX"):
        import onnxscript  # noqa: F401 - what torch.onnx writes with

        from servanda.engines import checkpoint

    config = checkpoint.read_config(folder)
    with checkpoint.quiet():
        state = checkpoint.read_weights(folder)
        model: Any = checkpoint.build_model(folder, config, state, kernel)
    # experts by products of batches, whose shapes do not depend on the routes
    model.config._experts_implementation = "batched_mm"
    try:
        with _silent():
            _write_graph(model, file)
    except OSError:
        raise
    except Exception as error:  # the exporter raises anything, the reason innermost
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise MeasurementError(
            f"the model {str(folder)!r} cannot be exported to ONNX: {reason}",
            hint=f"use engine: transformers for this architecture ({config.model_type})",
        ) from error
    text_config = config.get_text_config()
    return {
        "architecture": config.model_type,
        "tensors": checkpoint.tensor_digests(state, model.all_tied_weights_keys),
        "vocab_size": text_config.vocab_size,
        "context": getattr(text_config, "max_position_embeddings", None),
        "eos_token_id": text_config.to_dict().get("eos_token_id"),
    }


def _write_graph(model: Any, file: Path) -> None:
    import torch
    from transformers import DynamicCache

    def filled(past: Any) -> Any:
        # without the config, so that a sliding window is left to the mask alone and no key is
        # dropped: how many there are is what the graph cannot know
        cache = DynamicCache()
        for layer, (keys_SHPD, values_SHPD) in enumerate(past):
            cache.update(keys_SHPD, values_SHPD, layer)
        return cache

    class Step(torch.nn.Module):
        """One forward over new tokens, with what went before as plain tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, columns: Any, past: Any
        ) -> Any:
            cache = filled(past)
            logits_SCV = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=columns,
            ).logits
            return logits_SCV, [(layer.keys, layer.values) for layer in cache.layers]

    # sizes that differ from each other and from 0 and 1, so that none is taken for a constant
    sequences, before, new = 2, 5, 3
    with torch.inference_mode(False), torch.no_grad():
        seen: Any = DynamicCache()
        model(torch.zeros((sequences, before), dtype=torch.long), past_key_values=seen)
        # contiguous: a stride would become part of the graph
        past = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in seen.layers]
        inputs = {
            "input_ids": torch.zeros((sequences, new), dtype=torch.long),
            "attention_mask": torch.ones((sequences, before + new), dtype=torch.long),
            "position_ids": torch.full((sequences, new), before),
            "columns": torch.arange(1, new),
            "past": past,
        }
        any_size = torch.export.Dim.DYNAMIC
        shapes = {name: {0: any_size, 1: any_size} for name in FIXED_INPUTS[:-1]}
        names = past_names(len(past))
        program = torch.onnx.export(
            Step().eval(),
            (),
            kwargs=inputs,
            dynamo=True,
            verbose=False,
            dynamic_shapes={
                **shapes,
                "columns": {0: any_size},
                "past": [({0: any_size, 2: any_size},) * 2 for _ in past],
            },
            input_names=[*FIXED_INPUTS, *(f"past.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
        )
    assert program is not None  # it is None only where no dynamo is asked for
    program.save(file, external_data=True)


def _quantize(source: Path, file: Path) -> None:
    """Weights to int8, one scale a tensor; what they multiply is rounded while it runs."""
    with needing("quantising a model"):
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

    with _silent():
        # a model, not its path: onnxruntime would write beside the source
        graph = onnx.load(source)
        quantize_dynamic(graph, file, weight_type=QuantType.QInt8, use_external_data_format=True)
