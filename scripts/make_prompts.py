# Writes the two committed data files from held-out documents of corpus.py.
#
# data/prompts.jsonl   texts that break off where a model should go on; one in sixteen of each
#                      domain is long: whole documents first, so that positions pass 256
# data/golden.jsonl    a few fixed whole texts to be scored as they are
#
# Lengths are counted with the shipped tokenizer, so train_tiny_lm.py comes first.  The
# same tokenizer always gives byte-identical files.
#
#     python scripts/make_prompts.py

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import corpus

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "tiny-lm"
DATA = ROOT / "data"

PROMPT_SEED, GOLDEN_SEED = 11, 12  # apart from the seed of the held-out loss
PROMPTS = 1120  # a domain
LONG_ONE_IN = 16
GOLDEN = 16  # a domain

SHORT_TOKENS = (8, 80)
LONG_TOKENS = (270, 400)
GOLDEN_TOKENS = (60, 160)
DRAFT_TOKENS = 10_000  # drafts that turn out too long are measured, then dropped
REST_TOKENS = 40  # left unsaid, so that a short continuation seldom meets the end

SOLVED_BEFORE = (0, 1, 2)  # sums worked out before the open one in a short arith prompt
SOLVED_ODDS = (5, 2, 1)
WORD_END = re.compile(r"(?<=\S)(?=\s)")

Span = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """The beginning of a text, and its length in tokens."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Writer:
    """Draws texts of one domain whose length, in tokens, lies in a span."""

    domain: str
    tokenizer: PreTrainedTokenizerBase
    source: Iterator[str]
    rng: random.Random

    def whole(self, span: Span) -> str:
        """Whole documents, with end-of-text between them."""
        low, high = span
        while True:
            wanted, texts = self.rng.randint(low, (low + high) // 2), [next(self.source)]
            while self.length(texts) < wanted:
                texts.append(next(self.source))
            if self.length(texts) <= high:
                return corpus.END_OF_TEXT.join(texts)

    def unfinished(self, span: Span, before: int) -> str:
        """At least `before` whole documents, then the beginning of another one."""
        low, high = span
        opening = SHORT_TOKENS[0] if self.domain == "arith" else SHORT_TOKENS[1]
        while True:
            wanted, texts = self.rng.randint(low, high), [*islice(self.source, before)]
            while before and self.length([*texts, ""]) + opening < wanted:
                texts.append(next(self.source))
            text = corpus.END_OF_TEXT.join([*texts, next(self.source)])
            first = len(text) - len(text.rpartition(corpus.END_OF_TEXT)[2])
            fitting = [cut for cut in self.cuts(text, first) if low <= cut.tokens <= high]
            if fitting:
                return self.rng.choice(fitting).text

    def cuts(self, text: str, first: int) -> Iterator[Cut]:
        """Where the document that starts at `first` may break off.

        A cut is at the end of a word, and the tokens before it do not depend on what
        would have followed.
        """
        ids = self.tokenizer.encode(text)
        if self.domain == "arith":
            ends = [first + len(corpus.PROBLEM.match(text, first)[0])]
            rest = 1
        else:
            ends = [match.start() for match in WORD_END.finditer(text, first + 1)]
            rest = REST_TOKENS
        opening = len(self.tokenizer.encode(text[:first]))
        for end in ends:
            head = self.tokenizer.encode(text[:end])
            fits = SHORT_TOKENS[0] <= len(head) - opening <= SHORT_TOKENS[1]
            if fits and head == ids[: len(head)] and len(head) + rest <= len(ids):
                yield Cut(text[:end], len(head))

    def length(self, texts: list[str]) -> int:
        return len(self.tokenizer.encode(corpus.END_OF_TEXT.join(texts)))


def writer(domain: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> Writer:
    """A writer of held-out texts."""
    source = corpus.documents(domain, "heldout", seed)
    return Writer(domain, tokenizer, source, random.Random(f"cut/{domain}/{seed}"))


def prompt_texts(draw: Writer) -> Iterator[str]:
    """Endless distinct prompts; every LONG_ONE_IN-th is long."""
    seen: set[str] = set()
    while True:
        if len(seen) % LONG_ONE_IN == 0:
            before = 2
            text = draw.unfinished(LONG_TOKENS, before)
        else:
            solves = draw.domain == "arith"
            (before,) = draw.rng.choices(SOLVED_BEFORE, SOLVED_ODDS) if solves else (0,)
            text = draw.unfinished(SHORT_TOKENS, before)
        if text not in seen:
            seen.add(text)
            yield text


def golden_texts(draw: Writer) -> Iterator[str]:
    for _ in range(GOLDEN):
        yield draw.whole(GOLDEN_TOKENS)


def line(text: str, domain: str, group: str) -> dict[str, object]:
    return {"prompt": text, "labels": {"domain": domain}, "group": group}


def prompt_lines(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """All prompts in one fixed, shuffled order; an arith line also holds its answer."""
    lines = []
    for domain in corpus.DOMAINS:
        draw = writer(domain, tokenizer, PROMPT_SEED)
        for n, text in enumerate(islice(prompt_texts(draw), PROMPTS), start=1):
            record = line(text, domain, f"{domain}-{n:04d}")
            if domain == "arith":
                record["answer"] = corpus.open_sum(text).answer
            lines.append(record)
    random.Random(PROMPT_SEED).shuffle(lines)
    return lines


def golden_lines(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """The golden texts, domain by domain."""
    return [
        line(text, domain, f"golden-{domain}-{n:02d}")
        for domain in corpus.DOMAINS
        for n, text in enumerate(golden_texts(writer(domain, tokenizer, GOLDEN_SEED)), start=1)
    ]


def write(path: Path, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(record) + "\n" for record in lines)
    print(f"{path.name}: {len(lines)} lines, {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    cli = argparse.ArgumentParser(description="Write data/prompts.jsonl and data/golden.jsonl.")
    cli.add_argument("--model", type=Path, default=MODEL, help="where the tokenizer lies")
    cli.add_argument("--out", type=Path, default=DATA)
    given = cli.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model, model_max_length=DRAFT_TOKENS)
    write(given.out / "prompts.jsonl", prompt_lines(tokenizer))
    write(given.out / "golden.jsonl", golden_lines(tokenizer))


if __name__ == "__main__":
    main()
