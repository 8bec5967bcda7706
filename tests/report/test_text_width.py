# The verdict as text: as wide as a terminal, in colour there, and plain everywhere else.

import io
import re

import click
import pytest

from servanda.cli.screen import next_step, show_verdict
from servanda.judgement.verdict import FORMATS
from servanda.report.table import width
from servanda.report.text import lines
from tests.report import made

NAMES = ["holds", "violated", "inconclusive", "percentile", "golden only"]


@pytest.mark.parametrize("columns", [80, 120, 200])
@pytest.mark.parametrize("name", NAMES)
def test_a_verdict_fits_a_terminal(name, columns):
    found = lines(made.VERDICTS[name], columns)
    assert all(width(text) <= columns for text in found)
    rows = [text for text in found if text[:2] in ("✓ ", "✗ ", "? ")]
    assert len(rows) == len(made.VERDICTS[name].cells)


def test_a_narrow_terminal_loses_columns_and_says_which():
    narrow, wide = (lines(made.VERDICTS["violated"], n) for n in (80, 120))
    assert "  (left out at 80 columns: noise floor, n)" in narrow
    assert not any("left out" in text for text in wide)
    assert any("noise floor" in text for text in wide)
    assert all("≤ 0.1" in text for text in (*narrow, *wide) if text.startswith("✗"))


def test_a_pipe_gets_the_text_unwrapped():
    verdict = made.VERDICTS["violated"]
    assert "\n".join(lines(verdict)) == FORMATS["text"](verdict)
    assert "\n".join(lines(verdict, 500)) == FORMATS["text"](verdict)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, **env):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream)
    show_verdict(made.VERDICTS["violated"])
    return stream.getvalue()


def test_a_terminal_shows_glyphs_and_the_answer_in_colour(monkeypatch):
    text = shown(monkeypatch, Terminal(), COLUMNS="80")
    assert "\x1b[31m\x1b[1m✗\x1b[0m" in text and "\x1b[32m\x1b[1m✓\x1b[0m" in text
    assert "\x1b[31m\x1b[1mVIOLATED\x1b[0m: " in text
    assert click.unstyle(text) == "\n".join(lines(made.VERDICTS["violated"], 80)) + "\n"


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(monkeypatch, env):
    assert "\x1b" not in shown(monkeypatch, Terminal(), **env)


def test_a_pipe_has_neither_colour_nor_a_width(monkeypatch):
    text = shown(monkeypatch, io.StringIO(), COLUMNS="80")
    assert text == FORMATS["text"](made.VERDICTS["violated"]) + "\n"


def test_a_red_run_names_the_next_command():
    (line,) = next_step(made.VERDICTS["violated"], "runs/x")
    assert line.startswith("next: servanda tools report runs/x -o report.html")
    assert next_step(made.VERDICTS["violated"], "runs/x", page=True) == []
    assert next_step(made.VERDICTS["holds"], "runs/x") == []


def test_a_red_run_says_whom_it_hits():
    text = FORMATS["text"](made.VERDICTS["violated"])
    assert re.search(
        r"^impact: this hits 1\.0 % of the tokens; .* 24\.0 % .* overall\)\.$", text, re.M
    )
    assert "impact:" not in FORMATS["text"](made.VERDICTS["holds"])
