# Terms: what every step of a dump is held to, fixed from the first steps by counts alone.

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from servanda.contract.model import EXTERNAL, Contract
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl.dumps import preset as dump_preset
from servanda.rl.dumps.blocks import blocks, paired
from servanda.rl.dumps.formats import Dump
from servanda.rl.dumps.slicing import HEAD_TOKENS, Counts, rules_of
from servanda.rl.dumps.statistics import Kind, Weighing
from servanda.rl.dumps.steps import ENDS
from servanda.rl.dumps.window import MOST_STEPS, window_of
from servanda.runner.load import load


@dataclass(frozen=True)
class Asked:
    """What a user asks of a dump that is followed; None: it is found out."""

    path: Path
    format: str | None = None
    preset: str | None = None
    contract: Path | None = None
    unsafe_pickles: bool = False


@dataclass(frozen=True)
class Terms:
    """What each step is held to, fixed from the first.

    Args:
        text: the contract's.
        kinds: labels of sequences, so that every step has the same cells.
        left_out: what has no slice of its own, and why.
        window: steps that a slice is judged on together, where one does not decide it.
    """

    text: str
    contract: Contract
    preset: str
    why: str
    kinds: tuple[Kind, ...]
    window: int = 1
    left_out: tuple[str, ...] = ()


def fixed(
    asked: Asked, own: tuple[str, Contract] | None, dump: Dump, steps: Sequence[int]
) -> Terms | None:
    """Preset, slices and labels, from counts of the first steps that can be read.

    Args:
        own: a contract that was asked for, and its text.

    Returns:
        None where no step can be read.
    """
    counts, counted, tokens, trained = Counts(), 0, 0, 0
    left: tuple[str, ...] = ()
    rows: dict[Kind, None] = {}
    for step in steps[:ENDS]:
        if tokens >= HEAD_TOKENS:
            break
        try:
            for block in blocks(c for c in part_of(dump, step).read() if len(c)):
                pair = paired(block, 0)
                counts.add(pair)
                named = [[(name, v) for v in pair.labels[name]] for name in sorted(pair.labels)]
                rows.update(dict.fromkeys(zip(*named, strict=True)))
                tokens += len(block.token_N)
                trained += len(pair.infer.token_N)
            counted += 1
        except (EvidenceError, MeasurementError, OSError):
            continue  # it is told of when it is judged
    if not counted:
        return None
    if own is not None:
        window = MOST_STEPS  # of slices that are not ours, nobody knows how small they are
        text, contract = own
        preset, why = contract.metadata.name, "as asked"
    else:
        stale = any(n for age, n in counts.staleness.items() if age)
        preset, why = asked.preset or "", "as asked"
        if not preset:
            framework = dump.about.get("framework", "")
            preset, why = dump_preset.guessed(dump.format, framework, stale=stale)
        needed = dump_preset.needed(preset)
        window = window_of(needed, counted, trained)
        rules, left = rules_of(counts, math.ceil(counted * needed / window))
        text, contract = dump_preset.contract_of(preset, _name(asked.path), rules, filtered=True)
    values = Weighing(contract, str(asked.path)).values
    known = (tuple((n, v) for n, v in row if v in values.get(n, ())) for row in rows)
    return Terms(text, contract, preset, why, tuple(dict.fromkeys(known)), window, left)


def part_of(dump: Dump, step: int) -> Dump:
    """One step of a dump."""
    files = tuple(file for file in dump.found.files if file.step == step)
    return Dump(replace(dump.found, files=files))


def of_a_trainer(path: Path) -> tuple[str, Contract]:
    """A contract that steps can be held to, and its text.

    Raises:
        ContractError: it is of kernels that are measured, or speaks of more than a step.
    """
    contract = load(path)
    sides = (contract.kernels.train, contract.kernels.infer)
    if any(kernel.engine != EXTERNAL for kernel in sides) or contract.claim != "realised":
        raise ContractError(
            f"{path} is no contract of a trainer: its kernels are external and its claim realised",
            hint="servanda tools check-dump DIR --save-contract FILE writes one",
        )
    return path.read_text(encoding="utf-8-sig"), contract


def weighing_of(terms: Terms, path: Path) -> Weighing:
    """Of one step; it knows every label of the head, so that all steps have the same cells."""
    kinds = {kind: row for row, kind in enumerate(terms.kinds)}
    return Weighing(terms.contract, str(path), kinds=kinds)


def _name(path: Path) -> str:
    """A folder's name as a contract may be called."""
    return (re.sub(r"[^A-Za-z0-9_.-]+", "-", path.resolve().name).strip("-._") or "dump")[:60]
