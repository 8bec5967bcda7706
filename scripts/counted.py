# The numbers of the documents that count something: python -m scripts.counted writes them.
#
# On a page the name of a fact stands behind its number, as a comment that no reader sees:
# 54<!-- bugs.all -->.  COUNTED has where each comes from.  A page of FIRST may have no number
# beside these but a duration, a name, a date, or one of NOT_COUNTED, which has the reason.

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MEASURED = ROOT / "benchmarks" / "measured"
FIRST = [
    ROOT / "README.md",
    DOCS / "README.md",
    DOCS / "explanation" / "related.md",
    *sorted((DOCS / "start").glob("*.md")),
    *sorted((DOCS / "roles").glob("*.md")),
]
# MB of a fresh virtual environment on Linux (x86-64, Python 3.11) after `pip install '.[EXTRA]'`,
# by `du -sm`, with pip; an environment without packages has 26.  tests/slow/test_installed.py
# measures the first again.
INSTALLED_MB = {"": 330, "onnx": 451, "postgres": 343, "gateway": 361, "all gateway": 435}

_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_MARKED = re.compile(r"([\w.,]*\w)<!-- ([a-z]+\.[a-z_]+) -->")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def _page(path: str, pattern: str) -> tuple[str, ...]:
    """What a page that a script writes from its record says."""
    text = " ".join((DOCS / path).read_text(encoding="utf-8").split())
    found = re.search(pattern, text)
    assert found, f"{path} has no {pattern!r}"
    return found.groups()


def _bugs(state: str = "") -> int:
    from tests.field import ROWS

    return sum(row.state == state or not state for row in ROWS)


def _findings() -> int:
    from benchmarks.hunt.findings import FINDING, known

    return sum(finding.verdict == FINDING for finding in known())


def _lines_of_a_repro() -> int:
    """To the next ten: a page says "about"."""
    repros = (ROOT / "benchmarks" / "hunt" / "repro").glob("*.py")
    lines = (path.read_text(encoding="utf-8").splitlines() for path in repros)
    code = [sum(bool(line) and not line.startswith("#") for line in of) for of in lines]
    return round(median(code), -1)


def _runs_of_truth() -> str:
    (runs,) = {row["runs"] for row in json.loads((MEASURED / "truth.json").read_text())}
    return str(runs)


def _theorems() -> int:
    return len(json.loads((MEASURED / "theory.json").read_text(encoding="utf-8"))["theorems"])


def _millions() -> str:
    data = (ROOT / "models" / "tiny-lm" / "model.safetensors").read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    shapes = [entry["shape"] for name, entry in head.items() if name != "__metadata__"]
    return f"{sum(map(math.prod, shapes)) / 1e6:.1f}"


@cache
def _rules() -> tuple[int, int, int]:
    """Of other projects, on examples/tiny-dump: all, those never red, and the first red step."""
    from click.testing import CliRunner

    from servanda.cli.main import main

    call = ["check", str(ROOT / "examples" / "tiny-dump"), "--quiet", "--format", "json"]
    rules = json.loads(CliRunner().invoke(main, call).output)["breakdown"]["rules"]
    first = min(rule["first"] for rule in rules if rule["red"])
    return len(rules), sum(not rule["red"] for rule in rules), first


@cache
def _change() -> list[tuple[int, int, str]]:
    """First and last step, and seeds, of each fault that the comparison with good runs finds."""
    page = (DOCS / "explanation" / "experiment.md").read_text(encoding="utf-8")
    head = next(line for line in page.splitlines() if line.startswith("| check | fires when"))
    row = next(line for line in page.splitlines() if line.startswith("| **servanda change**"))
    cells = dict(zip(*(line[2:-2].split(" | ") for line in (head, row)), strict=True))
    assert cells["on healthy runs"].startswith("0 of")
    syncs = [cells[name] for name in [*cells][3:] if not re.search("temperature|no fault", name)]
    found = (re.match(r"(\d+)(?:-(\d+))?(?: \((.*)\))?$", cell) for cell in syncs)
    return [(int(f[1]), int(f[2] or f[1]), f[3] or "") for f in found if f]


