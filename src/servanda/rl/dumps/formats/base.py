# Shared parts of importers: detection, rows, and rejected rows.
#
# A row is one sequence.  An invalid row is rejected and counted, with the first place of each
# reason; no row is repaired, and no number is invented.

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from servanda.errors import EvidenceError
from servanda.registry import Registry
from servanda.rl.dumps.storage import Place
from servanda.traces.corpus import media
from servanda.traces.rollouts import REMOVED, Array, Rollouts

if TYPE_CHECKING:
    from servanda.rl.dumps.formats.rows import Rows

MEDIA = (
    "logprobs are judged as both sides recorded them; no slice tells rows with images, and no "
    "other kernel can score them"
)
CHUNK_TOKENS = 1 << 20  # most tokens held at once, including prompts
_LEAST_NATS = -1e4  # below any softmax: smallest floats mean "no probability"


@dataclass(frozen=True)
class File:
    path: Place
    step: int
    name: str  # as in messages, relative to the dump
    rank: int = 0

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


def files_in(folder: Place, glob: str, pattern: re.Pattern[str]) -> tuple[File, ...]:
    """The files of a format in a folder, in the order of step, rank and name.

    Args:
        glob: pattern of their names.
        pattern: regular expression of "FOLDER/NAME"; its groups are step and rank.
    """
    files = []
    for path in folder.rglob(glob):
        match = pattern.fullmatch(f"{path.parent.name}/{path.name}")
        if match and path.is_file():
            rank = int(match.groupdict().get("rank") or 0)
            name = path.relative_to(folder).as_posix()  # pyright: ignore[reportArgumentType] - of one kind
            files.append(File(path, int(match["step"]), name, rank))
    return tuple(sorted(files, key=lambda file: (file.step, file.rank, file.name)))


@dataclass(frozen=True)
class Detection:
    """A dump of one format in a folder.

    Args:
        files: in the order of their steps.
        sure: whether the head of a file matches the format, not only the names.
        why: the reason, for messages.
        notes: omitted files and columns that are not read.
        alone: whether it holds the sampler's side alone.
    """

    format: str
    folder: Place
    files: tuple[File, ...]
    sure: bool
    why: str
    notes: tuple[str, ...] = ()
    version: str = ""
    alone: bool = False


def detection(
    format_: str,
    folder: Place,
    files: Sequence[File],
    columns: Collection[str],
    needed: Sequence[str],
    read: Collection[str],
    notes: Sequence[str] = (),
    version: str = "",
) -> Detection:
    """A dump whose files have these columns.

    Args:
        needed: required columns; read: all known columns.
    """
    missing = ", ".join(name for name in needed if name not in columns)
    unread = sorted({*columns} - {*read})
    return Detection(
        format_,
        folder,
        tuple(files),
        sure=not missing,
        why=f"{files[0].name} has no {missing}" if missing else "names and columns",
        notes=(*notes, *of_unread(unread)),
        version=version,
    )


def of_unread(columns: Sequence[str]) -> tuple[str, ...]:
    """The notes about columns that are not read; media are said to be none of the evidence."""
    notes = (f"columns that are not read: {', '.join(columns)}",) if columns else ()
    return (*notes, f"{', '.join(found)}: {MEDIA}") if (found := media(columns)) else notes


@dataclass(frozen=True)
class RolloutRow:
    """One sequence of a file; index i of a column concerns token i.

    Args:
        token: ids, [T].
        mask: whether the trainer learns from the token, [T].
        prompt: number of tokens before the first sampled one.
        group: name of the prompt; "": derived from the prompt's tokens.
    """

    token: Array
    mask: Array
    logp_train: Array
    logp_infer: Array
    prompt: int
    group: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    per_sequence: Mapping[str, float] = field(default_factory=dict)
    per_token: Mapping[str, Array] = field(default_factory=dict)


Placed = tuple[str, RolloutRow]  # (place for messages, row)


@dataclass
class Refusal:
    reason: str
    first: str
    count: int = 0


class Refused(Mapping[str, Refusal]):
    """The rejected rows of a dump, by reason, in order of occurrence."""

    def __init__(self) -> None:
        self._by_reason: dict[str, Refusal] = {}
        self.truncated: list[str] = []
        self.accepted = 0

    def add(self, reason: str, place: str) -> None:
        self._by_reason.setdefault(reason, Refusal(reason, place)).count += 1

    def cut(self, place: str) -> None:
        """Record a file that ends in the middle of a row."""
        self.add("the file ends in the middle of a row", place)
        self.truncated.append(place)

    def join(self, later: Refused) -> None:
        """Add the rejected rows of later files."""
        for reason, refusal in later.items():
            known = self._by_reason.setdefault(reason, Refusal(reason, refusal.first))
            known.count += refusal.count
        self.truncated += later.truncated
        self.accepted += later.accepted

    @property
    def rows(self) -> int:
        return sum(refusal.count for refusal in self.values())

    def __getitem__(self, reason: str) -> Refusal:
        return self._by_reason[reason]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_reason)

    def __len__(self) -> int:
        return len(self._by_reason)

    def __str__(self) -> str:
        return "; ".join(f"{r.count:,} x {r.reason} (first: {r.first})" for r in self.values())

    def settle(self, what: str) -> None:
        """Check the result after reading.

        Raises:
            EvidenceError: no row was usable, or a file was cut off.
        """
        if not self.accepted:
            raise EvidenceError(
                f"no sequence of {what} can be used: {self or 'there is none'}",
                hint="the first place of each reason shows what the writer left out",
            )
        if self.truncated:
            raise EvidenceError(
                f"{self.truncated[0]}: the file ends in the middle of a row; {self.accepted:,} "
                f"sequences of {what} were read, refused: {self}",
                hint="wait until it is written, copy it again, or leave the step out: --steps",
            )


