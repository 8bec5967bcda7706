# Many versions of many contracts: each name's versions in order, and the step to each.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from servanda.authoring.diff.difference import Difference, counted, order
from servanda.contract.model import Contract


@dataclass(frozen=True)
class ContractFile:
    """A contract, and the file that it was read from."""

    file: str
    contract: Contract

    @property
    def version(self) -> str:
        return self.contract.metadata.version


@dataclass(frozen=True)
class Step:
    old: ContractFile
    new: ContractFile

    @property
    def difference(self) -> Difference:
        return Difference(self.old.contract, self.new.contract)

    @property
    def sentence(self) -> str:
        """The changes, such as "2 tightened, 1 loosened; evidence expires: measure again"."""
        return f"{counted(self.difference.changes)}; {self.difference.evidence}"

    @property
    def clash(self) -> str:
        """The reason why the two cannot coexist; "" if they can."""
        if self.old.version != self.new.version:
            return ""
        different = self.difference
        if all(c.kind == "cosmetic" for c in different.changes) and not different.evidence_expires:
            return ""
        return (
            f"two contracts are {self.new.contract.metadata.name} {self.new.version} and say "
            f"different things: {self.old.file}, {self.new.file}"
        )


@dataclass(frozen=True)
class ContractVersions:
    """All versions of one contract, oldest first."""

    name: str
    versions: tuple[ContractFile, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(Step(old, new) for old, new in pairwise(self.versions))

    @property
    def clashes(self) -> tuple[str, ...]:
        return tuple(step.clash for step in self.steps if step.clash)


def versions_by_name(files: Iterable[ContractFile]) -> tuple[ContractVersions, ...]:
    """Contracts by name, each name's versions in order."""
    by_name: dict[str, list[ContractFile]] = {}
    for file in files:
        by_name.setdefault(file.contract.metadata.name, []).append(file)
    return tuple(
        ContractVersions(
            name, tuple(sorted(by_name[name], key=lambda v: (order(v.version), v.version, v.file)))
        )
        for name in sorted(by_name)
    )
