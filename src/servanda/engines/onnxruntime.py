# Engine `onnxruntime`: a checkpoint folder, exported to ONNX, run by ONNX Runtime on the CPU.
#
# The folder is the one that engine transformers reads; onnx_export.py makes the graph of it,
# once.  How it pads, draws and scores is in local_engine.py.
# Axes: S rows of a chunk, T columns that are fed, C columns that logits are asked of, V
# vocabulary; keys and values are [S, heads, tokens, width of a head].

from __future__ import annotations

import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel
from servanda.engines import folder
from servanda.engines.base import ENGINES
from servanda.engines.local_engine import LocalEngine
from servanda.engines.onnx_export import QUANTIZED, needing, onnx_file, past_names
from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints
from servanda.traces.trace import Batch

_PROVIDER = "CPUExecutionProvider"


@ENGINES.register("onnxruntime")
class OnnxRuntimeEngine(LocalEngine):
    """One graph for prefill and decode, float32 or with dynamic int8, on one thread."""

    def __init__(self, kernel: Kernel) -> None:
        _refuse(kernel)  # before anything is read
        super().__init__(kernel)
        with needing("engine 'onnxruntime'"):
            import onnxruntime
            from tokenizers import Tokenizer

        place = folder.checkpoint_folder(kernel.model)
        config_json = folder.read_json(place / "config.json")
        tokenizer_json = folder.read_json(place / "tokenizer.json")
        with folder.reading(place / "tokenizer.json"):
            self._tokenizer: Any = Tokenizer.from_file(str(place / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        file = onnx_file(place, config_json, kernel)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3  # errors: they are raised as well
        with folder.reading(file.path, "delete its folder: it is made anew"):
            self._session: Any = onnxruntime.InferenceSession(file.path, options, [_PROVIDER])
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy
        # of each layer's keys and values
        self._heads = [
            (given.shape[1], given.shape[3])
            for given in self._session.get_inputs()
            if given.name.startswith("past.")
        ]
        self._names = past_names(len(self._heads) // 2)
        about = file.about
        self._description = Description(
            fingerprint={
                **_fingerprint(kernel, about),
                "onnxruntime": onnxruntime.__version__,
                "optimizations": options.graph_optimization_level.name,
                "config": digest_of(config_json),
                **folder.facts(place),
            },
            tensors=about["tensors"],
            tokens=folder.token_digest(self._tokenizer.get_vocab(), tokenizer_json),
            vocab_size=about["vocab_size"],
            eos=folder.end_tokens(place, about),
            context=about["context"],
            timed=True,
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

    def _run(
        self, ids_ST: Ints, mask_ST: Ints, columns_C: Ints, past: Sequence[Any], outputs: list[str]
    ) -> list[Any]:
        """The outputs asked for; `mask_ST` also covers what went before."""
        # counted from each row's first real token
        position_ST = np.maximum(mask_ST.cumsum(axis=-1) - 1, 0)[:, -ids_ST.shape[1] :]
        feed = {"input_ids": ids_ST, "attention_mask": mask_ST, "columns": columns_C}
        feed["position_ids"] = position_ST
        values = {name: self._value(np.ascontiguousarray(array)) for name, array in feed.items()}
        cache = {f"past.{name}": value for name, value in zip(self._names, past, strict=True)}
        return self._session.run_with_ort_values(outputs, values | cache)

    def _nothing(self, sequences: int) -> list[Any]:
        """Keys and values of no token."""
        return [
            self._value(np.zeros((sequences, heads, 0, width), dtype=np.float32))
            for heads, width in self._heads
        ]

    def _decode(self, chunk: Batch) -> Generator[Any, Ints | None, None]:
        ids_ST, mask_ST = self._left_padded(chunk.prompts)
        past = self._nothing(len(chunk))
        outputs = ["logits", *(f"present.{name}" for name in self._names)]
        while True:
            last_C = np.array([ids_ST.shape[1] - 1])
            logits_SCV, *past = self._run(ids_ST, mask_ST, last_C, past, outputs)
            token_S = yield logits_SCV.numpy()[:, -1]
            assert token_S is not None  # anyone who goes on sends what was drawn
            ids_ST = token_S[:, None]
            mask_ST = np.pad(mask_ST, ((0, 0), (0, 1)), constant_values=1)

    def _prefill(self, chunk: Batch) -> Iterator[NDArray[np.float32]]:
        ids_ST, mask_ST, keep = self._right_padded(chunk)
        columns_C = np.arange(ids_ST.shape[1])[-keep:]
        (logits_SCV,) = self._run(ids_ST, mask_ST, columns_C, self._nothing(len(chunk)), ["logits"])
        return self._after_prompts(chunk, logits_SCV.numpy())


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


def _fingerprint(kernel: Kernel, about: Mapping[str, Any]) -> dict[str, str]:
    # which of its kernels ONNX Runtime takes depends on what the processor can do
    seen: Any = np.show_config(mode="dicts")
    return {
        "engine": "onnxruntime",
        "python": platform.python_version(),
        "made_by": ", ".join(f"{name} {version}" for name, version in about["made_by"].items()),
        "dtype": kernel.dtype,
        "attention": kernel.attention,
        "quantization": kernel.quantization or "none",
        "device": "cpu",
        "provider": _PROVIDER,
        "cpu": " ".join(seen["SIMD Extensions"]["found"]),
        "threads": "1",
        "execution": "sequential",
        "architecture": about["architecture"],
    }