def _partly() -> list[str]:
    """The seeds of the one fault that is found on some of them only."""
    (seeds,) = [seeds for _, _, seeds in _change() if seeds]
    return seeds.split(" of ")


def _version() -> str:
    from servanda import __version__

    return ".".join(__version__.split(".")[:2])


def _python() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^requires-python = ">=([\d.]+)"$', text, re.M)
    assert found
    return found[1]


def _tokens_of_follow() -> int:
    from servanda.rl.follow import follow

    return follow.ROWS * (follow.TOKENS - 1)


def _installed(extra: str) -> Callable[[], int]:
    return lambda: round(INSTALLED_MB[extra], -1)


def _tolerance() -> int:
    from tests.transcripts import _TOLERANCE

    return round(100 * _TOLERANCE)


def _times_of_compiled() -> str:
    pattern = r"thirteen exact metrics \|[^|]*\|[^|]*\|[^|]*\| the readable formulas [^|]*\| (\S+)"
    return f"{1 / float(_page('explanation/performance.md', pattern)[0]):.0f}"


def _of_monitor(column: int) -> str:
    """Of the row of `Monitor.observe` in the table that monitor.md measured."""
    rows = (DOCS / "how-to" / "monitor.md").read_text(encoding="utf-8")
    row = re.search(r"^\| `Monitor.observe`, preset verl-sync \| (.*) \|$", rows, re.M)
    assert row
    return f"{float(row[1].split(' | ')[column].replace(',', '')):.0f}"


# fact -> its number
COUNTED: dict[str, Callable[[], int | str]] = {
    "bugs.all": _bugs,
    "bugs.caught": lambda: _bugs("caught"),
    "bugs.part": lambda: _bugs("in part"),
    "found.findings": _findings,
    "found.lines": _lines_of_a_repro,
    "truth.runs": _runs_of_truth,
    "theory.bounds": _theorems,
    "model.millions": _millions,
    "gpu.billions": lambda: _page("results/gpu.md", r"Divergences at (\S+) billion parameters")[0],
    "dump.steps": lambda: len([*(ROOT / "examples" / "tiny-dump").glob("*.parquet")]),
    "dump.rules": lambda: _rules()[0],
    "dump.quiet": lambda: _rules()[1],
    "dump.first": lambda: _rules()[2],
    "faults.all": lambda: _page("explanation/experiment.md", r"of (\d+) faults, the checks")[0],
    "faults.preflight": lambda: _page("explanation/experiment.md", r"preflight sync test (\d+),")[
        0
    ],
    "faults.change": lambda: len(_change()),
    "faults.first": lambda: min(first for first, _, _ in _change()),
    "faults.last": lambda: max(last for _, last, _ in _change()),
    "seeds.found": lambda: _partly()[0],
    "seeds.all": lambda: _partly()[1],
    "version.short": _version,
    "version.python": _python,
    "follow.tokens": _tokens_of_follow,
    "install.base": _installed(""),
    "install.onnx": _installed("onnx"),
    "install.postgres": _installed("postgres"),
    "install.gateway": _installed("gateway"),
    "install.integrations": _installed("all gateway"),
    "monitor.ms": lambda: _of_monitor(0),
    "monitor.ns": lambda: _of_monitor(4),
    "checkdump.rate": lambda: _page("how-to/check_a_dump.md", r"is (\S+) tokens per CPU second")[0],
    "exact.times": _times_of_compiled,
    "transcript.percent": _tolerance,
    "system.diagrams": lambda: (DOCS / "concepts" / "system.md").read_text().count("!["),
}
# a phrase with a number that counts nothing here -> why it stays
NOT_COUNTED = {
    "257 tokens or more": "of the fault: bfloat16 has 8 bits, so 257 is the first that it rounds",
    "by more than 0.05": "an example",
    "shows all three": "of the sentence",
    "need three arrays": "of the table below",
    "depends on three things": "of the sentence",
    "1 where the token counts in the loss, else 0": "values of an array",
    "often reads 0": "a value",
    "limit 0": "a value",
    "for 22 % to 140 % more time (their own numbers)": "of the projects",
    "31 commercial endpoints: 11 differed": "of the paper",
    "4-bit": "a format",
    "within 300 tokens": "of the paper",
    "at 1/30 of the cost": "of the paper",
    "The first four": "rows of the table above",
    '"(1 − p)"': "a title",
    "wrong at step 10": "of the transcript on the page, which a test runs",
    "(exit code 4)": "the table of exit codes",
    "the first three tokens": "of the transcript on the page, which a test runs",
    "for 8 and for 4 bits": "presets by name: fp8 and nvfp4",
    "9/10 for the first and 1/(10(r−1)r)": "tests/theory/stats/test_alpha.py",
    "confidence of 0.95": "tests/test_power_curve.py",
    "responses of 24": "tests/test_power_curve.py",
    "limit of 0.03": "tests/test_power_curve.py",
    "limit 0.03": "tests/test_power_curve.py",
    "24,576 measured tokens": "tests/test_power_curve.py",
    "between 0.025 and 0.036": "tests/test_power_curve.py",
    "ine of ten runs": "POWER of servanda.theory.stats.reachable",
    "than a million near": "of the picture",
    "Start with 5,000 tokens": "a rule of thumb",
    "with 1,000 prompt groups": "a rule of thumb",
    "ten times smaller needs ten to twenty times": "a rule of thumb",
    "Ten slices need ten times": "arithmetic",
}


