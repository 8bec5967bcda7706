# Engine `llamacpp`: a causal language model in llama.cpp, on one thread of the CPU.
#
# It runs a .gguf file as it is, or the one of a folder.  The file holds `quantization`, or else
# `dtype`, and its metadata may name the weights that it was made from (servanda.weights_from), by
# what (servanda.converter), its tokens (servanda.tokens) and those that end a sequence
# (servanda.eos), and that llama.cpp cannot cut its texts (servanda.tokenizes: false), as
# scripts/export_gguf.py writes them.  The cache of keys and values is `kv_cache`, or else
# float32 where dtype is, else float16, which is llama.cpp's own default.  Attention is fused
# (flash attention) where the contract says sdpa.
# How it draws and scores is in local_engine.py.  Sequences of a chunk are decoded together, one
# token of each in every call, and share one cache: no row is padded.  Prompts are fed in pieces
# of at most TOKENS_AT_ONCE tokens, as llama-server does; so is what `prefill` scores.
# Axes: S rows of a chunk, T steps, R rows of logits, V vocabulary.

from __future__ import annotations

import platform
from collections.abc import Generator, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path as FilePath

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel
from servanda.engines import folder
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES
from servanda.engines.llama_model import TOKENS_AT_ONCE, LlamaModel, TokenInput, llama
from servanda.engines.local_engine import LocalEngine
from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints
from servanda.traces.trace import Batch

# what a GGUF file holds, by the names of contracts
KIND_OF = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
QUANTIZED = ("q8_0", "q4_0", "q4_k_m")
KV_QUANTIZED = ("q8_0", "q4_0")  # of the cache
_MADE = (
    "convert the checkpoint with llama.cpp's convert_hf_to_gguf.py, and name the file or its folder"
)


