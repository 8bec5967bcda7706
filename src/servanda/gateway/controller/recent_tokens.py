# The tokens that were scored last, and the advice that they give when a slice is diverted.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from servanda.contract.model import Contract
from servanda.judgement.breakdown import Advice
from servanda.traces.request_log import Request
from servanda.traces.trace import TracePair

_TOKENS = 100_000  # the most that are kept


class RecentTokens:
    """The last scored requests, with both kernels' logprobs; kept in memory alone."""

    def __init__(self) -> None:
        self._pairs: deque[TracePair] = deque()
        self._tokens, self._number = 0, count()

    def add(self, requests: Sequence[Request], pair: TracePair) -> None:
        """Keep the pair of some requests; the oldest ones are dropped."""
        names = sorted({name for request in requests for name in request.labels})
        labels = {name: tuple(r.labels.get(name, "") for r in requests) for name in names}
        # requests of one user may depend on each other
        users = tuple(r.key or f"request {next(self._number)}" for r in requests)
        self._pairs.append(replace(pair, group_S=users, labels=labels))
        self._tokens += len(pair.infer.token_N)
        while self._tokens > _TOKENS and len(self._pairs) > 1:
            self._tokens -= len(self._pairs.popleft().infer.token_N)

    def advice(self, contract: Contract) -> Advice | None:
        """The likely cause of their gap, and what to do; None without a scored token."""
        # a gateway that diverts nothing does not need these
        from servanda.judgement.causes.token_table import TokenTable
        from servanda.runner.round_advice import advice_of

        table = TokenTable.of(self._steps())
        if table is None:
            return None
        # a row of a scored batch is no place on the server
        numbers = {name: of for name, of in table.numbers.items() if name != "context.row"}
        found = advice_of(replace(table, numbers=numbers), contract)
        return replace(found, corrections=())  # no one trains on these tokens

    def _steps(self) -> Iterator[tuple[int, TracePair, Sequence[str]]]:
        for pair in tuple(self._pairs):
            yield 1, pair, [""] * len(pair.infer.length_S)
