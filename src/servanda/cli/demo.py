# `servanda demo`: two real kernels at identical weights, one that keeps its contract, and one
# that breaks it on a slice that the aggregate hides; or any fault of the catalogue.

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from servanda.cli.input import contract_at
from servanda.cli.options import FILE_OR_DASH, shared
from servanda.cli.output import clear, write
from servanda.cli.progress import watching
from servanda.contract import presets
from servanda.engines.faults import FAULTS
from servanda.errors import MeasurementError
from servanda.judgement.field_thresholds import Gate, gates
from servanda.judgement.verdict import Verdict
from servanda.runner import run
from servanda.runner.fault_drill import Drill, drill

_CONFORMING = "tiny-bf16.kernelcontract.yaml"
_FAULTY = "tiny-bf16-positions.kernelcontract.yaml"
_FAULTS = "tiny-faults.kernelcontract.yaml"
_PAGE = Path("servanda-demo.html")  # in the current folder: the second run, as a page


def _example(name: str) -> Path:
    """An example beside the package (installed), or in the repository it was cloned with."""
    if path := presets.shipped(f"examples/{name}"):
        return path
    raise MeasurementError(
        "the demo's model and contracts are not here",
        hint="install the wheel, or run it in a clone of the repository",
    )


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _check(name: str, what: str, quiet: bool) -> Verdict:
    path = _example(name)
    click.secho(f"$ servanda check {_relative(path)}", bold=True)
    click.echo(f"  {what}\n")
    with tempfile.TemporaryDirectory(prefix="servanda-demo-") as folder, watching(quiet) as watch:
        verdict = run.check(path, run_dir=folder, watch=watch)
    click.echo(f"{verdict}\n")
    return verdict


@click.command()
@shared("--fault", help="Inject this one of the catalogue instead; `list` shows them.")
@click.option("--value", help="The fault's value, as JSON.  [default: the catalogue's]")
@shared(
    "--contract", type=FILE_OR_DASH, help="Its kernels get it.  [default: the shipped tiny-faults]"
)
@shared("--quiet")
def demo(fault: str | None, value: str | None, contract: Path | None, quiet: bool) -> None:
    """Check a kernel that keeps its contract, and one that breaks it on a hidden slice.

    The second run is left as a page, servanda-demo.html, in the current folder.
    With --fault: check the shipped kernels with that fault in them, and exit as check does.
    """
    if fault is None:
        for name, given in (("--value", value), ("--contract", contract)):
            if given is not None:
                raise click.UsageError(f"{name} goes with --fault NAME")
        _hidden_slice(quiet)
    elif fault == "list":
        click.echo(catalogue())
    else:
        path = contract or _example(_FAULTS)
        sys.exit(_drill_fault(fault, _value(fault, value), path, quiet).exit_code)


def _hidden_slice(quiet: bool) -> None:
    clear(_PAGE)
    conforming = _check(_CONFORMING, "bfloat16 serves what float32 trains.", quiet)
    broken = _check(
        _FAULTY, "The same kernel, with position ids kept in bfloat16: a real bug.", quiet
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
        f"{averages(gates(broken.portraits))}"
    )
    click.echo(f"report {_PAGE}")


def averages(thresholds: tuple[Gate, ...]) -> str:
    """What the field's thresholds say of all the traffic, for a run that is red on a slice."""
    missing = [gate.name for gate in thresholds if gate.passes]
    seeing = [gate.name for gate in thresholds if gate.passes is False]
    parts = [f"do not see it ({'; '.join(missing)})"] if missing else []
    parts += [f"see that something is wrong, not where ({'; '.join(seeing)})"] if seeing else []
    counts = [str(len(names)) for names in (missing, seeing) if names]
    sentence = " and ".join(f"{n} {part}" for n, part in zip(counts, parts, strict=True))
    return f"Of the field's {len(thresholds)} thresholds on averages over all traffic, {sentence}."


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
    click.echo(f"{result.verdict or result.refused}\n")
    click.secho("With the field's thresholds: ", bold=True, nl=False)
    click.echo(_in_the_field(result))
    return result


def _in_the_field(result: Drill) -> str:
    """One sentence on what thresholds on averages would have said."""
    if result.refused is not None:
        return "nothing would have been refused: an average asks for logprobs, not for identity."
    if not result.gates:
        return "no token came back, and a mean over none is logged as 0.0."
    fired = [gate for gate in result.gates if gate.passes is False]
    tokens = f"on these {result.tokens:,} tokens"
    if not fired:
        return f"none of {len(result.gates)} fires {tokens}."
    named = "; ".join(f"{gate.name}: {gate.text}" for gate in fired)
    return f"{len(fired)} of {len(result.gates)} fire {tokens}: {named}."
