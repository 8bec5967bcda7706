"""Ways of running a model that do not agree: runs the repros again, and writes the page.

    make hunt
    python -m benchmarks.hunt --python hunt=PYTHON --python vllm=PYTHON --write

The survey of the page stays as it is on record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.hunt import page
from benchmarks.hunt.findings import Finding, known

VERSIONS = (
    "import json, sys; from importlib.metadata import version as v; "
    "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
)
QUIET = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def run(finding: Finding, python: str) -> dict[str, Any]:
    """The versions of its packages, and the lines that its repro printed.

    Raises:
        RuntimeError: the repro printed fewer than two values.
    """
    environment = {**os.environ, **QUIET}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as place:
        done, versions = (
            subprocess.run(
                [str(Path(python).absolute()), *arguments],
                capture_output=True,
                text=True,
                cwd=place,
                env=environment,
                timeout=600,
            )
            for arguments in ([str(finding.repro)], ["-c", VERSIONS, *finding.at[1:]])
        )
    pairs = (line.partition(": ") for line in done.stdout.splitlines())
    printed = [[label, value] for label, _, value in pairs if _known(label)]
    if len(printed) < 2:
        raise RuntimeError(f"{finding.name} printed {done.stdout!r}\n{done.stderr[-2000:]}")
    return {"versions": json.loads(versions.stdout), "printed": printed}


def _known(label: str) -> bool:
    return bool(label) and not label.startswith(("(", "[", "INFO", "WARNING", "ERROR"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="hunt=PYTHON or vllm=PYTHON")
    parser.add_argument("--only", help="names of repros, separated by commas")
    parser.add_argument("--write", action="store_true", help="keep the record, write the page")
    asked = parser.parse_args()
    pythons: Mapping[str, str] = dict(text.split("=", 1) for text in asked.python)
    record = page.recorded()
    for finding in known():
        if finding.at[0] in pythons and (not asked.only or finding.name in asked.only.split(",")):
            record["repros"][finding.name] = run(finding, pythons[finding.at[0]])
            print(finding.name, record["repros"][finding.name]["printed"], flush=True)
    if asked.write:
        page.keep(record)


if __name__ == "__main__":
    main()
