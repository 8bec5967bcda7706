# Values that were made from other values: filled up, interpolated, kept by id, or rounded from the
# other side's.
#
# A logprob in float32 or finer hardly ever equals what a rule makes of others, to the last digit.
# Columns with few values do so by themselves, and are not examined.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, Sums, check
from servanda.rl.dumps.checks.columns import CERTAIN_NATS, SIDES, Grid, coarse, whose
from servanda.theory.divergence.precision import rounded
from servanda.traces.rollouts import Array, Rollouts

_WARNED, _UNSOUND = 0.005, 0.01  # share of the tokens
_LEAST_TOKENS = 200
_SAMPLE = 65_536  # first tokens of a chunk, which are examined
_DIGITS = 2.0**-22  # relative error of float32 arithmetic
_RULES = {
    "before": "repeat that of the token before, to the last digit: the column was filled up",
    "line": "lie on the line through their neighbours, to the last digit: missing values were "
    "interpolated",
    "id": "are those of an earlier place of the same id in the response, to the last digit, though "
    "another token stands before it: values were kept by id",
}
_PILED, _PILED_SHARE = 10, 0.1  # tokens of one value, of all that repeat the one before
_COARSER = ("bfloat16", "float16")
# first tokens of a sequence that are compared, those among them that are not certain, and the share
# of such tokens of other sequences that may be equal: chance then takes 0.3^8 of the sequences
_HEAD, _LEAST_UNSURE, _OTHERS = 16, 8, 0.3
_FEW_COPIES = 5


