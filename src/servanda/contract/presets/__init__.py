# Presets: contracts with cited limits, whose kernels and prompts `servanda compare` fills in;
# and where the prompts, models and examples are that travel with the package.

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from servanda.contract.model import Kernel
from servanda.errors import ContractError
from servanda.registry import did_you_mean

__all__ = ["PRESETS", "fitting", "preset_text", "shipped", "title"]

SUFFIX = ".kernelcontract.yaml"
# name -> purpose
PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "vllm-upgrade": "serving",
        "fp8": "serving",
        "fp8-kv": "serving",
        "nvfp4": "serving",
        "new-gpu": "serving",
        "nemo-grpo": "reinforcement learning",
        "verl-sync": "reinforcement learning",
        "verl-async": "reinforcement learning",
        "trl": "reinforcement learning",
        "prime-rl": "reinforcement learning",
        "slime": "reinforcement learning",
        "fp8-rollout": "reinforcement learning",
        "mxfp8-rollout": "reinforcement learning",
        "nvfp4-rollout": "reinforcement learning",
    }
)


def preset_text(name: str) -> str:
    """The YAML of a preset, comments included.

    Raises:
        ContractError: there is no such preset.
    """
    if name not in PRESETS:
        raise ContractError(f"there is no preset {name!r}", hint=did_you_mean(name, PRESETS))
    return files(__name__).joinpath(name + SUFFIX).read_text(encoding="utf-8")


def shipped(name: str) -> Path | None:
    """A file or folder that travels with the package, or lies in the repository of a clone."""
    package = Path(str(files("servanda")))
    places = (root / name for root in (package / "_demo", package.parents[1]))
    return next((place for place in places if place.exists()), None)


def title(name: str) -> str:
    """The first line of a preset: its purpose."""
    return preset_text(name).split("\n", 1)[0].removeprefix("# ")


def fitting(today: Kernel, candidate: Kernel) -> tuple[str, str]:
    """The serving preset for the differences of two kernels, with the reason.

    >>> fitting(Kernel(engine="x"), Kernel(engine="x", quantization="int4_g32"))
    ('nvfp4', 'B is int4_g32 and A is not quantised')
    """
    new, old = candidate.quantization, today.quantization
    if new == old and candidate.kv_cache != today.kv_cache:
        new, old = candidate.kv_cache or "the engine's own", today.kv_cache or "the engine's own"
        return "fp8-kv", f"the cache of B is {new} and that of A is {old}"
    if new == old:
        same = f"both are {new}" if new else "neither is quantised"
        return "vllm-upgrade", f"{same}: a change of build, not of weights"
    names = [name.split("_", 1)[0] for name in (new, old) if name]
    bits = "nvfp4" if any("4" in name for name in names) else "fp8"
    return bits, f"B is {new or 'not quantised'} and A is {old or 'not quantised'}"
