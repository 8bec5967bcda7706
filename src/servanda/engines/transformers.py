# Engine `transformers`: a causal language model of Hugging Face Transformers, on the CPU.
#
# The shapes it runs at are fixed by the launch, never by how long sequences turn out to be.
# Decoding pads prompts on the left, and ended rows are stepped on until the last has ended.
# Prefill pads on the right, to the longest prompt plus batch.width; its last column is
# always padding, since nothing follows a sequence's last token, and so the attention
# kernel, which Transformers picks by whether a mask is full, is fixed too.
# Axes: S rows of a chunk, T columns that are fed, W new tokens, N tokens of all sequences
# one after another, R rows of logits, V vocabulary.

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from servanda.contract import Kernel, Path
from servanda.engines import checkpoint
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES
from servanda.engines.decoding import Step, decoded, stacked
from servanda.engines.quantized import check_quantization, quantize_
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
)
from servanda.trace import Array, Batch, Trace


@ENGINES.register("transformers")
class TransformersEngine:
    """Draws by real decoding with a cache; scores by decoding or by prefill.

    The logits of kernel.batch_size scored sequences are in memory at a time.  Who wraps the
    engine may override `_load_state` and `_finish` (the torch module), `_positions`,
    `_attended`, `_cache` and `_forward` (how it runs), and `_draw`.
    """

    def __init__(self, kernel: Kernel) -> None:
        if kernel.quantization is not None:
            check_quantization(kernel.quantization)  # before anything is read
        torch.set_num_threads(1)
        self.kernel = kernel
        self.folder = checkpoint.checkpoint_folder(kernel.model)
        with checkpoint.quiet():
            with checkpoint.reading(self.folder / "config.json"):
                config_json = checkpoint.read_json(self.folder / "config.json")
                self._config: Any = transformers.AutoConfig.from_pretrained(
                    self.folder, local_files_only=True
                )
            with checkpoint.reading(self.folder / "tokenizer.json"):
                tokenizer_json = checkpoint.read_json(self.folder / "tokenizer.json")
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                    self.folder, local_files_only=True
                )
            state = self._load_state()
            self.model: Any = checkpoint.build_model(self.folder, self._config, state, kernel)
        tied = self.model.all_tied_weights_keys
        text_config = self._config.get_text_config()
        self._description = Description(
            fingerprint=self._fingerprint(config_json),
            tensors={
                name: checkpoint.tensor_digest(tensor)
                for name, tensor in state.items()
                if tied.get(name) not in state
            },
            tokens=checkpoint.token_digest(self._tokenizer.get_vocab(), tokenizer_json),
            vocab_size=text_config.vocab_size,
            eos=checkpoint.end_tokens(self.folder, text_config.to_dict()),
            context=getattr(text_config, "max_position_embeddings", None),
            timed=True,
        )
        self.clock: Callable[[], float] = time.perf_counter
        self._pad = self._description.eos[0] if self._description.eos else 0
        self._finish(kernel.quantization)

    def describe(self) -> Description:
        return self._description

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

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
        if not self._tokenizer.chat_template:
            raise MeasurementError(
                f"the tokenizer of {self.folder} has no chat template",
                hint="send /v1/completions, or add chat_template.jinja to the model's folder",
            )
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=True, tokenize=False
        )

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        self._refuse_misfits(batch)
        chunks = batch.chunks(self.kernel.batch_size)
        return Trace.join([self._generate(chunk, sampling, seed) for chunk in chunks])

    def steps(self, batch: Batch, sampling: Sampling, seed: int, best: int = 0) -> Iterator[Trace]:
        self._refuse_misfits(batch)
        for chunk in batch.chunks(self.kernel.batch_size):
            for step in self._steps(chunk, sampling, seed, best=best):
                yield self._trace(chunk, *step.record, "decode", sampling)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        self._refuse_misfits(batch)
        chunks = batch.chunks(self.kernel.batch_size)
        return Trace.join([self._score(chunk, sampling, path) for chunk in chunks])

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        self._refuse_misfits(batch)
        for chunk in batch.chunks(self.kernel.batch_size):
            for logits_RV in self._given_logits(chunk, path):
                if len(logits_RV):
                    yield logits_RV.float().numpy()

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        self._refuse_misfits(batch)
        begun = self.clock()
        chunks = batch.chunks(self.kernel.batch_size)  # requests beyond it wait
        return Timing.join([self._timed(chunk, sampling, seed, record, begun) for chunk in chunks])

    def close(self) -> None:
        self.model = None

    # loading

    def _load_state(self) -> dict[str, Tensor]:
        """The checkpoint's tensors, by name, at the precision they are stored in."""
        return checkpoint.read_weights(self.folder)

    def _finish(self, quantization: str | None) -> None:
        """The last step of loading: `model` is quantised, in place."""
        if quantization is not None:
            quantize_(self.model, quantization)

    def _fingerprint(self, config_json: Mapping[str, Any]) -> dict[str, str]:
        return {
            "engine": "transformers",
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "dtype": self.kernel.dtype,
            "attention": self.kernel.attention,
            "quantization": self.kernel.quantization or "none",
            "device": "cpu",
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "architecture": self._config.model_type,
            "config": digest_of(dict(config_json)),
        }

    # running

    def _positions(self, mask: Tensor) -> Tensor:
        """Position ids, [S, T], of a mask [S, T]: counted from each row's first real token."""
        return (mask.cumsum(dim=-1) - 1).clamp_min(0)

    def _attended(self, mask_ST: Tensor, columns: int) -> Tensor:
        """The keys that attention sees: a mask [S, T], or one [S, 1, columns, T] a query."""
        return mask_ST

    def _cache(self) -> Any:
        """An empty cache of keys and values, for one chunk of sequences."""
        return transformers.DynamicCache(config=self._config)

    def _draw(self, logp_SV: Floats, uniform_S: Floats) -> Ints:
        """The next token of each row, [S], from its processed logprobs."""
        return draw(logp_SV, uniform_S)

    def _forward(self, ids_ST: Tensor, mask_ST: Tensor, **options: Any) -> Tensor:
        """Logits of the columns asked for; `mask_ST` also covers what the cache holds."""
        with torch.inference_mode():
            position_ST = self._positions(mask_ST)[:, -ids_ST.shape[1] :]
            return self.model(
                input_ids=ids_ST,
                attention_mask=self._attended(mask_ST, ids_ST.shape[1]),
                position_ids=position_ST,
                **options,
            ).logits

    def _decode(self, prompts: Sequence[Sequence[int]]) -> Generator[Tensor, Ints | None, None]:
        """Yields logits of the next token, [S, V], and is sent the tokens to go on with."""
        width = max(map(len, prompts))
        ids_ST = torch.tensor([[self._pad] * (width - len(p)) + [*p] for p in prompts])
        mask_ST = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        cache = self._cache()
        while True:
            logits_S1V = self._forward(
                ids_ST, mask_ST, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            token_S = yield logits_S1V[:, -1]
            ids_ST = torch.from_numpy(token_S)[:, None]
            mask_ST = torch.nn.functional.pad(mask_ST, (0, 1), value=1)

    def _steps(self, chunk: Batch, sampling: Sampling, seed: int, **kept: Any) -> Iterator[Step]:
        """Draws a chunk, step by step; `kept` says what is recorded, see `decoded`."""
        decode, ends = self._decode(chunk.prompts), self._description.eos
        return decoded(
            lambda fed_S: logprobs(decode.send(fed_S), sampling),
            *(self._draw, chunk, seed, ends, self._pad),
            **kept,
        )

    def _generate(self, chunk: Batch, sampling: Sampling, seed: int) -> Trace:
        record = stacked(self._steps(chunk, sampling, seed))
        return self._trace(chunk, *record, "decode", sampling)

    def _timed(
        self, chunk: Batch, sampling: Sampling, seed: int, record: bool, begun: float
    ) -> Timing:
        steps, step_T = [], []
        for step in self._steps(chunk, sampling, seed, record=record):
            steps.append(step)
            step_T.append(self.clock())
        length_S, _, _ = stacked(steps)
        return Timing.of(begun, step_T, length_S.tolist())

    def _score(self, chunk: Batch, sampling: Sampling, path: Path) -> Trace:
        token_N = np.array([t for given in chunk.continuations for t in given], dtype=np.int64)
        parts, start = [], 0
        for logits_RV in self._given_logits(chunk, path):
            token_R = token_N[start : start + len(logits_RV)]
            parts.append(columns_of(logprobs(logits_RV, sampling), token_R))
            start += len(logits_RV)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        length_S = np.array([len(given) for given in chunk.continuations])
        return self._trace(chunk, length_S, token_N, columns, path, sampling)

    def _given_logits(self, chunk: Batch, path: Path) -> Iterator[Tensor]:
        """Logits before each given token, sequence by sequence, in one piece [R, V] or more."""
        length_S = np.array([len(given) for given in chunk.continuations])
        prompt_S = np.array([len(prompt) for prompt in chunk.prompts])
        if path == "decode":
            logits_STV, first_S = self._forced(chunk, int(length_S.max())), np.zeros_like(prompt_S)
        else:
            logits_STV, first_S = self._prefill(chunk), prompt_S - prompt_S.min()
        row_N = np.repeat(np.arange(len(chunk)), length_S)
        position_N = np.arange(len(row_N)) - np.repeat(length_S.cumsum() - length_S, length_S)
        row_N, column_N = torch.from_numpy(row_N), torch.from_numpy(first_S[row_N] + position_N)
        rows = max(1, CHUNK_ELEMENTS // logits_STV.shape[-1])
        for row_R, column_R in zip(row_N.split(rows), column_N.split(rows), strict=True):
            yield logits_STV[row_R, column_R]

    def _forced(self, chunk: Batch, steps: int) -> Tensor:
        """Logits [S, T, V] of decoding the given tokens, just as `generate` ran."""
        given_SW = np.full((len(chunk), chunk.width), self._pad)
        for row, given in enumerate(chunk.continuations):
            given_SW[row, : len(given)] = given
        decode = self._decode(chunk.prompts)
        logits_TSV = [next(decode)]
        logits_TSV += [decode.send(given_SW[:, t]) for t in range(steps - 1)]
        return torch.stack(logits_TSV, dim=1)

    def _prefill(self, chunk: Batch) -> Tensor:
        """Logits [S, T, V] of one forward; column 0 follows the shortest prompt."""
        texts = [
            [*prompt, *given[:-1]]
            for prompt, given in zip(chunk.prompts, chunk.continuations, strict=True)
        ]
        shortest, longest = min(map(len, chunk.prompts)), max(map(len, chunk.prompts))
        width = longest + chunk.width
        ids_ST = torch.tensor([text + [self._pad] * (width - len(text)) for text in texts])
        mask_ST = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts])
        keep = width - shortest + 1
        return self._forward(ids_ST, mask_ST, use_cache=False, logits_to_keep=keep)

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

    def _refuse_misfits(self, batch: Batch) -> None:
        """A sequence that the model cannot run, by its name and size."""
        context, ids = self._description.context, range(self._description.vocab_size)
        continuations = batch.continuations or ((),) * len(batch)
        for sequence, prompt, given in zip(
            batch.sequence_S, batch.prompts, continuations, strict=True
        ):
            odd = [token for token in (*prompt, *given) if token not in ids]
            if not prompt:
                found = "has an empty prompt"
                hint = "give its first token as the prompt"
            elif odd:
                found = f"has the token id {odd[0]}, and the model's ids end at {len(ids) - 1}"
                hint = "encode prompts with the tokenizer of this model"
            elif len(given) > batch.width:
                found = f"has {len(given)} tokens to score in a batch of width {batch.width}"
                hint = "the width of a batch is its longest continuation, or more"
            elif context is not None and len(prompt) + batch.width > context:
                found = (
                    f"needs {len(prompt) + batch.width} tokens ({len(prompt)} of prompt and "
                    f"{batch.width} new), and the model's context is {context}"
                )
                hint = "shorten the prompt, or lower max_new_tokens"
            else:
                continue
            raise MeasurementError(f"sequence {sequence} {found}", hint=hint)


def logprobs(logits_RV: Tensor, sampling: Sampling) -> Floats:
    """Processed logprobs in float64; a logit that is no number makes NaN, quietly."""
    with np.errstate(invalid="ignore"):
        return processed_logprobs(logits_RV.double().numpy(), sampling)
