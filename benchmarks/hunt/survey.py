# What a hunt measures, as one JSON file: each architecture in each way of running, adapters of
# PEFT, weights quantized by torchao, continuous batching, and graphs of ONNX Runtime.
#
# It runs in the environment of the hunt, one process for each part:
#     python -m benchmarks.hunt.survey PART OUT.json [NAME ...]

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

PACKAGES = {
    "ways": ("transformers", "torch"),
    "adapters": ("peft", "transformers"),
    "quantized": ("torchao", "torch"),
    "batching": ("transformers", "torch"),
    "onnx_graphs": ("onnxruntime", "torch"),
}


def main(part: str, out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    measured, usual = _part(part)
    found: dict[str, Any] = {}
    for name in names or usual:
        found[name] = sorted_by_outcome(measured(name))
        print(part, name, found[name]["differ"], flush=True)
    report = {"versions": {name: version(name) for name in PACKAGES[part]}, "rows": found}
    out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _part(name: str) -> tuple[Callable[[str], dict[str, float | str]], list[str]]:
    # each needs libraries of its own
    if name == "ways":
        from benchmarks.hunt import architectures, ways

        return ways.measured, architectures.names()
    module = importlib.import_module(f"benchmarks.hunt.{name}")
    return module.measured, [*module.NAMES]


def sorted_by_outcome(cells: dict[str, float | str]) -> dict[str, Any]:
    """How many ways agree within the limit, those that differ, and those that are refused."""
    from benchmarks.hunt.ways import LIMIT

    numbers = {way: value for way, value in cells.items() if not isinstance(value, str)}
    differ = {way: value for way, value in numbers.items() if not value < LIMIT}
    return {
        "agree": len(numbers) - len(differ),
        "differ": differ,
        "refused": {way: value for way, value in cells.items() if isinstance(value, str)},
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
