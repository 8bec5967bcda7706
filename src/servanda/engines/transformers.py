# Engine `transformers`: a causal language model of Hugging Face Transformers, on the CPU or a GPU.
#
# How it pads, draws and scores is in local_engine.py.  The last column of a prefill is always
# padding, and so the attention kernel, which Transformers picks by whether a mask is full,
# is fixed by the launch too.
# Axes: S rows of a chunk, T columns that are fed, V vocabulary.

from __future__ import annotations

import inspect
import pathlib
import platform
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.engines import checkpoint, folder
from servanda.engines.base import ENGINES
from servanda.engines.checkpoint import (
    adapter_config,
    adapter_digests,
    adapter_folder,
    adapter_tensors,
    quiet,
)
from servanda.engines.folder import reading
from servanda.engines.local_engine import LocalEngine, Step
from servanda.engines.low_precision.model import (
    ROUNDED,
    RoundedCache,
    check_quantization,
    quantize_,
    set_head_dtype_,
    take_over,
)
from servanda.errors import MeasurementError
from servanda.theory.sampling import Ints, Sampling
from servanda.traces.expert_columns import gate_column, route_column
from servanda.traces.trace import Batch, Trace

# A prefill in steps of so many tokens, as servers run long prompts: its memory grows with the cache
# of keys and values alone, and not with the square of the length.
# Axes: S rows of a chunk, T columns that are fed, C columns that are kept, N given tokens.


NOTHING = np.zeros(0, dtype=np.int64)  # columns of a step of which no logits are asked


def steps_of(columns: int, size: int | None) -> list[slice]:
    """The columns of each forward of a prefill; without a size there is one."""
    size = size or columns
    return [slice(at, min(at + size, columns)) for at in range(0, columns, size)]


def logits_in_steps(
    forward: Callable[..., Tensor],
    ids_ST: Tensor,
    mask_ST: Tensor,
    places: tuple[Ints, Ints],
    size: int,
) -> Tensor:
    """Logits [N, V] of some places of a text; no other logits are kept.

    Args:
        forward: runs the columns of a step, with the mask up to its end, and keeps `kept` of them;
            each step attends to those before it.
        places: row and column of each, [N].
    """
    row_N, column_N = places
    logits_NV: Any = None
    for step in steps_of(ids_ST.shape[1], size):
        in_N = (column_N >= step.start) & (column_N < step.stop)
        kept_C, at_N = np.unique(column_N[in_N] - step.start, return_inverse=True)
        logits_SCV = forward(ids_ST[:, step], mask_ST[:, : step.stop], kept=kept_C)
        if logits_NV is None:
            logits_NV = logits_SCV.new_empty(len(row_N), logits_SCV.shape[-1])
        if len(kept_C):
            logits_NV[in_N] = logits_SCV[row_N[in_N], at_N]
    return logits_NV


def refuse_cacheless(model: Any) -> None:
    """Refuse a model that takes no cache.

    Raises:
        MeasurementError: it would swallow the keyword, and score each token without those before.
    """
    taken = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    if not {"past_key_values", "cache"} & taken.keys():
        raise MeasurementError(
            f"{type(model).__name__} takes no past_key_values, so it cannot be decoded with a "
            "cache here",
            hint="score given tokens by prefill, or run the model in another engine",
        )


# Where a model of torch runs, and which implementation of attention runs there.


_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def usable_device(name: str | None) -> torch.device:
    """The device of a kernel; None is the CPU.

    Raises:
        MeasurementError: torch does not see it.
    """
    device = torch.device(name or "cpu")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = "is built for CPUs alone" if torch.version.cuda is None else "sees no GPU"
        raise MeasurementError(
            f"the kernel asks for device {name}, and torch {torch.__version__} {built}",
            hint="remove the key device to run on the CPU, or install a CUDA build of torch on a "
            "machine with a GPU",
        )
    if (device.index or 0) >= count:
        raise MeasurementError(
            f"the kernel asks for device {name}, and torch sees {count} of them",
            hint=f"the last is cuda:{count - 1}",
        )
    return device


