# The state file from which a restarted watch continues.

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

import msgspec

from servanda.contract.text_file import whole
from servanda.engines.file_lock import hold
from servanda.errors import ContractError, MeasurementError
from servanda.rl.watch.step import Source
from servanda.rl.watch.transitions import WatchState

SCHEMA = 1


class StateFile:
    """A state file, or none.

    Args:
        path: None: no file.
        watched: the followed path; a state belongs to one.
    """

    def __init__(self, path: Path | None, watched: Path) -> None:
        self.path = path
        self.watched = str(watched.resolve())

    def load(self, source: Source) -> WatchState:
        """Load the stored state and resume the source; a new state without a file.

        Raises:
            ContractError: not a state file, or one of another schema or another watch.
        """
        if self.path is None or not self.path.exists() or not self.path.stat().st_size:
            return WatchState()
        hint = "name another --state-file, or remove the file to start again"
        try:
            data = json.loads(self.path.read_bytes())
            if data["servanda"] != "watch":
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ContractError(
                f"{self.path} is not the state file of a watch", hint=hint
            ) from None
        ContractError.refuse_form(self.path, data.get("schema"), SCHEMA, hint)
        try:
            if data["watched"] != self.watched:
                raise ContractError(
                    f"{self.path} is the state of another watch, of {data['watched']}", hint=hint
                )
            state = msgspec.convert(data["memory"], WatchState)
            if data["kind"]:
                source.resume(data["source"])
        except (KeyError, TypeError, ValueError, msgspec.ValidationError):
            raise ContractError(
                f"{self.path} is not the state file of a watch", hint=hint
            ) from None
        return state

    def save(self, state: WatchState, source: Source) -> None:
        """Replace the file atomically.

        Raises:
            MeasurementError: it cannot be written.
        """
        if self.path is None:
            return
        data = {
            "servanda": "watch",
            "schema": SCHEMA,
            "watched": self.watched,
            "kind": source.kind,
            "memory": asdict(state),
            "source": source.to_plain(),
        }
        with _written(self.path), whole(self.path) as part:
            part.write_text(json.dumps(data), encoding="utf-8")


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Lock the state file for one watch; the lock ends with the process.

    Raises:
        MeasurementError: another watch uses it, or it cannot be written.
    """
    if path is None:
        yield
        return
    hint = "stop it, or use another --state-file here"
    busy = MeasurementError(f"another watch uses the state file {path}", hint=hint)
    with _written(path):
        held = hold(path.with_name(f".{path.name}.lock"), busy)
    with held:
        yield


def _written(path: Path) -> AbstractContextManager[None]:
    hint = "name another --state-file"
    return MeasurementError.of_system(f"{path} cannot be written", hint=hint)
