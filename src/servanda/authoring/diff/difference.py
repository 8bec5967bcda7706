# The difference of two contracts, for one side, and the version number that it requires.

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from servanda.authoring.diff.compare import changes
from servanda.authoring.diff.values import KINDS, Change, Side
from servanda.contract.model import Contract

_VERSION = re.compile(
    r"v?(?P<numbers>\d{1,9}(?:\.\d{1,9})*)(?:-(?P<pre>[0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?"
)

Key = tuple[object, ...]


def order(version: str) -> Key:
    """The sort key of versions; other texts come last, in alphabetical order.

    Numbers are compared as numbers, and a pre-release comes before its release; build metadata
    after a + is ignored.

    >>> sorted(["1.10.0", "draft", "1.2.0", "1.10.0-rc.2", "1.10.0-rc.10"], key=order)
    ['1.2.0', '1.10.0-rc.2', '1.10.0-rc.10', '1.10.0', 'draft']

    Source:
        Semantic Versioning 2.0.0, item 11.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        return (1, version)
    parts = (match["pre"] or "").split(".")
    # a number comes before a text, and none after both
    pre = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if match["pre"])
    numbers = [int(part) for part in match["numbers"].split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return (0, tuple(numbers), pre == (), pre)


def advice(old: str, new: str) -> str:
    """The advice for a version that does not announce a breaking change; "" if it does.

    The first number must increase; before 1.0.0, the second may instead.  The promises of a
    pre-release may change until its release.

    >>> advice("1.4.2", "1.5.0")
    'metadata.version went from 1.4.2 to 1.5.0; a change that breaks wants 2.0.0'
    >>> advice("1.4.2", "2.0.0"), advice("0.3.0", "0.4.0")
    ('', '')
    """
    before, after = (_VERSION.fullmatch(version) for version in (old, new))
    if before is None or after is None:
        wrong = old if before is None else new
        return f"metadata.version {wrong!r} is no version such as 1.0.0, so it cannot say that"
    (major, minor), (major_after, minor_after) = (
        ([*map(int, match["numbers"].split(".")), 0])[:2] for match in (before, after)
    )
    if before["pre"] or major_after > major or (major == major_after == 0 and minor_after > minor):
        return ""
    wanted = f"{major + 1}.0.0" if major else f"0.{minor + 1}.0"
    went = f"stayed {old}" if old == new else f"went from {old} to {new}"
    return f"metadata.version {went}; a change that breaks wants {wanted}"


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
