# Dialects: how one kind of server is asked, and how its answers read.
#
# A dialect owns no socket: it makes requests, and reads the replies that someone fetched.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from numpy.typing import NDArray

from servanda.contract.kernel_string import DIALECTS as DIALECTS
from servanda.contract.model import Path
from servanda.engines.http.responses import Best, Part
from servanda.engines.http.transport import Transport
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.json_fields import words

Meaning = Literal["raw", "processed"]
Request = tuple[str, Mapping[str, Any]]  # endpoint and body
Ids = tuple[int, ...]
Mute = Literal["completions", "chats", "streamed chats"]

BEST = 8  # top-k tokens of a drawn step: what the guard of the sampler reads
# sampling parameters of which 1 changes nothing; of the others it is 0
_ONE = ("temperature", "top_p", "typical_p", "repetition_penalty", "repeat_penalty")
TOP = 20  # of a golden position; the most that vLLM gives unless it is told otherwise

NEUTRAL = Sampling(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Server:
    """A server's description.

    Args:
        served: what it calls the model.
        context: the largest number of tokens that it runs, prompt and new ones together.
        vocab_size, tokens, eos, weights: as in Description; 0 and empty where unknown.
        scores: paths by which it scores given tokens.
        top: top-k tokens that it gives at most of a given position; 0 where none.
        meaning: its statement about its logprobs; None if none.
        defaults: what a request gets that names no sampling: temperature, top_p, top_k, min_p and
            penalties, those that are not neutral at least; None where it does not say.
        facts: what else may change a number, for the fingerprint.
    """

    served: str
    version: str = ""
    context: int | None = None
    vocab_size: int = 0
    tokens: str = ""
    eos: Ids = ()
    weights: str = ""
    scores: tuple[Path, ...] = ()
    top: int = 0
    meaning: Meaning | None = None
    defaults: Mapping[str, float] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def fills_in(self) -> dict[str, float] | None:
        """Those of the defaults that change a draw."""
        if self.defaults is None:
            return None
        return {k: v for k, v in self.defaults.items() if v not in (-1, float(k in _ONE))}


@dataclass(frozen=True)
class Serving:
    """How a server answers chats and completions of users, beside what measuring asks of it.

    Args:
        limit: new tokens that a request gets at most which names no number; None where it is what
            the context has room for, or where it does not say.
        mute: requests that it answers without token ids: completions, chats, streamed chats.
        masks: whether it says that tools which a chat may call make tokens impossible.
    """

    limit: int | None = None
    mute: frozenset[Mute] = frozenset()
    masks: bool = False


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence that is asked for.

    Args:
        prompt, given: token ids; `given` is empty where the server draws.
        width: new tokens at most.
        seed: of this sequence alone.
        best: how many of the most likely tokens are wanted beside the own; 0: none.
        record: whether logprobs are wanted at all.
        salt, warm: as of `Batch`; without a salt the request is as that of any client.
    """

    prompt: Ids
    width: int
    sampling: Sampling
    seed: int
    given: Ids = ()
    best: int = 0
    record: bool = True
    salt: str | None = None
    warm: bool = False


@dataclass(frozen=True)
class Answer:
    """What came back of one sequence: a logprob and the top-k tokens of each token.

    Args:
        cached: tokens of the prompt that a cache gave; None where the server does not say.
        routes: the experts of the pass that predicted each token, [tokens, ...], as
            `http.routed_experts` reads them; None where the server does not say.
    """

    tokens: Ids
    logp: tuple[float, ...]
    best: tuple[Best, ...]
    cached: int | None = None
    routes: NDArray[Any] | None = None


class Dialect(ABC):
    """One kind of server: how it is asked, and how its replies read.

    Attributes:
        meaning: what its logprobs are, unless the kernel declares otherwise.
        encodes, decodes: whether it has a tokenizer to ask.
        flush: the endpoint that empties its cache of prefixes, where scoring needs that.
        seed_bits: how long a seed may be.
    """

    name: str
    meaning: Meaning = "raw"
    encodes: bool = False
    decodes: bool = False
    flush: str | None = None
    seed_bits: int = 31

    @abstractmethod
    def meet(
        self, transport: Transport, served: str | None, known: Server | None = None
    ) -> Server | None:
        """The server's description; None if it is of another kind.

        Args:
            known: what it said before, where that is only examined again.
        """

    def serving(self, transport: Transport, server: Server) -> Serving:
        return Serving()

    @abstractmethod
    def refusal(self, sampling: Sampling, meaning: Meaning) -> tuple[str, str] | None:
        """Why processed logprobs of a transform cannot be had, and the next move."""

    @abstractmethod
    def draw(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request: ...

    @abstractmethod
    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer: ...

    def score(self, sequence: SequenceRequest, server: Server, path: Path) -> Request:
        raise self._unasked("score given tokens")

    def scored(self, reply: Part, sequence: SequenceRequest, server: Server, path: Path) -> Answer:
        raise self._unasked("score given tokens")

    def stream(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request:
        endpoint, body = self.draw(sequence, server, meaning)
        return endpoint, {**body, "stream": True}

    @abstractmethod
    def event(self, event: Part, before: int) -> tuple[int, bool]:
        """How many tokens there are after an event, and whether that is all of them."""

    def encode(self, text: str, server: Server) -> Request:
        raise self._unasked("encode a text")

    def encoded(self, reply: Part) -> list[int]:
        return list(reply["tokens"].tokens(0))

    def decode(self, ids: Ids, server: Server) -> Request:
        raise self._unasked("decode ids")

    def decoded(self, reply: Part) -> str:
        raise self._unasked("decode ids")

    def _unasked(self, verb: str) -> MeasurementError:
        return MeasurementError(
            f"no endpoint of a {self.name} server is asked to {verb}",
            hint="let a kernel that loads the checkpoint be the other side",
        )


# a chat that asks for next to nothing, to see how one is answered
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def best_of(sampling: Sampling, server: Server, best: int = BEST) -> int:
    """How many of the top-k tokens to ask for: a filter leaves no more than its top_k."""
    most = [best, sampling.top_k or best, server.vocab_size or best, server.top or BEST]
    return min(most)


_SAMPLING = ("temperature", "top_", "min_p", "typical_p", "penalty")


def without_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request that names no sampling, as clients send it that rely on a server's defaults."""
    return {
        key: without_sampling(value) if key == "sampling_params" else value
        for key, value in body.items()
        if not any(word in key for word in _SAMPLING) or "logprobs" in key
    }


def neutral(sampling: Sampling) -> bool:
    """Whether raw logprobs are processed ones: nothing is divided, nothing is filtered."""
    return sampling.temperature == 1.0 and not sampling.filters


def complete(part: Part, tokens: Ids, width: int, ended: str, ends: Ids = ()) -> None:
    """Refuse a response that is neither ended by the model nor of the requested length.

    Args:
        ended: "stop" where the model ended it, "length" where the limit did.
        ends: the tokens that end an answer, of a server that returns them; () where unknown.
    """
    if ended == "length" and len(tokens) != width:
        problem = f"has {len(tokens)} tokens and ended by its length, and {width} were asked for"
    elif ended not in ("stop", "length"):
        problem = f"ended by {ended!r}"
    elif not 1 <= len(tokens) <= width:
        problem = f"has {len(tokens)} tokens, and 1 to {width} were asked for"
    elif ended == "stop" and ends and tokens[-1] not in ends:
        problem = f"ended by 'stop' at token {tokens[-1]}, which ends no answer (those are {ends})"
    else:
        return
    raise part.refuse(
        f"{part.place or 'the reply'} {problem}",
        "the server cut or stopped it: look at its context length and its log",
    )


def with_end(answer: Answer, end: int, width: int) -> Answer:
    """The answer with the token that ended it, where a server leaves it out of its ids.

    No one knows the probability of that step then: it is NaN, and counts as missing.
    """
    if answer.tokens[-1:] == (end,) or len(answer.tokens) >= width:
        return answer
    tokens, logp = (*answer.tokens, end), (*answer.logp, math.nan)
    return replace(answer, tokens=tokens, logp=logp, best=(*answer.best, ()))


def only_model(transport: Transport, served: str | None) -> tuple[str, Part]:
    """The name of the served model, and its entry in /v1/models.

    Raises:
        MeasurementError: none of that name, or several and no name.
    """
    listed = transport.ask("/v1/models")["data"]
    models = {part["id"].text(): part for part in listed.items()}
    names = words(", ".join(models))
    if served is not None and served not in models:
        raise MeasurementError(
            f"{transport.url} serves no model {served!r}, only {names or 'none at all'}",
            hint="correct kernels.*.served",
        )
    if served is None and len(models) != 1:
        raise MeasurementError(
            f"{transport.url} serves {len(models)} models: {names or 'none'}",
            hint="name one as kernels.*.served" if models else "load a model on the server",
        )
    name = served if served is not None else next(iter(models))
    return name, models[name]
