# Every format, on verdicts of every outcome and with every absence, is what its readers parse.

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.contract.clause import Claim, Section
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.verdict import FORMATS, BlindSpot, Verdict
from servanda.report import format
from servanda.report.html import numbers
from servanda.report.html_cards import cards
from servanda.report.summary import headline, impact
from servanda.report.table import width
from tests.drawn import examples
from tests.report import made

JUNIT = xmlschema.XMLSchema(Path(__file__).parents[1] / "data" / "junit-10.xsd")
OPEN_TAGS = {"meta", "br", "img", "input", "link", "hr"}  # HTML closes these by itself
each_verdict = pytest.mark.parametrize("name", made.VERDICTS)


def rendered(format_, name):
    return FORMATS[format_](made.VERDICTS[name])


@pytest.mark.sampled(3)
@each_verdict
@pytest.mark.parametrize("format_", sorted(FORMATS))
def test_a_report_is_a_pure_function_of_its_verdict(format_, name):
    text = rendered(format_, name)
    assert len(FORMATS) == 7
    assert text.strip() and text == rendered(format_, name)
    assert "None" not in text and "nan" not in re.findall(r"\bnan\b", text)


# HTML


class Page(HTMLParser):
    """Refuses tags that are not closed in order; keeps what was met."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.links, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice on {tag}"
        assert not any(name.startswith("on") for name, _ in attrs), f"a handler on {tag}"
        self.links += [v for n, v in attrs if n in ("href", "src", "srcset", "data", "action")]
        if tag not in OPEN_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in OPEN_TAGS:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


@each_verdict
def test_the_page_is_whole_and_fetches_nothing(name):
    text = rendered("html", name)
    page = Page(text)
    assert text.lstrip().startswith("<!doctype html>")
    assert not {"script", "link", "iframe", "img", "object", "base", "form"} & {*page.tags}
    assert all(link.startswith("#") for link in page.links)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert page.tags.count("h1") == 1 and page.tags.count("main") == 1


@each_verdict
def test_the_page_answers_first(name):
    verdict = made.VERDICTS[name]
    text = " ".join("".join(Page(rendered("html", name)).text).split())
    head = headline(verdict)
    assert f"{head.glyph} {head.answer}" in text
    assert len(str(head)) < 320 and "\n" not in str(head)
    assert "Exit code" not in text
    for title in ("Is the comparison fair?", "Where is the drift?", "Which token is worst?"):
        assert title in text
    assert "Could this gate have missed it?" in text


def test_sixty_slices_are_ten_rows_and_a_count():
    text = rendered("html", "sixty slices")
    assert text.count('class="says ') == 10
    assert "51 more hold" in text


# JUnit


@each_verdict
def test_junit_is_valid_against_the_schema_of_jenkins(name):
    JUNIT.validate(rendered("junit", name))


@pytest.mark.parametrize(
    ("name", "failures", "errors", "skipped"),
    [
        ("holds", 0, 0, 0),
        ("violated", 1, 0, 0),
        ("inconclusive", 1, 0, 0),
        ("error", 1, 1, 0),
        ("not judged", 1, 0, 1),
        ("watched", 0, 0, 1),
    ],
)
def test_junit_counts_what_gates(name, failures, errors, skipped):
    suite = ET.fromstring(rendered("junit", name).encode())[0]
    counts = [int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")]
    cells = len(made.VERDICTS[name].cells)
    # where no cell is judged the verdict itself is the test case that fails
    assert counts == [cells + (name == "not judged"), failures, errors, skipped]
    tags = [element.tag for case in suite.iter("testcase") for element in case]
    assert [tags.count(t) for t in ("failure", "error", "skipped")] == counts[1:]


def test_junit_names_cells_and_says_why():
    suite = ET.fromstring(rendered("junit", "inconclusive").encode())[0]
    case = next(suite.iter("testcase"))
    assert case.get("classname") == "toy.statistical" and case.get("name") == "tv on all"
    assert case[0].get("type") == "inconclusive"
    assert "too few data" in case[0].get("message")
    assert "about 3,100 more prompt groups would decide" in case[0].get("message")


# SARIF


@each_verdict
def test_sarif_has_what_the_standard_requires(name):
    """SARIF 2.1.0: 3.13 log, 3.14 run, 3.19 driver, 3.27 result, 3.49 rule.

    A reading of the text of the standard; the published schema is not kept here.
    """
    verdict, log = made.VERDICTS[name], json.loads(rendered("sarif", name))
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert driver["name"] and len({*ids}) == len(ids)
    assert run["invocations"][0]["exitCode"] == verdict.exit_code
    assert len(run["results"]) == len(verdict.cells)
    kinds = {"pass", "open", "informational", "notApplicable", "review", "fail"}
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["message"]["text"] and result["kind"] in kinds
        # 3.27.10: where kind is not "fail", level is "none"
        assert (result["level"] == "none") == (result["kind"] != "fail")
        (location,) = result["locations"]
        if "physicalLocation" in location:
            physical = location["physicalLocation"]
            assert physical["region"]["startLine"] >= 1
            assert not re.search(r"[\s<>\"\\]", physical["artifactLocation"]["uri"])


def test_sarif_points_at_the_clause_with_its_severity():
    verdict = made.verdict("violated", [made.cell("violated", severity="critical")])
    result = json.loads(FORMATS["sarif"](verdict))["runs"][0]["results"][0]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "dir%20with%20space/c%3Ax.yaml"
    assert place["region"] == {"startLine": 29, "startColumn": 5}
    assert (result["kind"], result["level"]) == ("fail", "error")


# GitHub


@each_verdict
def test_github_annotations_are_commands_a_line_each(name):
    lines = rendered("github", name).splitlines()
    form = re.compile(r"::(error|warning|notice) ((?:\w+=[^,:\r\n]*,?)+)::[^\r\n]+")
    assert all(form.fullmatch(line) for line in lines)
    assert lines[-1].startswith("::notice ") and len(lines) <= 10
    assert not any("\x00" in line or "\x1b" in line for line in lines)


def test_github_annotations_escape_what_the_runner_would_read():
    first = rendered("github", "violated").splitlines()[0]
    assert first.startswith(
        "::error file=dir with space/c%3Ax.yaml,line=29,col=5,title=tv-long on long%3A violated::"
    )
    percentile = rendered("github", "percentile").splitlines()[0]
    assert "is 15.0 %25 on" in percentile


# Markdown


@each_verdict
def test_markdown_has_an_alert_a_table_and_no_markup_of_others(name):
    text = rendered("markdown", name)
    lines = text.splitlines()
    assert re.fullmatch(r"> \[!(CAUTION|WARNING|TIP)\]", lines[0])
    rows = [line for line in lines if line.startswith("|")]
    widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert widths <= {8, 4}
    tags = {*re.findall(r"</?\w+>", text)}
    assert tags <= {f"{a}{t}>" for t in ("details", "summary", "sub") for a in ("<", "</")}
    assert "@team" not in text and "http://" not in text


def test_markdown_has_its_own_words_for_what_is_not_decided():
    noisy = made.verdict("inconclusive", [made.cell("inconclusive", value=0.04, floor=0.05)])
    assert "? unreliable baseline" in FORMATS["markdown"](noisy)
    assert "? too few data" in rendered("markdown", "inconclusive")


def test_markdown_shows_five_rows_and_folds_the_rest():
    text = rendered("markdown", "sixty slices")
    before, folded = text.split("<details>", 1)
    assert before.count("\n| ") == 7 and "58 more cells" in folded


# a number format


def cells_of(format_, text):
    """The text above a report's first table, and what it says of each cell."""
    if format_ == "html":
        top, rest = text.split('<h2 id="where">', 1)
        return top, [unescape(row.split("</table>")[0]) for row in rest.split('<tr id="cell-')[1:]]
    if format_ == "markdown":
        top, rest = unescape(re.sub(r"\\(.)", r"\1", text)).split("\n|", 1)
        return top, [line for line in rest.splitlines() if line.startswith("- ")]
    if format_ == "junit":
        return "", [case[0].text for case in ET.fromstring(text.encode()).iter("testcase")]
    if format_ == "sarif":
        return "", [one["message"]["text"] for one in json.loads(text)["runs"][0]["results"]]
    *annotations, top = text.splitlines()
    return top, annotations


