# `servanda bisect`: what makes B differ from A, by modules or settings.

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import FILE, refuse_given, shared, show, show_as, show_json
from servanda.cli.screen import watching
from servanda.errors import ContractError
from servanda.report.format import count, number, percent
from servanda.report.html import Sheet, Story, board
from servanda.report.html_pictures import (
    WIDE,
    Markup,
    Scale,
    Tick,
    curve,
    key,
    mark,
    plot,
    spaced,
    toned,
)
from servanda.report.table import table
from servanda.runner.bisect.module_result import Module, ModuleBisection, place
from servanda.runner.bisect.settings import SettingBisection, bisect_settings
from servanda.runner.bisect.weight_layout import MISPLACED
from servanda.runner.measurement import Watch

_DIFFERENT = 1
_SIZES = (16, 32)  # sequences and new tokens of a search by modules


@click.command("bisect")
@click.argument("a", metavar="[A]", required=False)
@click.argument("b", metavar="[B]", required=False)
@click.option(
    "--settings",
    type=FILE,
    help="Flags and NAME=VALUE of the environment, one a line, such as settings.txt.",
)
@click.option(
    "--run",
    "command",
    metavar="COMMAND",
    help="Shell command of --settings, such as './judge.sh {}'; {} is the flags.",
)
@shared("--prompts", help="[default: the shipped ones]")
@shared("--sequences", "--max-new-tokens")
@click.option(
    "--path",
    type=click.Choice(["prefill", "decode"]),
    default="prefill",
    show_default=True,
    help="How modules score the tokens; decode also goes through the cache.",
)
@shared(
    "--format",
    type=click.Choice(["text", "json", "html"]),
    help="html is for modules: it draws the errors along the model.",
)
@shared("--quiet", "--no-code")
def bisect_command(
    a: str | None,
    b: str | None,
    settings: Path | None,
    command: str | None,
    format_: str,
    quiet: bool,
    **options: Any,
) -> None:
    """Find what makes B differ from A: a module or a setting.

    With A and B alone, two kernels of one architecture in transformers, each module of B runs on
    the inputs of A. The one whose output differs is at fault; what comes after it only passes the
    error on. Then the module of A takes its place: what it explains is the share of KL(B || A)
    that goes away.

    With --settings, the exit code of --run answers: 0 good, 1 bad, and 3, 4 or 125 skip. The
    command has to be good without the settings and bad with all. One after another is removed,
    as long as the rest is bad.
    """
    if (a is None) != (b is None) or (a is None) == (settings is None):
        raise click.UsageError("give A and B, or --settings")
    if settings is not None:
        refuse_given(("prompts", "path", "sequences", "max_new_tokens"), "settings have no modules")
        if format_ == "html":
            raise click.UsageError("--format html is for modules")
        _by_settings(settings, command, format_)
    refuse_given(("command",), "modules are compared without it")
    with watching(quiet) as watch:
        _by_modules(str(a), str(b), format_, options, watch)


def _by_modules(a: str, b: str, format_: str, options: dict[str, Any], watch: Watch) -> None:
    from servanda.runner.bisect.modules import bisect_kernels

    sequences, width = (
        options[name] or size
        for name, size in zip(("sequences", "max_new_tokens"), _SIZES, strict=True)
    )
    found = bisect_kernels(a, b, options["prompts"], sequences, width, options["path"], watch=watch)
    if format_ == "json":
        outliers = [module.name for module, _ in found.outliers]
        show_json({"outcome": found.outcome, "outliers": outliers, **vars(found)})
    elif format_ == "html":
        show(module_page(found))
    else:
        show("\n".join(module_lines(found)))
    sys.exit(0 if found.outcome == "same" else _DIFFERENT)


def _by_settings(file: Path, command: str | None, format_: str) -> None:
    with ContractError.of_system(f"{file} cannot be read", hint="name a file with one a line"):
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    found = bisect_settings([s for s in lines if s and not s.startswith("#")], command)
    probes = [{"settings": some, "outcome": outcome} for some, outcome in found.probes.items()]
    show_as(format_, {**vars(found), "probes": probes}, "\n".join(setting_lines(found)))
    sys.exit(3 if found.undecided else _DIFFERENT)


