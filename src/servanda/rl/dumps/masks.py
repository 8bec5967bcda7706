# Masks: the tokens of violated slices, for a trainer to exclude.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from servanda.errors import MeasurementError
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.rl.dumps.blocks import blocks, paired
from servanda.rl.dumps.token_fields import PairFields
from servanda.traces.rollouts import Rollouts


def write_masks(chunks: Iterable[Rollouts], cuts: Sequence[Cut], folder: Path) -> int:
    """Write one file per step, step_N.npz, with the tokens in any of the slices (at least one).

    Each has `source` (the place of the sequence), `sequence` (its index in `source`) and
    `token` (its index in the sequence, prompt included), the last two of equal length.

    Returns:
        The number of tokens.

    Raises:
        MeasurementError: a file cannot be written.
    """
    total, step = 0, None
    source: list[str] = []
    sequence: list[np.ndarray] = []
    token: list[np.ndarray] = []

    def flush() -> None:
        if step is None:
            return
        sequence_M, token_M = np.concatenate(sequence), np.concatenate(token)
        with MeasurementError.of_system(f"{folder} cannot be written", hint="name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(
                folder / f"step_{step}.npz",
                source=np.array(source),
                sequence=sequence_M,
                token=token_M,
            )

    for block in blocks(chunks):
        if block.step != step:
            flush()
            step, source, sequence, token = block.step, [], [], []
        atoms = atoms_of(cuts, PairFields(paired(block, 0)))
        inside_K = np.any(atoms.inside_CA[:, atoms.atom], axis=0)
        at_N = np.flatnonzero(block.mask_N.astype(bool))[inside_K]
        of_N = block.sequence_N[at_N]
        sequence.append(of_N + len(source))
        token.append(at_N - block.start_S[of_N])
        source += block.source_S
        total += len(at_N)
    flush()
    return total