@pytest.mark.parametrize("format_", ["html", "markdown", "junit", "sarif", "github"])
def test_a_cell_says_once_how_it_stands_to_the_rounding_of_its_format(format_):
    top, said = cells_of(format_, rendered(format_, "number format"))
    whole, long, other, *_ = made.FORMAT.cells
    if format_ in ("html", "markdown", "github"):
        assert top.index(whole.rounding) < top.index("The files differ.")
        assert long.rounding not in top and "differs by more" not in top
    sentences = [
        f"{whole.rounding}; this is what bfloat16 costs: limit 1.25",
        f"{long.rounding}; limit 1.5",
        other.rounding,
    ]
    for sentence in sentences[1:2] if format_ == "github" else sentences:
        (one,) = (text for text in said if sentence in text)
        assert one.count("times as far") == 1
    assert "rounding" not in rendered(format_, "holds")


def test_the_text_has_the_class_in_its_third_line():
    lines = rendered("text", "number format").splitlines()
    assert lines[2:4] == [made.FORMAT.cells[0].rounding, "The files differ."]


# text


def test_wide_names_do_not_shift_the_table_and_one_of_many_lines_is_one():
    cells = [made.cell(slice="領域=日本語"), made.cell(slice="e\u0301=x"), made.cell(slice="plain")]
    lines = FORMATS["text"](made.verdict(cells=cells)).splitlines()
    rows = [line for line in lines if line.startswith("✓")]
    widths = {width(row[: row.index("0.01")]) for row in rows}
    assert len(rows) == 3 and len(widths) == 1
    text = FORMATS["text"](made.verdict(cells=[made.cell(slice="a\nb\x1b[31m")]))
    assert "a b [31m" in text and "\x1b" not in text


