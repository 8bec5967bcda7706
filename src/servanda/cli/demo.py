# `servanda demo`: two real kernels at identical weights, one that keeps its contract, and one
# that breaks it on a slice that the aggregate hides; or any fault of the catalogue.

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from servanda.cli.input import contract_at
from servanda.cli.options import FILE, FILE_OR_DASH, refuse_given, shared
from servanda.cli.output import clear, write
from servanda.cli.screen import show_verdict, watching
from servanda.contract import presets
from servanda.engines.faults import FAULTS
from servanda.engines.worker import kept
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.token_profile import Gate, gates
from servanda.judgement.verdict import Verdict
from servanda.report.format import count
from servanda.report.summary import gate_text
from servanda.runner import run
from servanda.runner.fault_drill import Drill, drill
from servanda.runner.measurement import Open

_CONFORMING = "tiny-bf16.kernelcontract.yaml"
_FAULTY = "tiny-bf16-positions.kernelcontract.yaml"
_FAULTS = "tiny-faults.kernelcontract.yaml"
_RUNS = 2
_FOLDERS = ("examples", "models", "data")  # as in the repository: examples name their neighbours
_PAGE = Path("servanda-demo.html")  # in the current folder: the second run, as a page


def _shipped(name: str) -> Path:
    """An example or a folder beside the package (installed), or in the repository of a clone."""
    if path := presets.shipped(name):
        return path
    raise MeasurementError(
        "the demo's model and contracts are not here",
        hint="install the wheel, or run it in a clone of the repository",
    )


def _write_files(target: Path) -> None:
    """The files that the documents name, where their commands find them."""
    sources = [_shipped(name) for name in _FOLDERS]
    for name in _FOLDERS:
        if (target / name).exists():
            hint = "name a new folder, or move this one away"
            raise ContractError(f"{target / name} is there already", hint=hint)
    for source in sources:
        shutil.copytree(
            source, target / source.name, ignore=shutil.ignore_patterns("__pycache__", "runs")
        )
    click.echo(f"wrote {', '.join(f'{name}/' for name in _FOLDERS)} to {target}")
    dump = "servanda check examples/tiny-dump"
    click.echo(f"next: {dump}" if target == Path() else f"next: cd {target} && {dump}")


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _check(name: str, what: str, quiet: bool, number: int, open_: Open) -> Verdict:
    path, of = _shipped(f"examples/{name}"), f"run {number} of {_RUNS}"
    click.secho(f"$ servanda check {_relative(path)}", bold=True)
    click.echo(f"  {of}: {what}\n")
    with (
        tempfile.TemporaryDirectory(prefix="servanda-demo-") as folder,
        watching(quiet, run=of) as watch,
    ):
        verdict = run.check(path, run_dir=folder, open=open_, watch=watch)
    show_verdict(verdict, "")
    return verdict


@click.command()
@shared("--fault", help="The demo then checks the kernels with this fault only; `list` shows all.")
@click.option(
    "--value", help="Value of the fault, as JSON, such as 0.3.  [default: the catalogue's]"
)
@shared(
    "--contract",
    type=FILE_OR_DASH,
    help="The fault goes into its kernels.  [default: the shipped tiny-faults]",
)
@click.option(
    "--files",
    type=FILE,
    metavar="FOLDER",
    help="Write the shipped examples, models and prompts into this folder, such as ., and run "
    "nothing.",
)
@shared("--quiet")
def demo(
    fault: str | None,
    value: str | None,
    contract: Path | None,
    files: Path | None,
    quiet: bool,
) -> None:
    """Check a kernel that keeps its contract, then one that breaks it on one slice.

    The second run is also written as a page, servanda-demo.html, in the current folder.
    With --fault: check the shipped kernels with that fault injected, and exit as `check` does.
    """
    if files is not None:
        refuse_given(("fault", "value", "contract"), "--files runs nothing")
        _write_files(files)
    elif fault is None:
        for name, given in (("--value", value), ("--contract", contract)):
            if given is not None:
                raise click.UsageError(f"{name} goes with --fault NAME")
        _hidden_slice(quiet)
    elif fault == "list":
        click.echo(catalogue())
    else:
        path = contract or _shipped(f"examples/{_FAULTS}")
        sys.exit(_drill_fault(fault, _value(fault, value), path, quiet).exit_code)


