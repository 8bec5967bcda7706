# Engine `transformers`: a causal language model of Hugging Face Transformers, on the CPU or a GPU.
#
# How it pads, draws and scores is in local_engine.py.  The last column of a prefill is always
# padding, and so the attention kernel, which Transformers picks by whether a mask is full,
# is fixed by the launch too.
# Axes: S rows of a chunk, T columns that are fed, V vocabulary.

from __future__ import annotations

import platform
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.engines import checkpoint, folder
from servanda.engines.base import ENGINES
from servanda.engines.devices import device_facts, sdpa_backend, usable_device
from servanda.engines.local_engine import LocalEngine, Step
from servanda.engines.low_precision.head import set_head_dtype_
from servanda.engines.low_precision.kv_cache import ROUNDED, RoundedCache
from servanda.engines.low_precision.model import check_quantization, quantize_, take_over
from servanda.engines.transformers_adapter import add_adapter_
from servanda.engines.transformers_prefixes import Block, PrefixCache, refuse_windows
from servanda.engines.transformers_routes import RouteRecorder, given_routes, route_columns
from servanda.engines.transformers_steps import (
    NOTHING,
    logits_in_steps,
    refuse_cacheless,
    steps_of,
)
from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints, Sampling
from servanda.traces.trace import Batch, Trace

# keys of a kernel that change its numbers
_FACTS = ("dtype", "attention", "head_dtype", "prefill_chunk", "prefix_cache", "kv_cache")


