# The difference of two contracts, as one side reads it.

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
    """Two versions of a contract, and who reads them.

    Args:
        side: consumer: who relies on the promise; producer: who has to keep it.
    """

    old: Contract
    new: Contract
    side: Side = "consumer"

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What breaks this side first; each kind in the order of the language."""
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
        """Whether what was measured under the old one says nothing of the new one.

        The same digest is needed and not enough: weights and texts count by their own.
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
        """What the version ought to say, where something breaks and it does not; else ""."""
        if self.compatible:
            return ""
        return advice(self.old.metadata.version, self.new.metadata.version)


def counted(listed: Iterable[Change]) -> str:
    """How many of each kind, such as "2 tightened, 1 loosened"; "no change" of none.

    What no enforced clause hangs on is counted by itself.
    """
    listed = [*listed]
    counts = [(kind, sum(c.kind == kind and c.enforced for c in listed)) for kind in KINDS]
    counts.append(("of what is monitored", sum(not c.enforced for c in listed)))
    return ", ".join(f"{n} {kind}" for kind, n in counts if n) or "no change"
