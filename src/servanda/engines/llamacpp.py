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

import ctypes
import importlib
import json
import os
import platform
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel
from servanda.engines import folder
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES
from servanda.engines.local_engine import LocalEngine
from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints
from servanda.traces.trace import Batch

# llama.cpp by the low-level bindings of llama-cpp-python: the library, and one model in memory
# with its metadata, its tokens, and the logits of what is fed to it.
#
# Axes: R rows of logits, S sequences, V vocabulary.


_PLACE = "LLAMA_CPP_LIB_PATH"  # read by llama-cpp-python when it is imported
_ERROR, _CONTINUED = 4, 5  # levels of ggml's log

_errors: deque[str] = deque(maxlen=20)
_log = SimpleNamespace(callback=None, level=0)
# tokens that one call and one graph take: what llama-server cuts a prompt into by default
TOKENS_AT_ONCE = 512
_MAGIC = b"GGUF"


@cache
def llama() -> Any:
    """The bindings, `llama_cpp.llama_cpp`, with the library loaded and its chatter off.

    The library is looked for where LLAMA_CPP_LIB_PATH says, or else in `llama.cpp/bin` of the
    virtual environment, or else in llama-cpp-python itself.

    Raises:
        MeasurementError: it is not installed, or its library cannot be loaded.
    """
    own = Path(sys.prefix) / "llama.cpp" / "bin"
    if _PLACE not in os.environ and any(own.glob("libllama.*")):
        os.environ[_PLACE] = str(own)
    try:
        bindings = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise MeasurementError(
            f"engine 'llamacpp' cannot import llama-cpp-python: {error}",
            hint="pip install 'servanda[llamacpp]' into the environment that runs it, and name "
            "it as kernels.*.python",
        ) from error
    except (OSError, RuntimeError) as error:
        place = os.environ.get(_PLACE)
        raise MeasurementError(
            f"the library of llama.cpp cannot be loaded: {error}"
            + (f" ({_PLACE} is {place!r})" if place else ""),
            hint=f"let {_PLACE} name the folder of libllama, or install llama-cpp-python with its "
            "library: pip install --no-binary llama-cpp-python llama-cpp-python",
        ) from error
    _log.callback = bindings.llama_log_callback(_on_log)
    bindings.llama_log_set(_log.callback, None)
    bindings.llama_backend_init()
    return bindings


def _on_log(level: int, text: bytes, _data: Any) -> None:
    """Errors are kept for messages and printed; the rest is how llama.cpp thinks aloud."""
    _log.level = _log.level if level == _CONTINUED else level
    if _log.level == _ERROR:
        words = text.decode(errors="replace")
        _errors.append(words.strip())
        print(words, end="", file=sys.stderr, flush=True)


def last_error() -> str:
    """The first line of llama.cpp's last error; cleared by reading."""
    metadata = next((line for line in _errors if line), "it does not say why")
    _errors.clear()
    return metadata


