# Holds the documents against the style of CONTRIBUTING.md: python scripts/prose.py [PAGE ...]
#
# Two ratios over the pages that people read first (the README, the tutorials, the how-to pages):
# "what" at most 4, "you" at least 6 in 1,000 words.  Then words and phrases of a list, on every
# page and in every string of the code that users may read (messages, help, docstrings): each has a
# standard word that says the same.  Code blocks and transcripts are not prose and are left out.
# Last, a second list for the docstrings of public functions and classes and for the comment at the
# head of a module; in the packages of PLAIN "what" is held to its ratio there, too.

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WHAT, LEAST_YOU = 4.0, 6.0  # per 1,000 words
PLAIN = ("contract", "gateway", "judgement", "promotion", "rl", "runner", "theory", "traces")
_FIRST = ("README.md", "docs/start", "docs/tutorial", "docs/how-to")
_CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$|<!--.*?-->|`[^`\n]+`|\]\([^)]*\)", re.M | re.S)
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_YOU = {"you", "your", "yours", "yourself", "you're", "you’re"}

# phrase (a regular expression, whole words, any case): what to write
INSTEAD = {
    r"bring(s|ing)? forth|brought forth": "generate",
    r"guards? (that )?(rings?|rang|speaks?)|(rings|rang) (on|for|at|in|before|where)": "fires",
    r"told (once|again)": "sent once, or replayed",
    r"tells? of": "reports",
    r"dear to|dearer|dearly": "expensive",
    r"for want of": "without",
    r"to and fro": "back and forth",
    r"hangs? together": "is correlated",
    r"nobody|whoever|whomever": "no one, anyone who",
    r"mend(s|ed|ing)?": "repair, fix",
    r"paid the price|pays? (for itself|the price)": "passed the threshold",
    r"quarter of (its|the) price": "25 % of the threshold",
    r"the way back is earned": "it returns after a re-test",
    r"self-noise": "noise floor",
    r"has paid|have paid": "passed the threshold",
    r"no word against": "no evidence against",
    r"is away|was away|are away": "is diverted",
    r"leaves infer(?! no)|to leave infer": "is diverted",
    r"nothing of it shows": "no metric shows it",
    r"speaks? (of|in)": "concerns, applies in",
    r"usual gates": "thresholds of other projects",
    r"deaf": "not synced",
    r"referee": "reference scorer",
    r"legs?": "step",
    r"dwell": "hold time",
    r"lie(s)? beyond": "exceed",
}
IN_DOCSTRINGS = {
    r"(no|some|every|any)body": "no one, someone, all, anyone",
    r"told(?!:)|tells|says? of": "reports, records, distinguishes, describes",
    r"hears?|heard(?!:)|rings": "receives, fires",
    r"(a|the|each|every|one|two|first|last|latest|next) looks?|looked at": "evaluation, examined",
    r"likeliest": "most likely, or top-k",
    r"pays?|paid(?!:)|(its|the|a|what) price|self-noise": "threshold, noise floor",
    r"launched(?!:)|launch order": "dispatched",
    r"(it|that) is none|is no more|is dear": "is invalid, is missing, is expensive",
    r"who asks|what is asked|was asked": "client, requested",
    r"what becomes? of|what became of": "result, state",
}
# names of fields that files store, which a docstring has to use
_FIELDS = {"leg", "legs", "referee", "deaf", "dwell"}


def _compiled(table: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(rf"\b(?:{phrase})\b", re.I), word) for phrase, word in table.items()]


_INSTEAD, _IN_DOCSTRINGS = _compiled(INSTEAD), _compiled(IN_DOCSTRINGS)
# most modules have nothing of a list, and one search tells so, in small letters
_ANY, _ANY_IN_DOCSTRINGS = (
    re.compile(rf"\b(?:{'|'.join(table)})\b")
    for table in ([p for p in INSTEAD if p.rstrip("s?") not in _FIELDS], IN_DOCSTRINGS)
)
_JOINT = re.compile(r"""["']\s*\n\s*f?["']""")  # between two lines of one string
_DEFINED = re.compile(r'^ *(?:async )?(?:def|class) (\w+)|^ *"""(.*?)"""', re.M | re.S)
_DOCTEST = re.compile(r"^ *>>>.*(?:\n *\S.*)*", re.M)
_HEAD = re.compile(r"(?:#.*\n)*")


def prose(text: str) -> str:
    """The text without code, comments, link targets and front matter; lines keep their numbers."""
    return _CODE.sub(_lines, text)


def _lines(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n") + " "


def ratios(texts: list[str]) -> tuple[float, float]:
    """How often "what" and "you" occur in 1,000 words of the texts together."""
    words = [word.lower() for text in texts for word in _WORD.findall(prose(text))]
    thousands = max(len(words), 1) / 1000
    return words.count("what") / thousands, sum(word in _YOU for word in words) / thousands


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and the words to write instead, for each phrase of the list in the text."""
    yield from _found(_INSTEAD, prose(text))


def _found(table: list[tuple[re.Pattern[str], str]], text: str) -> Iterator[tuple[int, str, str]]:
    for pattern, word in table:
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, found[0], word


def strings(code: str) -> Iterator[tuple[int, str, str]]:
    """As `phrases`, of the strings in Python code that are sentences: a name has no space."""
    if not _ANY.search(_JOINT.sub("", code).lower()):
        return
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for line, phrase, word in phrases(node.value):
                if phrase.lower() not in _FIELDS:
                    yield node.lineno + line - 1, phrase, word


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of the comment at the head of a module and of each public docstring."""
    head = _HEAD.match(code)
    yield 1, head[0] if head else ""
    name = ""
    for found in _DEFINED.finditer(code):
        name = found[1] or name
        if found[2] is not None and not name.startswith("_"):
            yield code.count("\n", 0, found.start(2)) + 1, _DOCTEST.sub(_lines, found[2])


def of_docstrings(code: str) -> Iterator[tuple[int, str, str]]:
    """As `phrases`, of the second list, in the docstrings and the head of a module."""
    for first, text in docstrings(code) if _ANY_IN_DOCSTRINGS.search(code.lower()) else ():
        for line, phrase, word in _found(_IN_DOCSTRINGS, prose(text)):
            yield first + line - 1, phrase, word


def in_plain(root: Path = ROOT) -> dict[str, float]:
    """Package of PLAIN -> how often "what" occurs in 1,000 words of its docstrings."""
    found = {}
    for name in PLAIN:
        codes = (path.read_text() for path in (root / "src/servanda" / name).rglob("*.py"))
        found[name] = ratios([text for code in codes for _, text in docstrings(code)])[0]
    return found


def pages(root: Path = ROOT) -> list[Path]:
    """Every page of the documents, then every module and template of the package."""
    found = [root / name for name in ("README.md", "CONTRIBUTING.md")]
    for folder, kind in (("docs", "md"), ("examples", "md"), ("src", "py"), ("src", "html")):
        found += sorted((root / folder).rglob(f"*.{kind}"))
    return found


def is_first(page: Path, root: Path = ROOT) -> bool:
    """Whether the two ratios hold the page: people read it first."""
    return str(page.relative_to(root)).startswith(_FIRST)


def main(names: list[str]) -> int:
    """Print every finding; 1 where there is one."""
    chosen = [Path(name).resolve() for name in names] or pages()
    texts = {page: page.read_text(encoding="utf-8") for page in chosen}
    bad = False
    for page, text in texts.items():
        code = page.suffix == ".py"
        found = [*strings(text), *of_docstrings(text)] if code else phrases(text)
        for line, phrase, word in sorted(found):
            bad = True
            print(f"{page.relative_to(ROOT)}:{line}: {phrase!r}; write: {word}")
    for name, what in ({} if names else in_plain()).items():
        if what > MOST_WHAT:
            bad = True
            print(f'src/servanda/{name}: "what" {what:.1f} in docstrings (at most {MOST_WHAT:g})')
    first = [page for page in chosen if is_first(page)]
    for page in first if names else ():
        what, you = ratios([texts[page]])
        print(f"{page.relative_to(ROOT)}: what {what:.1f}, you {you:.1f} per 1,000 words")
    what, you = ratios([texts[page] for page in first])
    if first:
        print(
            f'"what" {what:.1f} (at most {MOST_WHAT:g}), "you" {you:.1f} (at least {LEAST_YOU:g})'
        )
    bad |= bool(first) and (what > MOST_WHAT or you < LEAST_YOU)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
