# Engine `llamacpp`: a causal language model in llama.cpp, on one thread of the CPU.
#
# A folder is converted to GGUF and kept in a cache; a .gguf file is run as it is.  The file
# holds `quantization`, or else `dtype`.  The cache of keys and values is float32 where dtype
# is, else float16, which is llama.cpp's own default.  Attention is fused (flash attention)
# where the contract says sdpa.
# Sequences of a chunk are decoded together, one token of each in every call, and share one
# cache; ended rows are stepped on until the last has ended, so that the shapes are fixed by
# the launch.  Prompts are fed in pieces of at most TOKENS_AT_ONCE tokens, as llama-server
# does; so is what `prefill` scores.
# Axes: S rows of a chunk, T steps, W new tokens, N tokens of all sequences one after another,
# R rows of logits, V vocabulary.

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract import Kernel, Path
from servanda.engines import folder
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES
from servanda.engines.gguf_kinds import kind_of, name_of_kind, refuse_other_kind
from servanda.engines.llama_library import llama
from servanda.engines.llama_model import TOKENS_AT_ONCE, Fed, LlamaModel
from servanda.engines.misfits import refuse_misfits
from servanda.engines.stored import read_stored, weights_digest
from servanda.errors import MeasurementError
from servanda.identity import Description, digest_of
from servanda.latency import Timing
from servanda.sampling import (
    Floats,
    Ints,
    Sampling,
    columns_of,
    draw,
    processed_logprobs,
    uniforms,
)
from servanda.trace import Array, Batch, Trace

_INSTALL = "pip install 'servanda[llamacpp]' into the environment that runs it"