def device_facts(device: torch.device) -> dict[str, str]:
    """What of a device, and of how torch computes on it, changes the last bits of a result."""
    if device.type == "cpu":
        return {"device": "cpu", "cpu": torch.backends.cpu.get_cpu_capability()}
    major, minor = torch.cuda.get_device_capability(device)
    matmul = torch.backends.cuda.matmul
    return {
        "device": torch.cuda.get_device_name(device),
        "compute capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        # float32 products by TF32 keep 10 bits of the mantissa, and reductions in half precision
        # fewer than float32 ones
        "tf32": str(matmul.allow_tf32),
        "reduced_precision_reduction": str(
            matmul.allow_bf16_reduced_precision_reduction
            or matmul.allow_fp16_reduced_precision_reduction
        ),
    }


@contextmanager
def sdpa_backend(attention: str) -> Iterator[None]:
    """Runs `scaled_dot_product_attention` by the backend of this name alone.

    Args:
        attention: the key of a kernel; eager and sdpa leave the choice to torch.

    Raises:
        MeasurementError: torch has no such backend for these shapes, masks, dtype and device.
    """
    backend = _BACKENDS.get(attention)
    if backend is None:
        yield
        return
    try:
        with sdpa_kernel(backend):
            yield
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        raise MeasurementError(
            f"torch {torch.__version__} has no {attention} for this kernel: its dtype, device or "
            "mask is not taken",
            hint="on a CPU there are sdpa_math and sdpa_flash; on a GPU, sdpa_efficient, "
            "sdpa_cudnn (float16, bfloat16) and sdpa_math take masks, and sdpa_flash does not",
        ) from error


# LoRA in a model of Transformers: PEFT's own layers, not merged, as a trainer runs them.


_WRAPPED = "base_model.model."  # how names begin in the file
_OWN = (".lora_", ".modules_to_save.")  # parts of names that are an adapter's


def add_adapter_(model: Any, adapter: str | None) -> dict[str, str]:
    """Put an adapter's layers around those of a model, in place; without one nothing is done.

    Returns:
        the digests of its tensors, by names of a description.

    Raises:
        MeasurementError: PEFT is not installed, or the adapter is not of this model.
    """
    if adapter is None:
        return {}
    folder = adapter_folder(adapter)
    adapter_config(folder)
    try:
        from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError:
        raise MeasurementError(
            "the key adapter needs PEFT, which is not installed",
            hint="pip install 'servanda[adapters]', or merge the adapter into the checkpoint",
        ) from None
    tensors = adapter_tensors(folder)
    with quiet(), reading(folder, "name the model that the adapter was trained on"):
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        inject_adapter_in_model(config, model)
        named = {name.removeprefix(_WRAPPED): tensor for name, tensor in tensors.items()}
        found = set_peft_model_state_dict(model, named)
    _refuse_misfit(folder, found.unexpected_keys, found.missing_keys)
    model.eval()
    return adapter_digests(tensors)


def _refuse_misfit(folder: pathlib.Path, unexpected: Sequence[str], missing: Sequence[str]) -> None:
    """Refuse an adapter that leaves layers as they were initialised, which is without it."""
    own = [name for name in missing if any(part in name for part in _OWN)]
    for names, says in (
        (unexpected, "has tensors for layers that the model does not have:"),
        (own, "lacks tensors that its config names:"),
    ):
        if names:
            raise MeasurementError(
                f"the adapter {str(folder)!r} {says} {min(names)} ({len(names)} such)",
                hint="name the model that the adapter was trained on",
            )


# The prefix cache of engine `transformers`: keys and values of whole blocks of prompts.
#
# A block is found under the salt of its request and all tokens up to its end, as servers do.


Block = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [1, H, size, D]
_MOST = 4096  # blocks that are kept; the one that was used least recently goes first


