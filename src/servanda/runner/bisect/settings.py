# The fewest settings with which a command fails, by its exit codes.  A run that decides nothing is
# taken neither for good nor for bad.

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from servanda.errors import ContractError, MeasurementError

Outcome = Literal["good", "bad", "skip"]

_PLACE = "{}"  # of the flags in a command


@dataclass(frozen=True)
class SettingBisection:
    """Settings that are bad together.

    Args:
        undecided: those whose removal was not decided: they may be needless.
        probes: the settings of each run, and its outcome.
    """

    settings: tuple[str, ...]
    undecided: tuple[str, ...]
    probes: dict[tuple[str, ...], Outcome]


def bisect_settings(settings: Sequence[str], command: str | None) -> SettingBisection:
    """The fewest settings with which a shell command fails.

    Args:
        settings: flags, which take the place of {}, and NAME=VALUE for the environment.

    Raises:
        ContractError: no setting, one that is neither, or a command that cannot be run.
        MeasurementError: good with all settings, or bad without any.
    """
    odd = [s for s in settings if not s.startswith("-") and "=" not in s]
    if not settings or odd:
        raise ContractError(
            f"{odd[0]!r} is no setting" if odd else "there are no settings",
            hint="write a flag such as --enforce-eager, or NAME=VALUE, one a line",
        )
    if command is None or (_PLACE not in command and any(s.startswith("-") for s in settings)):
        raise ContractError(
            f"the settings need a command, with {_PLACE} in the place of the flags",
            hint="write --run './judge.sh {}'",
        )
    return fewest_settings(settings, lambda some: _outcome(some, command))


def fewest_settings(
    settings: Sequence[str], judge: Callable[[tuple[str, ...]], Outcome]
) -> SettingBisection:
    """A set of settings that is bad, and not without any one of them, by removing one at a time.

    Nothing is assumed of how settings work together.

    Args:
        judge: the outcome with these settings, in their order, and no others.

    Raises:
        MeasurementError: it is not good without settings, or not bad with all.
    """
    probes: dict[tuple[str, ...], Outcome] = {}

    def outcome_of(some: tuple[str, ...]) -> Outcome:
        if some not in probes:
            probes[some] = judge(some)
        return probes[some]

    left = tuple(settings)
    for some, wanted in (((), "good"), (left, "bad")):
        if (outcome := outcome_of(some)) != wanted:
            raise MeasurementError(
                f"the command {'with all' if some else 'without'} settings has to be {wanted}, "
                f"and it is {outcome.replace('skip', 'not decided')}",
                hint="the difference is not in these settings: name others",
            )
    while True:
        before, undecided = left, []
        for setting in before:
            rest = tuple(other for other in left if other != setting)
            outcome = outcome_of(rest)
            if outcome == "bad":
                left = rest
            elif outcome == "skip":
                undecided.append(setting)
        if left == before:
            return SettingBisection(left, tuple(undecided), probes)


def _outcome(settings: Sequence[str], command: str) -> Outcome:
    """The outcome of a command with some settings, by its exit code."""
    flags = [word for s in settings if s.startswith("-") for word in shlex.split(s)]
    pairs = (s.partition("=") for s in settings if not s.startswith("-"))
    line = command.replace(_PLACE, shlex.join(flags))
    code = subprocess.run(
        line,
        shell=True,
        env={**os.environ, **{name: value for name, _, value in pairs}},
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode
    if code in (2, 126, 127) or not 0 <= code < 128:
        raise ContractError(
            f"the command ended with {code}: {line}",
            hint="0 is good, 1 bad, and 3, 4 or 125 skip; 2, 126, 127 and signals end the search",
        )
    # inconclusive, failed, and git's own
    return "skip" if code in (3, 4, 125) else "bad" if code else "good"
