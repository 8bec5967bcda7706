# The page of a hunt, docs/results/found.md, from its record and the texts in findings.yaml and
# differences.yaml.

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from typing import Any

import yaml

from benchmarks import committed
from benchmarks.hunt.findings import FINDING, HERE, Finding, known

PAGE = committed.ROOT / "docs" / "results" / "found.md"
RECORD = committed.KEPT / "found.json"
Record = dict[str, Any]
# of a part of the survey what is run
PARTS = {
    "ways": "architectures in ways of running",
    "batching": "requests in continuous batching",
    "adapters": "models with adapters, applied, merged and saved",
    "quantized": "models in schemes of quantization",
    "onnx_graphs": "models at levels of graph optimization",
    "llama_server": "models/tiny-lm under flags of llama-server",
}
VERDICTS = {
    "finding": "a finding of this page",
    "documented": "documented limit",
    "silent": "undocumented limit, without a message",
    "rounding": "rounding",
    "asked": "asked for",
}
TEXT = """\
<!-- written by benchmarks/hunt/page.py -->
# Disagreements found in engines and trainers

A model should give the same logprobs however it is run: in one call or token by token, alone or
padded, with one attention implementation or another, with an adapter applied or merged. This page
lists cases in recent releases where it does not: {findings} findings, {before} of them from
earlier work on the engines of Servanda, and {limits} documented limit. Each has a repro of about
ten lines that needs only the library. Models are small and random, built by the repro, in float32
on a CPU. The values are mean logprobs of a text, one logprob, or the tokens that were generated;
equal kernels print equal values. The sizes are those of these models, whose weights are larger
than usual so that an error shows. They do not say how large the effect is in a trained model.

{summary}

*Public thread* is what a search of public issues found in November 2026. "None found" does not
mean that none exists.

## How much was run

{counts}

A *case* is one model in one way of running, beside one forward pass without a cache in eager
attention (for adapters: beside the adapter as it is applied; for quantized weights: beside the
same weights in prefill). It *agrees* if no logprob over the whole vocabulary differs by more than
{limit} nats. *Refused* means that the library raised an error, which includes ways that a model
does not have. Dropout and noise of routers are off. A case of continuous batching is a request: its
greedy tokens are compared. llama-server is compared with itself without the flags, in float32.

Of the cases that differ:

{reasons}

A case that no entry of `benchmarks/hunt/differences.yaml` explains stops the page from being
written. The code that measured the cases is no longer in the repository. Its history has it, in
`benchmarks/hunt` of revision `d9ed851a`.

Not run: GPUs and their kernels, FlashAttention and flex attention, tensor parallelism, the
weights of released models, images and sound, and trainers (TRL and verl) as a whole. vLLM was not
surveyed: its findings are from earlier work.

## The findings

{entries}

## How to run it

`make hunt` makes an environment with the releases of `constraints-hunt.txt`, runs the repros there,
and those of vLLM in the environment of `make test-engines`; then it writes this page. Repros are in
`benchmarks/hunt/repro`, the record is `benchmarks/measured/found.json`. In the commands,
`DIR` is a model that `python -m benchmarks.hunt.architectures NAME DIR` builds.
"""


def recorded() -> Record:
    """What was kept."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def keep(record: Record) -> None:
    """Write the record and its page."""
    data = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True)
    RECORD.write_text(f"{data}\n", encoding="utf-8")
    PAGE.write_text(page(recorded()), encoding="utf-8")


def page(record: Record) -> str:
    """The page.

    Raises:
        KeyError: the repro of a finding is not in the record.
        ValueError: a case differs that differences.yaml does not explain.
    """
    findings = [f for f in known() if f.verdict == FINDING]
    return TEXT.format(
        findings=len(findings),
        before=sum(f.set == "before" for f in findings),
        limits=len(known()) - len(findings),
        summary=_summary(record),
        counts=_counts(record),
        limit="0.001",
        reasons=_reasons(record),
        entries="\n\n".join(_entry(f, record["repros"][f.name]) for f in known()),
    )


def _table(*rows: tuple[str, ...]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *rest])


def _summary(record: Record) -> str:
    rows = [("", "finding", "release", "public thread")]
    for number, finding in enumerate(known(), 1):
        package = finding.at[1]
        release = f"{package} {record['repros'][finding.name]['versions'][package]}"
        verdict = "" if finding.verdict == FINDING else f" ({finding.verdict})"
        rows.append(
            (str(number), f"[{finding.title}](#{finding.name}){verdict}", release, finding.upstream)
        )
    return _table(*rows)


def _entry(finding: Finding, run: Record) -> str:
    code = finding.repro.read_text(encoding="utf-8").rstrip()
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    printed = "\n".join(f"{label}: {value}" for label, value in run["printed"])
    lines = [
        f"### {finding.name}",
        f"{finding.title[0].upper()}{finding.title[1:]}. {versions}.",
        f"```py\n{code}\n```",
        f"```text\n{printed}\n```",
        f"**Cause.** {finding.cause}",
        f"**Public thread.** {finding.upstream[0].upper()}{finding.upstream[1:]}.",
    ]
    if finding.command:
        command = finding.command if "`" in finding.command else f"`{finding.command}`"
        lines.append(f"**Found by.** {command}")
    return "\n\n".join(lines)


@cache
def entries() -> list[dict[str, Any]]:
    """The explanations of differences.yaml, the first that fits first."""
    return yaml.safe_load((HERE / "differences.yaml").read_text(encoding="utf-8"))


def explained(part: str, name: str, way: str) -> dict[str, Any] | None:
    """The entry of differences.yaml that fits a case, if there is one."""
    for entry in entries():
        fits = part == entry["part"] and re.fullmatch(entry["ways"], way)
        if fits and name in entry.get("names", [name]):
            return entry
    return None


def _verdicts(record: Record, part: str) -> Counter[int]:
    # how many cases each entry explains, by its place in the file
    counted: Counter[int] = Counter()
    for name, row in record["survey"][part]["rows"].items():
        for way, value in row["differ"].items():
            entry = explained(part, name, way)
            if entry is None:
                raise ValueError(
                    f"differences.yaml does not explain {part}, {name}, {way}: {value}"
                )
            counted[entries().index(entry)] += 1
    return counted


def _counts(record: Record) -> str:
    rows = [
        ("run", "releases", "models", "cases", "agree", "refused", "differ", *VERDICTS.values())
    ]
    for part, run in PARTS.items():
        cells = record["survey"][part]["rows"].values()
        agree, differ, refused = (
            sum(c if isinstance(c := cell[key], int) else len(c) for cell in cells)
            for key in ("agree", "differ", "refused")
        )
        kinds: Counter[str] = Counter()
        for place, count in _verdicts(record, part).items():
            kinds[entries()[place]["verdict"]] += count
        numbers = (len(cells), agree + differ + refused, agree, refused, differ)
        shown = (*numbers, *(kinds[kind] for kind in VERDICTS))
        versions = ", ".join(f"{k} {v}" for k, v in record["survey"][part]["versions"].items())
        rows.append((run, versions, *(f"{n:,}" for n in shown)))
    return _table(*rows)


def _reasons(record: Record) -> str:
    rows = [("cases", "verdict", "why")]
    for part in PARTS:
        for place, count in sorted(_verdicts(record, part).items()):
            entry = entries()[place]
            why = entry.get("why") or f"[{entry['of']}](#{entry['of']})"
            rows.append((f"{count:,}", VERDICTS[entry["verdict"]], why))
    return _table(*rows)
