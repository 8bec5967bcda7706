# The transcripts of the documents: what a page says that a command prints, held against it.
#
# A ```console block is a transcript: "$ " begins a command, the lines below are what it prints.
#   ...            alone on a line stands for any lines, within a line for any words
#   a number       may be off by 10 % in a slow transcript (a measurement: other processors
#                  round otherwise, so that other tokens are drawn), nowhere else.  A value with an
#                  interval may be any other in that interval whose own interval has the shown
#                  value; what follows it, the floor and the count, may be up to three times as
#                  large or as small
#   a digest       of eight hexadecimal digits may be any other in a slow transcript
#   $ echo $?      prints the exit code of the command above; where it does not follow, the code
#                  is what a shown last line says ("exit 1"), else 0
# The commands of a page run in its order in one folder, a copy of examples/, models/ and data/.
# Of other programs only `cp` is run.  Commands of which nothing is shown stand in ```sh blocks:
# they are parsed, and not run.

import re
import shlex
import subprocess
from dataclasses import dataclass, field

import click
from click.testing import CliRunner

from servanda.cli.commands import FIRST, GROUPS
from servanda.cli.main import main

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
_CONTEXT = click.Context(main)
_GROUPS = {name: main.get_command(_CONTEXT, name) for name in GROUPS}
# each command by its words, such as "contract lint"
COMMANDS = {name: main.get_command(_CONTEXT, name) for name in FIRST} | {
    f"{group} {name}": commands.get_command(_CONTEXT, name)
    for group, commands in _GROUPS.items()
    for name in commands.list_commands(_CONTEXT)
}
SLOW_COMMANDS = (
    "check",
    "compare",
    "tools measure",
    "demo",
    "contract plan",
    "preflight",
    "bisect",
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?<!,)")
_DIGEST = re.compile(r"\b[0-9a-f]{8}\b")
_INTERVAL = re.compile(r"(\S+)(\s+)\[([^\s,]+), ([^\]\s]+)\]")  # value [low, high]
_TOLERANCE, _BEHIND_INTERVAL = 0.1, 2 / 3  # of the larger of two numbers


@dataclass
class Command:
    """One line after a "$ ", and what the page says that it prints."""

    line: str
    shown: list[str] = field(default_factory=list)
    code: int | None = None

    @property
    def words(self):
        words = shlex.split(self.line, comments=True)
        return ["servanda", "demo"] if words[:2] == ["make", "demo"] else words

    @property
    def ours(self):
        return self.words[:1] == ["servanda"]

    @property
    def runs(self):
        return self.ours or self.words[:1] == ["cp"]

    @property
    def slow(self):
        quick = {"--no-probe", "list", "--help", "-h"} & {*self.words}
        measures = split(self.words[1:])[0] in SLOW_COMMANDS or "--faults" in self.words
        return self.ours and measures and not quick

    @property
    def expected_code(self):
        if self.code is not None:
            return self.code
        said = [re.search(r"exit (\d)$", line) for line in self.shown]
        return next((int(found[1]) for found in reversed(said) if found), 0)


def blocks(page, *kinds):
    """The fenced blocks of a page, by their info string."""
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def commands(text):
    """The commands of one block."""
    found, echoes = [], False
    for line in text.rstrip("\n").split("\n"):
        if line.startswith("$ "):
            echoes = line == "$ echo $?"
            if not echoes:
                found.append(Command(line[2:]))
        elif echoes:
            found[-1].code, echoes = int(line), False
        else:
            found[-1].shown.append(line)
    return found


def transcripts(page):
    """The console blocks of a page, each a list of the commands that are run."""
    listed = [[c for c in commands(text) if c.runs] for text in blocks(page, "console")]
    return [block for block in listed if block]


def is_slow(block):
    return any(command.slow for command in block)


def differing(shown, printed, *, measured=False):
    """The first shown part that the output does not have where it should, or None.

    >>> differing(["a", "...", "c 1.0"], ["a", "b", "b", "c 1.05"], measured=True)
    >>> differing(["a", "...", "c 1.0"], ["a", "b", "c 1.05"])
    'c 1.0'
    >>> differing(["{", "...", "}"], ["{", "}", "}"])
    >>> differing(["a"], ["a", "b"])
    '(nothing), and there is: b'
    """
    first, *parts = _parts(_trimmed(shown))
    printed = _trimmed(printed)
    if not _found(first, printed, 0, measured):
        return "\n".join(first)
    at = len(first)
    if not parts:
        return None if at == len(printed) else f"(nothing), and there is: {printed[at]}"
    for part in parts[:-1]:
        places = range(at, len(printed) - len(part) + 1)
        start = next((i for i in places if _found(part, printed, i, measured)), None)
        if start is None:
            return "\n".join(part)
        at = start + len(part)
    start = len(printed) - len(parts[-1])
    if start < at or not _found(parts[-1], printed, start, measured):
        return "\n".join(parts[-1])
    return None