@check("filled")
class Filled(Sums):
    """Counts the logprobs of each side, and of both, that a rule makes of others."""

    def __init__(self) -> None:
        self.tokens = self.coarse = 0
        # a context that comes again has its number again, but not on both sides
        self.made = {"id both": 0} | {
            f"{rule} {side}": 0 for rule in ("before", "line") for side in ("both", *SIDES)
        }
        self.grids: dict[str, Grid] = {side: Grid() for side in SIDES}
        self.sequences = self.copied = 0  # that are compared; those that are the trainer's, rounded
        self.equal = self.compared = 0  # of the others' first tokens: equal once rounded, and all
        self.first = {name: FirstPlace() for name in (*self.made, "copied")}

    def add(self, rollouts: Rollouts) -> None:
        at_K = rollouts.trained_K[:_SAMPLE]
        if not len(at_K):
            return
        columns: dict[str, Array] = dict(
            zip(SIDES, (rollouts.infer_K[:_SAMPLE], rollouts.train_K[:_SAMPLE]), strict=True)
        )
        self.tokens += len(at_K)
        some = max(1, len(at_K) // 4096)
        self.coarse += any(coarse(logp_K[::some]) for logp_K in columns.values())
        for side, grid in self.grids.items():
            grid.add(columns[side][::some])
        sequence_K, token_K = rollouts.sequence_of(at_K), rollouts.token_N[at_K]
        next_K = (np.diff(at_K) == 1) & (np.diff(sequence_K) == 0)
        other_K = np.append(False, next_K & (np.diff(token_K) != 0))
        inner_K = np.append(False, next_K) & np.append(next_K, False)
        row_M, before_M = _same_ids(token_K, sequence_K)
        found = {
            side: {
                "before": _rare(logp_K, other_K & np.append(False, np.diff(logp_K) == 0)),
                "line": inner_K & _on_line(logp_K),
                "id": _at(len(logp_K), row_M[logp_K[row_M] == logp_K[before_M]]),
            }
            for side, logp_K in columns.items()
        }
        for side, logp_K in columns.items():
            unsure_K = logp_K < -CERTAIN_NATS
            found[side] = {rule: flag_K & unsure_K for rule, flag_K in found[side].items()}
        sampler, trainer = (found[side] for side in SIDES)
        found["both"] = {rule: sampler[rule] & trainer[rule] for rule in _RULES}
        for side, of in found.items():
            for rule, flag_K in of.items():
                if (name := f"{rule} {side}") in self.made:
                    self.made[name] += int(np.count_nonzero(flag_K))
                    self.first[name].add(rollouts, flag_K)
        self._copies(rollouts)

    def _copies(self, rollouts: Rollouts) -> None:
        """Count sequences whose sampler's column is the trainer's in a coarser format."""
        start_S = (np.cumsum(rollouts.trained_S) - rollouts.trained_S)[rollouts.trained_S >= _HEAD]
        head_SH = start_S[:, None] + np.arange(_HEAD)
        train_SH, infer_SH = rollouts.train_K[head_SH], rollouts.infer_K[head_SH]
        unsure_SH = infer_SH < -CERTAIN_NATS
        told_S = np.count_nonzero(unsure_SH, axis=1) >= _LEAST_UNSURE
        start_S, unsure_SH = start_S[told_S], unsure_SH[told_S]
        train_SH, infer_SH = train_SH[told_S], infer_SH[told_S]
        alike_SH = np.zeros(train_SH.shape, bool)
        for form in _COARSER:
            alike_SH |= rounded(train_SH, form) == infer_SH
        differ_S = (unsure_SH & (train_SH != infer_SH)).any(axis=1)
        copied_S = differ_S & (alike_SH | ~unsure_SH).all(axis=1)
        self.sequences += len(start_S)
        self.copied += int(copied_S.sum())
        self.equal += int((alike_SH & unsure_SH)[~copied_S].sum())
        self.compared += int(unsure_SH[~copied_S].sum())
        if copied_S.any():
            self.first["copied"].add_token(rollouts, int(start_S[copied_S][0]))

    def finding(self) -> Finding:
        others = self.compared and self.equal <= _OTHERS * self.compared
        if self.copied >= max(_FEW_COPIES, _UNSOUND * self.sequences) and others:
            text = (
                f"in {self.copied:,} of {self.sequences:,} sequences the sampler's first {_HEAD} "
                "logprobs are the trainer's, rounded to a smaller format: one column was made from "
                "the other"
            )
            odd = self.copied, self.sequences, _UNSOUND
            return Finding("filled", "unsound", text, {}, self.first["copied"].place, odd)
        if self.coarse or any(grid.step for grid in self.grids.values()):
            return Finding("filled", "ok", "")
        for name, n in self.made.items():
            rule, side = name.split()
            if self.tokens < _LEAST_TOKENS or n <= _WARNED * self.tokens:
                continue
            text = f"{n:,} of {self.tokens:,} of {whose(side)} logprobs {_RULES[rule]}"
            state = "unsound" if n > _UNSOUND * self.tokens else "warning"
            return Finding("filled", state, text, {"made": n}, self.first[name].place)
        return Finding("filled", "ok", "")


def _rare(logp_K: Array, flag_K: Array) -> Array:
    """The flagged tokens whose value is no bound and no placeholder, which `piles` counts.

    A bound stands in more places than behind itself.
    """
    value_V, at_M, n_V = np.unique(logp_K[flag_K], return_inverse=True, return_counts=True)
    if not len(value_V):
        return flag_K
    every_V, all_V = np.unique(logp_K[np.isfinite(logp_K)], return_counts=True)
    all_V = all_V[np.searchsorted(every_V, value_V)]
    few_V = (n_V < max(_PILED, _PILED_SHARE * len(at_M))) & (all_V <= 2 * n_V)
    flag_K = flag_K.copy()
    flag_K[flag_K] = few_V[at_M]
    return flag_K


def _on_line(logp_K: Array) -> Array:
    """Whether a value lies between its neighbours as on a line, and is none of them, [K]."""
    on_K = np.zeros(len(logp_K), bool)
    if len(logp_K) > 2:
        before_K, own_K, after_K = logp_K[:-2], logp_K[1:-1], logp_K[2:]
        most_K = np.maximum(np.abs(before_K), np.abs(after_K))
        bend_K = np.abs(before_K - 2 * own_K + after_K)
        on_K[1:-1] = (bend_K <= _DIGITS * most_K) & (np.abs(after_K - before_K) > 1e-3 * most_K)
    return on_K


def _same_ids(token_K: Array, sequence_K: Array) -> tuple[Array, Array]:
    """Tokens, and the place of the same id before them in their response, behind another token."""
    order = np.lexsort((token_K, sequence_K))  # stable: places of one id stay in their order
    own, earlier = order[1:], order[:-1]
    pairs = (token_K[own] == token_K[earlier]) & (sequence_K[own] == sequence_K[earlier])
    own, earlier = own[pairs], earlier[pairs]
    inside = (earlier > 0) & (own - earlier > 1)
    own, earlier = own[inside], earlier[inside]
    apart = token_K[own - 1] != token_K[earlier - 1]
    return own[apart], earlier[apart]


def _at(size: int, at: Array) -> Array:
    flag_K = np.zeros(size, bool)
    flag_K[at] = True
    return flag_K