def number(name: str, like: str) -> str:
    """The number of a fact, as a word where the page has a word."""
    value = COUNTED[name]()
    text = str(value)
    if like.isalpha() and text.isdigit() and int(text) < len(_WORDS):
        word = _WORDS[int(text)]
        return word.capitalize() if like[0].isupper() else word
    return text


def written(text: str) -> str:
    """A page with its counted numbers as they are today."""
    return _MARKED.sub(lambda found: f"{number(found[2], found[1])}<!-- {found[2]} -->", text)


def names(text: str) -> set[str]:
    """The facts that a page names."""
    return {name for _, name in _MARKED.findall(text)}


_NUMERAL = re.compile(
    r"\b(?:three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|"
    r"a (?:hundred|thousand|million))\b|(?<![\w.,/-])\d[\d,.]*",
    re.I,
)
_APART = re.compile(
    r"`[^`\n]+`|\]\([^)]*\)|<!--.*?-->"  # code, targets of links, comments
    r"|^\d\. |^\| \d \||^\|[^\n]*\bexit code\b[^\n]*"  # the numbers of a list and of exit codes
    r"|^\| (?:limit|0\.\d+) \|.*"  # tests/test_power_curve.py
    r"|\b\d{4}\.\d{4,5}\b|\b(?:ICLR |, )?(?:19|20)\d\d\b|Apache-2\.0"  # papers, years, a licence
    r"|(?:\w+ to )?\w+(?:-| )(?:seconds?|minutes?|hours?|s|ms)\b",  # durations
    re.M,
)


def uncounted(text: str) -> Iterator[tuple[int, str]]:
    """Line and words of each number of a page that is neither counted nor excepted."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    text = _MARKED.sub(blank, _FENCE.sub(blank, text))
    for phrase in NOT_COUNTED:
        text = text.replace(phrase, blank(re.match(r"(?s).*", phrase)))  # type: ignore[arg-type]
    text = _APART.sub(blank, text)
    for found in _NUMERAL.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield line, " ".join(text[max(0, found.start() - 30) : found.end() + 30].split())


def main(paths: list[str]) -> int:
    """Write the numbers of all pages, and print those of FIRST that nothing counts."""
    for page in map(Path, paths) if paths else [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        if names(text):
            page.write_text(written(text), encoding="utf-8")
    found = [(page, *at) for page in FIRST for at in uncounted(page.read_text(encoding="utf-8"))]
    for page, line, words in found:
        print(f"{page.relative_to(ROOT)}:{line}: {words!r} is not counted")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
