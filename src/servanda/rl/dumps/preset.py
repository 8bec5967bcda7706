# The contract for a trainer's steps: the choice of the preset, and the resulting contract.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from servanda.contract.clause import SliceRule
from servanda.contract.model import EXTERNAL, Contract
from servanda.contract.presets import PRESETS, preset_text
from servanda.errors import ContractError
from servanda.judgement.contract_text import of_trainer
from servanda.registry import did_you_mean
from servanda.rl.dumps.slicing import Counts
from servanda.runner import load
from servanda.theory.stats.interval import units_at_best

WORKLOAD = "workload"  # the only workload of such a contract
# at least one prompt group for `holds`; the size is that of the dump
_SIZES = (1, 10_000_000)
AMPLE = 4  # multiple of the tokens that identical kernels need
_OF_FORMAT: Mapping[str, str] = {
    "nemo": "nemo-grpo",
    "prime-rl": "prime-rl",
    "slime": "slime",
    "miles": "slime",
    "skyrl": "verl-sync",
}
_OF_FRAMEWORK: Mapping[str, str] = {
    "trl": "trl",
    "verl": "verl-sync",
    "nemo": "nemo-grpo",
    "prime": "prime-rl",
    "slime": "slime",
    "miles": "slime",
}


def chosen(preset: str | None, about: Mapping[str, str], counts: Counts) -> tuple[str, str]:
    """The preset of a dump with its reason: as requested, or as detected.

    Args:
        about: the dump's summary.
        counts: counts of its first tokens.
    """
    if preset:
        return preset, "as asked"
    stale = any(n for age, n in counts.staleness.items() if age)
    return guessed(about["format"], about.get("framework", ""), stale=stale)


def guessed(format_: str, framework: str, *, stale: bool) -> tuple[str, str]:
    """The preset for a dump, with the reason.

    Args:
        stale: whether any token is older than its step.

    >>> guessed("nemo", "NeMo-RL", stale=False)
    ('nemo-grpo', 'as the format suggests')
    >>> guessed("own", "my TRL fork", stale=False)
    ('trl', 'as the dump names its trainer')
    """
    named = (p for word, p in _OF_FRAMEWORK.items() if word in framework.lower())
    if format_ in _OF_FORMAT:
        preset, why = _OF_FORMAT[format_], "as the format suggests"
    elif (preset := next(named, "")) != "":
        why = "as the dump names its trainer"
    else:
        preset, why = "verl-sync", "the default, because the dump does not name its trainer"
    if preset == "verl-sync" and stale:
        return "verl-async", "because its tokens are some updates old"
    return preset, why


def preset_of(name: str) -> str:
    """Check that a preset applies to a dump.

    Raises:
        ContractError: no such preset, or one for serving.
    """
    if name not in PRESETS or PRESETS[name] != "reinforcement learning":
        fitting = [n for n in PRESETS.names() if PRESETS[n] == "reinforcement learning"]
        what = "is for serving" if name in PRESETS else "does not exist"
        raise ContractError(
            f"a dump needs a preset for a trainer, and {name!r} {what}",
            hint=did_you_mean(name, fitting),
        )
    return name


def needed(preset: str) -> int:
    """The number of tokens that a slice needs for a cell."""
    contract = contract_of(preset, "dump", ())[1]
    limits = [
        float(c.at_most)
        for c in contract.statistical
        if c.metric == "tv" and c.enforced and isinstance(c.at_most, float)
    ]
    if not limits:  # of another package
        raise ContractError(
            f"preset {preset!r} has no enforced clause of tv with a number as its limit",
            hint="a dump needs one, as in `servanda contract presets --show verl-sync`",
        )
    limit = min(limits)
    units = units_at_best(limit, 1 - contract.confidence)
    assert units is not None  # no preset has a limit of 0
    return AMPLE * units


def contract_of(
    preset: str,
    name: str,
    slices: Sequence[SliceRule],
    *,
    filtered: bool = False,
    bitwise: bool = False,
) -> tuple[str, Contract]:
    """The contract of a dump, and its text.

    Args:
        filtered: whether the source records removals by a filter of the trainer.
        bitwise: whether both kernels are declared to compute the same bits.
    """
    text = of_trainer(
        preset_text(preset),
        name=name,
        titles=("trainer", "rollout engine"),
        slices=slices,
        sizes=_SIZES,
        head=(f"Of a trainer's dump, held to the preset {preset}.",),
        filtered=filtered,
        bitwise=bitwise,
    )
    return text, load.contract_of(text, f"{name}.kernelcontract.yaml")


def of_a_trainer(path: Path) -> tuple[str, Contract]:
    """Load a contract for steps, and its text.

    Raises:
        ContractError: its kernels are not external, or its claim is not realised.
    """
    contract = load.load(path)
    sides = (contract.kernels.train, contract.kernels.infer)
    if any(kernel.engine != EXTERNAL for kernel in sides) or contract.claim != "realised":
        raise ContractError(
            f"{path} is no contract for a trainer's steps, which has external kernels and a "
            "realised claim",
            hint="servanda check DUMP --save-contract FILE writes one",
        )
    return path.read_text(encoding="utf-8-sig"), contract


def contract_name(path: Path) -> str:
    """A valid contract name from a folder's name."""
    return (re.sub(r"[^A-Za-z0-9_.-]+", "-", path.resolve().name).strip("-._") or "dump")[:60]
