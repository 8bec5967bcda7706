"""The laws of docs/explanation/verdicts.md: verdicts, dumps, live traffic and promotions."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from servanda.gateway.controller.audit import render as audit_text
from servanda.gateway.controller.web import summary
from servanda.gateway.controller.web.app import fragment, view
from servanda.gateway.routing.model import STATUSES, Pin
from servanda.judgement.clauses.base import worst
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run import report as promotion
from servanda.promotion.run.history import advance_run, override_cell
from servanda.promotion.state import Override
from servanda.report import cell_text, html_cards
from servanda.report import summary as headlines
from servanda.report.text import lines as text_lines
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.report import render as dump_text
from tests import kit
from tests.gateway.controller import controllers
from tests.gateway.controller.test_audit import audited, logged
from tests.gateway.controller.web import fake
from tests.gateway.controller.web.test_page import VIEWER
from tests.promotion.run.histories import ACTOR, cell, finding, reaching
from tests.report import made
from tests.rl.dumps import made as dumps

KEPT = Path(__file__).parent / "data" / "first.verdict.json"
FIRST = Verdict.from_dict(json.loads(KEPT.read_text(encoding="utf-8")))
FAULT = ", fault: {undisclosed_temperature: 0.8}"
STRENGTH = {"undisclosed_temperature": "0.8", "bf16_positions": "true"}
MEASURED = {
    "measured holds": {"q": {"": kit.BASE}},
    "measured violated": {"q": {"": kit.moved(kit.BASE, 0.3)}},
    "measured open": {"q": {"": kit.moved(kit.BASE, 0.045)}, "first": 96, "last": 96},
    "measured fault": {"infer": FAULT, "width": 24},
}
REQUESTS = (1, 20, 240, 600)


@pytest.fixture(scope="module", params=[*made.VERDICTS, *MEASURED, "first"])
def verdict(request, tmp_path_factory):
    """Verdicts with every outcome: made ones, runs on exact tables, and one of real kernels."""
    if request.param not in MEASURED:
        return {**made.VERDICTS, "first": FIRST}[request.param]
    folder = tmp_path_factory.mktemp("run")
    path, _ = kit.write(folder, **MEASURED[request.param])
    done = kit.servanda("check", path, "--run-dir", folder / "run", "--quiet", "--format", "json")
    code = {"holds": 0, "open": 3}.get(request.param.split()[1], 1)
    assert done.exit_code == code
    return Verdict.from_dict(json.loads(done.stdout))


@pytest.fixture(scope="module", params=["healthy", "late", "small"])
def dump(request, tmp_path_factory):
    """A dump that is judged: one that holds, one whose last steps do not, and one of few tokens."""
    far = {"tv": lambda step, *_: 0.07 if step == 6 else 0.004}
    sizes = {"healthy": {}, "late": far, "small": {"turn_tokens": 16, "n": 4}}[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return judge_dump(DumpOptions(dumps.write(folder, **{"steps": range(1, 13), **sizes})))


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """Audits of healthy and of faulty traffic, of one request to 600."""

    @cache
    def of(n, faulty):
        folder = tmp_path_factory.mktemp("audit")
        q = controllers.FAULTY if faulty else controllers.NEARLY
        path = controllers.contract(folder, q=q)
        return audited(path, logged(folder, path, n))[0]

    return [of(n, faulty) for n in REQUESTS for faulty in (False, True)]


def slices():
    """Slices in every state, with every evidence: none, little, of a pass, and of an alarm."""
    of_cells = {
        "little": fake.cell(log_below=0.1, n=1, more=69),
        "near": fake.cell(log_below=-1.0, log_evidence=1.0, n=400),
        "within": fake.cell(),
        "alarm": fake.cell(value=0.17, log_evidence=9.1, log_below=-9.0),
        "sampler": fake.cell("fidelity", limit=0.0, refutes=True),
    }
    pins = [None, *(Pin(to, "a", "b", fake.NOW + 9) for to in ("stable", "infer", "enforce"))]
    for n in range(3):
        for names in itertools.combinations(of_cells, n):
            for status, pin, scored in itertools.product(STATUSES, pins, (0, 400)):
                cells = tuple(of_cells[name] for name in names)
                yield fake.slice_("a", status, pin=pin, scored=scored, cells=cells), {*names}


def rows_of(text):
    """The rows of a verdict's text, without their notes."""
    return [row for row in text if re.match(r"[✓✗?!–] ", row)]


