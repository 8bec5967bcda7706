# Speculative decoding over an engine that can continue one text by several tokens at once.
#
# Each sequence is decoded by itself: a draft, one forward of the target over all its tokens, and a
# decision on each.  Its random numbers are those of its positions, so that neither its company nor
# the drafts before change them.  Numbers that a rejection leaves unused decided nothing, and are as
# good as new ones where they are used later.
# The reference of a law, and not a fast implementation: rows do not share a forward.
# Axes: S rows of a chunk, T drafted tokens, V vocabulary.

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from servanda.contract.model import Kernel
from servanda.contract.speculation import OPTION, SpeculativeConfig, speculation_of
from servanda.engines.drafters import (
    Continuation,
    Drafter,
    DraftModel,
    Lookup,
    Proposal,
    prompt_lookup,
)
from servanda.engines.local_engine import LocalEngine, Step
from servanda.errors import MeasurementError
from servanda.theory.sampling import (
    Floats,
    Ints,
    Sampling,
    columns_of,
    likeliest,
    uniforms,
)
from servanda.theory.speculation import acceptance, replacement
from servanda.traces.drafts import ACCEPTED, DRAFTED
from servanda.traces.trace import Batch


class _Drawn(NamedTuple):
    """A token, the processed logprobs that it is reported by, and the draft that begins at it."""

    token: int
    logp_V: Floats
    drafted: int = 0
    accepted: int = 0


class _Request:
    """One sequence of a chunk, and its random numbers by the position of its new tokens."""

    def __init__(self, chunk: Batch, s: int, seed: int) -> None:
        self.prompt, self.width = chunk.prompts[s], chunk.width
        self.draw_W, self.draft_W, self.accept_W = (
            uniforms(seed, stream, chunk.sequence_S[s], chunk.width)
            for stream in ("draw", "draft", "accept")
        )


