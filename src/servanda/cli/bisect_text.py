# What `servanda bisect` found, as lines of text.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from servanda.report.format import count, number, percent
from servanda.report.table import table
from servanda.runner.bisect.module_result import Module, ModuleBisection, place
from servanda.runner.bisect.settings import SettingBisection
from servanda.runner.bisect.weight_layout import MISPLACED

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