@ENGINES.register("transformers")
class TransformersEngine(checkpoint.Tokenized, LocalEngine):
    """A model as `from_pretrained` builds it, in the kernel's dtype, attention and quantization.

    Who wraps the engine may override `_load_state` and `_finish` (the torch module), `_positions`,
    `_attended`, `_cache` and `_forward` (how it runs), `_prefix_key` and `_prefix` (what of a
    prompt is cached), and `_draw`.
    """

    keys = ("adapter", "attention", "device", "routes", *_FACTS[2:5])
    kv_caches = (*ROUNDED,)
    options = ("ranks", "offload")
    _without_gradients: Any = torch.inference_mode

    @classmethod
    def opened(cls, kernel: Kernel) -> Any:
        from servanda.engines.transformers_parts import class_of

        return class_of(kernel, cls)(kernel)

    def __init__(self, kernel: Kernel) -> None:
        if kernel.quantization is not None:
            check_quantization(kernel.quantization)  # before anything is read
        torch.set_num_threads(1)
        super().__init__(kernel)
        self._device = usable_device(kernel.device)
        self.folder = folder.checkpoint_folder(kernel.model)
        config_json = folder.read_json(self.folder / "config.json")
        self._config = checkpoint.read_config(self.folder)
        tokenizer_json = folder.read_json(self.folder / "tokenizer.json")
        self._tokenizer = checkpoint.read_tokenizer(self.folder)
        with checkpoint.quiet():
            tensors = self._load_model()
        text_config = self._config.get_text_config()
        self._description = Description(
            fingerprint=self._fingerprint(config_json),
            tensors=tensors,
            tokens=folder.token_digest(self._tokenizer.get_vocab(), tokenizer_json),
            vocab_size=text_config.vocab_size,
            eos=folder.end_tokens(self.folder, text_config.to_dict()),
            context=getattr(text_config, "max_position_embeddings", None),
            timed=True,
            config=folder.config_values(config_json),
        )
        self._place()
        self._recorder = RouteRecorder(self.model)
        self._routes: list[NDArray[np.float32] | None] | None = None  # of forwards, if recorded
        self._replay: Iterator[NDArray[np.int16]] = iter(())  # the routes of the next forwards
        self._prefixes = None
        if kernel.prefix_cache is not None:
            self._prefixes = PrefixCache(kernel.prefix_cache)
            refuse_windows(self._cache(), self.folder)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
        if not self._tokenizer.chat_template:
            raise MeasurementError(
                f"the tokenizer of {self.folder} has no chat template",
                hint="send /v1/completions, or add chat_template.jinja to the model's folder",
            )
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=True, tokenize=False
        )

    def close(self) -> None:
        self.model = None

    def load(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take over a trainer's weights, tensors by the names of the checkpoint; returns the names.

        Each is rounded, and quantised, as it was at the start; what is not named stays.  From then
        on the engine reports no digests of its weights.

        Raises:
            MeasurementError: a tensor that the model does not have, or of another shape; those
                before it have been taken over.
        """
        self._description = replace(self._description, tensors={})  # also if it is cut short
        if self._prefixes is not None:
            self._prefixes.clear()  # keys and values of other weights
        return take_over(self.model, named, getattr(torch, self.kernel.dtype))

    # loading

    def _load_model(self) -> dict[str, str]:
        """The digests of the checkpoint's tensors, once `model` has them."""
        state = self._load_state()
        self.model: Any = checkpoint.build_model(self.folder, self._config, state, self.kernel)
        digests = checkpoint.tensor_digests(state, self.model.all_tied_weights_keys)
        return digests | add_adapter_(self.model, self.kernel.adapter)

    def _load_state(self) -> dict[str, Tensor]:
        """The checkpoint's tensors, by name, at the precision they are stored in."""
        return checkpoint.read_weights(self.folder)

    def _finish(self, quantization: str | None) -> None:
        """The last step of loading: `model` is quantised, in place."""
        if quantization is not None:
            quantize_(self.model, quantization)

    def _place(self) -> None:
        self._finish(self.kernel.quantization)
        if self.kernel.head_dtype is not None:
            set_head_dtype_(self.model, self.kernel.head_dtype)
        self.model.to(self._device)  # what was made on the CPU has the same bits on each device

    def _fingerprint(self, config_json: Mapping[str, Any]) -> dict[str, str]:
        return {
            "engine": "transformers",
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "quantization": self.kernel.quantization or "none",
            **device_facts(self._device),
            "threads": str(torch.get_num_threads()),
            **{k: str(v) for k in _FACTS if (v := getattr(self.kernel, k)) is not None},
            "architecture": self._config.model_type,
            "config": digest_of(dict(config_json)),
            **folder.facts(self.folder),
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
        if self.kernel.kv_cache is not None:
            return RoundedCache(self._config, self.kernel.kv_cache)
        return transformers.DynamicCache(config=self._config)

    def _forward(self, ids_ST: Tensor, mask_ST: Tensor, **options: Any) -> Tensor:
        """Logits of the columns asked for; `mask_ST` also covers what the cache holds.

        Columns are asked for by `logits_to_keep`, or by their indexes `kept` among those fed.
        """
        kept_C = options.pop("kept", None)
        if kept_C is not None:  # a model keeps one column or more
            kept = torch.from_numpy(kept_C).to(self._device) if len(kept_C) else 1
            options["logits_to_keep"] = kept
        ids_ST, mask_ST = ids_ST.to(self._device), mask_ST.to(self._device)
        replay = self._recorder.replaying(next(self._replay, None), self._device)
        with self._without_gradients(), sdpa_backend(self.kernel.attention), replay:
            position_ST = self._positions(mask_ST)[:, -ids_ST.shape[1] :]
            logits_SCV = self.model(
                input_ids=ids_ST,
                attention_mask=self._attended(mask_ST, ids_ST.shape[1]),
                position_ids=position_ST,
                **options,
            ).logits
            if kept_C is None:
                kept_C = np.arange(ids_ST.shape[1])[-logits_SCV.shape[1] :]
            route_SCLK2 = self._recorder.taken(len(ids_ST), kept_C)
            if self._routes is not None:
                self._routes.append(route_SCLK2)
            return logits_SCV

    def _prefix_key(self, salt: str, text: Sequence[int]) -> Hashable:
        """What the last block of a text is cached under."""
        return salt, tuple(text)

    def _prefix(self, salt: str, prompt: Sequence[int]) -> list[Block]:
        """The cached blocks that a prompt begins with."""
        assert self._prefixes is not None
        return self._prefixes.found(prompt, partial(self._prefix_key, salt))

    def _steps(self, chunk: Batch, sampling: Sampling, seed: int, **options: Any) -> Iterator[Step]:
        cached = self._prefixes is not None and bool(chunk.salts)
        self._routes = []
        for step in super()._steps(chunk, sampling, seed, **options):
            more = {"cached": self._cached_S} if cached else {}
            route_SCLK2 = self._recorded_routes()
            if route_SCLK2 is not None and step.columns:
                more |= route_columns(route_SCLK2[:, -1])
            yield replace(step, columns={**step.columns, **more}) if more else step
            self._routes = []  # whatever ran meanwhile
        self._routes = None

    def _score(self, chunk: Batch, sampling: Sampling, path: Path) -> Trace:
        cached = self._prefixes is not None
        routes = given_routes(chunk, path, self.kernel.prefill_chunk, cached=cached)
        self._routes, self._replay = [], iter(routes)
        try:
            trace = super()._score(chunk, sampling, path)
        finally:
            self._replay = iter(())
        route_SCLK2 = self._recorded_routes()
        if route_SCLK2 is None:
            return trace
        route_NLK2 = route_SCLK2[self._places(chunk, path)]
        return replace(trace, columns={**trace.columns, **route_columns(route_NLK2)})

    def _recorded_routes(self) -> NDArray[np.float32] | None:
        """The routes of the last forwards, as `RouteRecorder.taken` has them; they are forgotten.

        With a prefix cache, sequences run one by one, and a cached token is routed by no forward.
        """
        routes, self._routes = self._routes or [], None
        known = [route_SCLK2 for route_SCLK2 in routes if route_SCLK2 is not None]
        if not known or len(known) < len(routes) or self._prefixes is not None:
            return None
        return np.concatenate(known, axis=1)

    def _decode(self, chunk: Batch) -> Generator[Tensor, Ints | None, None]:
        refuse_cacheless(self.model)
        if self._prefixes is not None:
            yield from self._decode_alone(chunk)
            return
        ids_ST, mask_ST = map(torch.from_numpy, self._left_padded(chunk.prompts))
        cached = partial(self._forward, past_key_values=self._cache(), use_cache=True)
        *before, last = steps_of(ids_ST.shape[1], self.kernel.prefill_chunk)
        for step in before:
            cached(ids_ST[:, step], mask_ST[:, : step.stop], kept=NOTHING)
        ids_ST = ids_ST[:, last]
        while True:
            logits_S1V = cached(ids_ST, mask_ST, logits_to_keep=1)
            token_S = yield logits_S1V[:, -1]
            ids_ST = torch.from_numpy(token_S)[:, None]
            mask_ST = torch.nn.functional.pad(mask_ST, (0, 1), value=1)

    def _decode_alone(self, chunk: Batch) -> Generator[Tensor, Ints | None, None]:
        """Each sequence by itself: neither its company nor a hit of the cache changes a shape."""
        salts = chunk.salts or (None,) * len(chunk)
        rows = [self._decode_row(*row) for row in zip(chunk.prompts, salts, strict=True)]
        self._cached_S = np.zeros(len(chunk))
        token_S: Ints | None = None
        while True:
            fed = (None,) * len(rows) if token_S is None else token_S
            answers = [row.send(token) for row, token in zip(rows, fed, strict=True)]
            if token_S is None:
                self._cached_S = np.array([cached for _, cached in answers], dtype=np.float64)
            token_S = yield torch.cat([logits for logits, _ in answers])

    def _decode_row(
        self, prompt: Sequence[int], salt: str | None
    ) -> Generator[tuple[Tensor, int], int | None, None]:
        """Logits [1, V], and how many tokens of the prompt were cached.

        The prompt runs in pieces of a block, whether blocks before are cached or not, so that a
        hit changes no shape.  Without a salt nothing is read and nothing is kept.
        """
        assert self._prefixes is not None
        size, cache = self._prefixes.size, self._cache()
        blocks = [] if salt is None else self._prefix(salt, prompt)
        for block in blocks:
            for layer, (key, value) in enumerate(block):
                cache.layers[layer].update(key, value)  # as they were kept, not rounded again
        done = cached = size * len(blocks)
        logits_11V = None
        while done < len(prompt):
            piece = prompt[done : done + size]
            done += len(piece)
            logits_11V = self._next(piece, done, cache)
            if len(piece) == size and salt is not None:
                self._prefixes.keep(self._prefix_key(salt, prompt[:done]), cache)
        while logits_11V is not None:
            token = yield logits_11V[:, -1], cached
            done += 1
            logits_11V = self._next([int(token or 0)], done, cache)

    def _next(self, piece: Sequence[int], length: int, cache: Any) -> Tensor:
        """Logits [1, 1, V] after a piece of one sequence, which is `length` tokens long then."""
        return self._forward(
            torch.tensor([[*piece]]),
            torch.ones((1, length), dtype=torch.int64),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def _places(self, chunk: Batch, path: Path) -> tuple[Ints, Ints]:
        row_N, column_N = super()._places(chunk, path)
        if path != "prefill" or self.kernel.prefill_chunk is None:
            return row_N, column_N
        # of a prefill in steps, only columns that some row asks for are kept
        return row_N, np.unique(column_N, return_inverse=True)[1].astype(np.int64)

    def _prefill(self, chunk: Batch) -> Iterator[Tensor]:
        ids_ST, mask_ST, keep = self._right_padded(chunk)
        ids_ST, mask_ST = torch.from_numpy(ids_ST), torch.from_numpy(mask_ST)
        size = self.kernel.prefill_chunk
        if size is None:
            kept = {"past_key_values": self._cache()} if self.kernel.kv_cache else {}
            run = partial(self._forward, use_cache=bool(kept), **kept)
            logits_STV = run(ids_ST, mask_ST, logits_to_keep=keep)
            yield from self._after_prompts(chunk, logits_STV)
            return
        row_N, column_N = super()._places(chunk, "prefill")
        cached = partial(self._forward, past_key_values=self._cache(), use_cache=True)
        places = row_N, column_N + ids_ST.shape[1] - keep
        yield logits_in_steps(cached, ids_ST, mask_ST, places, size)

    def _stack(self, logits_TSV: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(logits_TSV), dim=1)

    def _numpy(self, logits: Tensor) -> NDArray[np.floating]:
        wide = logits.dtype in (torch.float32, torch.float64)
        return (logits if wide else logits.float()).cpu().numpy()