@ENGINES.register("llamacpp")
class LlamaCppEngine:
    """Draws by decoding up to kernel.batch_size sequences in one call; scores by either path."""

    def __init__(self, kernel: Kernel) -> None:
        kind = kind_of(kernel)  # before anything is read
        self.kernel = kernel
        self._tokenizer: Any = None
        cache = "f32" if kernel.dtype == "float32" else "f16"
        flash = kernel.attention == "sdpa"
        file = FilePath(kernel.model or "")
        bare = file.is_file()
        if not bare:
            converted, config, identity = self._converted(kind)
            self.model = LlamaModel(converted, cache, flash)
        else:
            self.model = LlamaModel(file, cache, flash)
            config, identity = {}, self._of_file(file, kind)
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
            "architecture": self.model.said("general.architecture"),
            "converter": self.model.said("servanda.converter") or "unknown",
        }
        own = self.model.said("servanda.tokenizes") != "false"
        tokenizes = self._tokenizer is not None or own
        self._description = Description(
            fingerprint={**fingerprint, **identity},
            tensors={},
            tokens=self.model.said("servanda.tokens"),
            vocab_size=self.model.vocab_size,
            eos=self.model.ends,
            context=config.get("max_position_embeddings", self.model.context),
            timed=True,
            weights_from=self._weights_from(bare),
            encodes=tokenizes,
            decodes=tokenizes,
        )
        self.clock: Callable[[], float] = time.perf_counter
        self._pad = self._description.eos[0] if self._description.eos else 0

    def describe(self) -> Description:
        return self._description

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._tokenizer is None:
            self._refuse_no_texts()
            return [self.model.tokenize(text) for text in texts]
        encode = self._tokenizer.encode
        return [encode(text, add_special_tokens=False).ids for text in texts]

    def vocabulary(self) -> list[str]:
        if self._tokenizer is None:
            return self.model.vocabulary() if self._description.decodes else []
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        token = {i: token for token, i in ids.items()}
        return [token.get(i, f"<{i}>") for i in range(self._description.vocab_size)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        if self._tokenizer is None:
            self._refuse_no_texts()
            return [self.model.text(tokens) for tokens in ids]
        decode = self._tokenizer.decode
        return [decode(list(tokens), skip_special_tokens=False) for tokens in ids]

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        self._refuse(batch)
        chunks = batch.chunks(self.kernel.batch_size)
        return Trace.join([self._generate(chunk, sampling, seed) for chunk in chunks])

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        self._refuse(batch)
        chunks = batch.chunks(self.kernel.batch_size)
        return Trace.join([self._score(chunk, sampling, path) for chunk in chunks])

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        self._refuse(batch)
        for chunk in batch.chunks(self.kernel.batch_size):
            yield from (piece for piece in self._given_logits(chunk, path) if len(piece))

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        self._refuse(batch)
        begun = self.clock()
        chunks = batch.chunks(self.kernel.batch_size)  # requests beyond it wait
        return Timing.join([self._timed(chunk, sampling, seed, record, begun) for chunk in chunks])

    def close(self) -> None:
        self.model.close()

    # loading

    def _converted(self, kind: str) -> tuple[FilePath, Mapping[str, Any], dict[str, str]]:
        """The GGUF file of the kernel's folder, its config, and what may change a number."""
        place = folder.checkpoint_folder(self.kernel.model)
        config = folder.read_json(place / "config.json")
        try:
            from tokenizers import Tokenizer

            from servanda.engines.gguf_file import cached_gguf
        except ImportError as error:
            raise MeasurementError(
                f"engine 'llamacpp' cannot convert a folder: {error}", hint=_INSTALL
            ) from error
        with folder.reading(place / "tokenizer.json"):
            self._tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
        self._weights = weights_digest(read_stored(place), config)
        file = cached_gguf(place, self._weights, kind)
        return file, config, {"config": digest_of(dict(config))}

    def _of_file(self, file: FilePath, kind: str) -> dict[str, str]:
        """Refuse a file that holds another kind than the contract says; digest its bytes."""
        name = llama().llama_ftype_name(self.model.kind)
        refuse_other_kind(file, name_of_kind(name.decode() if name else ""), kind)
        digest = hashlib.blake2b(digest_size=16)
        with folder.reading(file), file.open("rb") as opened:
            while piece := opened.read(1 << 24):
                digest.update(piece)
        return {"file": digest.hexdigest()}

    def _weights_from(self, bare: bool) -> str:
        said = self.model.said("servanda.weights_from") if bare else self._weights
        declared = self.kernel.weights_from or ""
        if said and declared and said != declared:
            raise MeasurementError(
                f"{self.kernel.model!r} was made from weights {said[:8]}, and weights_from says "
                f"{declared[:8]}",
                hint="leave weights_from out, or name the file of those weights",
            )
        return said or declared

    # running

    def _draw(self, logp_SV: Floats, uniform_S: Floats) -> Ints:
        """The next token of each row, [S], from its processed logprobs; a fault overrides it."""
        return draw(logp_SV, uniform_S)

    def _begin(self, chunk: Batch) -> None:
        self.model.begin(len(chunk), sum(map(len, chunk.prompts)) + len(chunk) * chunk.width)

    def _decode(
        self, chunk: Batch
    ) -> Generator[NDArray[np.float32], Ints | NDArray[Any] | None, None]:
        """Yields logits of the next token, [S, V], and is sent the tokens to go on with."""
        self._begin(chunk)
        fed = [
            Fed(token, at, row, at == len(prompt) - 1)
            for row, prompt in enumerate(chunk.prompts)
            for at, token in enumerate(prompt)
        ]
        at_S = [len(prompt) for prompt in chunk.prompts]
        while True:
            token_S = yield np.concatenate(list(self.model.feed(fed)))
            assert token_S is not None
            fed = [Fed(int(t), at_S[row], row, True) for row, t in enumerate(token_S)]
            at_S = [at + 1 for at in at_S]

    def _generate(
        self,
        chunk: Batch,
        sampling: Sampling,
        seed: int,
        record: bool = True,
        stepped: Callable[[], None] = lambda: None,
    ) -> Trace:
        """Draws a chunk; `stepped` is called once all of a step is known, and recorded."""
        uniform_SW = np.stack([uniforms(seed, "draw", s, chunk.width) for s in chunk.sequence_S])
        steps, fed_S = self._decode(chunk), None
        open_S = np.ones(len(chunk), dtype=bool)
        record_T: list[dict[str, Array]] = []
        for t in range(chunk.width):
            logp_SV = _logprobs(steps.send(fed_S), sampling)
            token_S = self._draw(logp_SV, uniform_SW[:, t])
            columns = columns_of(logp_SV, token_S) if record else {}
            record_T.append(columns | {"token": token_S, "open": open_S})
            stepped()
            fed_S = np.where(open_S, token_S, self._pad)
            open_S = open_S & ~np.isin(token_S, self._description.eos)
            if not open_S.any():
                break
        record_ST = {c: np.stack([r[c] for r in record_T], axis=1) for c in record_T[0]}
        open_ST = record_ST.pop("open")
        columns = {name: values_ST[open_ST] for name, values_ST in record_ST.items()}
        length_S = open_ST.sum(axis=1)
        return self._trace(chunk, length_S, columns.pop("token"), columns, "decode", sampling)

    def _timed(
        self, chunk: Batch, sampling: Sampling, seed: int, record: bool, begun: float
    ) -> Timing:
        step_T: list[float] = []
        drawn = self._generate(chunk, sampling, seed, record, lambda: step_T.append(self.clock()))
        return Timing.of(begun, step_T, drawn.length_S.tolist())

    def _score(self, chunk: Batch, sampling: Sampling, path: Path) -> Trace:
        token_N = np.array([t for given in chunk.continuations for t in given], dtype=np.int64)
        parts, start = [], 0
        for logits_RV in self._given_logits(chunk, path):
            token_R = token_N[start : start + len(logits_RV)]
            parts.append(columns_of(_logprobs(logits_RV, sampling), token_R))
            start += len(logits_RV)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        length_S = np.array([len(given) for given in chunk.continuations], dtype=np.int64)
        return self._trace(chunk, length_S, token_N, columns, path, sampling)

    def _given_logits(self, chunk: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        """Logits before each given token, sequence by sequence, in one piece [R, V] or more."""
        pieces = self._forced(chunk) if path == "decode" else self._prefill(chunk)
        rows = max(1, CHUNK_ELEMENTS // self._description.vocab_size)
        for logits_RV in pieces:
            for start in range(0, max(1, len(logits_RV)), rows):
                yield logits_RV[start : start + rows]

    def _forced(self, chunk: Batch) -> Iterator[NDArray[np.float32]]:
        """By decoding the given tokens, just as `generate` ran: one piece for each sequence."""
        given_SW = np.full((len(chunk), chunk.width), self._pad)
        for row, given in enumerate(chunk.continuations):
            given_SW[row, : len(given)] = given
        decode = self._decode(chunk)
        logits_TSV = [next(decode)]
        steps = max(map(len, chunk.continuations))
        logits_TSV += [decode.send(given_SW[:, t]) for t in range(steps - 1)]
        for row, given in enumerate(chunk.continuations):
            logits_TV = [logits_SV[row] for logits_SV in logits_TSV[: len(given)]]
            yield np.array(logits_TV, np.float32).reshape(len(given), self.model.vocab_size)

    def _prefill(self, chunk: Batch) -> Iterator[NDArray[np.float32]]:
        """By feeding prompts and given tokens at once."""
        self._begin(chunk)
        fed = [
            Fed(token, at, row, at >= len(prompt) - 1)
            for row, (prompt, given) in enumerate(
                zip(chunk.prompts, chunk.continuations, strict=True)
            )
            if given  # nothing is asked of a sequence that was lost when it was drawn
            for at, token in enumerate((*prompt, *given[:-1]))
        ]
        if not fed:
            yield np.zeros((0, self.model.vocab_size), np.float32)
        yield from self.model.feed(fed)

    def _trace(
        self,
        chunk: Batch,
        length_S: Array,
        token_N: Array,
        columns: Mapping[str, Floats],
        path: Path,
        sampling: Sampling,
    ) -> Trace:
        return Trace(
            sequence_S=np.array(chunk.sequence_S, dtype=np.int64),
            length_S=length_S.astype(np.int64),
            lost_S=np.zeros(len(chunk), dtype=bool),
            prompt_tokens_S=np.array([len(p) for p in chunk.prompts], dtype=np.int64),
            token_N=token_N,
            columns=columns,
            about={
                "path": path,
                "batch_size": str(chunk.together or self.kernel.batch_size),
                "sampling": sampling.model_dump_json(),
            },
        )

    def _refuse(self, batch: Batch) -> None:
        refuse_misfits(batch, self._description)
        together = batch.together or self.kernel.batch_size
        if min(together, len(batch)) > self.model.most_sequences:
            raise MeasurementError(
                f"llama.cpp runs {self.model.most_sequences} sequences at once, not {together}",
                hint=f"lower kernels.*.batch_size to {self.model.most_sequences} or less",
            )

    def _refuse_no_texts(self) -> None:
        if not self._description.encodes:
            raise MeasurementError(
                f"{self.kernel.model!r} holds a tokenizer that llama.cpp does not have",
                hint="name the checkpoint's folder, or let the other side be one that has it",
            )


def _logprobs(logits_RV: NDArray[np.float32], sampling: Sampling) -> Floats:
    """Processed logprobs in float64; a logit that is no number makes NaN, quietly."""
    with np.errstate(invalid="ignore"):
        return processed_logprobs(logits_RV, sampling)
