# Rows: a bug of the field, its thread, and the answer of Servanda to a case of its shape.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from click.testing import CliRunner

from servanda.cli.main import main

State = Literal["caught", "in part", "not"]


class Answer(NamedTuple):
    """What a user reads, and the exit code."""

    exit: int
    text: str


Case = Callable[[Path, bool], Answer]


@dataclass(frozen=True)
class Row:
    """One row of docs/explanation/field_bugs.md.

    Args:
        section: of the page.
        threads: "owner/repository#number", the first names the row.
        what: happened.
        command: that a user runs.
        state: "caught" where the answer is red and leads to the bug.
        says: a line of the answer, word for word; "" where nothing is run.
        exit: of the broken case; that of its healthy twin is 0.
        missing: what keeps the row from being caught.
        case: builds the bug, or its healthy twin, in a folder, and runs the command.
    """

    section: str
    threads: tuple[str, ...]
    what: str
    command: str
    state: State
    says: str = ""
    exit: int | None = None
    missing: str = ""
    case: Case | None = None

    @property
    def name(self) -> str:
        return short(self.threads[0])


ROWS: list[Row] = []


def short(thread: str) -> str:
    """A thread as the field calls it.

    >>> short("NVIDIA-NeMo/RL#4018")
    'NeMo-RL#4018'
    """
    return thread.replace("NVIDIA-NeMo/RL", "NeMo-RL").split("/")[-1]


def bug(section: str, *threads: str, **fields) -> Callable[[Case], Case]:
    """Enter the case that it decorates; fields as of Row."""

    def enter(case: Case) -> Case:
        ROWS.append(Row(section, threads, case=case, **fields))
        return case

    return enter


def known(section: str, *threads: str, **fields) -> None:
    """Enter a row of which no case is run."""
    ROWS.append(Row(section, threads, **fields))


def servanda(*words) -> Answer:
    """Run the command line as a user does."""
    done = CliRunner().invoke(main, [*map(str, words)], prog_name="servanda")
    return Answer(done.exit_code, done.output)


def observed(step) -> Answer:
    """What a monitor said of a step."""
    return Answer(step.exit_code, f"{step.outcome}: {step.cause}\n{step}")
