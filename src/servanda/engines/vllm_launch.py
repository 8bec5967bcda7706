# vLLM started inside this process, and what decides its numbers.
#
# No server and no child that could outlive the process.  What vLLM would choose by itself,
# and what moves a number, is chosen here or recorded in the fingerprint.

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from servanda.contract.identity import digest_of
from servanda.contract.model import Kernel
from servanda.contract.speculation import OPTION as SPECULATION
from servanda.contract.speculation import draft_of
from servanda.engines import checkpoint, folder
from servanda.engines.checkpoint import adapter_config, adapter_folder
from servanda.engines.safetensors import read_stored, weights_digest
from servanda.errors import MeasurementError
from servanda.registry import did_you_mean
from servanda.theory.sampling import Floats, best_columns
from servanda.traces.drafts import COUNTED
from servanda.traces.trace import Batch, Trace

# vLLM's output for each token, as arrays and traces; and a tap on the logits before its sampler.
#
# Nothing here imports vLLM.  Axes: T tokens of one request, K reported tokens beside the
# token itself, V vocabulary.


Rows = NDArray[np.float32]
SequenceRecord = tuple[Sequence[int], Mapping[str, Floats]]  # tokens of a sequence, their columns

KEY = "servanda"  # in SamplingParams.extra_args: which tap is the request's


