# The verdict as JUnit XML: one test case a cell, for whatever shows test results.

from __future__ import annotations

import xml.etree.ElementTree as ET

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format
from servanda.report.format import xml_document, xml_text
from servanda.report.summary import headline


@FORMATS.register("junit")
def render(verdict: Verdict) -> str:
    """JUnit XML in the form that Jenkins and surefire read.

    A violated cell fails; so does one that is not decided (type "inconclusive"), for its exit
    code is not 0 either.  Cells that are only watched, or do not apply, are skipped.
    """
    tags = [_tag(cell) for cell in verdict.cells]
    silent = verdict.exit_code != 0 and not {"failure", "error"} & set(tags)
    name = xml_text(format.line(verdict.contract))
    counts = {
        "tests": str(len(tags) + silent),
        "failures": str(tags.count("failure") + silent),
        "errors": str(tags.count("error")),
        "skipped": str(tags.count("skipped")),
        "time": f"{verdict.circumstances.seconds or 0:.3f}",
    }
    # the outer element has no count of skipped cases in Jenkins's schema
    outer = {key: value for key, value in counts.items() if key != "skipped"}
    suites = ET.Element("testsuites", {"name": name, **outer})
    suite = ET.SubElement(suites, "testsuite", {"name": name, **counts})
    about = {
        "outcome": verdict.outcome,
        "exit_code": str(verdict.exit_code),
        "summary": str(headline(verdict)),
        "train": verdict.train,
        "infer": verdict.infer,
        "evidence": verdict.evidence,
    }
    if verdict.blind_spots:
        about["not_examined"] = "\n".join(format.line(spot.text) for spot in verdict.blind_spots)
    properties = ET.SubElement(suite, "properties")
    for key, value in about.items():
        ET.SubElement(properties, "property", {"name": key, "value": xml_text(value)})
    for cell, tag in zip(verdict.cells, tags, strict=True):
        _case(suite, name, cell, tag)
    if silent:  # nothing was judged: anyone who reads test results must not see green
        case = ET.SubElement(suite, "testcase", {"name": "verdict", "classname": name, "time": "0"})
        what = {"message": xml_text(str(headline(verdict))), "type": verdict.outcome}
        ET.SubElement(case, "failure", what)
    return xml_document(suites)


def _tag(cell: CellVerdict) -> str:
    if not cell.enforced or cell.outcome == "not applicable":
        return "skipped"
    return {"holds": "", "error": "error"}.get(cell.outcome, "failure")


def _case(suite: ET.Element, name: str, cell: CellVerdict, tag: str) -> None:
    named = xml_text(f"{format.line(cell.clause)} on {format.line(cell.place)}")
    attributes = {"name": named, "classname": f"{name}.{cell.section}", "time": "0"}
    case = ET.SubElement(suite, "testcase", attributes)
    message = {"message": xml_text(cell_text.sentence(cell))}
    numbers = "\n".join(filter(None, (cell_text.meaning(cell), cell_text.remark(cell))))
    if not tag:
        ET.SubElement(case, "system-out").text = xml_text(numbers)
    elif tag == "skipped":
        ET.SubElement(case, tag, message)
    else:
        element = ET.SubElement(case, tag, {**message, "type": cell.outcome})
        element.text = xml_text(numbers)