# 1. A tick only on evidence


def test_a_row_of_a_verdict_is_green_where_its_own_test_decided_that_it_holds(verdict):
    sound = [c for c in verdict.cells if c.outcome == "holds" and c.n]

    assert sum(row.startswith("✓") for row in rows_of(text_lines(verdict))) == len(sound)
    assert (headlines.headline(verdict).glyph == "✓") == (verdict.outcome == "holds")
    without = replace(verdict, cells=tuple(c.but(n=0) for c in verdict.cells))
    assert not [row for row in rows_of(text_lines(without)) if row.startswith("✓")]


def test_a_slice_of_traffic_is_green_where_its_return_test_passed():
    for one, names in slices():
        green = one.status == "active" and bool(one.scored) and "within" in names
        green &= not names & {"little", "near", "alarm"}
        green &= one.pin is None or one.pin.to == "enforce"
        status = fake.status(slices=(one,))
        for shown in (summary.text(status, "URL"), fragment(status, VIEWER)):
            assert ("✓" in shown) == green, (one, shown)
        assert (summary.headline(status).tone == "good") == green


def test_a_short_audit_says_how_many_requests_it_lacks_and_is_never_green(audits):
    for found in audits:
        shown = audit_text(found)
        for one in found.standing.slices:
            (row,) = [row for row in shown.splitlines() if row.split("  ")[0] == one.name]
            judged = [c for c in one.cells if not c.refutes]
            assert ("✓" in row) == all(c.log_below >= c.log_leave_price for c in judged)
            if "gathering" in row:
                n, about = re.findall(r"gathering: (\d+) of about (\d+) requests", row)[0]
                assert one.scored == int(n) < int(about)
    assert "✓" not in audit_text(audits[0]) and audits[0].exit_code == 3
    assert audits[-2].exit_code == 0


@pytest.mark.parametrize("outcome", ["holds", "inconclusive", "violated"])
@pytest.mark.parametrize("waived", [False, True])
def test_a_step_of_a_promotion_is_green_where_it_was_passed_on_evidence(tmp_path, outcome, waived):
    with open_ledger(str(tmp_path / "ledger.db")) as ledger:
        run = reaching(ledger, "canary-1")
        if waived:
            given = Override("tv", "all", ACTOR, "a known fault", 1e9)
            run = override_cell(ledger, run, given, now=900.0)
        both = (cell(outcome), replace(cell(), clause="p99"))
        found = replace(finding("canary-1", outcome), cells=both)
        run = advance_run(ledger, run, found, actor=ACTOR, now=1000.0)
    glyphs = "".join(row.glyph for row in promotion.rows(run))

    passed = {"holds": "✓✓✓▶·", "inconclusive": "✓✓▶··", "violated": "✓✓✗··"}[outcome]
    assert glyphs == ("✓✓!▶·" if waived and outcome != "holds" else passed)


# 2. A fault that a run caught is not one that it misses


def test_a_fault_that_a_run_caught_is_not_listed_as_missed(verdict):
    has = re.findall(r"\[fault: (.*?)\]", f"{verdict.infer} {verdict.train}")
    missed = {f"{c.fault} {c.strength}" for c in verdict.power if not c.by and not c.met}
    shown = " ".join(line.text for line in html_cards.cards(verdict)[-1].lines)

    assert not has or (verdict.outcome == "violated" and verdict.power)
    assert not [fault for fault in has if f"{fault} {STRENGTH[fault]}" in missed]
    assert not verdict.power or f" catches {_caught(verdict)} known faults at their def" in shown


def _caught(verdict):
    own = [c for c in verdict.power if not c.met]
    return f"{sum(bool(c.by) for c in own)} of {len(own)}"


# 3. A direction agrees with the numbers beside it


