# Rollout dumps of all supported frameworks: detected, read in chunks, and checked.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from shlex import quote

from servanda.errors import ContractError, EvidenceError
from servanda.rl.dumps.checks.routes import RoutesCheck
from servanda.rl.dumps.formats import base, jsonl, nemo, parquet, prime_rl, skyrl, slime
from servanda.rl.dumps.formats.base import (
    FORMATS,
    Detection,
    File,
    Refused,
)
from servanda.rl.dumps.formats.rows import Collector
from servanda.rl.dumps.formats.slime import alone
from servanda.rl.dumps.storage import Place, answering, place
from servanda.traces.rollouts import Rollouts

__all__ = ["FORMATS", "Detection", "Dump", "Refused", "open_dump"]

NO_DUMP = (
    "TRL and verl write no logprobs to disk by default: docs/how-to/dumps.md has the lines that do"
)
_BUILTIN = (nemo, parquet, prime_rl, skyrl, slime)  # importing a module registers its format
_SHOWN = 8  # most names of a folder in a message


@dataclass
class Dump:
    """A detected dump; `read` iterates over it once.

    Args:
        detection: place and format.
        refused: rejected rows, by reason; filled while reading.
        empty: steps without a usable sequence -> their first file; filled while reading.
    """

    detection: Detection
    refused: Refused = field(default_factory=Refused)
    empty: dict[int, str] = field(default_factory=dict)

    @property
    def format(self) -> str:
        return self.detection.format

    @property
    def files(self) -> tuple[Place, ...]:
        return tuple(file.path for file in self.detection.files)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(file.step for file in self.detection.files))

    def of(self, steps: Iterable[int]) -> Dump:
        wanted = {*steps}
        files = tuple(file for file in self.detection.files if file.step in wanted)
        return Dump(replace(self.detection, files=files))

    def finished(self) -> Dump:
        """The dump without a newest step that is still being written, if it has others."""
        files = self.detection.files
        last = self.steps[-1]
        cut = [file.name for file in files if file.step == last and jsonl.unfinished(file)]
        if not cut or len(self.steps) == 1:
            return self
        note = f"step {last} is left out: {cut[0]} ends in the middle of a row (being written?)"
        notes = (*self.detection.notes, note)
        kept = tuple(file for file in files if file.step != last)
        return Dump(replace(self.detection, files=kept, notes=notes))

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.detection.files)

    @property
    def about(self) -> dict[str, str]:
        """The summary for reports: framework, files, bytes, schema version, notes."""
        detection = self.detection
        return {
            "framework": FORMATS[self.format].framework,
            "format": self.format,
            "files": str(len(detection.files)),
            "bytes": str(self.bytes),
            **({"version": detection.version} if detection.version else {}),
            **({"notes": "; ".join(detection.notes)} if detection.notes else {}),
        }

    def read(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Rollouts]:
        """The sequences in the order of their steps; a step may come in several chunks.

        Args:
            progress: called after each step with the bytes read and the total bytes.

        Yields:
            Rollouts of at most about 2^20 tokens; a longer sequence is a separate chunk.

        Raises:
            EvidenceError: at the end, if every row was rejected or a file was cut off.
            MeasurementError: a file cannot be read.
        """
        self.refused, self.empty = Refused(), {}
        done, total = 0, self.bytes
        for step in self.steps:
            yield from self.read_step(step)
            done += self.of([step]).bytes
            if progress is not None:
                progress(done, total)
        self.settle()

    def read_step(self, step: int) -> Iterator[Rollouts]:
        """The sequences of one step; a step without any is noted in `empty`.

        Raises:
            MeasurementError: a file cannot be read.
        """
        files = self.of([step]).detection.files
        chunk, before = Collector(step, self.refused), self.refused.accepted
        for rows in FORMATS[self.format].rows(files, self.refused):
            yield from chunk.add(rows)
        yield from chunk.flush()
        if self.refused.accepted == before:
            self.empty[step] = files[0].name

    def join(self, part: Dump) -> None:
        """Add what reading a part of this dump found out: later steps, in their order."""
        self.refused.join(part.refused)
        self.empty |= part.empty

    def refuse_alone(self) -> None:
        """Refuse a dump of the sampler's side alone, with what its recorded experts show.

        Raises:
            EvidenceError: it is one.
            MeasurementError: a file cannot be read.
        """
        if not self.detection.alone:
            return
        check, refused = RoutesCheck(), Refused()
        for step, where, row in alone(self.detection.files, refused):
            check.add(base.rollouts_of(step, where, row))
        found = check.finding()
        problems = f"; {refused.rows:,} samples were refused: {refused}" if refused.rows else ""
        raise EvidenceError(
            f"{self.files[0].parent.name}/ of {self.detection.folder} holds the sampler's side "
            f"alone, so nothing is compared; {found.placed or 'no experts are recorded'}{problems}",
            hint="write the trainer's side as well: --dump-details writes train_data/",
        )

    def settle(self) -> None:
        """Check the result after every step was read.

        Raises:
            EvidenceError: every row was rejected, or a file was cut off.
        """
        self.refused.settle(str(self.detection.folder))


