# Laws of an engine's description, and of its tokenizer.

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict

from servanda.engines.conformance.base import LAWS, Broken, Case, Skipped, require
from servanda.errors import MeasurementError
from servanda.theory.divergence.precision import CAPTURES


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
