# Relations: what must not change the answer to a request, one class each.
#
# A relation runs a request in two ways.  A kernel needs no reference for that: it is compared
# with itself.

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from servanda.registry import Registry
from servanda.runner.relations.observation import Ids, Observation
from servanda.runner.relations.subject import Request, Subject
from servanda.traces.corpus import joined

Unseen = Literal["", "untestable", "inconclusive"]
BLOCKS = (8, 16, 32, 64, 256)  # sizes of blocks and tiles that servers use


@dataclass(frozen=True)
class Cases:
    """The material of requests.

    Args:
        texts: token ids.
        longest: tokens of a prompt at most; width: new tokens; requests: of relations that
            need no certain lengths.
        largest: requests that are sent at once, at most.
        given: the only request, where the command line names one.
    """

    texts: Sequence[Ids]
    longest: int
    width: int
    requests: int
    largest: int
    seed: int = 0
    given: Request | None = None

    def text(self, row: int, length: int) -> Ids:
        return joined(self.texts, row * (1 + length // 8), length)

    @property
    def lengths(self) -> list[int]:
        """Lengths one below, at and one above the multiples of block sizes, ascending."""
        found = {n * block + odd for block in BLOCKS for n in (1, 2) for odd in (-1, 0, 1)}
        return sorted(n for n in found if 1 < n <= self.longest)

    def some(self, rows: int) -> Iterator[Request]:
        """Requests of unlike lengths."""
        for row in range(rows):
            length = max(2, self.longest * (row + 1) // rows)
            yield Request(self.text(row, length), self.width, seed=self.seed + row)


class Relation(ABC):
    """One relation.

    Attributes:
        name: on the command line; summary: the change that must not change an answer.
        tries: how often a case runs at most, until it differs.
        reshapes: whether the other way may add up in another order, which rounds otherwise.
    """

    name: str
    summary: str
    tries = 1
    reshapes = True

    @abstractmethod
    def cases(self, of: Cases) -> Iterator[Request]: ...

    def requests(self, of: Cases) -> list[Request]:
        """Those of the relation, or the only one that the command line names."""
        return [*self.cases(of)] if of.given is None else [of.given]

    def refusal(self, subject: Subject) -> str:
        """Why it cannot be tested on this kernel; "" where it can."""
        return ""

    def plain(self, subject: Subject, request: Request) -> Observation:
        return subject.answer(request)

    @abstractmethod
    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        """The same request the other way; `plain`: its answer before."""

    def size(self, request: Request, other: Observation) -> int | None:
        """The number that a fault may depend on modulo a block size; None where there is none."""
        return None

    @abstractmethod
    def place(self, request: Request, other: Observation) -> str:
        """In which circumstances a case is, in words."""

    def unseen(self, others: Sequence[Observation]) -> tuple[Unseen, str]:
        """Whether equal answers show nothing, and why; ("", "") where they do."""
        return "", ""

    def caveat(self, subject: Subject) -> str:
        """The part that an answer of "holds" does not cover."""
        return ""

    def cut_front(self, request: Request, n: int) -> Request:
        """The request without its first n tokens."""
        return replace(request, prompt=request.prompt[n:])


RELATIONS: Registry[Relation] = Registry("relation")


def relation(kind: Callable[[], Relation]) -> Callable[[], Relation]:
    made = kind()
    RELATIONS.add(made.name, made)
    return kind


@relation
class Replay(Relation):
    name, summary = "replay", "the same request once more"
    reshapes = False

    def cases(self, of: Cases) -> Iterator[Request]:
        yield from of.some(of.requests)

    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        return subject.answer(request)

    def place(self, request: Request, other: Observation) -> str:
        return f"when a request of {len(request.prompt)} tokens is sent twice"


@relation
class Company(Relation):
    name, summary = "company", "requests that are sent at the same time"
    tries = 3  # which requests a server runs together is a race

    def cases(self, of: Cases) -> Iterator[Request]:
        size, row = 2, 0
        while size <= of.largest:
            longest = max(2, of.longest // 4)
            lengths = [2 + (7 * n + 3) % longest for n in range(size)]
            texts = [of.text(row + n, length) for n, length in enumerate(lengths)]
            yield Request(texts[0], of.width, tuple(texts[1:]), of.seed + row)
            size, row = 2 * size, row + 1

    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        return subject.together(request)

    def place(self, request: Request, other: Observation) -> str:
        return f"among {len(request.others) + 1} requests at once"

    def caveat(self, subject: Subject) -> str:
        remote = subject.kernel.url is not None
        return "; which of them ran together the server does not say" if remote else ""


@relation
class Cache(Relation):
    name, summary = "cache", "a prefix that is read from the prefix cache"

    def cases(self, of: Cases) -> Iterator[Request]:
        for row, shared in enumerate(of.lengths):
            prompt = of.text(row, shared + 1 + 11 * row % 24)
            # the same blocks after another beginning are not the prompt's prefix
            swapped = (_unlike(prompt[0]), *prompt[1:])
            fill = (*prompt[:shared], _unlike(prompt[shared]))
            yield Request(prompt, of.width, (swapped, fill), of.seed + row)

    def refusal(self, subject: Subject) -> str:
        facts = subject.engine.describe().fingerprint
        ours = subject.kernel.url is None or "kernel.engine" in facts  # here, or serve-kernel
        if ours and not {"prefix_cache", "kernel.prefix_cache"} & facts.keys():
            return (
                "the kernel keeps no prefixes between requests (transformers does with the key "
                "prefix_cache=16)"
            )
        if facts.get("dialect") == "plain":
            return "a server of this kind is not told to compute a prefix that it has cached"
        return ""

    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        return subject.warm(request)

    def size(self, request: Request, other: Observation) -> int | None:
        return _shared(request)

    def place(self, request: Request, other: Observation) -> str:
        cached = "" if other.cached is None else f", and {other.cached} were read from the cache"
        return (
            f"when {_shared(request)} of the prompt's {len(request.prompt)} tokens are shared "
            f"with an earlier request{cached}"
        )

    def unseen(self, others: Sequence[Observation]) -> tuple[Unseen, str]:
        known = [one.cached for one in others if one.cached is not None]
        if any(known):
            return "", ""
        if known:
            return "untestable", "the server says that it read no token from a cache"
        return "inconclusive", (
            "the answers are equal, and the server does not say whether it read its cache (vLLM: "
            "--enable-prompt-tokens-details)"
        )

    def cut_front(self, request: Request, n: int) -> Request:
        others = tuple(other[n:] for other in request.others if len(other) > n)
        return replace(request, prompt=request.prompt[n:], others=others)


def _unlike(token: int) -> int:
    """An id that is not the token's."""
    return token - 1 if token else 1


def _shared(request: Request) -> int:
    """Tokens of the longest prefix that the prompt shares with another request."""

    def common(other: Ids) -> int:
        alike = (a == b for a, b in zip(request.prompt, other, strict=False))
        return len([*itertools.takewhile(bool, alike)])

    return max(map(common, request.others), default=0)


@relation
class Order(Relation):
    name, summary = "order", "requests that were answered before"
    reshapes = False

    def cases(self, of: Cases) -> Iterator[Request]:
        requests = [*of.some(of.requests)]
        for n, one in enumerate(requests[: max(2, of.requests // 2)]):
            rest = [r.prompt for r in (*requests[n + 1 :], *requests[:n])]
            yield replace(one, others=tuple(rest[:3]))

    def plain(self, subject: Subject, request: Request) -> Observation:
        return subject.after(request, request.others[::-1])

    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        return subject.after(request, request.others)

    def place(self, request: Request, other: Observation) -> str:
        return f"when {len(request.others)} requests before it come in another order"


@relation
class Prefill(Relation):
    name, summary = "prefill", "scoring the tokens that were generated"

    def cases(self, of: Cases) -> Iterator[Request]:
        yield from of.some(of.requests)

    def refusal(self, subject: Subject) -> str:
        if "prefill" not in subject.engine.describe().scores:
            return "no endpoint scores a prompt here (the relation length compares one token)"
        return ""

    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        return subject.scored(request, plain.tokens)

    def place(self, request: Request, other: Observation) -> str:
        return f"by prefill, after a prompt of {len(request.prompt)} tokens"


@relation
class Length(Relation):
    name, summary = "length", "where the prompt ends and the answer begins"

    def cases(self, of: Cases) -> Iterator[Request]:
        for row, length in enumerate(of.lengths):
            yield Request(of.text(row, length - 1), 2, seed=of.seed + row)

    def plain(self, subject: Subject, request: Request) -> Observation:
        return subject.answer(request, width=2)

    def other(self, subject: Subject, request: Request, plain: Observation) -> Observation:
        if len(plain.tokens) < 2:  # the first token ended it
            return Observation(plain.tokens[:1], ({},))
        first, second = plain.tokens[:2]
        longer = replace(request, prompt=(*request.prompt, first))
        after = subject.next(longer, second)
        return Observation((first, second), ({}, after.logp[0]))

    def size(self, request: Request, other: Observation) -> int | None:
        return len(request.prompt) + 1

    def place(self, request: Request, other: Observation) -> str:
        n = len(request.prompt)
        return f"as the first token after {n + 1} tokens of prompt, and as the second after {n}"