def _hidden_slice(quiet: bool) -> None:
    clear(_PAGE)
    with kept() as open_:  # the second run loads no library again
        conforming = _check(
            _CONFORMING,
            "float32 trains, bfloat16 serves; about a minute on two cores",
            *(quiet, 1, open_),
        )
        broken = _check(
            _FAULTY,
            "the same kernels, but the infer kernel keeps position ids in bfloat16",
            *(quiet, 2, open_),
        )
    write(broken, "html", _PAGE)
    whole = [c for c in broken.cells if c.slice == "all" and c.outcome == "violated"]
    click.secho("What the second run shows: ", bold=True, nl=False)
    if whole or broken.outcome != "violated" or conforming.outcome != "holds":
        click.echo("not what this demo expects; see the verdicts above.")
        sys.exit(1)
    bad = sorted({c.slice for c in broken.cells if c.outcome == "violated"})
    click.echo(
        f"every clause on the whole traffic holds, and slice {', '.join(bad)} is violated. "
        f"{averages(gates(broken.portraits), gates(conforming.portraits))}"
    )
    click.echo(f"report {_PAGE}\nnext: open {_PAGE} in a browser")


def averages(broken: tuple[Gate, ...], conforming: tuple[Gate, ...] = ()) -> str:
    """Thresholds of other projects on the whole traffic, for a run violated on a slice."""
    missing = [gate.name for gate in broken if gate.passes]
    firing = [gate.name for gate in broken if gate.passes is False]
    always = [gate.name for gate in conforming if gate.passes is False and gate.name in firing]
    parts = [f"{len(missing)} pass it ({'; '.join(missing)})"] if missing else []
    parts += [f"{len(firing)} fail, and do not say where ({'; '.join(firing)})"] if firing else []
    text = (
        f"Of {count(len(broken), 'threshold')} of other projects, which look at the whole traffic, "
        f"{' and '.join(parts)}."
    )
    return f"{text} The first run fails, too: {'; '.join(always)}." if always else text


def catalogue() -> str:
    """Every fault: name, side, default value, meaning, and where it was met."""
    parts = []
    for name, fault in FAULTS.items():
        parts.append(f"{name}  ({fault.side}, default {json.dumps(fault.default)})")
        parts.append(f"    {fault.summary}")
        parts += [f"    seen: {fault.seen}"] if fault.seen else []
    return "\n".join(parts)


def _value(name: str, text: str | None) -> Any:
    """The value of --value, or the default; what is not JSON is a word.

    Raises:
        click.UsageError: no such fault, or it does not take the value.
    """
    if name not in FAULTS:
        hint = f"{FAULTS.hint(name)} (`servanda demo --fault list` shows them all)"
        raise click.UsageError(f"there is no fault {name!r}\n  hint: {hint}")
    if text is None:
        return FAULTS[name].default
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    problem = FAULTS[name].problem(value)
    if problem is not None:
        default = json.dumps(FAULTS[name].default)
        raise click.UsageError(f"--value: {problem.message}\n  hint: write --value '{default}'")
    return value


def _drill_fault(name: str, value: Any, path: Path, quiet: bool) -> Drill:
    fault = FAULTS[name]
    click.secho(f"$ servanda check {_relative(path)}", bold=True)
    injection = f"{fault.side}.fault {{{name}: {json.dumps(value)}}}"
    click.echo(f"  with kernels.{injection}: {fault.summary}\n")
    contract = contract_at(path)
    with watching(quiet) as watch:
        result = drill(contract, name, value, watch=watch)
    if result.verdict is not None:
        show_verdict(result.verdict, "")
    else:
        click.echo(f"{result.refused}\n")
    click.secho("With the thresholds of other projects: ", bold=True, nl=False)
    click.echo(_in_the_field(result))
    return result


def _in_the_field(result: Drill) -> str:
    """One sentence on the thresholds of other projects, all on averages."""
    if result.refused is not None:
        return "nothing would have been refused: an average asks for logprobs, not for identity."
    if not result.gates:
        return "no token came back, and a mean over none is logged as 0.0."
    fired = [gate for gate in result.gates if gate.passes is False]
    tokens = f"on these {count(result.tokens, 'token')}"
    if not fired:
        return f"none of {len(result.gates)} fires {tokens}."
    named = "; ".join(f"{gate.name}: {gate_text(gate)}" for gate in fired)
    return f"{len(fired)} of {len(result.gates)} fire {tokens}: {named}."
