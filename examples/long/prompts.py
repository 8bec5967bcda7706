"""Long prompts of known lengths, made and not collected: retrieval, code and dialogue.

    python examples/long/prompts.py MODEL -o prompts.jsonl --tokens 1024 4096 16384 65536 131072

One prompt of each kind and length, cut to exactly that many tokens of MODEL, with the labels `kind`
and `length`.  A retrieval prompt hides one fact at a depth that its label `depth` gives, and ends
with the question for it, whose answer is the line's `answer`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = ("Ada", "Bela", "Cleo", "Dario", "Edda", "Falk", "Gesa", "Henk", "Ines", "Jona")
THINGS = ("lantern", "ledger", "compass", "kettle", "anchor", "ribbon", "violin", "saddle")
PLACES = ("harbour", "orchard", "archive", "bakery", "chapel", "depot", "garden", "foundry")
VERBS = ("sort", "merge", "filter", "count", "load", "store", "split", "check", "parse", "rank")


def retrieval(rng: random.Random) -> Iterator[str]:
    """Facts of one form; the question at the end asks for one of them."""
    while True:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        place, day = rng.choice(PLACES), rng.randint(1, 28)
        yield f"On day {day}, {name} left the {thing} at the {place}. "


def code(rng: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        verb, thing = rng.choice(VERBS), rng.choice(THINGS)
        bound, step = rng.randint(2, 99), rng.randint(2, 9)
        yield (
            f"def {verb}_{thing}_{number}(items):\n    found = {bound}\n    for item in items:\n"
            f"        if item % {step} == 0:\n            found += item\n    return found\n\n\n"
        )


def dialogue(rng: random.Random) -> Iterator[str]:
    while True:
        first, second = rng.sample(NAMES, 2)
        thing, place = rng.choice(THINGS), rng.choice(PLACES)
        yield f"{first}: Where is the {thing}?\n{second}: I saw it at the {place} this morning.\n"


KINDS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "retrieval": retrieval,
    "code": code,
    "dialogue": dialogue,
}


def prompt(kind: str, tokens: int, encode: Callable[[str], list[int]], seed: int) -> dict[str, Any]:
    """A prompt of exactly so many tokens, with its labels.

    Args:
        encode: token ids of a text.
    """
    rng = random.Random(f"{kind} {tokens} {seed}")
    labels = {"kind": kind, "length": f"{tokens:,}"}
    line: dict[str, Any] = {"labels": labels}
    end: list[int] = []
    if kind == "retrieval":
        depth = rng.choice([10, 50, 90])
        labels["depth"] = f"{depth} %"
        end = encode("Where did Zora leave the hourglass? Zora left the hourglass at the")
        line["answer"] = rng.choice(PLACES)
        fact = encode(f"On day 7, Zora left the hourglass at the {line['answer']}. ")
        at = (tokens - len(end) - len(fact)) * depth // 100
    ids: list[int] = []
    for piece in KINDS[kind](rng):
        if len(ids) >= tokens:
            break
        ids += encode(piece)
    if end:
        ids = [*ids[:at], *fact, *ids[at:]]
        ids = [*ids[: tokens - len(end)], *end]
    return {"token_ids": ids[:tokens], **line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder with tokenizer.json")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << n for n in range(10, 18)])
    parser.add_argument("--each", type=int, default=1, help="prompts of each kind and length")
    given = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(given.model) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    with given.output.open("w", encoding="utf-8") as out:
        for tokens in given.tokens:
            for kind in KINDS:
                for seed in range(given.each):
                    out.write(json.dumps(prompt(kind, tokens, encode, seed)) + "\n")


if __name__ == "__main__":
    main()
