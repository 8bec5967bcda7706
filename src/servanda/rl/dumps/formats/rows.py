# Many sequences of a file at once, as columns; and the chunks that a dump is read in.
#
# A sequence that `flaw` or `with_removed` can concern is taken out of its columns and goes the way
# of a single row, so that each refusal has one definition.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from servanda.rl.dumps.formats import base
from servanda.rl.steps.blocks import joined, taken
from servanda.traces.rollouts import Array, Rollouts

BATCH_TOKENS = 1 << 17  # about as many are read at once


@dataclass(frozen=True)
class Rows:
    """Sequences of one step, concatenated; index i of a column concerns token i.

    The prompt of a sequence is what precedes its first trained token.

    Args:
        place_S: their places, for messages.
        length_S: tokens of each, [S].
        token_N: int64, [N].
        mask_N: whether the trainer learns from the token, [N].
        logp_train_N, logp_infer_N: nats, float32 or float64, [N]; NaN if missing.
        group_S: name of each prompt; "": derived from the prompt's tokens.
        labels: name -> text of each sequence, [S]; "" if missing.
        per_sequence: name -> number of each sequence, [S]; NaN if missing.
        per_token: name -> number of each token, [N], float64; NaN if missing.
    """

    place_S: Sequence[str]
    length_S: Array
    token_N: Array
    mask_N: Array
    logp_train_N: Array
    logp_infer_N: Array
    group_S: Sequence[str]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    per_sequence: Mapping[str, Array] = field(default_factory=dict)
    per_token: Mapping[str, Array] = field(default_factory=dict)

    def rollouts(self, step: int, first_S: Sequence[int]) -> Rollouts:
        """All sequences, usable or not.

        Args:
            first_S: index of the first trained token of each, -1 if there is none.
        """
        ends = self.length_S.cumsum().tolist()
        groups = [
            group or base.group_of(self.token_N[end - length : end if first < 0 else first])
            for group, length, end, first in zip(
                self.group_S, self.length_S.tolist(), ends, first_S, strict=True
            )
        ]
        return Rollouts(
            step,
            self.length_S,
            self.token_N,
            self.mask_N,
            base.possible(self.logp_train_N),
            base.possible(self.logp_infer_N),
            tuple(groups),
            tuple(self.place_S),
            {name: tuple(texts) for name, texts in self.labels.items() if any(texts)},
            self.per_sequence,
            self.per_token,
        )

    def first_trained(self) -> list[int]:
        """The index of the first trained token of each sequence; -1 if there is none."""
        trained, at, first_S = self.mask_N.tobytes(), 0, []
        for length in self.length_S.tolist():
            first_S.append(trained.find(1, at, at + length))
            at += length
        return first_S

    def doubtful(self, first_S: Sequence[int]) -> list[int]:
        """The sequences that may have a flaw or removed tokens; all others have none.

        A sequence has no flaw if its ids are no less than 0 and both sides scored one of its
        trained tokens, here the first.
        """
        at_S = np.array(first_S, dtype=np.int64)
        sure_S = at_S >= 0
        for logp_N in (self.logp_train_N, self.logp_infer_N):
            logp_S = logp_N[at_S[sure_S]]
            sure_S[sure_S] = np.isfinite(logp_S) & (logp_S != 0)
        if len(self.token_N) and self.token_N.min() < 0:
            negative = np.flatnonzero(self.token_N < 0)
            sure_S[np.searchsorted(self.length_S.cumsum(), negative, side="right")] = False
        return np.flatnonzero(~sure_S).tolist()

    def row(self, at: int, first_S: Sequence[int]) -> base.RolloutRow:
        """One sequence."""
        end = int(self.length_S[: at + 1].sum())
        start, first = end - int(self.length_S[at]), first_S[at]
        part = slice(start, end)
        return base.RolloutRow(
            self.token_N[part],
            self.mask_N[part],
            self.logp_train_N[part].astype(np.float64),
            self.logp_infer_N[part].astype(np.float64),
            prompt=end - start if first < 0 else first - start,
            group=self.group_S[at],
            labels={name: texts[at] for name, texts in self.labels.items() if texts[at]},
            per_sequence={
                name: float(number_S[at])
                for name, number_S in self.per_sequence.items()
                if not np.isnan(number_S[at])
            },
            per_token={name: number_N[part] for name, number_N in self.per_token.items()},
        )


class Collector:
    """Collects the usable rows of one step into chunks; counts the others."""

    def __init__(self, step: int, refused: base.Refused) -> None:
        self.step = step
        self._refused = refused
        self._parts: list[Rollouts] = []
        self._tokens = 0

    def add(self, rows: base.Placed | Rows) -> Iterator[Rollouts]:
        """Add rows; yields the chunks before them that are full."""
        if not isinstance(rows, Rows):
            yield from self._add_row(*rows)
            return
        first_S = rows.first_trained()
        whole, after = rows.rollouts(self.step, first_S), 0
        apart = [at for at in rows.doubtful(first_S) if not _is_plain(rows.row(at, first_S))]
        for at in (*apart, len(whole)):
            if at > after:
                self._refused.accepted += at - after
                yield from self._put(taken(whole, after, at) if apart else whole)
            if at < len(whole):
                yield from self._add_row(rows.place_S[at], rows.row(at, first_S))
            after = at + 1

    def _add_row(self, place: str, row: base.RolloutRow) -> Iterator[Rollouts]:
        if reason := base.flaw(row):
            self._refused.add(reason, place)
        else:
            self._refused.accepted += 1
            row = base.with_removed(row)
            yield from self._put(base.rollouts_of(self.step, place, row))

    def _put(self, part: Rollouts) -> Iterator[Rollouts]:
        while True:
            tokens = len(part.token_N)
            # half a batch is a chunk: to join it with the next would cost more than it saves
            if self._tokens >= BATCH_TOKENS // 2 or self._tokens + tokens > base.CHUNK_TOKENS:
                yield from self.flush()
            if tokens <= base.CHUNK_TOKENS or len(part) == 1:
                self._parts.append(part)
                self._tokens += tokens
                return
            end_S = part.length_S.cumsum()
            fit = max(1, int(np.searchsorted(end_S, base.CHUNK_TOKENS, side="right")))
            self._parts.append(taken(part, 0, fit))
            yield from self.flush()
            part = taken(part, fit, len(part))

    def flush(self) -> Iterator[Rollouts]:
        """The last chunk, if not empty."""
        if self._parts:
            parts, self._parts, self._tokens = self._parts, [], 0
            yield joined(parts)


def _is_plain(row: base.RolloutRow) -> bool:
    """Whether a row goes into a chunk as it is."""
    return not base.flaw(row) and bool(row.mask.any())