@ENGINES.register("llamacpp")
class LlamaCppEngine(LocalEngine):
    """A .gguf file: up to kernel.batch_size sequences a call."""

    kv_caches = (*KIND_OF, *KV_QUANTIZED)

    def __init__(self, kernel: Kernel) -> None:
        kind = kind_of(kernel)  # before anything is read
        super().__init__(kernel)
        cache = kernel.kv_cache or ("float32" if kernel.dtype == "float32" else "float16")
        cache = KIND_OF.get(cache, cache)
        flash = kernel.attention == "sdpa"
        if cache in QUANTIZED and not flash:
            raise MeasurementError(
                f"llama.cpp has a KV cache of {cache} with fused attention only",
                hint="write attention: sdpa beside it",
            )
        file = folder.model_file(kernel.model, ".gguf", "llama.cpp reads GGUF files", _MADE)
        self.model = LlamaModel(file, cache, flash)
        held = llama().llama_ftype_name(self.model.kind)
        refuse_other_kind(file, name_of_kind(held.decode() if held else ""), kind)
        with folder.reading(file):
            digest = folder.file_digest(file)
        fingerprint = {
            "engine": "llamacpp",
            "python": platform.python_version(),
            "llama_cpp_python": version("llama-cpp-python"),
            "llama_cpp": llama().llama_version().decode(),
            "cpu": llama().llama_print_system_info().decode().strip(),
            "file_type": kind,
            "cache": cache,
            "flash_attention": "on" if flash else "off",
            "threads": "1",
            "tokens_at_once": str(TOKENS_AT_ONCE),
            "architecture": self.model.metadata("general.architecture"),
            "converter": self.model.metadata("servanda.converter") or "unknown",
            "file": digest,
        }
        tokenizes = self.model.metadata("servanda.tokenizes") != "false"
        stated = self.model.metadata("servanda.weights_from")
        self._description = Description(
            fingerprint=fingerprint,
            tensors={},
            tokens=self.model.metadata("servanda.tokens"),
            vocab_size=self.model.vocab_size,
            eos=self.model.ends,
            context=self.model.context,
            timed=True,
            weights_from=folder.converted_from(kernel.model, stated, kernel.weights_from),
            encodes=tokenizes,
            decodes=tokenizes,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self._refuse_no_texts()
        return [self.model.tokenize(text) for text in texts]

    def vocabulary(self) -> list[str]:
        return self.model.vocabulary() if self._description.decodes else []

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        self._refuse_no_texts()
        return [self.model.text(tokens) for tokens in ids]

    def close(self) -> None:
        self.model.close()

    # running

    def _chunks(self, batch: Batch) -> list[Batch]:
        chunks, most = super()._chunks(batch), self.model.most_sequences
        if any(len(chunk) > most for chunk in chunks):
            together = batch.together or self.kernel.batch_size
            raise MeasurementError(
                f"llama.cpp runs {most} sequences at once, not {together}",
                hint=f"lower kernels.*.batch_size to {most} or less",
            )
        return chunks

    def _begin(self, chunk: Batch) -> None:
        """Room for the tokens of a chunk."""
        self.model.begin(len(chunk), sum(map(len, chunk.prompts)) + len(chunk) * chunk.width)

    def _decode(self, chunk: Batch) -> Generator[NDArray[np.float32], Ints | None, None]:
        self._begin(chunk)
        fed = [
            TokenInput(token, at, row, at == len(prompt) - 1)
            for row, prompt in enumerate(chunk.prompts)
            for at, token in enumerate(prompt)
        ]
        at_S = [len(prompt) for prompt in chunk.prompts]
        while True:
            token_S = yield np.concatenate(list(self.model.feed(fed)))
            assert token_S is not None  # anyone who goes on sends what was drawn
            fed = [TokenInput(int(t), at_S[row], row, True) for row, t in enumerate(token_S)]
            at_S = [at + 1 for at in at_S]

    def _prefill(self, chunk: Batch) -> Iterator[NDArray[np.float32]]:
        self._begin(chunk)
        fed = [
            TokenInput(token, at, row, at >= len(prompt) - 1)
            for row, (prompt, given) in enumerate(
                zip(chunk.prompts, chunk.continuations, strict=True)
            )
            if given  # nothing is asked of a sequence that was lost when it was drawn
            for at, token in enumerate((*prompt, *given[:-1]))
        ]
        if not fed:
            yield np.zeros((0, self.model.vocab_size), np.float32)
            return
        rows = max(1, CHUNK_ELEMENTS // self.model.vocab_size)
        for logits_RV in self.model.feed(fed):
            for start in range(0, max(1, len(logits_RV)), rows):  # one piece, be it empty
                yield logits_RV[start : start + rows]

    def _refuse_no_texts(self) -> None:
        if not self._description.encodes:
            raise MeasurementError(
                f"{self.kernel.model!r} holds a tokenizer that llama.cpp does not have",
                hint="let the other side be one that has it",
            )


def kind_of(kernel: Kernel) -> str:
    """The kind of file that a kernel runs: its quantization, or else its dtype.

    Raises:
        MeasurementError: GGUF, or this engine, does not have it.
    """
    if kernel.quantization is not None:
        if kernel.quantization not in QUANTIZED:
            raise MeasurementError(
                f"engine 'llamacpp' has no quantization {kernel.quantization!r}",
                hint=f"it has {', '.join(QUANTIZED)}; leave the key out for none",
            )
        return kernel.quantization
    if kernel.dtype not in KIND_OF:
        raise MeasurementError(
            f"engine 'llamacpp' has no dtype {kernel.dtype!r}", hint=f"it has {', '.join(KIND_OF)}"
        )
    return KIND_OF[kernel.dtype]


def name_of_kind(file_type: str) -> str:
    """`q4_k_m` of what llama.cpp calls 'Q4_K - Medium', `f32` of 'all F32'.

    >>> name_of_kind("Q4_K - Medium"), name_of_kind("all F32"), name_of_kind("Q8_0")
    ('q4_k_m', 'f32', 'q8_0')
    """
    kind, _, size = file_type.removeprefix("all ").partition(" - ")
    return (kind + (f"_{size[0]}" if size else "")).lower()


def refuse_other_kind(file: FilePath, held: str, kind: str) -> None:
    """A file that holds something else than its kernel says.

    Raises:
        MeasurementError: with what to write for this file.
    """
    if held == kind:
        return
    right = {k: f"dtype: {dtype}" for dtype, k in KIND_OF.items()}
    right |= {k: f"quantization: {k}" for k in QUANTIZED}
    key = "quantization" if kind in QUANTIZED else "dtype"
    raise MeasurementError(
        f"{str(file)!r} holds {held or 'an unknown kind'}, and the kernel's {key} says {kind}",
        hint=f"write {right[held]} for this file, or name one that holds {kind}"
        if held in right
        else f"engine 'llamacpp' runs files of {', '.join(right)}",
    )
