# `servanda demo`: two real kernels at identical weights, one that keeps its contract, and one
# that breaks it on a slice that the aggregate hides.

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

import servanda
from servanda import run
from servanda.cli.progress import watching
from servanda.errors import MeasurementError
from servanda.verdict import Verdict

_CONFORMING = "tiny-bf16.kernelcontract.yaml"
_FAULTY = "tiny-bf16-positions.kernelcontract.yaml"


def _examples() -> Path:
    """The examples beside the package (installed), or in the repository it was cloned with."""
    package = Path(servanda.__file__).parent
    for root in (package / "_demo", package.parents[1]):
        if (root / "examples" / _CONFORMING).is_file():
            return root / "examples"
    raise MeasurementError(
        "the demo's model and contracts are not here",
        hint="install the wheel, or run it in a clone of the repository",
    )


def _told(name: str, what: str, quiet: bool) -> Verdict:
    path = _examples() / name
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    click.secho(f"$ servanda check {shown}", bold=True)
    click.echo(f"  {what}\n")
    with tempfile.TemporaryDirectory(prefix="servanda-demo-") as folder, watching(quiet) as watch:
        verdict = run.check(path, run_dir=folder, watch=watch)
    click.echo(f"{verdict}\n")
    return verdict


@click.command(short_help="See a kernel keep its contract, and one break it on a slice.")
@click.option("--quiet", is_flag=True, help="No progress.")
def demo(quiet: bool) -> None:
    """Check a kernel that keeps its contract, and one that breaks it on a hidden slice."""
    kept = _told(_CONFORMING, "bfloat16 serves what float32 trains.", quiet)
    broken = _told(
        _FAULTY, "The same kernel, with position ids kept in bfloat16: a real bug.", quiet
    )
    whole = [c for c in broken.cells if c.slice == "all" and c.outcome == "violated"]
    click.secho("What the second run shows: ", bold=True, nl=False)
    if whole or broken.outcome != "violated" or kept.outcome != "holds":
        click.echo("not what this demo expects; see the verdicts above.")
        sys.exit(1)
    bad = sorted({c.slice for c in broken.cells if c.outcome == "violated"})
    click.echo(
        f"every clause on the whole traffic holds, and slice {', '.join(bad)} is violated. "
        "A gate on aggregates would have promoted this kernel."
    )
