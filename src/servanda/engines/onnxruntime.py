# Engine `onnxruntime`: a causal language model as an ONNX file, run by ONNX Runtime on the CPU.
#
# The graph has the layout of Optimum: it takes input_ids, attention_mask and, if it wants them,
# position_ids, and gives logits of each token.  A graph that also takes the keys and values of the
# tokens before (past_key_values.*, which may be of no token) and gives those of all tokens
# (present.*, in the same order) decodes with them; without them each step runs the whole text.
# config.json and tokenizer.json lie beside the file, or in the folder above it.
# The metadata of the file may name the weights that it was made from (servanda.weights_from), by
# what (servanda.converter), and in which quantization (servanda.quantization), as
# scripts/export_onnx.py writes them.
# How it pads, draws and scores is in local_engine.py.
# Axes: S rows of a chunk, T columns that are fed, V vocabulary; keys and values are
# [S, heads, tokens, width of a head].

from __future__ import annotations

import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel
from servanda.engines import folder
from servanda.engines.base import ENGINES
from servanda.engines.foreign_code import code_is_refused
from servanda.engines.local_engine import LocalEngine
from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints
from servanda.traces.trace import Batch

QUANTIZED = ("int8_dynamic",)
_PROVIDER, _FLOAT = "CPUExecutionProvider", "tensor(float)"
_GIVEN = ("input_ids", "attention_mask", "position_ids")
_PAST, _PRESENT = "past_key_values.", "present."
_MADE = (
    "export the checkpoint with `optimum-cli export onnx --model CHECKPOINT FOLDER`, and name the "
    "file or its folder"
)


def _configured(place: Path) -> Path:
    """The folder of the configuration: that of the file, or the one above."""
    if code_is_refused() or (place / "config.json").is_file():
        return place
    return place.parent if (place.parent / "config.json").is_file() else place