class Importer(Protocol):
    """A dump format: its detection and its reader."""

    framework: str
    looks_for: str
    pickled: bool  # whether reading it may run code in it

    def sniff(self, folder: Place) -> Detection | None:
        """Detect such a dump in a folder, from names and the head of one file."""
        ...

    def rows(self, files: Sequence[File], refused: Refused) -> Iterator[Placed | Rows]:
        """The rows of one step's files with their places, in the order of the files."""
        ...


FORMATS: Registry[Importer] = Registry("dump format", plugins="servanda.dump_formats")


def importer(name: str):  # noqa: ANN201 - a class decorator

    def register(cls: type[Importer]) -> type[Importer]:
        FORMATS.add(name, cls())
        return cls

    return register


def with_removed(row: RolloutRow) -> RolloutRow:
    """The row with its removed tokens, if a filter removed all of them.

    A row without a trained token that both sides scored was removed as a whole; zeros mark tokens
    that were not sampled.  A side with only zeros did not score it.
    """
    if row.mask.any():
        return row
    if REMOVED in row.per_token:
        drawn_T = row.per_token[REMOVED] == 1
    else:
        drawn_T = np.isfinite(row.logp_train) & np.isfinite(row.logp_infer)
        drawn_T &= (row.logp_infer != 0) & (row.logp_train != 0)
    if not drawn_T.any():
        return row

    def scored(logp_T: Array) -> Array:
        return logp_T if logp_T[drawn_T].any() else np.where(drawn_T, np.nan, logp_T)

    return replace(
        row,
        logp_train=scored(row.logp_train),
        logp_infer=scored(row.logp_infer),
        per_token={**row.per_token, REMOVED: drawn_T.astype(np.float64)},
    )


def group_of(prompt_T: Array) -> str:
    """A name for a prompt, equal for sequences with the same prompt, in every step.

    >>> group_of(np.array([1, 2])) == group_of(np.array([1, 2], dtype=np.int32))
    True
    """
    data = np.ascontiguousarray(prompt_T, dtype="<i8").tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


_UNSURE_NATS = -1.0  # of a whole answer: it may be certain to one side, and nearly so to the other


def flaw(row: RolloutRow) -> str:
    """The reason why a row cannot be used; "" if it can."""
    tokens = len(row.token)
    columns = {
        "the loss mask": row.mask,
        "the trainer's logprobs": row.logp_train,
        "the sampler's logprobs": row.logp_infer,
        **row.per_token,
    }
    for name, column in columns.items():
        if len(column) != tokens:
            return f"{name} and the token ids are not equally long"
    if not tokens:
        return "it has no tokens"
    if row.token.min() < 0:
        return "a token id is negative"
    train, infer = row.logp_train[row.mask], row.logp_infer[row.mask]
    if len(train):
        if not np.any(np.isfinite(train) & np.isfinite(infer)):
            return "none of its trained tokens has both logprobs"
        if not train.any() and np.nansum(infer) < _UNSURE_NATS:
            return "the trainer's logprobs are all zero, which says they were not computed"
        if not infer.any() and np.nansum(train) < _UNSURE_NATS:
            return "the sampler's logprobs are all zero, which says they were not recorded"
    return ""


def rollouts_of(step: int, place: str, row: RolloutRow) -> Rollouts:
    """One sequence as the rollouts of a step."""
    return Rollouts(
        step,
        np.array([len(row.token)]),
        row.token,
        row.mask,
        possible(row.logp_train),
        possible(row.logp_infer),
        (row.group or group_of(row.token[: row.prompt]),),
        (place,),
        {name: (text,) for name, text in row.labels.items()},
        {name: np.array([number]) for name, number in row.per_sequence.items()},
        row.per_token,
    )


def possible(logp_N: Array) -> Array:
    """Convert placeholders for "no probability" to -inf, so that they enter no sum."""
    impossible_N = logp_N < _LEAST_NATS
    logp_N = logp_N.astype(np.float64, copy=False)
    return np.where(impossible_N, -np.inf, logp_N) if impossible_N.any() else logp_N


def drawn_only(logp_T: Array, mask_T: Array) -> Array:
    """A sampler's column in which zeros outside the mask mark tokens that it did not sample."""
    return np.where(mask_T | (logp_T != 0), logp_T, np.nan)
