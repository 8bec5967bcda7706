# Explicit next-token tables: kernels whose every divergence is known exactly.
#
# A table gives the next-token distribution after the last `order` tokens.  Two tables over
# one vocabulary stand for two kernels at identical weights.  Expectations are exact sums
# over contexts or over whole sequences, never samples: the oracle for everything sampled.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servanda.errors import MeasurementError
from servanda.theory.bounds.gradient import Loss
from servanda.theory.divergence.precision import CAPTURES
from servanda.theory.sampling import Sampling, processed_logprobs

Floats = NDArray[np.float64]
Ids = tuple[int, ...]
_SUM_SLACK = 1e-9  # rows written as decimals need not add up to the last bit


@dataclass(frozen=True)
class Seconds:
    """What a table kernel says its tokens take: the first, each next, and recording one."""

    first: float = 0.0
    next: float = 0.0
    record: float = 0.0

    def of(self, step: int, record: bool) -> float:
        return (self.next if step else self.first) + (self.record if record else 0.0)


@dataclass(frozen=True)
class Table:
    """Next-token distributions by context.

    Args:
        tokens: the vocabulary; the last `order` tokens joined by a blank name a context.
        eos: id of the token that ends a sequence.
        order: how many tokens of context a row sees.
        rows: context -> probabilities, [V]; the longest known suffix of a context is used,
            and "" must be there.
        weights: name of the policy that this table evaluates.
        capture: the format that its logprobs are recorded in: rounded to it, for drills.
        seconds: how long it claims to take, for drills; None: what the clock says.
    """

    tokens: tuple[str, ...]
    eos: int
    order: int
    rows: Mapping[str, tuple[float, ...]]
    weights: str = "table"
    capture: str = "float64"
    seconds: Seconds | None = None

    @classmethod
    def parse(cls, text: str, file: str) -> Table:
        """From JSON: {"tokens": [...], "eos": "...", "order": 1, "rows": {"": [...]}, ...}.

        Raises:
            MeasurementError: not JSON, a key is missing, or a row is no distribution.
        """
        try:
            data = json.loads(text)
            tokens = tuple(map(str, data["tokens"]))
            rows = {str(c): tuple(map(float, row)) for c, row in data["rows"].items()}
            table = cls(
                tokens,
                tokens.index(data["eos"]),
                int(data.get("order", 1)),
                rows,
                str(data.get("weights", "table")),
                str(data.get("capture", "float64")),
                Seconds(**data["seconds"]) if "seconds" in data else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasurementError(
                f"{file}: not a table of next-token probabilities ({error!r})",
                hint='{"tokens": ["a", "."], "eos": ".", "order": 1, "rows": {"": [0.9, 0.1]}}',
            ) from None
        table._check(file)
        return table

    def _check(self, file: str) -> None:
        if self.capture not in CAPTURES:
            raise MeasurementError(
                f"{file}: logprobs cannot be recorded as {self.capture!r}",
                hint=f"capture is one of {', '.join(CAPTURES)}",
            )
        if "" not in self.rows:
            raise MeasurementError(f"{file}: the table has no row '' for unknown contexts")
        for context, row in self.rows.items():
            if len(row) != len(self.tokens):
                raise MeasurementError(
                    f"{file}: row {context!r} has {len(row)} values for {len(self.tokens)} tokens"
                )
            if not all(p >= 0 for p in row) or abs(math.fsum(row) - 1) > _SUM_SLACK:
                raise MeasurementError(
                    f"{file}: row {context!r} is no distribution (sum {math.fsum(row)!r})"
                )

    @cached_property
    def contexts(self) -> Mapping[str, int]:
        return {context: i for i, context in enumerate(self.rows)}

    @cached_property
    def logits_CV(self) -> Floats:
        """log p of every row, [C, V]; -inf where p = 0."""
        with np.errstate(divide="ignore"):
            return np.log(np.array(list(self.rows.values())))

    def row_of(self, prefix: Sequence[int]) -> int:
        """Index of the row that follows a prefix of token ids."""
        for keep in range(min(self.order, len(prefix)), 0, -1):
            name = " ".join(self.tokens[t] for t in prefix[-keep:])
            if name in self.contexts:
                return self.contexts[name]
        return self.contexts[""]

    def processed(self, sampling: Sampling) -> Floats:
        """Probabilities of every row after the sampling transform, [C, V]."""
        return np.exp(processed_logprobs(self.logits_CV, sampling))


@dataclass(frozen=True)
class TablePair:
    """Two tables and their transforms; exact expectations under the infer side."""

    train: Table
    infer: Table
    train_sampling: Sampling = Sampling()  # type: ignore[call-arg]
    infer_sampling: Sampling = Sampling()  # type: ignore[call-arg]

    @cached_property
    def _p_CV(self) -> Floats:
        return self.train.processed(self.train_sampling)

    @cached_property
    def _q_CV(self) -> Floats:
        return self.infer.processed(self.infer_sampling)

    def rows(self, prefix: Sequence[int]) -> tuple[Floats, Floats]:
        """(p, q) after a prefix."""
        return self._p_CV[self.train.row_of(prefix)], self._q_CV[self.infer.row_of(prefix)]

    def token_tv(self, prefix: Sequence[int]) -> float:
        """Exact TV of the next token after a prefix."""
        p_V, q_V = self.rows(prefix)
        return 0.5 * math.fsum(np.abs(p_V - q_V).tolist())

    def visits(self, prompt: Ids, width: int) -> Iterator[tuple[int, Ids, float]]:
        """(position, context, probability under infer) of everything a prompt can reach.

        Contexts are merged when no table can tell them apart, so long widths stay cheap.
        """
        keep = max(self.train.order, self.infer.order)
        state: dict[Ids, float] = {prompt[-keep:] if keep else (): 1.0}
        for position in range(width):
            following: dict[Ids, float] = {}
            for context, mass in state.items():
                yield position, context, mass
                _, q_V = self.rows(context)
                for token in np.flatnonzero(q_V):
                    if token != self.infer.eos:
                        nxt = (*context, int(token))[-keep:] if keep else ()
                        following[nxt] = following.get(nxt, 0.0) + mass * float(q_V[token])
            state = following

    def expected(self, prompt: Ids, width: int, value: Callable[[Ids], float]) -> float:
        """E_infer of the sum over tokens of value(context)."""
        return math.fsum(mass * value(c) for _, c, mass in self.visits(prompt, width))

    def mean_tv(self, prompts: Sequence[Ids], width: int) -> float:
        """Token-weighted mean TV over prompts drawn uniformly: what `population` speaks of."""
        return self.by_loss(prompts, width, self.token_tv)

    def by_loss(
        self,
        prompts: Sequence[Ids],
        width: int,
        value: Callable[[Ids], float],
        loss: Loss = "token_mean",
    ) -> float:
        """What a loss makes of value(context), over prompts drawn uniformly.

        token_mean: the mean over tokens.  sequence_sum: the mean over answers of the sum over
        an answer's tokens.  sequence_mean: the same, token t counting 1/t.
        """
        counts = 1.0 / np.arange(1, width + 1) if loss == "sequence_mean" else np.ones(width)
        total = math.fsum(
            mass * counts[position] * value(context)
            for prompt in prompts
            for position, context, mass in self.visits(prompt, width)
        )
        if loss != "token_mean":
            return total / len(prompts)
        return total / math.fsum(self.expected(p, width, lambda _: 1.0) for p in prompts)

    def token_gap(self, prefix: Ids, psi: Callable[[Floats], Floats]) -> float:
        """Exact D_psi = sum |p - q psi(p/q)| of the next token after a prefix."""
        p_V, q_V = self.rows(prefix)
        drawn_V = q_V > 0
        weight_V = np.divide(p_V, q_V, out=np.zeros_like(p_V), where=drawn_V)
        return math.fsum(np.abs(p_V - np.where(drawn_V, q_V * psi(weight_V), 0.0)).tolist())

    def weight_gap(self, prompt: Ids, width: int, psi: Callable[[Floats], Floats]) -> float:
        """Token-weighted mean of D_psi (the bias of a correction)."""
        return self.by_loss([prompt], width, lambda context: self.token_gap(context, psi))

    def sequences(self, prompt: Ids, width: int) -> Iterator[tuple[Ids, float, float]]:
        """(new tokens, probability under train, under infer) of every sequence; width small."""
        stack: list[tuple[Ids, float, float]] = [((), 1.0, 1.0)]
        while stack:
            new, big_p, big_q = stack.pop()
            if len(new) == width or (new and new[-1] == self.infer.eos):
                yield new, big_p, big_q
                continue
            p_V, q_V = self.rows((*prompt, *new))
            stack += [
                ((*new, int(token)), big_p * float(p_V[token]), big_q * float(q_V[token]))
                for token in np.flatnonzero((p_V > 0) | (q_V > 0))
            ]

    def sequence_tv(self, prompt: Ids, width: int) -> float:
        """Exact TV between the two laws of whole sequences."""
        return 0.5 * math.fsum(abs(p - q) for _, p, q in self.sequences(prompt, width))

    def reward_drift(self, prompt: Ids, width: int, reward: Callable[[Ids], float]) -> float:
        """E_train R - E_infer R, exactly."""
        return math.fsum((p - q) * reward(y) for y, p, q in self.sequences(prompt, width))