class PrefixCache:
    """Blocks of `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: OrderedDict[Hashable, Block] = OrderedDict()

    def found(self, prompt: Sequence[int], key: Callable[[Sequence[int]], Hashable]) -> list[Block]:
        """The cached blocks that a prompt begins with; its last token is always computed."""
        blocks: list[Block] = []
        for end in range(self.size, len(prompt), self.size):
            block = self._blocks.get(key(prompt[:end]))
            if block is None:
                break
            self._blocks.move_to_end(key(prompt[:end]))
            blocks.append(block)
        return blocks

    def age(self, key: Hashable) -> int:
        """Blocks that were kept or read after this one; 0 if it is not there."""
        return next((n for n, other in enumerate(reversed(self._blocks)) if other == key), 0)

    def keep(self, key: Hashable, cache: Any) -> None:
        """Keep the last block of what a cache of Transformers holds."""
        self._blocks[key] = [
            (layer.keys[:, :, -self.size :].clone(), layer.values[:, :, -self.size :].clone())
            for layer in cache.layers
        ]
        if len(self._blocks) > _MOST:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def refuse_windows(cache: Any, folder: pathlib.Path) -> None:
    """Let a model pass whose layers keep all keys and values.

    Raises:
        MeasurementError: one has a window, or a state.
    """
    from transformers.cache_utils import DynamicLayer

    kinds = (type(layer) for layer in cache.layers)
    odd = next((kind.__name__ for kind in kinds if kind is not DynamicLayer), None)
    if odd is not None:
        raise MeasurementError(
            f"the prefix cache holds keys and values of whole texts, and {folder} has layers "
            f"that keep others ({odd})",
            hint="remove the key prefix_cache",
        )


# Which experts the routers of a mixture pick, as a model of Transformers runs; and a run in which
# they pick given ones.
#
# Transformers names the modules that route (`_can_record_outputs["router_logits"]`); of what one
# returns, the whole numbers are the experts, and the last numbers of the same shape their weights.
# Axes: S rows of a chunk, T columns that are fed, C columns that are kept, L layers, K experts.


class RouteRecorder:
    """Keeps the experts of each forward of a model, and their weights; empty without routers."""

    def __init__(self, model: Any) -> None:
        self._picked: list[tuple[Tensor, Tensor]] = []
        self.routers = [*_routers(model)]
        for router in self.routers:
            router.register_forward_hook(self._keep)

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        parts = [part for part in parts if isinstance(part, Tensor)]
        for expert in (part for part in parts if not part.is_floating_point()):
            # the scores of all experts have the same shape if each is picked; they come first
            same = (p for p in parts[::-1] if p.is_floating_point() and p.shape == expert.shape)
            unknown = torch.full_like(expert, torch.nan, dtype=torch.float32)
            self._picked.append((expert, next(same, unknown)))

    def taken(self, rows: int, kept_C: NDArray[np.integer]) -> NDArray[np.float32] | None:
        """The experts of the forward that has just run and their weights, [S, C, L, K, 2].

        Args:
            rows: S of that forward; kept_C: indexes of the columns.

        Returns:
            Sorted by expert, the weights NaN where the routers do not return them; None where they
            do not return their experts.
        """
        picked, self._picked = self._picked, []
        if not picked or len(picked) != len(self.routers):
            return None
        both_LSCK = [
            [part.reshape(rows, -1, part.shape[-1])[:, kept_C].float() for part in both]
            for both in picked
        ]
        route_LSCK, gate_LSCK = map(torch.stack, zip(*both_LSCK, strict=True))
        route_LSCK, order = route_LSCK.sort(dim=-1)
        route_LSCK2 = torch.stack([route_LSCK, gate_LSCK.gather(-1, order)], dim=-1)
        return route_LSCK2.permute(1, 2, 0, 3, 4).cpu().numpy()

    @contextmanager
    def replaying(
        self, route_SCLK: NDArray[np.integer] | None, device: torch.device
    ) -> Iterator[None]:
        """Let the routers of one forward pick these experts, with weights of their own scores.

        Args:
            route_SCLK: for each column that is fed; -1 where the router picks by itself.  None: it
                always does.

        Raises:
            MeasurementError: the model has other routers, or one that does not pick by one topk.
        """
        if route_SCLK is None:
            yield
            return
        if len(self.routers) != route_SCLK.shape[2]:
            raise MeasurementError(
                f"the recorded experts are of {route_SCLK.shape[2]} layers, and this model has "
                f"{len(self.routers)} routers",
                hint="replay the experts of the same mixture, or remove the key routes",
            )
        given_LRK = torch.from_numpy(route_SCLK).long().to(device).movedim(2, 0).flatten(1, 2)
        own = [vars(router).get("forward") for router in self.routers]  # if it was replaced before
        for router, given_RK in zip(self.routers, given_LRK, strict=True):
            router.forward = _picking(router, given_RK)
        try:
            yield
        finally:
            for router, forward in zip(self.routers, own, strict=True):
                del router.forward
                if forward is not None:
                    router.forward = forward


class _Given(TorchFunctionMode):
    """Replaces what `topk` returns by the given experts, and their scores.

    A router that picks groups of experts first calls `topk` for them too; those calls stay.

    Args:
        given_RK: -1 where the router picks by itself.
        experts: of the layer; None if unknown.
    """

    def __init__(self, given_RK: Tensor, experts: int | None) -> None:
        super().__init__()
        self.given_RK, self.experts, self.picks = given_RK, experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        score, own = (args[0] if args else kwargs["input"]), found[1]
        same = own.shape[-1] == self.given_RK.shape[-1] and own.numel() == self.given_RK.numel()
        if not same or self.experts not in (None, score.shape[-1]):
            return found
        self.picks += 1
        if (most := int(self.given_RK.max())) >= score.shape[-1]:
            raise MeasurementError(
                f"expert {most} was recorded, and a layer of this model has {score.shape[-1]}",
                hint="replay the experts of the same mixture, or remove the key routes",
            )
        given = self.given_RK.reshape(own.shape)
        given = given.where(given >= 0, own)
        # in the order of topk, so that what is equal is equal in every bit
        value, order = score.gather(-1, given).sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((value, given.gather(-1, order)))


def _picking(router: Any, given_RK: Tensor) -> Callable[..., Any]:
    forward, weight = router.forward, getattr(router, "weight", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Given(given_RK, None if weight is None else len(weight)) as given:
            output = forward(*args, **kwargs)
        if given.picks != 1:
            raise MeasurementError(
                f"{given_RK.shape[-1]} experts a token were recorded, and a router "
                f"({type(router).__name__}) has {given.picks} calls of topk that pick as many",
                hint="replay the experts of the same mixture; if they are, its architecture is "
                "not supported: remove the key routes",
            )
        return output

    return run


def given_routes(
    chunk: Batch, path: Path, size: int | None, *, cached: bool
) -> list[NDArray[np.int16]]:
    """The routes of each forward that scores a chunk, [S, C, L, K]; -1 where none is given.

    Args:
        size: columns of each forward of a prefill; None: all at once.
        cached: whether the engine has a prefix cache.

    Raises:
        MeasurementError: it has.
    """
    if not chunk.routes:
        return []
    if cached:
        raise MeasurementError(
            "a prefix cache and routes=replayed exclude each other: no router runs for a cached "
            "token",
            hint="remove the key prefix_cache of the kernel that replays",
        )
    longest, shape = max(map(len, chunk.prompts)), chunk.routes[0].shape[1:]
    whole = np.full((len(chunk), longest + chunk.width, *shape), -1, dtype=np.int16)
    for row, (prompt, route) in enumerate(zip(chunk.prompts, chunk.routes, strict=True)):
        # the last column of a prompt predicts the first token; decoding pads prompts on the left
        first = (len(prompt) if path == "prefill" else longest) - 1
        whole[row, first : first + len(route)] = route
    fed = whole.shape[1] if path == "prefill" else longest
    steps = [*steps_of(fed, size), *(slice(at, at + 1) for at in range(fed, whole.shape[1]))]
    return [whole[:, step] for step in steps]


def route_columns(route_NLK2: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    """What `RouteRecorder.taken` returns as columns of a trace, [N] each."""
    _, layers, experts, _ = route_NLK2.shape
    names = (route_column, gate_column)
    if np.isnan(route_NLK2[..., 1]).all():  # the routers do not return weights
        names = names[:1]
    return {
        name(layer, k): route_NLK2[:, layer, k, part].astype(np.float64)
        for part, name in enumerate(names)
        for layer in range(layers)
        for k in range(experts)
    }


def _routers(model: Any) -> Iterator[Any]:
    """The modules that route, in the order in which they run."""
    named = [
        getattr(part, "_can_record_outputs", None) or {}
        for part in model.modules()
        if hasattr(part, "_can_record_outputs")
    ]
    recorders = [found["router_logits"] for found in named if "router_logits" in found]
    each = [one for of in recorders for one in (of if isinstance(of, list | tuple) else [of])]
    kinds = {getattr(one, "target_class", one) for one in each}
    yield from (part for part in model.modules() if type(part) in kinds)


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
