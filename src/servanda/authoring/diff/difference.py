# The difference of two contracts, for one side.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from servanda.authoring.diff.compare import changes
from servanda.authoring.diff.values import KINDS, Change, Side
from servanda.authoring.diff.versions import advice
from servanda.contract.model import Contract

EXPIRES = "evidence expires: measure again"
CARRIES_OVER = "evidence carries over"


@dataclass(frozen=True)
class Difference:
    """Two versions of a contract, for one reader.

    Args:
        side: consumer: who relies on the promise; producer: who has to keep it.
    """

    old: Contract
    new: Contract
    side: Side = "consumer"

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes, breaking ones first; each kind in the order of the language."""
        unsorted = changes(self.old, self.new)
        return tuple(sorted(unsorted, key=lambda c: (not c.breaks(self.side), KINDS.index(c.kind))))

    @cached_property
    def breaking(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.breaks(self.side))

    @property
    def compatible(self) -> bool:
        return not self.breaking

    @property
    def evidence_expires(self) -> bool:
        """Whether evidence under the old version is invalid for the new one.

        Equal digests are necessary but not sufficient: weights and texts count separately.
        """
        return self.old.digest != self.new.digest

    @property
    def evidence(self) -> str:
        return EXPIRES if self.evidence_expires else CARRIES_OVER

    @property
    def sentence(self) -> str:
        """The answer on one line."""
        if not self.changes:
            return f"the same contract; {self.evidence}"
        if self.compatible:
            return f"compatible for the {self.side}: {counted(self.changes)}; {self.evidence}"
        return f"BREAKING for the {self.side}: {counted(self.breaking)}; {self.evidence}"

    @property
    def advice(self) -> str:
        """The advice about the version number, if a change breaks; else ""."""
        if self.compatible:
            return ""
        return advice(self.old.metadata.version, self.new.metadata.version)


def counted(listed: Iterable[Change]) -> str:
    """The number of changes of each kind, such as "2 tightened, 1 loosened"; or "no change".

    Changes without an enforced clause are counted separately.
    """
    listed = [*listed]
    counts = [(kind, sum(c.kind == kind and c.enforced for c in listed)) for kind in KINDS]
    counts.append(("of what is monitored", sum(not c.enforced for c in listed)))
    return ", ".join(f"{n} {kind}" for kind, n in counts if n) or "no change"
