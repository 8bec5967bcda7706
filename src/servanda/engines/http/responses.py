# Replies: what a server said, read strictly.
#
# A value that is not what it should be is an error that names server, endpoint and field;
# a logprob that a server does not know is NaN, and never a number that it did not send.
# Not by msgspec: servers differ in what else they say, and a message quotes what they said.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from servanda.errors import MeasurementError
from servanda.registry import cut
from servanda.traces import json_fields
from servanda.traces.json_fields import LineError, json_text, unique_keys, words

_SHOWN = 120  # characters of a server's words that a message repeats
_HEAD = 8  # token ids of a list that a message shows
_LEAST = -9999.0  # what vLLM writes where it means -inf, and no server below that
_SLACK = 1e-5  # a softmax in float32 may exceed 1 by rounding
_MOST_ID = 2**31 - 1
_ODD = "this reply is not one of the declared dialect: check `dialect` and the server's version"

_NO_BOS = "serve the model without a BOS token of the server's own, and without a template"
Best = tuple[tuple[int, float], ...]  # ids and logprobs of the top-k tokens, best first


@dataclass(frozen=True)
class Part:
    """A value of a reply, and where it was found."""

    value: Any
    place: str
    url: str
    endpoint: str

    @classmethod
    def parse(
        cls, text: bytes | str, url: str, endpoint: str, shown: Callable[[str], str] = str
    ) -> Part:
        """The whole of a reply.

        Args:
            shown: what a message may repeat of a text.

        Raises:
            MeasurementError: it is not JSON, or names a field twice.
        """
        try:
            value = json.loads(text, object_pairs_hook=partial(unique_keys, noun="field"))
        except (ValueError, RecursionError, LineError) as error:
            body = text.decode(errors="replace") if isinstance(text, bytes) else text
            page = body.lstrip()[:1] == "<"
            content = "an HTML page" if page else f"no JSON ({words(shortened(str(error)))})"
            said = words(repr(shortened(shown(body).strip())))
            raise MeasurementError(
                f"{url}{endpoint} answered with {content}: {said}",
                hint="is it the right server? A gateway between may answer in its place",
            ) from None
        return cls(value, "", url, endpoint)

    def wrong(self, wanted: str, hint: str = _ODD) -> MeasurementError:
        """The error that this value is; `wanted` says what it should have been."""
        field = self.place or "the reply"
        shown = json_text(self.value, _SHOWN)
        return MeasurementError(
            f"{self.url}{self.endpoint}: {field} is {shown}, not {wanted}", hint=hint
        )

    def refuse(self, what: str, hint: str) -> MeasurementError:
        """The error of a field whose value is well formed."""
        what = f"{self.place or 'the reply'} is refused" if json_fields.hides_data() else what
        return MeasurementError(f"{self.url}{self.endpoint}: {what}", hint=hint)

    def __getitem__(self, key: str) -> Part:
        """A field that has to be there."""
        part = self.get(key)
        if part is None:
            raise self.refuse(f"{self._at(key)} is missing", _ODD)
        return part

    def get(self, key: str) -> Part | None:
        """A field; None where it is absent or null."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        value = self.value.get(key)
        return None if value is None else self._part(value, self._at(key))

    def items(self, length: int | None = None, what: str = "entries") -> list[Part]:
        """The elements of a list, of a given length if it is said."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if length is not None and len(self.value) != length:
            problem = f"{self.place} has {len(self.value)} entries for {length} {what}"
            raise self.refuse(problem, "the server lost or added some: nothing can be aligned")
        return [self._part(v, f"{self.place}[{i}]") for i, v in enumerate(self.value)]

    def fields(self) -> Iterator[tuple[str, Part]]:
        """The fields of an object."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for key, value in self.value.items():
            yield key, self._part(value, self._at(words(key)))

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def whole(self) -> int:
        """A whole number, not negative."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_ID:
            raise self.wrong("a whole number")
        return value

    def number(self) -> float:
        """A finite number; a whole one stays whole."""
        if not math.isfinite(self._float("a number")):
            raise self.wrong("a number")
        return self.value

    def token(self, vocab_size: int) -> int:
        """A token id; one beyond the known vocabulary is refused.

        Args:
            vocab_size: 0 where it is not known.
        """
        token = self.whole()
        if vocab_size and token >= vocab_size:
            raise self.refuse(
                f"{self.place} is the token id {token}, and the vocabulary ends at "
                f"{vocab_size - 1}",
                "the server's output layer is padded beyond the tokenizer: mask those rows "
                "(a token that has no text is never trained on)",
            )
        return token

    def tokens(self, vocab_size: int, length: int | None = None) -> tuple[int, ...]:
        """A list of token ids."""
        return tuple(part.token(vocab_size) for part in self.items(length))

    def logprob(self) -> float:
        """A logprob, nats; NaN where the server does not know it.

        Unknown are null, NaN and everything from -9999 down, which servers write for -inf.
        """
        value = self._float("a logprob") if self.value is not None else math.nan
        if value != value or value <= _LEAST:
            return math.nan
        if value > _SLACK:
            raise self.wrong("a logprob: those are never above 0")
        return float(value)

    def log_of_probability(self) -> float:
        """The log of a probability, nats; NaN where it is 0, for nothing of mass 0 is drawn."""
        value = self._float("a probability") if self.value is not None else math.nan
        if value != value or value == 0:
            return math.nan
        if not 0 < value <= 1 + _SLACK:
            raise self.wrong("a probability")
        return math.log(value)

    def _float(self, wanted: str) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.wrong(wanted)
        return self.value

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _part(self, value: Any, place: str) -> Part:
        return Part(value, place, self.url, self.endpoint)


