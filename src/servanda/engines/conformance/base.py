# A law of engines, and the case it is tried on: one open engine and what was drawn with it; and the
# laws of an engine as a whole: its description, its texts, the requests it refuses, and its end.
#
# Axes: S sequences, N tokens of all sequences one after another, K best tokens.

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from servanda.contract.identity import Description
from servanda.contract.model import Path
from servanda.engines.base import Engine, verb_of
from servanda.errors import MeasurementError
from servanda.registry import Registry
from servanda.theory.divergence.precision import CAPTURES
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.trace import Array, Batch, Trace

PLAIN = Sampling()  # type: ignore[call-arg]
COLD = Sampling(temperature=0.5)  # type: ignore[call-arg]
GREEDY = Sampling(top_k=1)  # type: ignore[call-arg]
CUT = Sampling(top_p=0.5)  # type: ignore[call-arg]
BY_CHANCE = 1e-9  # what is rarer than this in an honest engine is no accident
FEW = 16  # sequences where a law does not need many

_TEXTS = ("The ship left the harbour", "Two and two", "In the year", "A", "Once there was a king")
_FIRST, _STRIDE = 11, 3  # launch indexes are neither rows of a batch nor consecutive

T = TypeVar("T")


class Broken(Exception):  # noqa: N818 - it is found, and not raised at a caller
    """An engine does otherwise than a law says: what was found, and the next move."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Skipped(Exception):  # noqa: N818
    """A law does not apply to this engine; the reason is reported."""


Law = Callable[["Case"], str | None]
LAWS: Registry[Law] = Registry("law")


def require(holds: object, message: str, hint: str) -> None:
    """What an engine was found to do, where it is not what a law says.

    Raises:
        Broken: `holds` is false.
    """
    if not holds:
        raise Broken(message, hint)


def require_none(odd_N: Array, message: Callable[[int], str], hint: str) -> None:
    """What was found at the first token that is odd.

    Raises:
        Broken: one is.
    """
    at = np.flatnonzero(odd_N)
    if len(at):
        raise Broken(message(int(at[0])), hint)


@dataclass
class Case:
    """One open engine, and how strictly it is held: the options of `examine_engine`.

    Args:
        open_engine: opens it again; engine: the one that laws are tried on.
        texts: prompts, as texts or token ids; None: they are made up.
    """

    open_engine: Callable[[], Engine]
    engine: Any
    texts: Sequence[str | Sequence[int]] | None
    tolerance: float
    prefill: float
    flips: float
    deterministic: bool
    reopen: bool
    sequences: int
    width: int
    seed: int
    _drawn: dict[Any, tuple[Batch, Trace]] = field(default_factory=dict)

    @cached_property
    def description(self) -> Description:
        """The engine's description before anything ran."""
        return self.engine.describe()

    @cached_property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the prompts, of unequal lengths where they are made up.

        Raises:
            MeasurementError: there are none, and none can be made up.
        """
        texts = self.texts
        size, ends = self.description.vocab_size, set(self.description.eos)
        if texts is None and size:
            ids = [i for i in range(size) if i not in ends]
            at = (uniforms(self.seed, "prompt", 0, 32) * len(ids)).astype(int).tolist()
            return tuple(tuple(ids[i] for i in at[4 * n : 4 * n + 1 + n % 4]) for n in range(8))
        if texts is None and not self.description.encodes:
            raise MeasurementError(
                "the engine knows neither its vocabulary nor a tokenizer, so no prompt can be "
                "made up",
                hint="give token ids: check_engine(open_engine, prompts=[[1, 2], [3]])",
            )
        lines = [*(_TEXTS if texts is None else texts)]
        ids_of = iter(self.engine.encode([line for line in lines if isinstance(line, str)]))
        return tuple(tuple(next(ids_of) if isinstance(line, str) else line) for line in lines)

    @cached_property
    def room(self) -> int:
        """New tokens that every prompt has room for.

        Raises:
            MeasurementError: there are none.
        """
        context, longest = self.description.context, max(map(len, self.prompts))
        room = self.width if context is None else min(self.width, context - longest)
        if room < 1:
            raise MeasurementError(
                f"a prompt of {longest} tokens leaves no room in a context of {context}",
                hint="give shorter prompts",
            )
        return room

    def batch(self, n: int = FEW, width: int | None = None, same: bool = False) -> Batch:
        """The first n sequences; `same`: all from one prompt."""
        prompts = [self.prompts[0 if same else i % len(self.prompts)] for i in range(n)]
        launched = tuple(_FIRST + _STRIDE * i for i in range(n))
        return Batch(launched, tuple(prompts), width or self.room)

    def generate(self, batch: Batch, sampling: Sampling = PLAIN, seed: int | None = None) -> Trace:
        """Draw; an engine that cannot, or not under these filters, is not spoken of."""
        seed = self.seed if seed is None else seed
        return self._unless_refused(
            lambda: verb_of(self.engine, "generate")(batch, sampling, seed), sampling
        )

    def score(self, batch: Batch, path: Path, sampling: Sampling = PLAIN) -> Trace:
        if path not in self.description.scores:
            raise Skipped(f"it does not score by {path}")
        return self._unless_refused(lambda: self.engine.score(batch, sampling, path), sampling)

    def _unless_refused(self, ask: Callable[[], T], sampling: Sampling) -> T:
        try:
            return ask()
        except MeasurementError as error:
            if "has no verb" in error.args[0]:
                raise Skipped(error.args[0]) from None
            if sampling != PLAIN:
                changed = sampling.model_dump(exclude_defaults=True).items()
                options = ", ".join(f"{name} {value}" for name, value in changed)
                raise Skipped(f"it refuses {options}: {error.args[0]}") from None
            raise

    def drawn(self, sampling: Sampling = PLAIN, n: int | None = None) -> tuple[Batch, Trace]:
        """A batch and what was drawn for it, once; n: the default is as many as laws need."""
        key = sampling, n
        if key not in self._drawn:
            batch = self.batch(self.sequences if n is None else n)
            self._drawn[key] = batch, self.generate(batch, sampling)
        return self._drawn[key]

    def given(self, sampling: Sampling = PLAIN) -> tuple[Batch, Array]:
        """Continuations to score and their recorded logprobs, [N]; NaN where nothing drew them.

        Sequences that were lost, or are empty, are left out.
        """
        try:
            batch, trace = self.drawn(sampling, FEW)
        except Skipped:
            if sampling != PLAIN:
                raise
            return self._made_up()
        rows = [row for row, length in enumerate(trace.length_S) if length]
        if not rows:
            raise Skipped("every sequence it drew was lost")
        batch = replace(batch, continuations=trace.continuations).take(rows)
        return batch, trace.columns["logp"]

    def _made_up(self) -> tuple[Batch, Array]:
        batch = self.batch()
        tokens = [token for prompt in self.prompts for token in prompt]
        lengths = [1 + i % self.room for i in range(len(batch))]
        given = tuple(
            tuple(tokens[(i + t) % len(tokens)] for t in range(length))
            for i, length in enumerate(lengths)
        )
        return replace(batch, continuations=given), np.full(sum(lengths), np.nan)


def place(trace: Trace, at: int) -> str:
    """Where a token of a trace stands: "sequence 14, new token 3"."""
    ends_S = np.cumsum(trace.length_S)
    row = int(np.searchsorted(ends_S, at, side="right"))
    start = int(ends_S[row] - trace.length_S[row])
    return f"sequence {trace.sequence_S[row]}, new token {at - start}"


def apart(one_N: Array, other_N: Array) -> Array:
    """|difference| of two records of the same logprobs, [N]; equal infinities are equal.

    NaN where either side has no value.
    """
    with np.errstate(invalid="ignore"):
        gap_N = np.abs(one_N - other_N)
    return np.where(one_N == other_N, 0.0, gap_N)


def unlikely(logp_N: Array) -> bool:
    """Whether drawing just these tokens once more, by chance, is out of the question."""
    known_N = logp_N[np.isfinite(logp_N)]
    return len(known_N) > 0 and float(known_N.sum()) < np.log(BY_CHANCE)


# Laws of an engine's description, and of its tokenizer.


@LAWS.register("describe_is_stable")
def describe_is_stable(case: Case) -> None:
    """The description is the same at every call, and running changes nothing in it."""
    first = case.description
    with contextlib.suppress(Skipped):  # it does not draw
        case.drawn(n=2)
    again = case.engine.describe()
    other = [name for name, value in asdict(first).items() if asdict(again)[name] != value]
    require(
        not other and first.digest == again.digest,
        f"{', '.join(other)} of the description changed while the engine ran",
        "evidence is keyed by the description: work it out once, when the model is loaded",
    )


@LAWS.register("describe_is_plain")
def describe_is_plain(case: Case) -> None:
    """The description is JSON, and every fingerprint is a text."""
    try:
        json.dumps(asdict(case.description))
    except (TypeError, ValueError) as error:
        raise Broken(
            f"the description is no JSON: {error}", "give texts, whole numbers and tuples of them"
        ) from None
    odd = [
        (name, value)
        for name, value in case.description.fingerprint.items()
        if not (isinstance(value, str) and value and name)
    ]
    require(case.description.fingerprint, "the fingerprint is empty", "name engine and versions")
    require(
        not odd,
        f"the fingerprint has {odd[:1]}, which is no text",
        "a fingerprint is texts that are not empty: versions, precision, threads",
    )


@LAWS.register("describe_is_consistent")
def describe_is_consistent(case: Case) -> None:
    """Ends lie in the vocabulary, the context has room, and the words are known ones."""
    about = case.description
    require(
        about.vocab_size >= 0 and all(0 <= e < (about.vocab_size or e + 1) for e in about.eos),
        f"the ids that end a sequence are {list(about.eos)} in a vocabulary of {about.vocab_size}",
        "vocab_size is the number of rows of the output distribution; 0 where it is not known",
    )
    require(
        about.context is None or about.context > 1,
        f"the context is {about.context} tokens",
        "Description.context is None where there is no limit",
    )
    require(
        about.capture in CAPTURES,
        f"logprobs are recorded as {about.capture!r}",
        f"Description.capture is one of {', '.join(CAPTURES)}",
    )
    require(
        set(about.scores) <= {"prefill", "decode"},
        f"it scores by {list(about.scores)}",
        "Description.scores has prefill, decode, both or none",
    )
    require(about.top >= 0, f"top is {about.top}", "0 says that Engine.top does not work")


@LAWS.register("texts_round_trip")
def texts_round_trip(case: Case) -> None:
    """A decoded text is the same text once it was encoded and decoded again."""
    about = case.description
    if not (about.encodes and about.decodes):
        raise Skipped(f"it does not {'decode' if about.encodes else 'encode'}")
    texts = [text for text in case.texts or () if isinstance(text, str)]
    ids = case.engine.encode(texts) if texts else [list(p) for p in case.prompts]
    texts = case.engine.decode(ids)
    require(
        len(texts) == len(ids) and all(isinstance(t, str) for t in texts),
        f"decode gives {len(texts)} texts for {len(ids)} sequences",
        "one text a sequence",
    )
    once = case.engine.decode(case.engine.encode(texts))
    for text, back in zip(texts, once, strict=True):
        # some tokenizers put a blank before the first word
        require(
            text.strip() == back.strip(),
            f"{text!r} is {back!r} once it was encoded and decoded",
            "encode adds no special tokens, and decode leaves blanks as they were drawn",
        )


@LAWS.register("ids_are_in_the_vocabulary")
def ids_are_in_the_vocabulary(case: Case) -> None:
    """Encoding gives ids of the vocabulary, which has a token for each."""
    about, tokens = case.description, case.engine.vocabulary()
    if not tokens and not about.vocab_size:
        raise Skipped("it does not know its vocabulary")
    require(
        not tokens or not about.vocab_size or len(tokens) == about.vocab_size,
        f"vocabulary has {len(tokens)} tokens, and the description says {about.vocab_size}",
        "a token for each row of the output distribution; [] where they are not known",
    )
    require(
        all(isinstance(token, str) for token in tokens),
        "vocabulary has something that is no text",
        "an id without a token has a text of its own, such as <17>",
    )
    size = about.vocab_size or len(tokens)
    odd = [i for prompt in case.prompts for i in prompt if not 0 <= i < size]
    require(
        not odd,
        f"a prompt has the id {odd[:1]}, and the vocabulary has {size}",
        "encode with the tokenizer of this model",
    )


@LAWS.register("nothing_encodes_as_nothing")
def nothing_encodes_as_nothing(case: Case) -> None:
    """No texts give no ids, no ids give no texts, and an empty text has no special tokens."""
    about = case.description
    if not (about.encodes or about.decodes):
        raise Skipped("it neither encodes nor decodes")
    if about.encodes:
        result = case.engine.encode([])
        require(result == [], f"encode([]) is {result!r}", "return [] for no texts")
        with contextlib.suppress(MeasurementError):  # it may refuse an empty text
            result = [list(ids) for ids in case.engine.encode([""])]
            require(
                result == [[]],
                f'encode([""]) is {result!r}',
                "add no special tokens: a prompt begins as its text does",
            )
    if about.decodes:
        result = case.engine.decode([])
        require(result == [], f"decode([]) is {result!r}", "return [] for no sequences")


# Laws of what an engine refuses, and of its end.


_PATIENCE_S = 60.0  # a closed engine that has not answered by then never will


@LAWS.register("misfits_are_refused_by_name")
def misfits_are_refused_by_name(case: Case) -> str:
    """A sequence that cannot be run is refused by its index, and the engine still works."""
    batch, before = case.drawn(n=FEW)
    description = case.description
    name = batch.sequence_S[1]
    misfits: list[tuple[str, Batch]] = []
    if description.vocab_size:
        misfits.append(("the id of no token", _with(batch, (description.vocab_size,))))
        misfits.append(("an id below 0", _with(batch, (-1,))))
    if description.context is not None:
        long = case.prompts[0][:1] * description.context
        misfits.append(("a prompt as long as the context", _with(batch, long)))
    for what, odd in misfits:
        try:
            case.engine.generate(odd, PLAIN, case.seed)
        except MeasurementError as error:
            require(
                str(name) in str(error),
                f"{what} in sequence {name} is refused without its name: {error.args[0]}",
                "name the sequence, so that the author of the prompt can find it",
            )
        else:
            raise Broken(
                f"sequence {name} has {what}, and was answered",
                "raise a MeasurementError that names the sequence",
            )
    # a kernel may begin from nothing; what cannot is refused like the others
    try:
        case.engine.generate(_with(batch, ()), PLAIN, case.seed)
    except MeasurementError as error:
        require(
            str(name) in str(error),
            f"an empty prompt in sequence {name} is refused without its name: {error.args[0]}",
            "name the sequence",
        )
    after = case.generate(batch)
    require(
        not case.deterministic or np.array_equal(before.token_N, after.token_N),
        "after a sequence was refused, the same seed drew other tokens",
        "refuse before anything is begun",
    )
    return "refused: " + (", ".join(what for what, _ in misfits) or "nothing that is known to fail")


def _with(batch: Batch, prompt: tuple[int, ...]) -> Batch:
    """The same batch, but for the prompt of its second sequence."""
    return replace(batch, prompts=(batch.prompts[0], prompt, *batch.prompts[2:]))


@LAWS.register("a_closed_engine_opens_again")
def a_closed_engine_opens_again(case: Case) -> None:
    """An engine may be closed twice, does not hang afterwards, and opens as the same kernel.

    The last of the laws: what it leaves behind is a closed engine.
    """
    if not case.reopen:
        raise Skipped("it is opened once only: reopen=False")
    first = case.description
    draws = hasattr(case.engine, "generate")
    batch, before = case.drawn(n=FEW) if draws else (case.batch(), None)
    case.engine.close()
    case.engine.close()
    for verb, ask in (
        ("describe", case.engine.describe),
        *([("generate", lambda: case.engine.generate(batch, PLAIN, case.seed))] if draws else []),
    ):
        require(
            _returns(ask),
            f"after close, {verb} did not answer within {_PATIENCE_S:g} s",
            "raise a MeasurementError where the engine is gone",
        )
    case.engine = case.open_engine()
    again = case.engine.describe()
    other = [name for name, value in asdict(first).items() if asdict(again)[name] != value]
    require(
        not other,
        f"opened a second time, the engine has another {', '.join(other)}",
        "whatever differs between two loads of one kernel has no place in the description",
    )
    if before is not None and case.deterministic:
        require(
            np.array_equal(case.generate(batch).token_N, before.token_N),
            "opened a second time, the same seed drew other tokens",
            'draw with uniforms(seed, "draw", sequence, width), or check with deterministic=False',
        )


def _returns(ask: Callable[[], object]) -> bool:
    """Whether a call comes back, with an answer or an error."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            ask()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return not thread.is_alive()