def open_dump(
    path: str | Place, format: str | None = None, *, unsafe_pickles: bool = False
) -> Dump:
    """Detect the dump in a folder, or the dump of a file.

    Args:
        path: of the folder or file, or its URL: s3://BUCKET/KEY.
        format: one of FORMATS, if the folder contains more than one.
        unsafe_pickles: read formats that are Python pickles, in a separate process that accepts
            only tensors and plain data.

    Raises:
        ContractError: no such folder or format, no dump in it, more than one, or a pickle
            without `unsafe_pickles`.
        MeasurementError: an object store does not answer, or refuses.
    """
    path = place(path)
    if format is not None and format not in FORMATS:
        raise ContractError(f"there is no dump format {format!r}", hint=FORMATS.hint(format))
    with answering(path):
        return _found(path, format, unsafe_pickles)


def _found(path: Place, format: str | None, unsafe_pickles: bool) -> Dump:
    if not path.exists():
        raise ContractError(f"there is no {str(path)!r}", hint="name the folder of the dump")
    folder = path if path.is_dir() else path.parent
    names = FORMATS.names() if format is None else [format]
    command = f"servanda check {quote(str(path))}"
    sniffed = (_of(FORMATS[name].sniff(folder), path) for name in names)
    detected = [detection for detection in sniffed if detection is not None]
    detected = [detection for detection in detected if detection.sure] or detected
    if not detected:
        from servanda.rl.dumps.formats import foreign  # most folders hold a dump

        if known := foreign.recognised(path):
            file, kind = known
            raise ContractError(
                f"{str(path)!r} holds no dump: {file} looks like a file of {kind.framework}, "
                f"which holds {kind.holds}; a dump needs token ids and the logprobs of both sides",
                hint=kind.hint,
            )
        raise ContractError(_nothing(path, list(names)), hint=NO_DUMP)
    dump = detected[0]
    if len(detected) > 1:
        kinds = ", ".join(f"{len(d.files)} of {d.format}" for d in detected)
        raise ContractError(
            f"{str(path)!r} holds dumps of more than one format: {kinds}",
            hint=f"name one: {command} --as {dump.format}",
        )
    framework = FORMATS[dump.format].framework
    if not dump.sure:
        raise ContractError(
            f"{str(path)!r} has files named as {framework} names them, and {dump.why}",
            hint="a dump needs token ids, a loss mask and the logprobs of both sides",
        )
    if FORMATS[dump.format].pickled and not unsafe_pickles:
        raise ContractError(
            f"{dump.files[0].name} is a Python pickle ({framework}), which can hold a program",
            hint=f"if you trust who wrote it: {command} --unsafe-pickles (it is read in a process "
            "of its own, and anything but tensors and plain data is refused)",
        )
    _one_run(dump)
    return Dump(dump)


def _of(detection: Detection | None, path: Place) -> Detection | None:
    """The dump in a folder, or only the given file."""
    if detection is None or path.is_dir():
        return detection
    files = tuple(file for file in detection.files if file.path == path)
    return replace(detection, files=files) if files else None


def _nothing(path: Place, names: list[str]) -> str:
    looked = "; ".join(f"{FORMATS[n].looks_for} ({FORMATS[n].framework})" for n in names)
    if not path.is_dir():
        return f"{str(path)!r} is no file of a dump; looked for {looked}"
    entries = sorted(entry.name for entry in path.iterdir())
    rest = f", and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return (
        f"{str(path)!r} holds no dump; looked for {looked}; "
        f"it holds {', '.join(entries[:_SHOWN]) or 'nothing'}{rest}"
    )


def _one_run(detection: Detection) -> None:
    """Refuse a step that exists in two folders: they belong to two runs."""
    folders: dict[tuple[int, str], File] = {}
    for file in detection.files:
        other = folders.setdefault((file.step, file.path.name), file)
        if other is not file:
            raise ContractError(
                f"step {file.step} is there twice: {other.name} and {file.name}",
                hint="name the folder of one run",
            )