# What `servanda bisect` found, as lines of text and as a page.


HEADS = ("module", "class", "local error", "its noise", "error in B", "explains")
_ROWS = 12  # modules in the table of a terminal


def module_name(name: str) -> str:
    """A module in a line of output.

    >>> module_name("")
    '(the model)'
    """
    return name or "(the model)"


def module_row(module: Module) -> tuple[str, ...]:
    """The cells below HEADS."""
    share = "" if module.share is None else _share(module.share)
    return (
        module_name(module.name),
        module.kind,
        number(module.error),
        number(module.noise),
        number(module.run_error),
        share,
    )


def _share(value: float) -> str:
    return f"-{percent(-value)}" if value < 0 else percent(value)


def conclusion(found: ModuleBisection) -> str:
    """The answer in one sentence."""
    suspects = found.suspects
    looked = f"{count(found.tokens, 'token')} of {count(found.sequences, 'sequence')}"
    if found.outcome == "same":
        n = count(len(found.modules), "module")
        return f"no difference beyond the noise in {n}, on {looked}"
    if found.outcome == "below noise":
        n = count(len(suspects), "module")
        return f"{n} of B differ, but the logits by no more than their noise, on {looked}"
    if found.outcome == "unexplained":
        joint = "" if found.joint is None else f" (together {_share(found.joint)})"
        named = f"{count(len(suspects), 'module')} that differ{joint}" if suspects else "any module"
        return f"unexplained: the logits differ, and not by {named}"
    share = "" if found.explained is None else _share(found.explained)
    if len(found.cause) == 1:
        (module,) = (m for m in found.modules if m.name == found.cause[0])
        at = "" if module.tensor in ("", "output") else f", at {module.tensor}"
        if not module.differs:  # no tensor shows it
            at = ", what it keeps between calls, such as the cache"
        return f"{module_name(module.name)} ({module.kind}{at}) explains {share} of the difference"
    few = "no few modules explain it: " if found.outcome == "spread" else ""
    return (
        f"{few}{len(found.cause)} of {len(suspects)} that differ explain {share} together, "
        f"{grouped(found.cause)}"
    )


def outliers(found: ModuleBisection) -> Iterator[str]:
    """A sentence for each module that stands out where no few modules are the cause."""
    if found.outcome == "spread":
        for module, ratio in found.outliers:
            yield (
                f"{module.name} ({module.kind}): its local error is {number(ratio)} times the "
                "largest in its place in other layers"
            )


def grouped(names: Sequence[str]) -> str:
    """Modules by the last part of their names, the most frequent first.

    >>> grouped(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.norm"])
    'up_proj in 2 places, model.norm'
    """
    kinds = Counter(map(place, names))
    first = {place(name): name for name in reversed(names)}
    return ", ".join(
        f"{kind} in {n} places" if n > 1 else module_name(first[kind])
        for kind, n in kinds.most_common()
    )


def module_lines(found: ModuleBisection) -> Iterator[str]:
    """The answer, the evidence and a table of the modules that differ."""
    yield f"bisect    {found.b}  (B) against  {found.a}  (A)"
    yield (
        f"on        {count(found.tokens, 'token')} that B drew in "
        f"{count(found.sequences, 'sequence')}, scored by {found.path}"
    )
    yield (
        f"logits    KL(B || A) {number(found.kl_nats)} nats per token; A against itself in other "
        f"batches {number(found.floor_nats)}"
    )
    if found.first is not None:
        yield f"first     {module_name(found.first[0])}: {found.first[1]}"
    yield f"{'cause' if found.outcome == 'named' else 'answer':<9} {conclusion(found)}"
    yield from (f"outlier   {line}" for line in outliers(found))
    if found.outcome == "named":
        yield from (f"weights   {o.name} {o.text}" for o in found.weights if o.kind in MISPLACED)
    if not found.suspects:
        return
    ranked = sorted(found.suspects, key=lambda m: (m.share is None, -(m.share or 0.0)))
    yield ""
    yield from table([HEADS, *map(module_row, ranked[:_ROWS])], right={2, 3, 4, 5})
    if len(ranked) > _ROWS:
        yield f"and {len(ranked) - _ROWS} more that differ; --format json or html has all"
    yield "local error: on the inputs of A.  error in B: in a run of B, with errors before it."


