# The contract of a trainer's steps: which preset's limits they are held to, and the contract that
# comes of them.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from servanda.contract.clause import SliceRule
from servanda.contract.model import Contract
from servanda.contract.presets import PRESETS, preset_text
from servanda.errors import ContractError
from servanda.judgement.contract_text import of_trainer
from servanda.registry import did_you_mean
from servanda.rl.dumps.slicing import Counts
from servanda.runner import load
from servanda.theory.stats.interval import units_at_best

WORKLOAD = "workload"  # the only one of such a contract
# nothing holds before one prompt group, and a dump ends where it ends
_SIZES = (1, 10_000_000)
_AMPLE = 4  # times the tokens that identical kernels would need
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
    """The preset of a dump, and why: what a user asked for, or what fits.

    Args:
        about: what the dump says of itself.
        counts: of its first tokens.
    """
    if preset:
        return preset, "as asked"
    stale = any(n for age, n in counts.staleness.items() if age)
    return guessed(about["format"], about.get("framework", ""), stale=stale)


def guessed(format_: str, framework: str, *, stale: bool) -> tuple[str, str]:
    """The preset that fits a dump, and why.

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
        preset, why = "verl-sync", "because the dump does not name its trainer"
    if preset == "verl-sync" and stale:
        return "verl-async", "because its tokens are some updates old"
    return preset, why


def preset_of(name: str) -> str:
    """A preset that a dump can be held to.

    Raises:
        ContractError: there is none of that name, or it is one of serving.
    """
    fitting = [n for n, of in PRESETS.items() if of == "reinforcement learning"]
    if name not in fitting:
        what = "is for serving" if name in PRESETS else "does not exist"
        raise ContractError(
            f"a dump needs a preset for a trainer, and {name!r} {what}",
            hint=did_you_mean(name, fitting),
        )
    return name


def needed(preset: str) -> int:
    """Tokens that a slice must have to be worth a cell."""
    contract = contract_of(preset, "dump", ())[1]
    limit = min(
        float(c.at_most)
        for c in contract.statistical
        if c.metric == "tv" and c.enforced and isinstance(c.at_most, float)
    )
    units = units_at_best(limit, 1 - contract.confidence)
    assert units is not None  # no preset has a limit of 0
    return _AMPLE * units


def contract_of(
    preset: str,
    name: str,
    slices: Sequence[SliceRule],
    *,
    filtered: bool = False,
    bitwise: bool = False,
) -> tuple[str, Contract]:
    """The contract of a dump, and its text for keeping.

    Args:
        filtered: whether the source says what a filter of the trainer removed.
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


def contract_name(path: Path) -> str:
    """A folder's name as a contract may be called."""
    return (re.sub(r"[^A-Za-z0-9_.-]+", "-", path.resolve().name).strip("-._") or "dump")[:60]
