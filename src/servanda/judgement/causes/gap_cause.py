# An explanation of a gap: cause, evidence, slices, and the next experiment as a command.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote

from servanda.contract.clause import SliceRule
from servanda.judgement.causes import place_rules, shape_rules  # noqa: F401 - they register
from servanda.judgement.causes.case import RULES, Case
from servanda.judgement.causes.catalogue import CAUSES, UNEXPLAINED, Cause
from servanda.judgement.causes.gap_shape import WORST, signatures_of
from servanda.judgement.causes.sequence_search import find_sequences
from servanda.judgement.causes.slice_search import find_slices
from servanda.judgement.causes.token_table import TokenTable
from servanda.judgement.slices.rules import LABEL

# The decision: from signatures and slices to a cause, or to none.
#
# The first rule that fits names the cause: a failed check comes first, then a place or a transform,
# then what only fits the shape.  Each rule returns its evidence, with numbers, or "".  The
# thresholds were chosen on some models and strengths and tested on others (benchmarks/causes.py).


ORDER = (
    *("missing_data", "shift", "replay", "raw_logprobs"),
    *("stale_replica", "one_engine", "one_kind", "old_weights", "retokenised"),
    *("top_p", "temperature", "penalty"),
    *("vocabulary", "end_of_answer", "blocks", "stale_cache", "batch", "attention_window"),
    *("padding", "packing", "template", "odd_sequences", "precision_drift", "stale_weights"),
    *("positions", "routing", "softcap", "head", "numerics"),
)


def causes_of(case: Case) -> list[tuple[Cause, str]]:
    """The causes that fit, most likely first, with their evidence; `unexplained` if none does."""
    found = [(CAUSES[name], text) for name in ORDER if (text := RULES[name](case))]
    if found:
        return found
    s = case.signatures
    grown = f", x{s.growth:.2g} over the steps" if s.growth is not None else ""
    text = (
        f"{100 * s.tail:.0f} % of the gap in 1 % of the tokens, {100 * s.concentration:.0f} % in "
        f"the sequences with {100 * WORST:.0f} % of them{grown}; no signature fits"
    )
    return [(CAUSES[UNEXPLAINED], text)]


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
