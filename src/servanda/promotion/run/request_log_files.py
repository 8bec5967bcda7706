# The traffic log on disk: its files, and the check that evaluated rows are unchanged.

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.errors import EvidenceError, MeasurementError, Where
from servanda.judgement.schedule import Arrivals
from servanda.runner.round_files import batch_of, round_name
from servanda.runner.run_directory import RunDirectory
from servanda.traces.request_log import Assignment, Request, read_assignments, read_served

_SUFFIX = ".jsonl"
_DIGITS = re.compile(r"([0-9]+)")
_COMPARED = ("sequence_S", "lost_S", "prompt_tokens_S", "token_N")


def read_log(served: Sequence[Path]) -> tuple[Request, ...]:
    """Every request of a log, file after file in the order of their names.

    Args:
        served: files, and folders of .jsonl files.  Missing ones count as empty.

    Raises:
        EvidenceError: lines that are not valid requests.
        MeasurementError: a file cannot be read.
    """
    return tuple(
        request for path in files_of(served) for request in read_served(_text(path), str(path))
    )


def read_split(served: Sequence[Path]) -> tuple[Assignment, ...]:
    """Every assignment of a user in a log, in the order of `read_log`.

    Raises:
        EvidenceError: lines that are not valid assignments.
        MeasurementError: a file cannot be read.
    """
    return tuple(
        one for path in files_of(served) for one in read_assignments(_text(path), str(path))
    )


def files_of(served: Sequence[Path]) -> list[Path]:
    """The files of a log, in the order of their names."""
    files: list[Path] = []
    for path in served:
        files += path.glob(f"*{_SUFFIX}") if path.is_dir() else [path] if path.exists() else []
    return sorted(dict.fromkeys(files), key=lambda path: (_numbered(path.name), path))


def _numbered(name: str) -> list[str | int]:
    """A sort key of a file name by its numbers.

    >>> sorted(["log-10000.jsonl", "log-9999.jsonl"], key=_numbered)
    ['log-9999.jsonl', 'log-10000.jsonl']
    """
    return [int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(name))]


def _text(path: Path) -> str:
    with MeasurementError.of_system(
        f"the traffic log {path} cannot be read",
        hint="give this process read access to the log that the proxy writes",
    ):
        data = path.read_bytes()
    whole, end, tail = data.rpartition(b"\n")
    try:
        text = (whole + end).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise EvidenceError(
            f"not UTF-8 text: {error.reason}", where=Where(str(path), line, 1), hint="write UTF-8"
        ) from None
    with suppress(UnicodeDecodeError):  # a character is being written
        text += tail.decode("utf-8")
    return text


def absent(served: Sequence[Path]) -> tuple[str, ...]:
    """The missing parts of a log, as sentences; a new step may have none yet."""
    if not served:
        return ("no traffic log is given: name it with --log",)
    return tuple(
        f"--log {path}: {'no .jsonl file is in it' if path.is_dir() else 'nothing is there'} yet"
        for path in served
        if not files_of([path])
    )


def refuse_rewritten(schedule: Arrivals, run: RunDirectory, infer: TrafficReplayEngine) -> None:
    """Refuse a log in which an evaluated request has vanished or changed.

    Raises:
        EvidenceError: naming the round.
    """
    arrived = len(schedule.traffic.groups) // schedule.workload.round
    ids = [prompt.token_ids or () for prompt in schedule.corpus.prompts]
    hint = (
        "rows that have been evaluated are immutable: keep every file of the log unchanged during "
        "a step; where rows are lost, start another attempt with --fresh"
    )
    for index in itertools.count():
        name = round_name(schedule, index, "infer")
        place = f"round {index} of {schedule.traffic.leg}"
        if not run.has(name):
            return
        if index >= arrived:
            raise EvidenceError(
                f"{place} has been evaluated, and its requests are no longer in the log", hint=hint
            )
        batch = batch_of(schedule.units(index), ids, schedule.width)
        before = run.read(name)
        now = infer.generate(batch, schedule.workload.sampling.transform, schedule.seed)
        same = (
            all(np.array_equal(getattr(before, part), getattr(now, part)) for part in _COMPARED)
            and np.array_equal(before.columns["logp"], now.columns["logp"], equal_nan=True)
            and before.about.get("requests") == now.about.get("requests")
        )
        if not same:
            raise EvidenceError(
                f"{place} has been evaluated, and the log has changed it since", hint=hint
            )
