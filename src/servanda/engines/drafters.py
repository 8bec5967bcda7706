# Who proposes tokens: prompt lookup, or a draft model.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from servanda.contract.speculation import SpeculativeConfig
from servanda.theory.sampling import Floats, Ints, Sampling, draw
from servanda.theory.speculation import Verification


class Continuation(Protocol):
    """One text in a model: what is fed stays in its cache, until it is cut off."""

    def feed(self, tokens: Sequence[int], keep: int) -> Any:
        """Raw logits [keep, V] after the last of the tokens, which follow those fed before."""
        ...

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...


class Proposal(NamedTuple):
    """Drafted tokens, and by which probabilities the draft says that it drew each."""

    tokens: list[int]
    logq_TV: list[Floats]


class Drafter(Protocol):
    """Proposes tokens for one text."""

    def propose(self, text: Sequence[int], most: int, uniform_W: Floats) -> Proposal:
        """At most `most` tokens after the text; uniform_W: of the next tokens of the text."""
        ...


def certain(token: int, size: int) -> Floats:
    """The logprobs of a draft that is sure of its token, [V]."""
    logq_V = np.full(size, -np.inf)
    logq_V[token] = 0.0
    return logq_V


class Lookup:
    """The tokens that followed where the end of the text occurred before.

    Args:
        find: the ids that are proposed after ids, both [T].
        size: of the vocabulary.
    """

    def __init__(self, find: Callable[[Ints], Ints], size: int) -> None:
        self._find, self._size = find, size

    def propose(self, text: Sequence[int], most: int, uniform_W: Floats) -> Proposal:
        tokens = [int(token) for token in self._find(np.array(text))[:most]]
        return Proposal(tokens, [certain(token, self._size) for token in tokens])


def prompt_lookup(config: SpeculativeConfig) -> Callable[[Ints], Ints]:
    """As vLLM looks up: the longest end of the text that occurred before, where it did first.

    >>> config = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    >>> prompt_lookup(config)(np.array([5, 6, 7, 8, 5, 6])).tolist()
    [7, 8]
    """

    def find(ids: Ints) -> Ints:
        longest = min(config.prompt_lookup_max, len(ids) - 1)
        for size in range(longest, config.prompt_lookup_min - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
            found = np.flatnonzero((windows == ids[-size:]).all(axis=1))
            if len(found):
                start = found[0] + size
                return ids[start : start + config.num_speculative_tokens]
        return ids[:0]

    return find


class DraftModel:
    """A smaller model that draws a few tokens ahead, one after another.

    Args:
        continuation: one text in the draft's model.
        logprobs: the processed logprobs of its logits.
        sampling: the target's transform, which the draft takes over.
        rule: says at which multiple of the temperature it draws.
        greedy: it proposes its most likely token, and is certain of it.
    """

    def __init__(
        self,
        continuation: Continuation,
        logprobs: Callable[[Any, Sampling], Floats],
        sampling: Sampling,
        rule: Verification,
        *,
        greedy: bool,
    ) -> None:
        self._continuation, self._logprobs = continuation, logprobs
        self._sampling, self._greedy = sampling, greedy
        self._drawn = sampling.model_copy(
            update={"temperature": sampling.temperature * rule.drawn_at}
        )
        self._fed: list[int] = []

    def propose(self, text: Sequence[int], most: int, uniform_W: Floats) -> Proposal:
        kept = next(
            (i for i, (a, b) in enumerate(zip(self._fed, text, strict=False)) if a != b),
            min(len(self._fed), len(text)),
        )
        kept = min(kept, len(text) - 1)  # the last token is fed for its logits
        self._continuation.cut(kept)
        self._fed = self._fed[:kept]
        proposal, new = Proposal([], []), [*text[kept:]]
        for uniform in uniform_W[:most]:
            logits_1V = self._continuation.feed(new, 1)
            self._fed += new
            told_V = self._logprobs(logits_1V, self._sampling)[0]
            if self._greedy:
                token = int(told_V.argmax())
                told_V = certain(token, len(told_V))
            else:
                drawn_1V = self._logprobs(logits_1V, self._drawn)
                token = int(draw(drawn_1V, np.array([uniform]))[0])
            proposal.tokens.append(token)
            proposal.logq_TV.append(told_V)
            new = [token]
        return proposal
