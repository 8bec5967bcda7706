# Engines, found by name and imported only when one is opened.

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator, Sequence

from servanda.contract.model import Kernel
from servanda.contract.speculation import OPTION as SPECULATION
from servanda.engines.base import BUILTIN, ENGINES, Engine
from servanda.engines.faults import FAULTS, REQUEST_FAULTS
from servanda.errors import MeasurementError
from servanda.registry import did_you_mean

__all__ = ["BUILTIN", "Engine", "engine_names", "open_engine"]

# what to do where the library of an engine is missing
_INSTALL = {
    "llamacpp": "pip install 'servanda[llamacpp]'",
    "onnxruntime": "pip install 'servanda[onnx]'",
    "transformers": "pip install 'servanda[transformers]'",
    "vllm": "name its environment: `python: .venvs/vllm` in a contract, "
    "`vllm:MODEL@bfloat16,python=.venvs/vllm` on the command line; "
    "docs/how-to/engines.md says how one is made",
}
# keys of a kernel that an engine may not have (`keys` of its class): what it lacks
_OF_SOME = {
    "attention": "has no choice of the backend of its attention",
    "adapter": "takes no adapter",
    "device": "has no choice of its device here",
    "head_dtype": "has no choice of the precision of its head",
    "routes": "cannot replay the experts that infer recorded",
    "prefill_chunk": "has no choice of the steps of a prefill",
    "prefix_cache": "has no prefix cache of its own here",
}
_INSTEAD = {
    "attention": "write attention: sdpa, or use engine: transformers",
    "adapter": "merge the adapter into the checkpoint, or use engine: transformers or vllm",
    "device": "remove the key device: vllm takes what its build is for, the others the CPU",
    "prefill_chunk": "remove the key prefill_chunk, or use engine: transformers; vllm has the "
    "option max_num_batched_tokens",
}


class _Names(Collection[str]):
    def __contains__(self, name: object) -> bool:
        return name in BUILTIN or name in ENGINES

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*BUILTIN, *ENGINES.names())))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def engine_names() -> Collection[str]:
    """Built-in engines and those that installed packages offer: these are looked up only for a name
    that is not built in."""
    return _Names()


def open_engine(kernel: Kernel) -> Engine:
    """Open a kernel in this process; `worker.spawn` opens it in a child.

    Raises:
        MeasurementError: no such engine, its library is missing, or it refuses the kernel.
    """
    from servanda.engines.foreign_code import refuse_code_of_kernel  # imports this package

    refuse_code_of_kernel(kernel, "kernel")
    name = kernel.engine
    if name == "transformers" and "ranks" in (kernel.options or {}):
        from servanda.engines import rank_processes  # its ranks come back here, each in a process

        if rank_processes.MEETING not in os.environ:
            return rank_processes.ShardedEngine(kernel)
    if name in BUILTIN and name not in ENGINES:
        try:
            importlib.import_module(BUILTIN[name])
        except ImportError as error:
            raise MeasurementError(
                f"engine {name!r} cannot be imported: {error}",
                hint=_INSTALL.get(name, "install it beside servanda, or name its `python:`"),
            ) from error
    elif not ENGINES.load(name):
        raise MeasurementError(
            f"there is no engine {name!r}", hint=did_you_mean(name, engine_names())
        )
    make = ENGINES[name]
    for key, value in _asked(kernel).items():
        if key not in getattr(make, "keys", ()):
            hint = _INSTEAD.get(key, f"remove the key {key}, or use engine: transformers")
            raise MeasurementError(f"engine {name!r} {_OF_SOME[key]}: {key}={value}", hint=hint)
    if (kind := kernel.kv_cache) is not None:
        nothing = MeasurementError(
            f"engine {name!r} has no choice of its KV cache: kv_cache={kind}",
            hint="remove the key kv_cache; it is for llamacpp, transformers and vllm",
        )
        other = f"engine {name!r} has no KV cache of type {kind!r}"
        _refuse_unknown(kind, getattr(make, "kv_caches", ()), nothing, other)
    for option in kernel.options or {}:
        if option == SPECULATION and option not in getattr(make, "options", ()):
            raise MeasurementError(
                f"engine {name!r} does not speculate",
                hint=f"remove options.{SPECULATION}; measure a server that speculates by its URL, "
                "or engine vllm with this option",
            )
        nothing = MeasurementError(
            f"engine {name!r} takes no options: {option}",
            hint="remove kernels.*.options; it is for transformers and vllm",
        )
        other = f"engine {name!r} takes no option {option!r}"
        _refuse_unknown(option, getattr(make, "options", ()), nothing, other)
    for fault, value in (kernel.fault or {}).items():
        faults = REQUEST_FAULTS if fault in REQUEST_FAULTS else FAULTS
        if fault not in faults:
            raise MeasurementError(f"there is no fault {fault!r}", hint=FAULTS.hint(fault))
        make = faults[fault].inject(make, value)
    return getattr(make, "opened", make)(kernel)


def _asked(kernel: Kernel) -> dict[str, object]:
    """The keys of a kernel that ask an engine for what it may not have."""
    asked = {key: getattr(kernel, key) for key in _OF_SOME}
    every = {"attention": ("eager", "sdpa"), "device": ("cpu",)}  # what each engine takes
    return {k: v for k, v in asked.items() if v is not None and v not in every.get(k, ())}


def _refuse_unknown(
    value: str, known: Sequence[str], nothing: MeasurementError, other: str
) -> None:
    """Let a value pass that an engine has.

    Args:
        nothing: the error of an engine that has no values at all; other: the message of one that
            has others.
    """
    if not known:
        raise nothing
    if value not in known:
        raise MeasurementError(other, hint=did_you_mean(value, known))