def setting_lines(found: SettingBisection) -> Iterator[str]:
    """The settings that are bad together, and each probe."""
    yield f"bisect    {count(len(found.probes), 'probe')}"
    yield f"cause     {' '.join(found.settings)}"
    if found.undecided:
        names = ", ".join(found.undecided)
        yield f"unsure    may be needless, for without it nothing was decided: {names}"
    yield ""
    rows = [(" ".join(some) or "(none)", outcome) for some, outcome in found.probes.items()]
    yield from table([("settings", "outcome"), *rows], widest=60)


# What `servanda bisect` found, as a page.


_LEGEND = Markup(
    f"{key('violated', 'local error of a module that explains the difference ')}"
    f"{key('inconclusive', 'of another one that differs')}<br>Line: the error of each output in a "
    "run of B, where errors before it arrive as well. Errors are relative to the size of the "
    "tensor in A; what is not above the noise is not marked."
)
_HEIGHT = 240  # pixels
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")


def module_page(found: ModuleBisection) -> str:
    """A self-contained page: the errors along the model, and the modules that differ."""
    rows = sorted(found.modules, key=lambda m: (not m.differs, m.share is None, -(m.share or 0.0)))
    logits = (
        f"KL(B || A) is {number(found.kl_nats)} nats per token on {count(found.tokens, 'token')}, "
        f"and {number(found.floor_nats)} between runs of A in other batches."
    )
    sheets = [
        Sheet("Errors along the model", _LEGEND, _picture(found)),
        Sheet("Modules", logits, "", HEADS, [module_row(m) for m in rows]),
    ]
    glyph = "✓" if found.outcome == "same" else "✗"
    answer = "  ".join(f"{line}." for line in (conclusion(found), *outliers(found)))
    text = f"{answer}  B is {found.b}, A is {found.a}."
    return board("Bisection by modules", [Story(f"{glyph} {_head(found)}", text, sheets)])


def _head(found: ModuleBisection) -> str:
    if len(found.cause) == 1:
        return f"The module that differs: {module_name(found.cause[0])}"
    if found.cause:
        return f"{len(found.cause)} modules differ together"
    return {"same": "No difference", "below noise": "No difference of the logits"}.get(
        found.outcome, "Unexplained"
    )


def _picture(found: ModuleBisection) -> Markup:
    modules, last = found.modules, max(len(found.modules) - 1, 1)
    up = Scale.of([v for m in modules for v in (m.error, m.run_error)])

    def at(i: int, error: float) -> tuple[float, float]:
        return 100 * i / last, 100 - up.at(error)

    run = [at(i, m.run_error) for i, m in enumerate(modules) if not math.isnan(m.run_error)]
    shapes = [curve("aside", run)]
    for i, module in enumerate(modules):
        if module.differs:
            tone = "violated" if module.name in found.cause else "inconclusive"
            shapes.append(toned(tone, mark(tone, *at(i, module.error), 3.8)))
    label = f"Errors of modules in the order of execution: {conclusion(found)}."
    return plot(
        label,
        _HEIGHT,
        shapes,
        across=spaced(_layers(modules, last), WIDE),
        up=up.ticks(500),
        titles=("module, in the order of execution", "relative error, log scale"),
    )


def _layers(modules: tuple[Module, ...], last: int) -> Iterator[Tick]:
    """Where each layer begins."""
    seen: set[str] = set()
    for i, module in enumerate(modules):
        match = _LAYER.search(module.name)
        if match and match[1] not in seen:
            seen.add(match[1])
            yield Tick(100 * i / last, f"layer {match[1]}")
