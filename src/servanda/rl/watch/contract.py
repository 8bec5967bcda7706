# The contract for every step of a dump, fixed from counts of the first steps.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from servanda.contract.model import Contract
from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.dumps import preset as dump_preset
from servanda.rl.dumps.blocks import blocks, paired
from servanda.rl.dumps.formats import Dump
from servanda.rl.dumps.slicing import HEAD_TOKENS, Counts, Labels, rules_of
from servanda.rl.dumps.statistics import DumpStatistics
from servanda.rl.dumps.steps import ENDS
from servanda.rl.dumps.window import MOST_STEPS, window_of


@dataclass(frozen=True)
class WatchOptions:
    """The options for following a path; None: detected.

    Args:
        reference: of good runs, which the steps are compared with.
    """

    path: Path
    format: str | None = None
    preset: str | None = None
    contract: Path | None = None
    unsafe_pickles: bool = False
    reference: Path | None = None


@dataclass(frozen=True)
class StepContract:
    """The contract of each step, fixed at the first.

    Args:
        text: text of the contract.
        why: the reason for the preset.
        labels: labels of sequences, so that every step has the same cells.
        left_out: the reasons for omitted slices.
        window: number of steps that an undecided slice is judged on together.
    """

    text: str
    contract: Contract
    preset: str
    why: str
    labels: tuple[Labels, ...]
    window: int = 1
    left_out: tuple[str, ...] = ()

    def statistics(self, path: Path) -> DumpStatistics:
        """Empty statistics of one step, with all labels of the head and so the same cells."""
        rows = {labels: row for row, labels in enumerate(self.labels)}
        return DumpStatistics(self.contract, str(path), rows)


def fixed(
    options: WatchOptions, own: tuple[str, Contract] | None, dump: Dump, steps: Sequence[int]
) -> StepContract | None:
    """Preset, slices and labels, from counts of the first readable steps.

    Args:
        own: the user's contract and its text, if any.

    Returns:
        None if no step can be read.
    """
    counts, counted, tokens, trained = Counts(), 0, 0, 0
    left: tuple[str, ...] = ()
    rows: dict[Labels, None] = {}
    for step in steps[:ENDS]:
        if tokens >= HEAD_TOKENS:
            break
        try:
            for block in blocks(dump.of([step]).read()):
                pair = paired(block, 0)
                counts.add(pair)
                named = [[(name, v) for v in pair.labels[name]] for name in sorted(pair.labels)]
                rows.update(dict.fromkeys(zip(*named, strict=True)))
                tokens += len(block.token_N)
                trained += len(pair.infer.token_N)
            counted += 1
        except (EvidenceError, MeasurementError, OSError):
            continue  # reported at its judgement
    if not counted:
        return None
    if own is not None:
        window = MOST_STEPS  # the sizes of user-defined slices are unknown
        text, contract = own
        preset, why = contract.metadata.name, "as asked"
    else:
        preset, why = dump_preset.chosen(options.preset, dump.about, counts)
        needed = dump_preset.needed(preset)
        window = window_of(needed, counted, trained)
        rules, left = rules_of(counts, math.ceil(counted * needed / window))
        name = dump_preset.contract_name(options.path)
        text, contract = dump_preset.contract_of(preset, name, rules, filtered=True)
    values = DumpStatistics(contract, str(options.path)).values
    known = (tuple((n, v) for n, v in row if v in values.get(n, ())) for row in rows)
    return StepContract(text, contract, preset, why, tuple(dict.fromkeys(known)), window, left)
