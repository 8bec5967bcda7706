# Relations: what must not change the answer to a request, one class each.
#
# A relation runs a request in two ways.  A kernel needs no reference for that: it is compared
# with itself.

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from servanda.registry import Registry
from servanda.runner.relations.client import DIALECTS
from servanda.runner.relations.observation import Difference, Ids, Observation, difference
from servanda.runner.relations.subject import Request, Subject
from servanda.theory.sampling import uniforms
from servanda.traces.corpus import joined

Unseen = Literal["", "untestable", "inconclusive"]
BLOCKS = (8, 16, 32, 64, 256)  # sizes of blocks and tiles that servers use
MORE = 24  # tokens by which a prompt is longer than what it shares, at most
_COPIES = 8  # of a client's own request that are sent at once
_AT_ONCE = 8_192  # tokens of one group of requests, at most


@dataclass(frozen=True)
class Cases:
    """The material of requests.

    Args:
        texts: token ids.
        longest: tokens of a prompt at most; width: new tokens; requests: of relations that
            need no certain lengths.
        largest: requests that are sent at once, at most.
        given: the only request, where the command line names one.
        round: 0, or another number for requests that were not sent before.
        like: whether a client's own request is at hand.
    """

    texts: Sequence[Ids]
    longest: int
    width: int
    requests: int
    largest: int
    seed: int = 0
    given: Request | None = None
    round: int = 0
    like: bool = False

    def text(self, row: int, length: int) -> Ids:
        return joined(self.texts, (row + 37 * self.round) * (1 + length // 8), length)

    @property
    def lengths(self) -> list[int]:
        """Lengths one below, at and one above the multiples of block sizes, ascending."""
        found = {n * block + odd for block in BLOCKS for n in (1, 2) for odd in (-1, 0, 1)}
        return sorted(n for n in found if 1 < n <= self.longest)

    def some(self, rows: int) -> Iterator[Request]:
        """Requests of unlike lengths."""
        for row in range(rows):
            length = self.longest * row // max(1, rows - 1)
            yield Request(self.text(row, max(1, length)), self.width, seed=self.seed + row)

    def groups(self) -> Iterator[Request]:
        """Requests that are sent at once: groups of random sizes, and two of the largest."""
        draws = uniforms(self.seed, "groups", self.round, 3)
        parts = (0.1, 0.4, 1.0)
        sizes = {
            2 + int(u * part * (self.largest - 1)) for u, part in zip(draws, parts, strict=True)
        }
        long = max(4, min(self.longest, _AT_ONCE // self.largest))
        short = max(4, long // 4)
        shapes = [(size, short) for size in sorted({2, *sizes, self.largest})]
        for size, most in (*shapes, (self.largest, long)):
            prompts = [self.text(n, 2 + (7 * n + 3) % (most - 1)) for n in range(size)]
            yield Request(prompts[0], self.width, tuple(prompts[1:]), self.seed)


@dataclass(frozen=True)
class Pair:
    """A request, and its answers in two ways.

    Args:
        where: the circumstances of the second one, in words.
        seeded: whether both draw by one seed.
    """

    request: Request
    plain: Observation
    other: Observation
    where: str
    seeded: bool = True

    @cached_property
    def difference(self) -> Difference:
        return difference(self.plain, self.other)


class Relation(ABC):
    """One change that must not change an answer.

    Attributes:
        name: on the command line.
        compared: the share of the tokens that has to be comparable at least.
    """

    name: str
    compared = 0.25

    @abstractmethod
    def cases(self, of: Cases) -> Iterator[Request]: ...

    def requests(self, of: Cases) -> list[Request]:
        """Those of the relation, or the only one that the command line names."""
        return [*self.cases(of)] if of.given is None else [of.given]

    def sends(self, request: Request) -> int:
        """Requests to the kernel that a case takes, about."""
        return 2

    def refusal(self, subject: Subject) -> str:
        """Why it cannot be tested on this kernel; "" where it can."""
        return ""

    @abstractmethod
    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        """The request in two ways."""

    def size(self, pair: Pair) -> int | None:
        """The number that a fault may depend on modulo a block size; None where there is none."""
        return None

    def unseen(self, pairs: Sequence[Pair]) -> tuple[Unseen, str]:
        """Whether equal answers show nothing, and why; ("", "") where they do."""
        return "", ""

    def caveat(self, subject: Subject) -> str:
        """The part that an answer of "holds" does not cover."""
        return ""

    def smaller(self, subject: Subject) -> bool:
        """Whether a counterexample can be made smaller."""
        return True

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
    name = "replay"

    def cases(self, of: Cases) -> Iterator[Request]:
        yield from of.some(of.requests)

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        where = f"when a request of {len(request.prompt)} tokens is sent twice"
        yield Pair(request, subject.alone(request), subject.answer(request), where)


@relation
class PrefillDecode(Relation):
    name = "prefill-decode"

    def cases(self, of: Cases) -> Iterator[Request]:
        yield from of.some(of.requests)

    def refusal(self, subject: Subject) -> str:
        if "prefill" not in subject.engine.describe().scores:
            return "no endpoint scores a prompt here (prompt-length compares one token)"
        return ""

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        plain = subject.alone(request)
        where = f"by prefill, after a prompt of {len(request.prompt)} tokens"
        again = subject.scored(request.prompt, plain.tokens)
        yield Pair(request, plain, again, where, seeded=False)


@relation
class PromptLength(Relation):
    """Where the prompt ends and the answer begins."""

    name = "prompt-length"

    def cases(self, of: Cases) -> Iterator[Request]:
        for row, length in enumerate(of.lengths):
            yield Request(of.text(row, length - 1), 2, seed=of.seed + row)

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        request = replace(request, width=2)
        plain, n = subject.alone(request), len(request.prompt)
        if len(plain.tokens) < 2:  # the first token ended it
            return
        first, second = plain.tokens
        after = subject.next(replace(request, prompt=(*request.prompt, first)), second)
        where = f"as the first token after {n + 1} tokens of prompt, and as the second after {n}"
        # the token that is drawn now may be another one
        other = Observation((first, after.tokens[0]), ({}, after.logp[0]))
        yield Pair(request, plain, other, where, seeded=False)

    def size(self, pair: Pair) -> int | None:
        return len(pair.request.prompt) + 1


@relation
class Batching(Relation):
    name = "batching"

    def cases(self, of: Cases) -> Iterator[Request]:
        yield from of.groups()

    def sends(self, request: Request) -> int:
        return 2 * (1 + len(request.others))

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        group = (request.prompt, *request.others)
        alone = [subject.alone(replace(request, prompt=one, others=())) for one in group]
        for n, (plain, other) in enumerate(zip(alone, subject.together(request), strict=True)):
            at = f"request {n + 1} " if n else ""
            yield Pair(request, plain, other, f"{at}among {len(group)} requests at once")

    def caveat(self, subject: Subject) -> str:
        return "; which of them ran together the server does not say" if subject.remote else ""


@relation
class Client(Relation):
    """Several choices, streaming, a client's own request."""

    name = "client"
    compared = 0.1  # a request without a seed is answered otherwise after its first token

    def cases(self, of: Cases) -> Iterator[Request]:
        yield from of.some(of.requests)

    def requests(self, of: Cases) -> list[Request]:
        return super().requests(of)[: 1 if of.like else None]

    def sends(self, request: Request) -> int:
        return 7

    def refusal(self, subject: Subject) -> str:
        if not subject.remote:
            return "no server, and so no clients"
        dialect = subject.engine.describe().fingerprint.get("dialect")
        if dialect not in DIALECTS:
            return f"a server of the kind {dialect} is not asked by /v1/completions"
        return ""

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        client = subject.asked(request)
        (plain,) = subject.choices(client)
        whose = "as your request" if subject.like else f"after {len(client.prompt)} tokens"
        fixed = client.fields.get("seed") is not None
        again = subject.choices(client)[0]
        yield Pair(request, plain, again, f"sent again, {whose}", fixed)
        for streamed in subject.choices(client, stream=True):
            yield Pair(request, plain, streamed, f"streamed, {whose}", fixed)
        n = client.choices
        # raw logprobs are those of a prompt, whatever a request's sampling is
        scores = "prefill" in subject.engine.describe().scores and subject.raw(client)
        for at, choice in enumerate(subject.choices(client, n)):
            where = f"as choice {at + 1} of {n}, {whose}"
            yield Pair(request, plain, choice, where, seeded=False)
            if scores:
                scored = subject.scored(client.prompt, choice.tokens)
                where = f"scored by prefill, {where}"
                yield Pair(request, choice, scored, where, seeded=False)
        if subject.like:
            for other in subject.crowd(client, _COPIES):
                where = f"among {_COPIES} copies at once, {whose}"
                yield Pair(request, plain, other, where, fixed)

    def smaller(self, subject: Subject) -> bool:
        return subject.like is None


@relation
class PrefixCache(Relation):
    """A prefix that is read from the prefix cache."""

    name = "prefix-cache"

    def cases(self, of: Cases) -> Iterator[Request]:
        for row, shared in enumerate(of.lengths):
            # after a hit there is one token left to compute, or there are more
            more = 11 * row % MORE if row % 3 == 2 else 0
            prompt = of.text(row, shared + 1 + more)
            # the same blocks after another beginning are not the prompt's prefix
            swapped = (_unlike(prompt[0]), *prompt[1:])
            fill = (*prompt[:shared], _unlike(prompt[shared]))
            yield Request(prompt, of.width, (swapped, fill), of.seed + row)

    def sends(self, request: Request) -> int:
        return 8 + len(request.others)

    def refusal(self, subject: Subject) -> str:
        facts = subject.engine.describe().fingerprint
        ours = not subject.remote or "kernel.engine" in facts  # here, or serve-kernel
        if ours and not {"prefix_cache", "kernel.prefix_cache"} & facts.keys():
            return (
                "the kernel keeps no prefixes between requests (transformers does with the key "
                "prefix_cache=16)"
            )
        if facts.get("dialect") == "plain":
            return "a server of this kind is not told to compute a prefix that it has cached"
        return ""

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        plain, salt = subject.alone(request), subject.fill(request)
        shared, size = _shared(request), len(request.prompt)
        where = f"when {shared} of the prompt's {size} tokens are shared with an earlier request"
        for how in (where, "when it is sent a second time under its salt"):
            other = subject.warm(request, salt)
            read = "" if other.cached is None else f", and {other.cached} were read from the cache"
            yield Pair(request, plain, other, f"{how}{read}")
        if not subject.remote:
            return
        for again in ("", ", the second time"):
            other = replace(subject.plain(request), cached=None)
            yield Pair(request, plain, other, f"when it is sent without a salt{again}")
        if "prefill" in subject.engine.describe().scores and size > 1:
            text = (*request.prompt[1:], *plain.tokens)
            cold = subject.scored(request.prompt[:1], text)
            subject.scored(request.prompt[:1], text[::-1])  # what a server keeps is of this one
            other = subject.scored(request.prompt[:1], text, salt=salt)
            where = f"when its {size} tokens of prompt are scored after they were cached"
            yield Pair(request, cold, other, where, seeded=False)

    def size(self, pair: Pair) -> int | None:
        return _shared(pair.request)

    def unseen(self, pairs: Sequence[Pair]) -> tuple[Unseen, str]:
        known = [pair.other.cached for pair in pairs if pair.other.cached is not None]
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
    """Requests that were answered before, and time."""

    name = "order"

    def cases(self, of: Cases) -> Iterator[Request]:
        requests = [*of.some(of.requests)]
        for n, one in enumerate(requests):
            rest = [r.prompt for r in (*requests[n + 1 :], *requests[:n])]
            yield replace(one, others=tuple(rest[:3]))

    def sends(self, request: Request) -> int:
        return 1 + len(request.others)

    def pairs(self, subject: Subject, request: Request) -> Iterator[Pair]:
        plain, before = subject.alone(replace(request, others=())), subject.sent
        where = f"after {before} requests of other tests, and {len(request.others)} just before it"
        yield Pair(request, plain, subject.after(request), where)