def beyond(cell):
    return (cell.value < cell.limit) == (cell_text.limit_sign(cell) == "≥")


def test_a_violated_cell_is_beyond_its_limit_and_one_that_holds_is_not(verdict):
    for one in verdict.cells:
        if one.kind == "guard" or None in (one.value, one.limit) or one.value == one.limit:
            continue
        away = replace(one, value=abs(one.value))
        assert {"violated": True, "holds": False}.get(one.outcome, beyond(away)) == beyond(away)


def test_a_place_of_a_gap_has_more_of_it_than_the_rest(dump):
    verdict = dump.verdict
    for advice in filter(None, (verdict.advice, FIRST.advice)):
        assert all(part.rest.value < advice.before.value for part in advice.slices)
        for there, elsewhere in re.findall(r"\(([\d.e-]+) against ([\d.e-]+) else", advice.cause):
            assert float(there) > float(elsewhere)


def test_what_is_said_of_traffic_agrees_with_its_value(audits):
    for found in audits:
        for one in found.standing.slices:
            said = summary.state(one).text
            values = [
                (c.value, c.limit) for c in one.cells if not c.refutes and c.value is not None
            ]
            assert "within limits" not in said or all(v < limit for v, limit in values)
            assert "above its limit" not in said or any(v > limit for v, limit in values)


# 4. The first line is the worst of its rows


def test_the_answer_of_a_verdict_is_the_worst_of_its_cells(verdict):
    cells = [c for c in verdict.cells if c.enforced and c.outcome != "not applicable"]
    promised = any(c.section != "observability" for c in cells)
    assert verdict.outcome == worst([c.outcome for c in cells if promised])
    assert re.search(rf"^{verdict.outcome.upper()}: ", FORMATS["text"](verdict), re.M)


def test_the_answer_of_a_dump_is_the_worst_of_its_steps_and_cells(dump):
    verdict = dump.verdict
    steps = worst([row.outcome for row in verdict.breakdown.steps])
    assert verdict.outcome == worst([c.outcome for c in verdict.cells if c.enforced])
    (line,) = [text for text in dump_text(dump).splitlines() if "each step" in text]
    assert line.strip()[0] == cell_text.GLYPH[steps]


def test_the_first_line_of_traffic_is_the_worst_of_its_slices(audits):
    for found in audits:
        status = found.standing
        tones = [summary.state(one).tone for one in status.slices]
        head = summary.headline(status)
        assert head.tone == next(tone for tone in ("bad", "open", "good", "plain") if tone in tones)
        glyphs = {row.split("  ")[-1][0] for row in audit_text(found).splitlines()[2:6]}
        code = 1 if "✗" in glyphs else 0 if glyphs == {"✓"} else 3
        assert found.exit_code == code


# 5. The counts of the first line add up to its rows


def test_the_counts_of_a_verdict_are_those_of_its_rows(verdict):
    counted = [c for c in verdict.cells if c.enforced and c.outcome != "not applicable"]
    for hold, of in re.findall(r"(\d+) of (\d+) enforced", FORMATS["text"](verdict)):
        assert (int(hold), int(of)) == (sum(c.outcome == "holds" for c in counted), len(counted))


def test_the_counts_of_a_dump_are_those_of_its_steps(dump):
    (line,) = [text for text in dump_text(dump).splitlines() if "each step" in text]
    counts = re.findall(r"(\d+) (hold|violated|inconclusive)\b", line)
    rows = Counter(row.outcome for row in dump.verdict.breakdown.steps)
    assert {word.replace("hold", "holds"): int(n) for n, word in counts} == rows


def test_the_counts_of_traffic_are_those_of_its_slices(audits):
    shown = [found.standing for found in audits] + [fake.status()]
    for status in shown:
        words = Counter(row["state"].words for row in view(status, VIEWER)["rows"])
        said = [part.split(" ", 1) for part in summary.headline(status).text.split(" · ")]
        assert sum(int(n) for n, _ in said) == words.total() == len(status.slices)
        for word, n in words.items():
            assert sum(int(k) for k, text in said if text.startswith(word)) >= n
