# The case that rules decide on: signatures, slices, failed checks; and the registry of the rules.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from servanda.judgement.causes.gap_shape import Signatures
from servanda.judgement.causes.sequence_search import OddSequences
from servanda.judgement.causes.slice_search import FoundSlice
from servanda.judgement.slices.rules import modulo

MOST_OF_IT = 0.5  # least share that a cause explains
_MOST_IDS = 0.5  # of the tokens
_OF_THE_GAP = 0.2  # least share of the gap above other tokens in the main slice
GROWS, SURE_Z = 1.5, 3.0
FEW_ZEROS = 0.5  # share of the gap in logprobs of 0: with more they were written, not drawn


@dataclass(frozen=True)
class Case:
    """What a decision is made from.

    Args:
        limit: of the mean gap.
        problems: names of the data quality checks that failed.
    """

    signatures: Signatures
    slices: tuple[FoundSlice, ...] = ()
    sequences: OddSequences | None = None
    limit: float = 0.0
    problems: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def main(self) -> FoundSlice | None:
        """The slice that explains most of the excess, if one does."""
        best = max(self.slices, key=lambda s: s.share, default=None)
        if best is None or best.share < MOST_OF_IT:
            return None
        # a slice may have all that is uneven, and next to nothing of the gap
        own = best.tokens * (best.inside - best.outside)
        return best if own >= _OF_THE_GAP * self.signatures.gap else None

    @property
    def placed(self) -> bool:
        """Whether the gap is in one place, and not everywhere."""
        return self.main is not None or self.sequences is not None

    @property
    def of_most_ids(self) -> bool:
        """Whether the main slice is of most of the sampled ids: the tails that a cut leaves out."""
        ids = self.sliced("outcome.token_id")
        return ids is not None and ids.tokens > _MOST_IDS

    def sliced(self, *bases: str) -> FoundSlice | None:
        """The main slice, if its first condition is on one of these fields."""
        main = self.main
        if main is None:
            return None
        return main if modulo(main.first[0])[0] in bases else None


Rule = Callable[[Case], str]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return add


def explains(found: FoundSlice) -> str:
    return (
        f"{100 * found.share:.0f} % of the excess over the other tokens lies there "
        f"({found.inside:.2g} against {found.outside:.2g})"
    )


def grows(s: Signatures) -> bool:
    return (s.growth or 0.0) >= GROWS and (s.growth_z or 0.0) >= SURE_Z