class SpeculativeEngine(LocalEngine):
    """A base beside an engine's own class, which overrides how that draws.

    `healthy`: the engine's class without a fault, which runs the draft.
    """

    healthy: ClassVar[Any]  # a class of LocalEngine

    def __init__(self, kernel: Kernel) -> None:
        self._speculation = speculation_of(kernel.options)
        super().__init__(kernel)
        self._draft: SpeculativeEngine | None = None
        config = self._speculation
        if config is None:  # this is a draft itself
            return
        told = config.model_dump(exclude_none=True, exclude={"model"})
        facts = {f"option.{OPTION}": json.dumps(told, sort_keys=True)}
        if config.model is not None:
            self._draft = self._opened_draft(kernel, config)
            facts["draft"] = self._draft.describe().weights or self._draft.describe().digest
        fingerprint = {**self._description.fingerprint, **facts}
        self._description = replace(self._description, fingerprint=fingerprint)

    @abstractmethod
    def _continuations(self, chunk: Batch) -> Sequence[Continuation]:
        """An empty text in the model for each sequence, [S]."""

    def _find(self, config: SpeculativeConfig) -> Callable[[Ints], Ints]:
        """Prompt lookup: the ids that are proposed after ids."""
        return prompt_lookup(config)

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close()
        super().close()  # type: ignore[misc]  # of the base beside

    def _opened_draft(self, kernel: Kernel, config: SpeculativeConfig) -> SpeculativeEngine:
        changes = {"model": config.model, "dtype": config.dtype or kernel.dtype}
        changes["quantization"] = config.quantization
        nothing = ("options", "fault", "weights_from", "kv_cache", "head_dtype", "adapter")
        own = kernel.model_copy(update={**changes, **dict.fromkeys(nothing)})
        draft = type(self).over(self.healthy)(own)
        of, size = draft.describe(), self._description.vocab_size
        if of.vocab_size != size or (of.tokens and of.tokens != self._description.tokens):
            draft.close()
            raise MeasurementError(
                f"the draft {config.model!r} has {of.vocab_size} tokens, and the target {size}"
                if of.vocab_size != size
                else f"the draft {config.model!r} has other tokens than the target",
                hint=f"name a model with the target's tokenizer in {OPTION}.model",
            )
        return draft

    @classmethod
    def over(cls, base: Any) -> Any:
        """This class over an engine's class, with or without a fault in it."""
        own = next(c for c in cls.__mro__ if "healthy" in vars(c))
        return type(f"Speculative{base.__name__}", (own, base), {})

    def _steps(self, chunk: Batch, sampling: Sampling, seed: int, **options: Any) -> Iterator[Step]:
        record, best = options.get("record", True), options.get("best", 0)
        targets, drafters = self._continuations(chunk), self._drafters(chunk, sampling)
        rows = [
            self._row(_Request(chunk, s, seed), sampling, *of)
            for s, of in enumerate(zip(targets, drafters, strict=True))
        ]
        open_S = np.ones(len(chunk), dtype=bool)
        last: list[_Drawn] = []
        for _ in range(chunk.width):
            # an ended row repeats its last token, which no one reads
            last = [next(row) if open_S[s] else last[s] for s, row in enumerate(rows)]
            token_S = np.array([drawn.token for drawn in last], dtype=np.int64)
            logp_SV = np.stack([drawn.logp_V for drawn in last])
            columns = columns_of(logp_SV, token_S) if record else {}
            yield Step(token_S, open_S, columns | likeliest(logp_SV, best) | _counts(last))
            open_S = open_S & ~np.isin(token_S, self._description.eos)
            if not open_S.any():
                return

    def _drafters(self, chunk: Batch, sampling: Sampling) -> list[Drafter]:
        config = self._speculation
        assert config is not None  # a draft draws nothing by itself
        if self._draft is None:
            find = self._find(config)
            return [Lookup(find, self._description.vocab_size) for _ in chunk.prompts]
        greedy, logprobs = config.draft_sample_method == "greedy", self._draft._logprobs
        return [
            DraftModel(text, logprobs, sampling, self._verification, greedy=greedy)
            for text in self._draft._continuations(chunk)
        ]

    def _row(
        self, request: _Request, sampling: Sampling, target: Continuation, drafter: Drafter
    ) -> Iterator[_Drawn]:
        """One sequence, token by token; what follows its end is not drawn."""
        text, prompt_tokens, new = [*request.prompt], len(request.prompt), [*request.prompt]
        longest = self._speculation.num_speculative_tokens if self._speculation else 0
        while True:
            at = len(text) - prompt_tokens  # of the next token among the new ones
            # a prompt is read before anything is drafted, and a last token needs no draft
            most = min(longest, request.width - at - 1) if at else 0
            proposal = drafter.propose(text, most, request.draft_W[at:])
            keep = len(proposal.tokens) + 1
            logp_TV = self._logprobs(target.feed([*new, *proposal.tokens], keep), sampling)
            drawn = self._verified(request, text, at, logp_TV, proposal)
            n, accepted = len(proposal.tokens), sum(d.accepted for d in drawn)
            whole = accepted == n and not (drawn and drawn[-1].token in self._description.eos)
            if whole and (self._verification.bonus != "none" or not n):
                law_V = self._biased(logp_TV[-1:], [text])[0]
                if self._verification.bonus == "draft" and n:
                    more = drafter.propose(text, 1, request.draft_W[at + n :])
                    law_V = more.logq_TV[0] if more.tokens else law_V
                token = self._one(law_V, request.draw_W[at + n])
                text.append(token)
                drawn.append(_Drawn(token, logp_TV[-1]))
            yield drawn[0]._replace(drafted=n, accepted=accepted)
            yield from (d._replace(accepted=0) for d in drawn[1:])
            target.cut(len(text) - 1)  # the last token is fed with the next draft
            new = text[-1:]

    def _verified(
        self, request: _Request, text: list[int], at: int, logp_TV: Floats, proposal: Proposal
    ) -> list[_Drawn]:
        """The drafted tokens up to the first that is rejected, or ends the text, which grows."""
        rule, drawn = self._verification, []
        for t, (token, logq_V) in enumerate(zip(*proposal, strict=True)):
            law_V = rule.target(self._biased(logp_TV[t : t + 1], [text])[0])
            uniform = request.draw_W[at + t]
            if rule.accepts == "match":
                own = self._one(law_V, uniform)
                kept = own == token
            else:
                kept = request.accept_W[at + t] < acceptance(rule, law_V, logq_V, token)
                rest_V = law_V if kept else replacement(rule, law_V, logq_V, token)
                own = token if kept else self._one(rest_V, uniform)
            text.append(own)
            drawn.append(_Drawn(own, logp_TV[t], accepted=int(kept)))
            if not kept or own in self._description.eos:
                break
        return drawn

    def _one(self, logp_V: Floats, uniform: float) -> int:
        return int(self._draw(logp_V[None], np.array([uniform]))[0])


def _counts(drawn: Sequence[_Drawn]) -> dict[str, Floats]:
    return {
        DRAFTED: np.array([float(d.drafted) for d in drawn]),
        ACCEPTED: np.array([float(d.accepted) for d in drawn]),
    }
