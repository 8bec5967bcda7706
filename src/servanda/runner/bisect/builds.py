# The first bad build of a list or of a range of commits, and the settings that make a kernel bad.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from servanda.errors import ContractError
from servanda.runner.bisect import git_range
from servanda.runner.bisect.probes import ALPHA, PLACE, Prober, flags_and_variables
from servanda.runner.bisect.search import Outcome, Probe, fewest_settings, first_bad
from servanda.runner.compare.contract import Options
from servanda.runner.measurement import Watch, unwatched


@dataclass(frozen=True)
class Search:
    """What a search found.

    Args:
        of: builds, or settings, that were searched.
        good: the last good build; "" of settings.
        bad: the first bad build, or the settings that are bad together.
        unsure: builds before `bad` that were skipped, or settings that may be needless.
        alpha: probability that the answer is wrong; None: as sure as the command.
    """

    kind: str
    of: int
    good: str
    bad: tuple[str, ...]
    unsure: tuple[str, ...]
    probes: tuple[Probe, ...]
    alpha: float | None

    @property
    def tokens(self) -> int | None:
        """Of all probes; None if no probe knows."""
        known = [probe.tokens for probe in self.probes if probe.tokens is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Method:
    """How a state is tested: by the exit code of a command, or by a comparison of A and B."""

    command: str | None
    comparison: Options | None

    def prober(self, folder: Path, watch: Watch) -> Prober:
        if self.command is None and self.comparison is None:
            raise ContractError(
                "nothing tests a build: there is no --run COMMAND, and no A and B",
                hint="give --run 'COMMAND {}', two kernels with {} in B, or both",
            )
        return Prober(self.command, self.comparison, folder, watch)

    @property
    def alpha(self) -> float | None:
        return None if self.comparison is None else ALPHA

    def refuse_without_place(self) -> None:
        """Refuse a list of builds that nothing takes: all tests would be of one build."""
        kernels = (self.comparison.a, self.comparison.b) if self.comparison else ()
        if not any(PLACE in text for text in (self.command or "", *kernels)):
            raise ContractError(
                f"no build is tested: neither the command nor a kernel has {PLACE} in it",
                hint="write {} where the build belongs: --run './start.sh {}'",
            )


def bisect_builds(builds: Sequence[str], method: Method, *, watch: Watch = unwatched) -> Search:
    """The first bad of a list of builds, the oldest first.

    Raises:
        ContractError: fewer than two builds, or a command that cannot be run.
        MeasurementError: the first is not good, or the last not bad.
    """
    if len(builds) < 2 or len({*builds}) < len(builds):
        raise ContractError(
            f"{len(builds)} builds, {len({*builds})} of them different, have nothing to bisect",
            hint="name each build once, a good one first and a bad one last",
        )
    method.refuse_without_place()
    prober = method.prober(Path(), watch)

    def judge(number: int) -> Outcome:
        return prober.judge(builds[number], builds[number], {})

    low, high = first_bad(builds, judge)
    return _search("builds", builds, low, high, prober, method)


def bisect_git(repository: Path, text: str, method: Method, *, watch: Watch = unwatched) -> Search:
    """The first bad commit of a range GOOD..BAD; {} is the folder of its files.

    Raises:
        ContractError, MeasurementError: as `git_range.opened` and `bisect_builds`.
    """
    with git_range.opened(repository, text) as commits:
        prober = method.prober(commits.folder, watch)
        names = [
            f"{commit[:10]} {subject}"
            for commit, subject in zip(commits.commits, commits.subjects, strict=True)
        ]

        def judge(number: int) -> Outcome:
            commits.checkout(number)
            return prober.judge(names[number], str(commits.folder), {})

        low, high = first_bad(names, judge)
    return _search("commits", names, low, high, prober, method)


def bisect_settings(settings: Sequence[str], method: Method, *, watch: Watch = unwatched) -> Search:
    """The fewest settings that make a kernel bad.

    Args:
        settings: flags, which take the place of {}, and NAME=VALUE for the environment.

    Raises:
        ContractError: no setting, one that is neither, or flags without a place.
        MeasurementError: good with all settings, or bad without any.
    """
    odd = [s for s in settings if not s.startswith("-") and "=" not in s]
    if not settings or odd:
        raise ContractError(
            f"{odd[0]!r} is no setting" if odd else "there are no settings",
            hint="write a flag such as --enforce-eager, or NAME=VALUE, one a line",
        )
    if method.command is None:
        raise ContractError(
            "settings are of a command, and there is no --run COMMAND",
            hint="give --run './start.sh {}': flags take the place of {}",
        )
    if any(s.startswith("-") for s in settings) and PLACE not in method.command:
        raise ContractError(
            f"the settings have flags, and the command no {PLACE} for them",
            hint="write --run './start.sh {}'",
        )
    prober = method.prober(Path(), watch)

    def judge(some: tuple[str, ...]) -> Outcome:
        flags, variables = flags_and_variables(some)
        return prober.judge(" ".join(some) or "(none)", "", variables, flags)

    found = fewest_settings(settings, judge)
    probes = tuple(prober.probes)
    return Search(
        "settings", len(settings), "", found.settings, found.undecided, probes, method.alpha
    )


def _search(
    kind: str, names: Sequence[str], low: int, high: int, prober: Prober, method: Method
) -> Search:
    return Search(
        kind,
        len(names),
        names[low],
        (names[high],),
        tuple(names[low + 1 : high]),
        tuple(prober.probes),
        method.alpha,
    )
