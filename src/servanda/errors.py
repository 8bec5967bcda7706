# The errors of Servanda: one tree, and the place in a text that an error points at.
#
# Every message gives the place, what was found, and the next move.  The exit code of the
# command line hangs on the class: 2 the text or the call is wrong, 4 the text is right
# and measuring failed or was refused.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """A place in a text: file, line and column count from 1; `text` is the whole line."""

    file: str
    line: int
    column: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what was found, where, and what to do next."""

    message: str
    where: Where | None = None
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}" if self.where else self.message]
        if self.where and self.where.text.strip():
            lines += [f"{self.where.line:>5} | {self.where.text}"]
            lines += [f"{'':>5}   {' ' * (self.where.column - 1)}^"]
        if self.hint:
            lines += [f"  hint: {self.hint}"]
        return "\n".join(lines)


class ServandaError(Exception):
    """Base of all errors that Servanda raises on purpose."""

    exit_code = 4

    def __init__(self, message: str, *, where: Where | None = None, hint: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(message, where, hint),)
        super().__init__(message)

    @classmethod
    def all(cls, problems: Sequence[Problem]) -> ServandaError:
        """One error that carries every problem found, in the order of the text."""
        error = cls(problems[0].message)
        error.problems = tuple(problems)
        return error

    @classmethod
    @contextmanager
    def of_system(cls, what: str, hint: str = "") -> Iterator[None]:
        """What the system refuses within the block, as an error of this class: "WHAT: why"."""
        try:
            yield
        except OSError as error:
            raise cls(f"{what}: {error.strerror or error}", hint=hint) from None

    @classmethod
    def refuse_form(
        cls, name: object, found: object, read: int, anew: str, noun: str = "schema"
    ) -> None:
        """Refuse a file of another form than the one that is read, as an error of this class.

        Args:
            found: the number that the file states; None: it states none.
            anew: the next move, unless a newer version of Servanda wrote it.
        """
        if found == read:
            return
        stated = f"no {noun}" if found is None else f"{noun} {found}"
        newer = isinstance(found, int) and found > read
        raise cls(
            f"{name} has {stated}, and this version of Servanda reads {noun} {read}",
            hint="upgrade it: pip install --upgrade servanda" if newer else anew,
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class ContractError(ServandaError):
    """The text of a contract, or of a corpus it names, is wrong."""

    exit_code = 2


class EvidenceError(ServandaError):
    """Evidence does not fit: other shapes, other key, overlapping shards."""


class MeasurementError(ServandaError):
    """Measuring failed: an engine, a worker, a disk."""


class IdentityError(MeasurementError):
    """The two sides are not what the contract says: measuring was refused."""


class Interrupted(ServandaError):  # noqa: N818 - a wish of the user, not an error
    """The user stopped a measurement; what was measured is kept."""

    exit_code = 130
