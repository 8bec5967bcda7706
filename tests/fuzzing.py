# Broken contracts: mutations of good ones, and what must be true of whatever is said of them.

from __future__ import annotations

import re
from pathlib import Path
from random import Random

from servanda.engines import engine_names
from servanda.engines.faults import FAULTS
from servanda.errors import ContractError, Problem, Where
from tests.contract.test_language import EXAMPLE, SMALL
from tests.contract.test_messages import GOOD
from tests.contract.test_whole_language import TRAINER, WHOLE
from tests.kit import parse

_EXAMPLES = Path(__file__).parents[1] / "examples"
_FILES = [path.read_text() for path in sorted(_EXAMPLES.rglob("*.kernelcontract.yaml"))]
# the short ones more often: they are read in a millisecond, and break as well
BASES = [*[SMALL, TRAINER] * 4, GOOD, WHOLE, EXAMPLE, *_FILES[:1]]

_SCALARS = re.findall(
    r"\S+",
    "0 1 -1 1.0 1e-3 1e999 .nan -.inf 0x10 true null ~ yes '' \"a\" all tv mean p99 15m [] {} *x "
    "&a !t | > - : # %",
)
_ODD = ["\t", "\0", "\ufeff", "\u2028", "\x85", "\x07", "é", "漢", "🙂", "\ud800", "\udcff", "\\"]
_KEYS = sorted({key for text in (WHOLE, EXAMPLE) for key in re.findall(r"[\w.]+(?=: )", text)})
_SCALAR = re.compile(r"(?<=: )[^\s{\[,}\]][^,}\]\n]*")


def _line(lines: list[str], rng: Random) -> int:
    return rng.randrange(len(lines))


def delete(lines: list[str], rng: Random) -> list[str]:
    i = _line(lines, rng)
    return lines[:i] + lines[i + rng.randint(1, 3) :]


def duplicate(lines: list[str], rng: Random) -> list[str]:
    i = _line(lines, rng)
    return lines[: i + 1] + lines[i:]


def swap(lines: list[str], rng: Random) -> list[str]:
    i, j = _line(lines, rng), _line(lines, rng)
    lines = list(lines)
    lines[i], lines[j] = lines[j], lines[i]
    return lines


def retype(lines: list[str], rng: Random) -> list[str]:
    i = _line(lines, rng)
    spots = [m.span() for m in _SCALAR.finditer(lines[i])]
    if not spots:
        return lines
    start, end = rng.choice(spots)
    return [*lines[:i], lines[i][:start] + rng.choice(_SCALARS) + lines[i][end:], *lines[i + 1 :]]


def splice(lines: list[str], rng: Random) -> list[str]:
    """A key of somewhere else, with the value that stands here or a new one."""
    i = _line(lines, rng)
    keys = [m.span() for m in re.finditer(r"[\w.]+(?=: ?)", lines[i])]
    if not keys:
        return lines
    start, end = rng.choice(keys)
    key = rng.choice(_KEYS)
    if rng.random() < 0.5:
        key = f"{key}: {rng.choice(_SCALARS)}, {lines[i][start:end]}"
    return [*lines[:i], lines[i][:start] + key + lines[i][end:], *lines[i + 1 :]]


def unicode(lines: list[str], rng: Random) -> list[str]:
    i = _line(lines, rng)
    at = rng.randint(0, len(lines[i]))
    return [*lines[:i], lines[i][:at] + rng.choice(_ODD) + lines[i][at:], *lines[i + 1 :]]


def indent(lines: list[str], rng: Random) -> list[str]:
    i = _line(lines, rng)
    moved = lines[i][1:] if rng.random() < 0.5 else " " * rng.randint(1, 4) + lines[i]
    return [*lines[:i], moved, *lines[i + 1 :]]


def truncate(lines: list[str], rng: Random) -> list[str]:
    text = "\n".join(lines)
    return text[: rng.randint(0, len(text))].split("\n")


def edit(lines: list[str], rng: Random) -> list[str]:
    """A few characters taken out, or a scrap of YAML put in."""
    i = _line(lines, rng)
    at = rng.randint(0, len(lines[i]))
    put = rng.choice(["", *"{}[]:,-&*!|>'\"%@`#?", ": ", "- ", "---", "<<: "])
    rest = lines[i][at + (rng.randint(1, 9) if not put else 0) :]
    return [*lines[:i], lines[i][:at] + put + rest, *lines[i + 1 :]]


MUTATIONS = (
    delete, duplicate, swap, retype, retype, splice, splice, unicode, indent, truncate, edit, edit
)  # fmt: skip


def broken(rng: Random) -> str:
    """A contract with one to three mutations."""
    lines = rng.choice(BASES).split("\n")
    for _ in range(rng.randint(1, 3)):
        lines = rng.choice(MUTATIONS)(lines, rng) or [""]
    return rng.choice(["\n", "\n", "\n", "\r\n", "\r"]).join(lines)


def read_or_told(text: str) -> None:
    """The text is read, or refused by a ContractError whose every place is right."""
    try:
        contract, marks = parse(text, "x.yaml", engines=engine_names(), faults=[*FAULTS])
    except ContractError as error:
        lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
        assert error.problems
        for problem in error.problems:
            assert problem.message
            assert problem.where is not None, problem.message
            _in_place(problem, problem.where, lines)
    else:
        assert contract.digest
        assert type(contract).model_validate(contract.model_dump()) == contract
        assert marks[()].line >= 1


def _in_place(problem: Problem, where: Where, lines: list[str]) -> None:
    assert where.file == "x.yaml"
    assert 1 <= where.line <= len(lines)
    line = lines[where.line - 1]
    assert 1 <= where.column <= len(line) + 1
    printed = str(problem).split("\n")
    assert printed[0].startswith(f"x.yaml:{where.line}:{where.column}: ")
    if not where.text.strip():
        return
    shown, caret = printed[1], printed[2]
    assert caret.rstrip() == " " * caret.index("^") + "^"
    column = caret.index("^") - len(f"{where.line:>5} | ") + 1
    assert column == where.column
    under = shown[caret.index("^") :][:1]
    meant = line[where.column - 1 :][:1]
    assert under == meant or not meant.isprintable() or where.column > 200
