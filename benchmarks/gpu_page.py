"""The tables of docs/results/gpu.md, from the numbers of `python -m benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_DIVERGENCES = """\
| kernel | mean TV | mean KL, nats | p99 of the absolute log ratio | its maximum | other top token |
|---|---|---|---|---|---|
"""


def text(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Every part that was measured, in a fixed order; a part that was not is named as such."""
    parts = []
    for name, (title, render) in _PARTS.items():
        part = measured.get(name)
        parts.append(f"## {title}\n")
        if part is None:
            command = f"python -m benchmarks.gpu --only {name}"
            parts.append(f"Not measured yet. The command is `{command}`.\n")
            continue
        versions = f"torch {part['torch']}, Transformers {part['transformers']}"
        parts.append(f"{part['device']}, {versions}.\n\n{render(part['found'])}\n")
    return "\n".join(parts)


def _metrics(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    lines = [
        "1,024 rows of 152,064 logits in bfloat16, both sides on the GPU, medians of 11 rounds.\n",
        "| path | picoseconds per pair of logits | time of the exact metrics, relative to it |",
        "|---|---|---|",
        f"| thirteen exact metrics by Triton, in float64 | {1e3 * first['ours']:.3g} | 1 |",
        *(
            f"| {row['peer']} | {1e3 * row['theirs']:.3g} | {1 / row['ratio']:.2g} |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def _monitor(rows: list[dict[str, Any]]) -> str:
    lines = [
        "`Monitor.observe` with the preset verl-sync on tensors of the GPU, elapsed time, medians "
        "of 11 pairs.\n",
        "| sequences × tokens | reduced on the GPU, ms | copied to NumPy first, ms | speed-up |",
        "|---|---|---|---|",
        *(
            f"| {row['shape'][0]} × {row['shape'][1]:,} | {row['device_ms']:.1f} | "
            f"{row['host_ms']:.1f} | {row['ratio']:.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def _divergences(found: dict[str, Any]) -> str:
    head = f"{found['tokens']:,} tokens, compared with float32 and eager attention by prefill.\n"
    rows = "\n".join(
        f"| {row['name']} | {row['tv']:.2g} | {row['kl']:.2g} | {row['p99']:.2g} | "
        f"{row['max']:.2g} | {row['flip']:.1%} |"
        for row in found["rows"]
    )
    return f"{head}\n{_DIVERGENCES}{rows}"


def _check(found: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"`servanda check` of bfloat16 against float32, {found['groups']} prompts, 32 new "
            "tokens each.\n",
            "| path | seconds |",
            "|---|---|",
            f"| the whole command | {found['whole_s']:.1f} |",
            f"| floor: both engines opened in one process | {found['opened_s']:.1f} |",
            f"| floor: one generation, and the logits of both sides | {found['engines_s']:.1f} |",
            f"| the command, relative to the floor | {found['ratio']:.2f} |",
        ]
    )


def _drill(found: dict[str, Any]) -> str:
    return "\n".join(
        [
            "| preflight test of a sync over CUDA IPC | |",
            "|---|---|",
            f"| parameters | {found['parameters'] / 1e9:.1f} billion |",
            f"| weight groups | {found['groups']} |",
            f"| seconds | {found['seconds']:.0f} |",
            f"| syncs, and seconds of one | {found['syncs']}, {found['sync_s']:.2f} |",
            f"| peak memory of the trainer's process | {found['peak_gib']:.0f} GiB |",
        ]
    )


_PARTS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "small": ("Divergences at 0.6 billion parameters", _divergences),
    "large": ("Divergences at 8 billion parameters", _divergences),
    "check": ("What a check costs", _check),
    "metrics": ("Exact metrics of tensors", _metrics),
    "monitor": ("The monitor", _monitor),
    "drill": ("The preflight test at 8 billion parameters", _drill),
}
