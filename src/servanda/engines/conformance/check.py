# Trying the laws on an engine, and what came of it.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from servanda.engines.conformance import token_laws  # noqa: F401 - it registers laws
from servanda.engines.conformance.base import LAWS, Broken, Case, Skipped
from servanda.errors import ServandaError

_LAST = "a_closed_engine_opens_again"  # it closes what the others run on


@dataclass(frozen=True)
class Finding:
    """What one law found: a note, what was found to be broken, or why it was skipped."""

    law: str
    outcome: Literal["kept", "broken", "skipped"]
    message: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.law}: {self.message}" if self.message else self.law
        if self.outcome != "broken":
            return text
        wanted = (LAWS[self.law].__doc__ or "").strip().splitlines()[0]
        return f"{text}\n    the law: {wanted}\n    hint: {self.hint}"


@dataclass(frozen=True)
class Report:
    """What every law found, in the order they were tried; nothing is left out."""

    findings: tuple[Finding, ...]

    def those(self, outcome: str) -> tuple[Finding, ...]:
        """The findings of one outcome: kept, broken or skipped."""
        return tuple(f for f in self.findings if f.outcome == outcome)

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the laws that the engine breaks."""
        return tuple(f.law for f in self.those("broken"))

    def __str__(self) -> str:
        broken, skipped, kept = map(self.those, ("broken", "skipped", "kept"))
        lines = [f"{len(broken)} of {len(self.findings)} laws of engines are broken"]
        lines += [f"  {finding}" for finding in broken]
        for outcome, findings in (("skipped", skipped), ("kept", kept)):
            lines += [f"{outcome}: {len(findings)}"] * bool(findings)
            lines += [f"  {finding}" for finding in findings]
        return "\n".join(lines)


def check_engine(
    open_engine: Callable[[], Any],
    prompts: Sequence[str | Sequence[int]] | None = None,
    **options: Any,
) -> Report:
    """Hold an engine against every law that it says it can keep.

    Args:
        open_engine: opens it; asked a second time at the end.
        prompts: texts or token ids; default ids, or texts where no id is known.
        options: as `examine_engine` takes them.

    Returns:
        What each law found; a law that does not apply to the engine is skipped with a reason.

    Raises:
        AssertionError: a law is broken; the text names each one, what was found, and the next
            move.
    """
    report = examine_engine(open_engine, prompts, **options)
    if report.broken:
        raise AssertionError(str(report))
    return report


def examine_engine(
    open_engine: Callable[[], Any],
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    laws: Sequence[str] | None = None,
    tolerance: float = 1e-4,
    prefill: float = 0.25,
    flips: float = 0.05,
    deterministic: bool = True,
    reopen: bool = True,
    sequences: int = 96,
    width: int = 12,
    seed: int = 7,
) -> Report:
    """What each law finds of an engine; as `check_engine`, and nothing is raised.

    Args:
        laws: names of LAWS to try; default all.
        tolerance: nats by which two values of one logprob may differ: drawn and scored again.
        prefill: nats by which scores by prefill may differ from draws on average; prefill need
            not equal decode (law 7), but what is further away is of other tokens.
        flips: share of tokens that may be another in a batch of other sequences.
        deterministic: whether a seed fixes what is drawn; a server that cannot is only reported.
        reopen: whether the engine may be opened a second time; False if that is expensive.
        sequences, width: how much is drawn, which is what a wrong sampler shows in.
        seed: of everything that is drawn.

    Raises:
        ValueError: there is no such law.
    """
    names = [*LAWS] if laws is None else [*laws]
    for name in names:
        if name not in LAWS:
            raise ValueError(f"there is no law {name!r}; {LAWS.hint(name)}")
    case = Case(
        open_engine=open_engine,
        engine=open_engine(),
        texts=prompts,
        tolerance=tolerance,
        prefill=prefill,
        flips=flips,
        deterministic=deterministic,
        reopen=reopen,
        sequences=sequences,
        width=width,
        seed=seed,
    )
    try:
        return Report(tuple(_tried(name, case) for name in sorted(names, key=_LAST.__eq__)))
    finally:
        # what closing does is the matter of a law, which has reported it
        with contextlib.suppress(Exception):
            case.engine.close()


def _tried(name: str, case: Case) -> Finding:
    try:
        return Finding(name, "kept", LAWS[name](case) or "")
    except Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except Broken as broken:
        return Finding(name, "broken", broken.message, broken.hint)
    except ServandaError as error:
        problem = error.problems[0]
        hint = problem.hint or "the description says what an engine can do: say so there"
        return Finding(name, "broken", f"it refused: {problem.message}", hint)
    except Exception as error:
        # whatever an engine trips over is a finding, and the other laws are still tried
        message = f"it failed with {type(error).__name__}: {error}"
        return Finding(name, "broken", message, "an engine raises MeasurementError and no other")