def _parts(lines):
    """The runs of lines between those that stand for any lines."""
    parts = [[]]
    for line in lines:
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _found(part, printed, at, measured):
    lines = printed[at : at + len(part)]
    return len(lines) == len(part) and all(
        agree(a, b, measured) for a, b in zip(part, lines, strict=True)
    )


def _trimmed(lines):
    return [line for line in lines if line.strip()]


def agree(shown, printed, measured=False):
    """Whether two lines say the same, word by word.

    >>> agree("tv 0.1727  [0.1225, 0.2717]", "tv 0.18 [0.12, 0.28]", measured=True)
    True
    >>> agree("wrote ... then", "wrote a b c, then"), agree("at 1.0", "at 1.2", measured=True)
    (True, False)
    >>> shown = "x tv 0.0175 [0.0131, 0.0301] 0.05 0.0003 832 groups"
    >>> agree(shown, "x tv 0.0158 [0.0117, 0.0283] 0.05 0.0007 448 groups", measured=True)
    True
    >>> agree(shown, "x tv 0.0120 [0.0110, 0.0160] 0.05 0.0003 832 groups", measured=True)
    False
    >>> agree(shown, "✗ tv 0.0158 [0.0117, 0.0283] 0.05 0.0007 448 groups", measured=True)
    False
    >>> agree(shown, "x tv 0.0158 [0.0117, 0.0283] 0.05 0.0010 832 groups", measured=True)
    False
    >>> agree("ok, 287c6bdb, 7 clauses", "ok, 0f2d0b5c, 7 clauses", measured=True)
    True
    """
    tolerance = _TOLERANCE if measured else None
    found = [_INTERVAL.search(line) for line in (shown, printed)]
    if measured and None not in found and _within_each_other(*found):
        tolerance = _BEHIND_INTERVAL
        shown, printed = (_INTERVAL.sub("", line, count=1) for line in (shown, printed))
    return _agree(shown.split(), printed.split(), tolerance)


def _within_each_other(one, other):
    """Whether each of two values lies in the other's interval."""
    try:
        (a, low, high), (b, least, most) = (
            [_value(found[i].rstrip("%")) for i in (1, 3, 4)] for found in (one, other)
        )
    except ValueError:  # words
        return False
    return low <= b <= high and least <= a <= most


def _agree(shown, printed, tolerance):
    if not shown or not printed:
        return not printed and all(word == "..." for word in shown)
    if shown[0] == "...":
        return any(_agree(shown[1:], printed[i:], tolerance) for i in range(len(printed) + 1))
    same = shown[0] == printed[0] or (tolerance and _near(shown[0], printed[0], tolerance))
    return same and _agree(shown[1:], printed[1:], tolerance)


def _near(shown, printed, tolerance):
    shown, printed = (_DIGEST.sub("a digest", word) for word in (shown, printed))
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    numbers = ([_value(one) for one in _NUMBER.findall(word)] for word in (shown, printed))
    return all(abs(a - b) <= tolerance * max(a, b) for a, b in zip(*numbers, strict=True))


def _value(text):
    return float(text.replace(",", ""))


def split(words):
    """The words of a command, such as "contract lint", and those behind them."""
    size = 2 if words[0] in GROUPS and words[1:] and not words[1].startswith("-") else 1
    return " ".join(words[:size]), [*words[size:]]


def in_process(command):
    """(output, exit code) of a command, without a process of its own."""
    if not command.ours:
        subprocess.run(command.words, check=True)
        return "", 0
    done = CliRunner().invoke(main, command.words[1:], prog_name="servanda")
    return done.output, done.exit_code


def problem(command, folder, program, env=None, *, measured=False):
    """Run a command as a process; what of it the page does not show, or None.

    Args:
        program: the words that start Servanda.
        env: its environment; without one, that of the tests.
        measured: whether the page is slow: numbers may be off by 10 %.
    """
    done = subprocess.run(
        [*program, *command.words[1:]] if command.ours else command.words,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        # progress of a slow command goes there; messages of a quick one, between the lines
        stderr=subprocess.PIPE if command.slow else subprocess.STDOUT,
        text=True,
    )
    printed = done.stdout
    if done.returncode != command.expected_code:
        return f"$ {command.line}\nended with {done.returncode}:\n{printed}{done.stderr or ''}"
    missing = command.shown and differing(command.shown, printed.split("\n"), measured=measured)
    if not missing:
        return None
    return f"$ {command.line}\nnot as the page has it:\n{missing}\n\nit printed:\n{printed}"


def parsed(words):
    """Read a call as the command line would, and run nothing.

    Raises:
        click.UsageError: no such verb or option, or something is missing.
    """
    ends = [i for i, word in enumerate(words) if word in (">", "|", "&&", "||")]
    name, rest = split(words[1 : ends[0] if ends else None] or ["--help"])
    if name.startswith("-") or (name in GROUPS and not rest):
        return
    if name not in COMMANDS:
        raise click.UsageError(f"no command {name!r}")
    if not {"-h", "--help"} & {*rest}:
        parent = click.Context(main, **main.context_settings)
        COMMANDS[name].make_context(name, rest, parent=parent)
