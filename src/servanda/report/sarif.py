# The verdict as SARIF 2.1.0, so that a broken clause is shown at its line of the contract.

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from servanda._version import __version__
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format
from servanda.report.summary import headline

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_KINDS = {
    "violated": "fail",
    "error": "fail",
    "inconclusive": "open",
    "holds": "pass",
    "not applicable": "notApplicable",
}
_LEVELS = {"warning": "warning", "error": "error", "critical": "error"}


@FORMATS.register("sarif")
def render(verdict: Verdict) -> str:
    """SARIF: a rule for each clause, a result for each cell.

    The level of a failed cell is that of its clause's severity; SARIF says `none` for
    everything else.  What is only watched never fails.
    """
    rules = list(dict.fromkeys(cell.clause for cell in verdict.cells))
    results = [_result(verdict, cell, rules.index(cell.clause)) for cell in verdict.cells]
    first = {cell.clause: cell for cell in reversed(verdict.cells)}
    texts = (f"Not examined: {format.line(spot.text)}" for spot in verdict.blind_spots)
    notes = [{"level": "note", "message": {"text": text}} for text in texts]
    run = {
        "tool": {
            "driver": {
                "name": "servanda",
                "semanticVersion": __version__,
                "rules": [_rule(first[clause]) for clause in rules],
            }
        },
        "automationDetails": {"id": f"servanda/{format.line(verdict.contract)}/"},
        "invocations": [
            {
                "executionSuccessful": verdict.outcome != "error",
                "exitCode": verdict.exit_code,
                "exitCodeDescription": str(headline(verdict)),
                "toolExecutionNotifications": notes,
            }
        ],
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, allow_nan=False)


def _rule(cell: CellVerdict) -> dict[str, Any]:
    return {
        "id": cell.clause,
        "name": format.line(cell.clause),
        "shortDescription": {"text": f"{cell.section}: {cell_text.quantity(cell)}"},
        "defaultConfiguration": {"level": _LEVELS[cell.severity]},
    }


def _result(verdict: Verdict, cell: CellVerdict, rule: int) -> dict[str, Any]:
    kind = _KINDS[cell.outcome] if cell.enforced else "informational"
    result: dict[str, Any] = {
        "ruleId": cell.clause,
        "ruleIndex": rule,
        "kind": kind,
        "level": _LEVELS[cell.severity] if kind == "fail" else "none",
        "message": {"text": cell_text.sentence(cell)},
        "partialFingerprints": {"cell/v1": f"{verdict.contract}/{cell.clause}/{cell.place}"},
    }
    if cell.where is not None:
        location = {
            "artifactLocation": {"uri": quote(cell.where.file.replace("\\", "/"))},
            "region": {"startLine": cell.where.line, "startColumn": cell.where.column},
        }
        result["locations"] = [{"physicalLocation": location}]
    else:
        name = f"{format.line(verdict.contract)}.{cell.section}.{format.line(cell.clause)}"
        result["locations"] = [{"logicalLocations": [{"fullyQualifiedName": name}]}]
    return result
