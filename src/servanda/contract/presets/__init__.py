# Presets: contracts with cited limits, whose kernels and prompts `servanda compare` fills in;
# and where the prompts, models and examples are that travel with the package.

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from servanda.contract.model import Kernel
from servanda.errors import ContractError
from servanda.registry import Registry

__all__ = ["PRESETS", "add_preset", "fitting", "preset_text", "shipped", "title"]

SUFFIX = ".kernelcontract.yaml"
Purpose = Literal["serving", "reinforcement learning"]
_OWN: Mapping[Purpose, tuple[str, ...]] = MappingProxyType(
    {
        "serving": ("vllm-upgrade", "fp8", "fp8-kv", "nvfp4", "new-gpu"),
        "reinforcement learning": (
            *("nemo-grpo", "verl-sync", "verl-async", "trl", "prime-rl", "slime"),
            *("fp8-rollout", "mxfp8-rollout", "nvfp4-rollout"),
        ),
    }
)
# name -> purpose
PRESETS: Registry[Purpose] = Registry("preset", plugins="servanda.presets")
for _purpose, _names in _OWN.items():
    for _name in _names:
        PRESETS.add(_name, _purpose)
_TEXTS: dict[str, str] = {}  # of presets of installed packages


def add_preset(name: str, purpose: Purpose, text: str) -> None:
    """Register a preset of another package.

    Args:
        purpose: serving: `servanda compare` fills in the kernels and the prompts; reinforcement
            learning: it also judges dumps and monitors a training run.
        text: a contract in the layout of `servanda contract presets --show fp8` (or trl), which is
            filled in line by line; its first line is a comment with the title.

    Raises:
        ValueError: the name is registered already, there is no such purpose, or a line is missing.
    """
    if purpose not in _OWN:
        raise ValueError(f"the purpose of preset {name!r} is {purpose!r}: one of {(*_OWN,)}")
    lines = text.splitlines()
    needed = ["metadata:", f"  name: {name}", "kernels:", "workload:", "statistical:"]
    missing = [line for line in needed if line not in lines]
    if not all(line.startswith("#") for line in lines[:2]):
        missing.insert(0, "# two lines of comments at the top")
    if purpose == "reinforcement learning" and "metric: sampler_fidelity" not in text:
        missing.append("metric: sampler_fidelity")
    if missing:
        like = "fp8" if purpose == "serving" else "trl"
        raise ValueError(
            f"preset {name!r} has no line {missing[0]!r}: keep the layout of "
            f"`servanda contract presets --show {like}`"
        )
    PRESETS.add(name, purpose)
    _TEXTS[name] = text


def preset_text(name: str) -> str:
    """The YAML of a preset, comments included.

    Raises:
        ContractError: there is no such preset.
        MeasurementError: it is one of an installed package that cannot be imported.
    """
    if not PRESETS.load(name):
        raise ContractError(f"there is no preset {name!r}", hint=PRESETS.hint(name))
    if name in _TEXTS:
        return _TEXTS[name]
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