# all of them

names = st.text(max_size=12)
number = st.none() | st.floats(allow_nan=False)
cells = st.builds(
    CellVerdict,
    clause=names,
    section=st.sampled_from(get_args(Section)),
    metric=st.sampled_from(["tv", "usable_ratio", "sampler_fidelity", "seconds"]),
    aggregate=st.sampled_from(["", "mean", "max", "p99"]),
    slice=st.just("all") | names,
    outcome=st.sampled_from(get_args(Outcome)),
    kind=st.sampled_from(["", "certificate", "fact", "guard", "estimate"]),
    claim=st.sampled_from(get_args(Claim)),
    severity=st.sampled_from(["warning", "error", "critical"]),
    enforced=st.booleans(),
    value=number,
    interval=st.none() | st.tuples(st.floats(-2, 2), st.floats(-2, 2)).map(sorted).map(tuple),
    limit=number,
    floor=number,
    stable=number,
    share=st.none() | st.floats(0, 1),
    n=st.integers(0, 10**9),
    alpha=st.none() | st.floats(1e-9, 0.5),
    e_holds=number,
    threshold=st.none() | st.floats(0, 10),
    more=st.none() | st.integers(1, 10**6),
    note=names,
)


@pytest.mark.slow
@settings(max_examples=examples(40))  # a page takes a while
@given(st.lists(cells, max_size=4))
def test_whatever_a_verdict_holds_every_format_has_a_form_for_it(cells):
    counted = [c.outcome for c in cells if c.enforced and c.outcome != "not applicable"]
    verdict = made.verdict(worst(counted), cells)
    JUNIT.validate(FORMATS["junit"](verdict))
    Page(FORMATS["html"](verdict))
    assert Verdict.from_dict(json.loads(FORMATS["json"](verdict))) == verdict
    for format_ in ("github", "markdown", "sarif", "text"):
        assert FORMATS[format_](verdict)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("holds", "✓ May promote. Every promise holds, on the whole traffic."),
        (
            "violated",
            "✗ Do not promote. The infer kernel breaks slice long. "
            "The whole traffic and 1 other slice hold.",
        ),
        (
            "unfaithful",
            "✗ Do not promote. What it serves does not follow the distribution that it reports.",
        ),
        (
            "everywhere",
            "✗ Do not promote. The infer kernel breaks 3 slices (a, b and others). No slice holds.",
        ),
        (
            "whole",
            "✗ Do not promote. The infer kernel breaks tv on the whole traffic. "
            "1 other slice holds.",
        ),
        (
            "inconclusive",
            "… Not decided. tv on whole traffic: too few data. "
            "About 3,100 more prompt groups would decide.",
        ),
        ("not judged", "… Not decided. No enforced clause is judged at stage offline."),
        (
            "golden only",
            "✗ Do not promote. The infer kernel breaks drift on golden texts.",
        ),
    ],
)
def test_the_verdict_in_a_sentence(name, sentence):
    assert str(headline(made.VERDICTS[name])) == sentence


def test_the_line_under_it_says_whom_it_hits():
    assert impact(made.VERDICTS["violated"]) == (
        "Mean tv 0.17 on long, limit ≤ 0.1. 1.0 % of the tokens are affected. The most "
        "likely token differs at 24.0 % of the positions there (whole traffic 2.0 %). Exit code 1."
    )
    assert "(stable kernel 24.0 %)" in impact(made.VERDICTS["stable"])