class TokenInput(NamedTuple):
    """A token for the model: its id, place and sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence: int
    wanted: bool


class LlamaModel:
    """Weights, a cache of keys and values that all sequences share, and one thread.

    Args:
        file: of GGUF.
        cache: the type of keys and values, such as "f32" or "q8_0".
        flash: whether attention is fused.

    Raises:
        MeasurementError: llama.cpp is missing, or cannot load the file.
    """

    def __init__(self, file: Path, cache: str, flash: bool) -> None:
        self.lib, self.file = llama(), file
        _refuse_no_gguf(file)
        options = self.lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = self.lib.llama_model_load_from_file(os.fsencode(file), options)
        if not self._model:
            raise MeasurementError(
                f"llama.cpp cannot load {str(file)!r}: {last_error()}",
                hint="copy or convert the file again, or build a llama.cpp that has this "
                "architecture",
            )
        if self.lib.llama_model_has_encoder(self._model):
            raise MeasurementError(
                f"{str(file)!r} is no causal language model: it has an encoder",
                hint="kernels.*.model names a model that continues texts",
            )
        self._cache = getattr(self.lib, f"GGML_TYPE_{cache.upper()}")
        self._flash = int(flash)
        self._vocab = self.lib.llama_model_get_vocab(self._model)
        self._batch = self.lib.llama_batch_init(TOKENS_AT_ONCE, 0, 1)
        self._context: Any = None
        self._room = (0, 0)
        self.vocab_size: int = self.lib.llama_vocab_n_tokens(self._vocab)
        self.context: int = self.lib.llama_model_n_ctx_train(self._model)
        self.kind: int = self.lib.llama_model_ftype(self._model)
        self.most_sequences: int = self.lib.llama_max_parallel_sequences()

    def metadata(self, key: str) -> str:
        """A value of the file's metadata as text; "" where it has none."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.lib.llama_model_meta_val_str(self._model, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode(errors="replace") if length > 0 else ""
            size = length + 1

    # tokens

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a sequence: as the converter said, or else as llama.cpp has it."""
        metadata = self.metadata("servanda.eos")
        if metadata:
            return tuple(json.loads(metadata))
        ids = range(self.vocab_size)
        return tuple(i for i in ids if self.lib.llama_vocab_is_eog(self._vocab, i))

    def vocabulary(self) -> list[str]:
        texts = [self.lib.llama_vocab_get_text(self._vocab, i) for i in range(self.vocab_size)]
        return [text.decode(errors="replace") for text in texts]

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        size = len(data) + 1
        ids = (self.lib.llama_token * size)()
        n = self.lib.llama_tokenize(self._vocab, data, len(data), ids, size, False, True)
        if n < 0:
            raise MeasurementError(
                f"llama.cpp cannot cut the text {text[:40]!r} into tokens",
                hint="let the other side be an engine that has this tokenizer",
            )
        return list(ids[:n])

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, ids)).decode(errors="replace")

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self.lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    # running

    def begin(self, sequences: int, cells: int) -> None:
        """Forget what was fed, and make room for so many sequences and tokens of all of them."""
        if self._context and sequences <= self._room[0] and cells <= self._room[1]:
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self._context), True)
            return
        self._free_context()
        options = self.lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = cells, sequences
        options.n_batch = options.n_ubatch = TOKENS_AT_ONCE
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = self._cache
        options.flash_attn_type = self._flash
        options.kv_unified = options.no_perf = True
        self._context = self.lib.llama_init_from_model(self._model, options)
        if not self._context:
            raise MeasurementError(
                f"llama.cpp cannot make room for {sequences} sequences of {cells} tokens in all: "
                f"{last_error()}",
                hint="lower kernels.*.batch_size or max_new_tokens",
            )
        self._room = (sequences, cells)

    def feed(self, tokens: Sequence[TokenInput]) -> Iterator[NDArray[np.float32]]:
        """Logits [R, V] of the tokens that want them, in the order fed, a piece for each call."""
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            piece = tokens[start : start + TOKENS_AT_ONCE]
            batch = self._batch
            batch.n_tokens = len(piece)
            for i, fed in enumerate(piece):
                batch.token[i], batch.pos[i] = fed.token, fed.position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, fed.sequence
                batch.logits[i] = fed.wanted
            code = self.lib.llama_decode(self._context, batch)
            if code:
                raise MeasurementError(
                    f"llama.cpp cannot run {len(piece)} tokens (code {code}): {last_error()}",
                    hint="lower kernels.*.batch_size",
                )
            wanted = [i for i, fed in enumerate(piece) if fed.wanted]
            pointers = [self.lib.llama_get_logits_ith(self._context, i) for i in wanted]
            rows = [np.ctypeslib.as_array(p, shape=(self.vocab_size,)) for p in pointers]
            yield np.stack(rows) if rows else np.zeros((0, self.vocab_size), np.float32)

    def close(self) -> None:
        if self._model:
            self._free_context()
            self.lib.llama_batch_free(self._batch)
            self.lib.llama_model_free(self._model)
            self._model = None

    def _free_context(self) -> None:
        if self._context:
            self.lib.llama_free(self._context)
            self._context = None


def _refuse_no_gguf(file: Path) -> None:
    """A file that does not begin as GGUF does: llama.cpp would say less."""
    hint = "kernels.*.model of engine 'llamacpp' is a .gguf file or a folder that holds one"
    with MeasurementError.of_system(f"{str(file)!r} cannot be read", hint), file.open("rb") as held:
        magic = held.read(len(_MAGIC))
    if magic != _MAGIC:
        raise MeasurementError(
            f"{str(file)!r} is no GGUF file: it begins with {magic!r}",
            hint="copy the file again, or convert the checkpoint with llama.cpp's "
            "convert_hf_to_gguf.py",
        )


# what a GGUF file holds, by the names of contracts
KIND_OF = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
QUANTIZED = ("q8_0", "q4_0", "q4_1", "q4_k_m")
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


def refuse_other_kind(file: Path, held: str, kind: str) -> None:
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