def same_prompt(part: Part, sent: Sequence[int]) -> None:
    """Refuse a server that ran another prompt than the one it was sent.

    Args:
        part: the token ids that it says it ran.
    """
    ran = part.tokens(0)
    if ran != tuple(sent):
        raise part.refuse(
            f"{part.place} is {_head(ran)}, and {_head(sent)} was sent: the server put a token "
            "before the prompt (BOS), or encoded it anew",
            _NO_BOS,
        )


def same_number(part: Part, sent: Sequence[int], hint: str = _NO_BOS) -> None:
    """The same for a server that reports only the number of tokens.

    Args:
        part: their number.
    """
    if part.whole() != len(sent):
        raise part.refuse(
            f"{part.place} is {part.value}, and {len(sent)} tokens were sent: the server put a "
            "token before the prompt (BOS), or encoded it anew",
            hint,
        )


def likeliest(
    pairs: Sequence[tuple[int, float]], drawn: int, logp: float, k: int, place: Part, few: bool
) -> Best:
    """The k top-k tokens of a step, best first; shorter only where `few` may be.

    A server that appends the drawn token gives k + 1: then it is taken out again, since which
    ids are listed has to be fixed before the draw.

    Raises:
        MeasurementError: another number of them, an id twice, or another value for the drawn one.
    """
    ids = [token for token, _ in pairs]
    hint = "ask for fewer top logprobs, or raise the server's limit (vLLM: --max-logprobs)"
    if len(set(ids)) < len(ids):
        raise place.refuse(f"{place.place} lists a token id twice", _ODD)
    for token, value in pairs:
        # unknown in one place and known in the other is no contradiction
        if token == drawn and value != logp and value == value and logp == logp:
            claim = f"{place.place} says {value:g} for the drawn token {drawn}, whose logprob is"
            raise place.refuse(f"{claim} {logp:g}", _ODD)
    if len(pairs) == k + 1 and drawn in ids:
        pairs = [pair for pair in pairs if pair[0] != drawn]
    if len(pairs) > k or (len(pairs) < k and not few):
        raise place.refuse(f"{place.place} lists {len(pairs)} tokens, and {k} were asked for", hint)
    known = [pair for pair in pairs if pair[1] == pair[1]]
    return tuple(sorted(known, key=lambda pair: (-pair[1], pair[0])))


def shortened(text: str) -> str:
    """At most a line of it."""
    return cut(" ".join(text.split()), _SHOWN)


def _head(ids: Sequence[int]) -> str:
    more = f", ... ({len(ids)})" if len(ids) > _HEAD else ""
    return f"[{', '.join(map(str, ids[:_HEAD]))}{more}]"