def test_a_share_that_is_not_whole_is_never_shown_as_whole():
    assert [format.percent(x) for x in (1.0, 0.99996, 0.5, 1e-5, 0.0)] == [
        *("100 %", "> 99.9 %", "50.0 %", "0.001 %", "0 %")
    ]


def test_names_on_the_page_are_text_and_a_tried_gate_says_what_it_misses():
    text = rendered("html", "hostile")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "\x00" not in text and "\x1b" not in text
    assert "catches 1 of 2 known faults" in text and "Missed: b." in text
    lone = FORMATS["html"](replace(made.VERDICTS["holds"], power=()))  # only this run speaks
    assert "violated from about" in lone and "known faults" not in lone


def test_a_conditional_bound_is_shown_like_a_certificate():
    """It is one, times what the contract declares: with its claim, and with what it would miss."""
    rests = ("sampler", "order", "same_tokens", "independent", "advantage", "score_norm")
    bound = made.cell(clause="bias", kind="conditional bound", assumptions=rests)
    verdict = made.verdict(cells=[bound, *made.guards()])
    (row,) = (n.columns for n in numbers(verdict).rows if n.columns[0].startswith("bias"))
    assert "conditional bound" in row and "all such tokens" in row
    missed = cards(verdict)[3].lines
    assert missed[0].text == "By the widths of this run's intervals, violated from about:"
    text = FORMATS["text"](verdict)
    assert "scope (population): all tokens" in text
    assert (
        "bias: a conditional bound, if the advantage of a token is at most the declared one; the "
        "norm of grad log p is at most the declared one" in text
    )
    assert "times factors that the contract declares" in FORMATS["html"](verdict)


def test_the_unit_of_a_threshold_is_that_of_its_metric():
    share = made.cell(aggregate="p99", metric="ratio_budget", threshold=0.5)
    nats = made.cell(aggregate="p99", metric="abs_log_ratio_nats", threshold=0.5)
    told = [FORMATS["text"](made.verdict(cells=[c])) for c in (share, nats)]
    assert ["within 0.5 if" in text for text in told] == [True, False]
    assert ["within 0.5 nats if" in text for text in told] == [False, True]


def test_what_a_number_rests_on_is_said_of_decided_cells_only():
    """After a guard was rejected the cell is open, and nothing of it is certified."""
    drift = made.cell(clause="rd", metric="reward_drift", assumptions=("reward_range",))
    told = [
        FORMATS["text"](made.verdict(outcome, [replace(drift, outcome=outcome), *made.guards()]))
        for outcome in ("holds", "violated", "inconclusive")
    ]
    assert ["rd: certified, if" in text for text in told] == [True, True, False]


@pytest.mark.parametrize(
    ("metric", "kind", "value", "noted"),
    [
        ("policy_gradient_bias", "conditional bound", -0.0002, True),
        ("support_mass", "certificate", -0.0002, True),
        ("tv", "certificate", 0.0, False),
        ("reward_gap", "certificate", -0.2, False),
        ("log_ratio_nats", "certificate", -0.2, False),
    ],
)
def test_a_mean_below_0_that_cannot_be_is_told_as_noise(metric, kind, value, noted):
    cell = made.cell(metric=metric, kind=kind, value=value)
    text = FORMATS["text"](made.verdict(cells=[cell, *made.guards()]))
    assert ("below 0 by sampling noise: the mean is never negative" in text) == noted


def test_a_metric_of_answers_says_so_and_counts_answers_as_missing():
    gap = made.cell(metric="weight_gap", unit="per answer", missing=3)
    drift = made.cell(clause="rd", metric="reward_drift", missing=4)
    text = FORMATS["text"](made.verdict(cells=[gap, drift, made.cell(missing=5), *made.guards()]))
    assert "    counted per answer\n" in text
    for missing in ("3 answers", "4 answers", "5 tokens"):
        assert f"    {missing} missing, counted against both answers" in text


@pytest.mark.parametrize("format_", sorted(FORMATS))
def test_every_format_says_what_was_not_examined(format_):
    """A pass that does not say what it did not look at is read as having looked at everything."""
    spot = BlindSpot("slice", "slice 'tools' met no token, so nothing is known about it")
    silent = made.verdict()
    told = FORMATS[format_](replace(silent, blind_spots=(spot,)))

    assert "met no token" in told
    assert "met no token" not in FORMATS[format_](silent)
