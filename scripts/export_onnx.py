"""Exports a checkpoint folder to an ONNX file, in the layout of Optimum.

    python scripts/export_onnx.py models/tiny-lm tiny-lm-onnx/model.onnx
    python scripts/export_onnx.py models/tiny-lm tiny-lm-int8/model.onnx --type int8_dynamic

For tests and benchmarks; `optimum-cli export onnx` exports more architectures.  config.json and the
files of the tokenizer are copied beside the file, and large tensors lie in FILE.data.  The file
names the weights that it was made from (servanda.weights_from), and by what (servanda.converter).
"""

# Axes: S sequences, T new tokens, P tokens before them, V vocabulary; keys and values are
# [S, heads, P, width of a head].

import argparse
import logging
import shutil
import sys
import tempfile
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import DynamicCache

from servanda.contract.identity import digest_of
from servanda.contract.model import Kernel
from servanda.engines import checkpoint
from servanda.engines.folder import checkpoint_folder
from servanda.errors import MeasurementError, ServandaError

TYPES = ("f32", "int8_dynamic")
BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "special_tokens_map.json"),
)
GIVEN = ("input_ids", "attention_mask", "position_ids")


def write_onnx(folder: Path, path: Path, kind: str = "f32", attention: str = "eager") -> None:
    """Write a checkpoint as ONNX; the file is there whole or not at all.

    Args:
        folder: config.json, tokenizer.json and safetensors of a causal language model.
        kind: one of TYPES; int8_dynamic: weights to int8, one scale per tensor, and what they
            multiply is rounded while it runs.
        attention: eager or sdpa.

    Raises:
        MeasurementError: the folder cannot be used, or the model cannot be exported.
    """
    folder = checkpoint_folder(str(folder))
    config = checkpoint.read_config(folder)
    kernel = Kernel(engine="transformers", model=str(folder), attention=attention)
    with checkpoint.quiet():
        state = checkpoint.read_weights(folder)
        model = checkpoint.build_model(folder, config, state, kernel)
    # experts by products of batches, whose shapes do not depend on the routes
    model.config._experts_implementation = "batched_mm"
    libraries = ("torch", "transformers", "onnx", "onnxscript")
    libraries += ("onnxruntime",) if kind == "int8_dynamic" else ()
    told = {
        "weights_from": digest_of(checkpoint.tensor_digests(state, model.all_tied_weights_keys)),
        "converter": ", ".join(f"{name} {version(name)}" for name in libraries),
        "quantization": "none" if kind == "f32" else kind,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place, silent():
        graph = graph_of(folder, model)
        if kind == "int8_dynamic":
            quantize_dynamic(graph, Path(place) / "int8.onnx", weight_type=QuantType.QInt8)
            graph = onnx.load(Path(place) / "int8.onnx")
        onnx.helper.set_model_props(graph, {f"servanda.{key}": v for key, v in told.items()})
        data = f"{path.name}.data"
        onnx.save(graph, Path(place) / path.name, save_as_external_data=True, location=data)
        for made in (data, path.name):
            if (Path(place) / made).is_file():
                (Path(place) / made).replace(path.parent / made)
    for name in BESIDE:
        if (folder / name).is_file() and folder.resolve() != path.parent.resolve():
            shutil.copy(folder / name, path.parent)


@contextmanager
def silent():
    """The exporter and the quantiser print a lot for their own developers: errors are raised."""
    handlers, level = logging.root.handlers[:], logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
            logging.root.handlers[:] = handlers  # logging.warning() adds one


def graph_of(folder, model):
    """The graph of a model, as onnx.ModelProto."""
    try:
        return exported(model)
    except Exception as error:  # the exporter raises anything, the reason innermost
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise MeasurementError(
            f"the model {str(folder)!r} cannot be exported to ONNX: {reason}",
            hint=f"use engine: transformers for this architecture ({model.config.model_type})",
        ) from error


def filled(past):
    # without the config, so that a sliding window is left to the mask alone and no key is
    # dropped: how many there are is what the graph cannot know
    cache = DynamicCache()
    for layer, (keys_SHPD, values_SHPD) in enumerate(past):
        cache.update(keys_SHPD, values_SHPD, layer)
    return cache


class Step(torch.nn.Module):
    """One forward over new tokens, with what went before as plain tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, past):
        cache = filled(past)
        logits_STV = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits_STV, [(layer.keys, layer.values) for layer in cache.layers]


def exported(model):
    # sizes that differ from each other and from 0 and 1, so that none is taken for a constant
    sequences, before, new = 2, 5, 3
    with torch.inference_mode(False), torch.no_grad():
        seen = DynamicCache()
        model(torch.zeros((sequences, before), dtype=torch.long), past_key_values=seen)
        # contiguous: a stride would become part of the graph
        past = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in seen.layers]
        inputs = {
            "input_ids": torch.zeros((sequences, new), dtype=torch.long),
            "attention_mask": torch.ones((sequences, before + new), dtype=torch.long),
            "position_ids": torch.full((sequences, new), before),
            "past": past,
        }
        any_size = torch.export.Dim.DYNAMIC
        names = [f"{layer}.{kind}" for layer in range(len(past)) for kind in ("key", "value")]
        program = torch.onnx.export(
            Step(model).eval(),
            (),
            kwargs=inputs,
            dynamo=True,
            verbose=False,
            dynamic_shapes={
                **{name: {0: any_size, 1: any_size} for name in GIVEN},
                "past": [({0: any_size, 2: any_size},) * 2 for _ in past],
            },
            input_names=[*GIVEN, *(f"past_key_values.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
        )
    return program.model_proto


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("path", type=Path, help="the file to write, such as tiny-lm/model.onnx")
    parser.add_argument("--type", choices=TYPES, default="f32")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    given = parser.parse_args(argv)
    try:
        write_onnx(given.folder, given.path, given.type, given.attention)
    except ServandaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
