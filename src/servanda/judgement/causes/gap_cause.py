# An explanation of a gap: cause, evidence, slices, and the next experiment as a command.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote

from servanda.contract.clause import SliceRule
from servanda.judgement.causes.case import Case
from servanda.judgement.causes.catalogue import CAUSES, UNEXPLAINED
from servanda.judgement.causes.decision import causes_of
from servanda.judgement.causes.gap_shape import signatures_of
from servanda.judgement.causes.sequence_search import find_sequences
from servanda.judgement.causes.slice_search import find_slices
from servanda.judgement.causes.token_table import TokenTable
from servanda.judgement.slices.rules import LABEL


@dataclass(frozen=True)
class Explanation:
    """The likely cause of a gap.

    Args:
        cause, rival: names of the two most likely causes; `unexplained` where no signature fits.
        evidence: the measured numbers that suggest it.
        experiment, command: what separates the two.
        case: the signatures, slices and failed checks that it was decided on.
    """

    cause: str
    rival: str
    evidence: str
    experiment: str
    command: str
    case: Case

    @property
    def named(self) -> bool:
        return self.cause != UNEXPLAINED

    @property
    def text(self) -> str:
        """The cause and its evidence in one line."""
        words = CAUSES[self.cause].words.replace("{where}", self._where)
        return f"{words}; {self.evidence}"

    @property
    def _where(self) -> str:
        """The label of the main slice, such as "env math"."""
        for name, conditions in (self.case.main.match if self.case.main else {}).items():
            if name.startswith(LABEL):
                return f"{name.removeprefix(LABEL)} {conditions['in'][0]}"
        return "one label"

    @property
    def rules(self) -> list[SliceRule]:
        """The slices as a contract has them."""
        return [
            SliceRule(name=f"found-{number}", match=found.match)  # type: ignore[call-arg]
            for number, found in enumerate(self.case.slices, 1)
        ]


def explain(
    table: TokenTable,
    limit: float = 0.0,
    problems: Mapping[str, str] | None = None,
    place: str = "DIR",
) -> Explanation:
    """The likely cause of a gap.

    Args:
        limit: of the mean of |p - q| / (p + q), which a slice has to exceed.
        problems: failed data quality checks, by name, with what they found.
        place: of the data, for commands.
    """
    slices = find_slices(table, limit)
    most = max((found.share for found in slices), default=0.0)
    sequences = None if most >= 0.5 else find_sequences(table, limit)
    signatures = signatures_of(table)
    return explained(Case(signatures, slices, sequences, limit, problems or {}), place)


def explained(case: Case, place: str = "DIR") -> Explanation:
    """The likely cause of a case; `place` is that of the data, for commands."""
    (cause, evidence), *_ = causes_of(case)
    command = cause.command.replace("{dir}", quote(place))
    command = command.replace("{step}", str(case.signatures.first_step))
    return Explanation(cause.name, cause.rival, evidence, cause.experiment, command, case)