@dataclass(frozen=True)
class Reported:
    """Logprobs of the top-k tokens at each position, and of the token that stands there.

    Args:
        ids_TK, logp_TK: [T, 1 + K].  The token itself comes first, then the top-k tokens,
            best first: the token is not among them because it is the token (see rank).
    """

    ids_TK: NDArray[np.int64]
    logp_TK: NDArray[np.float64]

    @classmethod
    def of(cls, flat: Any) -> Reported:
        """Of vLLM's FlatLogprobs; positions that it says nothing of have no row.

        The first token of a prompt is such a position: nothing comes before it.
        """
        ends = zip(flat.start_indices, flat.end_indices, strict=True)
        positions = sum(start < end for start, end in ends)
        shape = (positions, len(flat.token_ids) // positions if positions else 1)
        ids = np.array(flat.token_ids, dtype=np.int64).reshape(shape)
        return cls(ids, np.array(flat.logprobs, dtype=np.float64).reshape(shape))

    @classmethod
    def best(cls, logp_TV: Rows, token_T: Sequence[int], k: int) -> Reported:
        """From whole rows: the k most likely, ties by id."""
        order_TK = np.argsort(-logp_TV, axis=-1, kind="stable")[:, :k]
        ids_TK = np.column_stack([np.asarray(token_T, dtype=np.int64), order_TK])
        logp_TK = np.take_along_axis(logp_TV, ids_TK, axis=-1)
        return cls(ids_TK, logp_TK.astype(np.float64))

    def last(self, n: int) -> Reported:
        """The last n positions."""
        start = len(self.ids_TK) - n
        return Reported(self.ids_TK[start:], self.logp_TK[start:])

    def then(self, other: Reported) -> Reported:
        """These positions, followed by others."""
        return Reported(
            np.concatenate([self.ids_TK, other.ids_TK]),
            np.concatenate([self.logp_TK, other.logp_TK]),
        )

    def rows(self, vocab_size: int) -> Rows:
        """Whole rows, [T, V]; NaN where a token was not reported."""
        logp_TV = np.full((len(self.ids_TK), vocab_size), np.nan, dtype=np.float32)
        np.put_along_axis(logp_TV, self.ids_TK, self.logp_TK.astype(np.float32), axis=-1)
        return logp_TV

    def columns(self, k: int) -> dict[str, NDArray[np.float64]]:
        """Columns of a Trace: the token's own, and its k best as "id.0", "logp.0", ..."""
        return {
            "logp": self.logp_TK[:, 0],
            "top1": self.ids_TK[:, 1].astype(np.float64),
            "p_max": np.exp(self.logp_TK[:, 1]),
            **best_columns(self.ids_TK[:, 1 : 1 + k], self.logp_TK[:, 1 : 1 + k]),
        }


@dataclass
class Tap:
    """Sees the logits of one request before its sampler does, and may choose its tokens.

    Args:
        forced: tokens to decode, one a step; none where the sampler is free.
        logp: position -> raw logprobs, [V]: by vLLM's own formula, so that they are bit for
            bit what it reports of a free request.
    """

    forced: Sequence[int] = ()
    logp: dict[int, Rows] = field(default_factory=dict)

    def __call__(self, output_ids: Sequence[int], logits_V: Any) -> Any:
        step = len(output_ids)  # a prompt that comes in pieces is seen more than once: the last
        self.logp[step] = logits_V.float().log_softmax(dim=-1).cpu().numpy()
        if self.forced:
            logits_V.fill_(-np.inf)
            logits_V[self.forced[step]] = 0.0
        return logits_V

    def rows(self, n: int) -> Rows:
        """Of the first n positions, [n, V]."""
        return np.stack([self.logp[step] for step in range(n)])


class TapProcessor:
    """The half of a vLLM logits processor that is ours; the other is its AdapterLogitsProcessor.

    `taps` holds those of the requests that are being served.
    """

    taps: dict[str, Tap]

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Tap | None:
        return self.taps.get((params.extra_args or {}).get(KEY, ""))


def trace_of(
    parts: Sequence[SequenceRecord | None], batch: Batch, about: Mapping[str, str]
) -> Trace:
    """A trace of a batch from its sequences' parts; one that has none is lost."""
    there = [part for part in parts if part is not None]
    names = there[0][1] if there else ("logp",)
    return Trace.of(
        batch,
        [len(part[0]) if part else 0 for part in parts],
        [t for tokens, _ in there for t in tokens],
        {
            name: np.concatenate([np.zeros(0), *(columns[name] for _, columns in there)])
            for name in names
        },
        about,
        lost_S=[part is None for part in parts],
    )


DTYPES = ("float32", "bfloat16", "float16")
KV_CACHES = ("float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")  # vLLM refuses some by device

# arguments of vLLM that a kernel may give as they are: none of them runs code of a checkpoint, nor
# changes what is recorded.
OPTIONS = (
    *("async_scheduling", "attention_backend", "block_size", "cpu_offload_gb"),
    *("disable_cascade_attn", "enable_chunked_prefill", "enable_expert_parallel"),
    *("enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "linear_backend"),
    *("long_prefill_token_threshold", "max_num_batched_tokens", "moe_backend"),
    *("optimization_level", "pipeline_parallel_size", "tensor_parallel_size", SPECULATION),
)
# keys of speculative_config that run no code of a checkpoint
_DRAFTING = (
    *("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    *("draft_sample_method", "rejection_sample_method", "synthetic_acceptance_rates"),
    *("synthetic_acceptance_length", "quantization", "draft_tensor_parallel_size"),
)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
# which a user may have set otherwise
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_SAID = 300  # characters of vLLM's own message that are repeated


def refuse_options(kernel: Kernel) -> None:
    """Let a kernel pass whose options vLLM can honour.

    Raises:
        MeasurementError: another dtype or quantization, by name.
    """
    if kernel.dtype not in DTYPES:
        raise MeasurementError(
            f"engine 'vllm' has no {kernel.dtype}", hint=f"its dtypes are {', '.join(DTYPES)}"
        )
    if kernel.quantization is not None:
        # int8_per_channel_weight_only of vLLM 0.32 is for experts: a dense model stays as it is
        raise MeasurementError(
            f"engine 'vllm' has no quantization {kernel.quantization!r}: what vLLM quantises by "
            "itself are other layers, or other formats",
            hint="leave `quantization` out; let `model` be a checkpoint that is stored quantised, "
            "and `weights_from` the digest of the one it was made from",
        )
    config = (kernel.options or {}).get(SPECULATION, {"method": ""})
    if not isinstance(config, Mapping) or config.get("method") in (None, "custom_class"):
        raise MeasurementError(
            f"{SPECULATION} is {json.dumps(config)}, and it is a mapping with a method of vLLM",
            hint=f'write {SPECULATION}: {{"method": "ngram", "num_speculative_tokens": 4, '
            '"prompt_lookup_max": 3}}',
        )
    odd = [key for key in config if key not in _DRAFTING]
    if odd:
        raise MeasurementError(
            f"{SPECULATION} of engine 'vllm' takes no {odd[0]!r}",
            hint=did_you_mean(odd[0], _DRAFTING),
        )


def imported() -> Any:
    """The module vllm, in an environment that keeps it to this process and this machine.

    Raises:
        MeasurementError: it is not in this interpreter, or something beside it breaks it.
    """
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        vllm: Any = importlib.import_module("vllm")
        _ = vllm.LLM, vllm.SamplingParams  # imported when they are first named
    except ImportError as error:
        raise MeasurementError(
            f"engine 'vllm' cannot be imported: {error}",
            hint="name its environment: `python: .venvs/vllm` in a contract, "
            "`vllm:MODEL@bfloat16,python=.venvs/vllm` on the command line; "
            "docs/how-to/engines.md says how one is made",
        ) from error
    except RuntimeError as error:
        raise MeasurementError(
            f"engine 'vllm' cannot be imported: {str(error).splitlines()[0]}",
            hint="a torchvision that was built for another torch does this; text models need "
            "none: python -m pip uninstall torchvision torchaudio torchcodec",
        ) from error
    return vllm


def taps_here(kernel: Kernel) -> dict[str, Tap] | None:
    """Where taps are kept by request; None beside speculation, or where vLLM replays tokens itself.

    The latter is its second model runner, on a GPU.  On the CPU the first one is chosen, whose
    logits processors the taps are.
    """
    if not on_cpu():
        return None
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return None if speculates(kernel) else {}


def on_cpu() -> bool:
    """Whether this vLLM was built for the CPU."""
    return importlib.import_module("vllm.platforms").current_platform.is_cpu()


def speculates(kernel: Kernel) -> bool:
    """Whether a kernel verifies drafts."""
    return SPECULATION in (kernel.options or {})


def draft_counters(llm: Any) -> dict[str, Any]:
    """What this vLLM has counted of its drafts since it was started."""
    found: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in found:
            found[name] += metric.value
        elif name == "accepted_tokens_per_pos":
            found[name] = list(metric.values)
    return found


def counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """`Trace.about` of the drafts between two readings; nothing where none was made."""
    drafts, proposed, accepted = (
        after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    now = after.get("accepted_tokens_per_pos", [])
    then = before.get("accepted_tokens_per_pos") or [0] * len(now)
    by_depth = [a - b for a, b in zip(now, then, strict=True)]
    counts = {"drafts": drafts, "proposed": proposed, "accepted": accepted, "by_depth": by_depth}
    return {COUNTED: json.dumps(counts)} if drafts else {}


def start(
    vllm: Any, kernel: Kernel, place: Path, context: int | None, taps: dict[str, Tap] | None
) -> Any:
    """An `LLM` that runs kernel.batch_size sequences at once.

    Raises:
        MeasurementError: vLLM refuses the checkpoint.
    """
    options: dict[str, Any] = {"enable_trace_replay": True}
    if speculates(kernel):  # beside which vLLM has neither replay nor logits processors
        options = {"disable_log_stats": False}
    elif taps is not None:
        processors: Any = importlib.import_module("vllm.v1.sample.logits_processor")
        bases = (TapProcessor, processors.AdapterLogitsProcessor)
        options = {"logits_processors": [type("Taps", bases, {"taps": taps})]}
    # taps are of the CPU alone
    if context is not None and (taps is not None or (speculates(kernel) and on_cpu())):
        # on a CPU vLLM dies where a seeded request is prefilled in pieces (0.32: "CPU
        # Generator does not use offset"), so that all of a batch has to fit at once
        options["max_num_batched_tokens"] = kernel.batch_size * context
    chosen = {"enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False}
    try:
        return vllm.LLM(
            str(place),
            dtype=kernel.dtype,
            max_model_len=context,
            max_num_seqs=kernel.batch_size,
            max_logprobs=-1,
            logprobs_mode="processed_logprobs",
            kv_cache_dtype=kernel.kv_cache or "auto",
            generation_config="vllm",  # no sampling defaults of the folder
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            **_lora_options(kernel),
            **chosen | options | (kernel.options or {}),
        )
    except Exception as error:  # it raises anything, bare Exception included
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MeasurementError(
            f"vLLM does not start with {str(place)!r}: {reason[:_SAID]}",
            hint="it may not have this architecture, or not this much memory: "
            "VLLM_CPU_KVCACHE_SPACE is of its cache, in GiB",
        ) from error


def _lora_options(kernel: Kernel) -> dict[str, Any]:
    if kernel.adapter is None:
        return {}
    rank = int(adapter_config(adapter_folder(kernel.adapter))["r"])
    # vLLM takes these ranks only, and pads smaller ones
    most = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if rank <= size), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": most}


def lora_request(kernel: Kernel) -> Any:
    """What each request of a kernel with an adapter carries; None without one."""
    if kernel.adapter is None:
        return None
    folder = adapter_folder(kernel.adapter)
    return importlib.import_module("vllm.lora.request").LoRARequest("adapter", 1, str(folder))


def fingerprint(
    vllm: Any, llm: Any, kernel: Kernel, architecture: str, config_json: Mapping[str, Any]
) -> dict[str, str]:
    """All that may change a number, as this vLLM resolved it."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {
        layer.get_attn_backend().get_name()
        for layer in layers
        if hasattr(layer, "get_attn_backend")
    }
    current_platform = importlib.import_module("vllm.platforms").current_platform
    return {
        "engine": "vllm",
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": str(torch.__version__),
        "dtype": kernel.dtype,
        "attention": ", ".join(sorted(backends)),  # kernel.attention is not vLLM's to follow
        "quantization": config.model_config.quantization or "none",
        "kv_cache": str(config.cache_config.cache_dtype),
        "enforce_eager": str(config.model_config.enforce_eager).lower(),
        "prefix_caching": str(config.cache_config.enable_prefix_caching).lower(),
        **{f"option.{name}": json.dumps(value) for name, value in _facts(kernel).items()},
        "max_num_seqs": str(config.scheduler_config.max_num_seqs),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
        "model_runner": "2" if config.use_v2_model_runner else "1",
        "logprobs": "processed_logprobs",
        "device": current_platform.get_device_name(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "architecture": architecture,
        "config": digest_of(dict(config_json)),
    }


def _facts(kernel: Kernel) -> dict[str, Any]:
    """The options, with the weights of a draft in the place of its folder."""
    options: dict[str, Any] = dict(kernel.options or {})
    draft = draft_of(options)
    if draft is not None:
        place = folder.checkpoint_folder(draft)
        weights = weights_digest(read_stored(place), folder.read_json(place / "config.json"))
        options[SPECULATION] = {**options[SPECULATION], "model": weights}
    return options


def digests(place: Path, config: Any) -> dict[str, str]:
    """The digest of each tensor of the checkpoint, but of those that are tied to another.

    Raises:
        MeasurementError: a tensor has not the shape that config.json gives it.  vLLM 0.32 would
            load as much of it as fits, and say nothing.
    """
    state = checkpoint.read_weights(place)
    with torch.device("meta"):  # a model without numbers knows the shapes, and what is one tensor
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    other = sorted(n for n in state if n in shapes and state[n].shape != shapes[n])
    if other:
        raise MeasurementError(
            f"the checkpoint {str(place)!r} has another shape than config.json for {other[0]!r} "
            f"({len(other)} such)",
            hint="config.json and weights must come from one save_pretrained",
        )
    return checkpoint.tensor_digests(state, model.all_tied_weights_keys)