@ENGINES.register("onnxruntime")
class OnnxRuntimeEngine(LocalEngine):
    """One graph for prefill and decode, on one thread."""

    def __init__(self, kernel: Kernel) -> None:
        _refuse(kernel)  # before anything is read
        super().__init__(kernel)
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MeasurementError(
                f"engine 'onnxruntime' needs more libraries: {error}",
                hint="pip install 'servanda[onnx]'",
            ) from error

        file = folder.model_file(kernel.model, ".onnx", "ONNX Runtime reads ONNX files", _MADE)
        place = _configured(file.parent)
        folder.refuse_bare(place)
        config_json = folder.read_json(place / "config.json")
        tokenizer_json = folder.read_json(place / "tokenizer.json")
        with folder.reading(place / "tokenizer.json"):
            self._tokenizer: Any = Tokenizer.from_file(str(place / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3  # errors: they are raised as well
        with folder.reading(file, "copy the file again, with the data beside it"):
            self._session: Any = onnxruntime.InferenceSession(file, options, [_PROVIDER])
            # large tensors lie in files beside it, whose names begin with its own
            parts = sorted(p for p in file.parent.iterdir() if p.name.startswith(file.name))
            digest = digest_of([folder.file_digest(part) for part in parts])
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._read_layout(file)
        about = self._session.get_modelmeta()
        told: Mapping[str, str] = about.custom_metadata_map
        _refuse_other_quantization(file, told.get("servanda.quantization"), kernel)
        text_config = config_json.get("text_config") or config_json
        self._description = Description(
            fingerprint={
                **_fingerprint(kernel),
                "onnxruntime": onnxruntime.__version__,
                "optimizations": options.graph_optimization_level.name,
                "file": digest,
                "converter": told.get("servanda.converter") or about.producer_name or "unknown",
                "architecture": str(text_config.get("model_type")),
                "config": digest_of(config_json),
                **folder.facts(place),
            },
            tensors={},
            tokens=folder.token_digest(self._tokenizer.get_vocab(), tokenizer_json),
            vocab_size=self._vocab_size or int(text_config["vocab_size"]),
            eos=folder.end_tokens(place, text_config),
            context=text_config.get("max_position_embeddings"),
            timed=True,
            weights_from=folder.converted_from(
                kernel.model, told.get("servanda.weights_from", ""), kernel.weights_from
            ),
            config=folder.config_values(config_json),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def vocabulary(self) -> list[str]:
        token = {i: token for token, i in self._tokenizer.get_vocab().items()}
        return [token.get(i, f"<{i}>") for i in range(self._description.vocab_size)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        # as it was drawn: end tokens are text too
        return self._tokenizer.decode_batch([*map(list, ids)], skip_special_tokens=False)

    def close(self) -> None:
        self._session = None

    # running

    def _read_layout(self, file: Path) -> None:
        """Fix what the graph takes and gives.

        Raises:
            MeasurementError: it is another layout than that of Optimum, or not in float32.
        """
        taken = {given.name: given for given in self._session.get_inputs()}
        given = {out.name: out for out in self._session.get_outputs()}
        past = [name for name in taken if name.startswith(_PAST)]
        self._present = [name for name in given if name.startswith(_PRESENT)]
        odd = [name for name in taken if name not in (*_GIVEN, *past)]
        odd += [name for name in _GIVEN[:2] if name not in taken]
        odd += ["logits"] if "logits" not in given else []
        if odd or len(past) != len(self._present):
            raise MeasurementError(
                f"{str(file)!r} has another layout than engine 'onnxruntime' reads: it takes "
                f"{', '.join(taken)}, and gives {', '.join(given)}",
                hint="export it again: `optimum-cli export onnx` writes input_ids, attention_mask, "
                "position_ids and past_key_values.* to logits and present.*",
            )
        floats = [taken[name] for name in past] + [given["logits"]]
        other = next((value for value in floats if value.type != _FLOAT), None)
        if other is not None:
            raise MeasurementError(
                f"{str(file)!r} has {other.name} as {other.type}, and engine 'onnxruntime' runs "
                "models in float32",
                hint="export it again in float32",
            )
        self._positions = "position_ids" in taken
        # of each layer's keys and values: heads, and width of a head
        self._past = {name: (taken[name].shape[1], taken[name].shape[3]) for name in past}
        size = given["logits"].shape[-1]
        self._vocab_size = size if isinstance(size, int) else 0

    def _run(
        self, ids_ST: Ints, mask_ST: Ints, past: Sequence[Any], outputs: list[str]
    ) -> list[Any]:
        """The outputs asked for; `mask_ST` also covers what went before."""
        feed = {"input_ids": ids_ST, "attention_mask": mask_ST}
        if self._positions:  # counted from each row's first real token
            position_ST = np.maximum(mask_ST.cumsum(axis=-1) - 1, 0)
            feed["position_ids"] = position_ST[:, -ids_ST.shape[1] :]
        values = {name: self._value(np.ascontiguousarray(array)) for name, array in feed.items()}
        cache = dict(zip(self._past, past, strict=True))
        return self._session.run_with_ort_values(outputs, values | cache)

    def _nothing(self, sequences: int) -> list[Any]:
        """Keys and values of no token."""
        return [
            self._value(np.zeros((sequences, heads, 0, width), dtype=np.float32))
            for heads, width in self._past.values()
        ]

    def _decode(self, chunk: Batch) -> Generator[Any, Ints | None, None]:
        ids_ST, mask_ST = self._left_padded(chunk.prompts)
        past = self._nothing(len(chunk))
        while True:
            logits_STV, *past = self._run(ids_ST, mask_ST, past, ["logits", *self._present])
            token_S = yield logits_STV.numpy()[:, -1]
            assert token_S is not None  # anyone who goes on sends what was drawn
            new_S1 = token_S[:, None]
            ids_ST = new_S1 if self._past else np.concatenate([ids_ST, new_S1], axis=1)
            mask_ST = np.pad(mask_ST, ((0, 0), (0, 1)), constant_values=1)

    def _prefill(self, chunk: Batch) -> Iterator[NDArray[np.float32]]:
        ids_ST, mask_ST, keep = self._right_padded(chunk)
        (logits_STV,) = self._run(ids_ST, mask_ST, self._nothing(len(chunk)), ["logits"])
        return self._after_prompts(chunk, logits_STV.numpy()[:, -keep:])


def _refuse(kernel: Kernel) -> None:
    """A kernel that this engine cannot be."""
    if kernel.dtype != "float32":
        raise MeasurementError(
            f"engine 'onnxruntime' has no dtype {kernel.dtype!r}",
            hint="it has float32; leave the key out, or add quantization: int8_dynamic",
        )
    if kernel.quantization not in (None, *QUANTIZED):
        raise MeasurementError(
            f"engine 'onnxruntime' has no quantization {kernel.quantization!r}",
            hint=f"it has {' and '.join(QUANTIZED)}; leave the key out for none",
        )


def _refuse_other_quantization(file: Path, held: str | None, kernel: Kernel) -> None:
    """A file that says to hold something else than its kernel; many files do not say it."""
    if held in (None, kernel.quantization or "none"):
        return
    right = "leave quantization out" if held == "none" else f"write quantization: {held}"
    raise MeasurementError(
        f"{str(file)!r} holds quantization {held}, and the kernel says "
        f"{kernel.quantization or 'none'}",
        hint=f"{right} for this file, or name another",
    )


def _fingerprint(kernel: Kernel) -> dict[str, str]:
    # which of its kernels ONNX Runtime takes depends on what the processor can do
    seen: Any = np.show_config(mode="dicts")
    return {
        "engine": "onnxruntime",
        "python": platform.python_version(),
        "dtype": kernel.dtype,
        "quantization": kernel.quantization or "none",
        "device": "cpu",
        "provider": _PROVIDER,
        "cpu": " ".join(seen["SIMD Extensions"]["found"]),
        "threads": "1",
        "execution": "sequential",
    }
