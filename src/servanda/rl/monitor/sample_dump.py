# The sampled share: sequences that are stored completely, for `servanda check DIR`.
#
# They are chosen by the step and their index alone, before any of their data is examined.

from __future__ import annotations

from pathlib import Path

import numpy as np

from servanda.errors import EvidenceError
from servanda.rl.monitor.batch import Array, Batch
from servanda.theory.sampling import uniforms


class SampleDump:
    """Writes a share of each step's sequences.

    Args:
        share: share of the sequences, above 0 and at most 1.

    Raises:
        EvidenceError: an invalid share.
    """

    def __init__(self, folder: Path, share: float, seed: int) -> None:
        if not 0 < share <= 1:
            raise EvidenceError(f"sample is {share!r}", hint="a share above 0 and at most 1")
        self.folder = folder
        self.share = share
        self.seed = seed
        self.next_share: float | None = None  # for the next step only, if a rule requests more

    def check(self, batch: Batch) -> None:
        """Refuse a step that cannot be stored.

        Raises:
            EvidenceError: there are no token ids.
        """
        if batch.token_BT is None:
            raise EvidenceError(
                f"step {batch.weights} has no token ids, and a dump is of sequences",
                hint="pass tokens=, or leave out dump=",
            )

    def write(self, batch: Batch, rank: int, step: int) -> Path | None:
        share = max(self.share, self.next_share or 0.0)
        drawn_B = uniforms(self.seed, f"keep.{rank}", batch.weights, batch.sequences)
        at = np.flatnonzero((drawn_B < share) & batch.selected_B)
        if not len(at):
            return None
        # readers of dumps cost more to import than a monitor does
        from servanda.rl.dumps.formats.parquet import Writer

        token_BT = batch.token_BT
        assert token_BT is not None  # `check` refuses a step without ids
        width = batch.mask_BT.shape[1]
        last_B = width - batch.mask_BT[:, ::-1].argmax(axis=1)  # the rest is padding
        before = token_BT.shape[1] - width
        present_BT = (np.arange(token_BT.shape[1]) < before + last_B[:, None]) & (token_BT >= 0)
        groups = batch.group_B or tuple(f"{rank}.{b}" for b in range(batch.sequences))

        def wide(values: Array | None) -> Array | None:
            return None if values is None else np.broadcast_to(values, batch.mask_BT.shape)[at]

        return Writer(self.folder, rank).step(
            step,
            token_BT[at],
            batch.mask_BT[at],
            batch.logp_train_BT[at],
            batch.logp_infer_BT[at],
            present=present_BT[at],
            groups=[groups[b] for b in at],
            labels={name: [values[b] for b in at] for name, values in batch.labels.items()},
            staleness=wide(batch.staleness_BT),
            advantages=wide(batch.advantage_BT),
            loss_weights=wide(batch.loss_weight_BT),
            loss_mask=wide(batch.loss_mask_BT),
            versions=wide(batch.version_BT),
        )
