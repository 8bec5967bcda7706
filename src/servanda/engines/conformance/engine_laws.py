# Laws of an engine as a whole: its description, its texts, the requests it refuses, and its end.

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from servanda.engines.conformance.base import FEW, LAWS, PLAIN, Broken, Case, Skipped, require
from servanda.errors import MeasurementError
from servanda.theory.divergence.precision import CAPTURES
from servanda.traces.trace import Batch

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
