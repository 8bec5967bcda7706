# Command: a program of the user receives every notification.

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import PurePath
from typing import IO

from servanda.contract.identity import digest_of
from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.base import KINDS, message
from servanda.promotion.state import Effect
from servanda.report.format import line

LIMIT_S = 60.0
_TAIL = 4096  # bytes at the end of stderr that are searched for its last line


class Command:
    """Run a program for every notification; exit code 0 means that it was accepted.

    It receives the JSON on its standard input, and SERVANDA_EFFECT and SERVANDA_IDEMPOTENCY_KEY in
    its environment.  A failed program is not run again before the next call, because it may have
    done half of its work.

    Args:
        text: program and arguments, split as a shell does; not run by a shell.
        limit_s: time after which it and its children are killed.

    Raises:
        ContractError: it cannot be split, or the program does not exist.
    """

    kinds = KINDS

    def __init__(self, text: str, limit_s: float = LIMIT_S) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise ContractError(
                f"--command cannot be split into words: {str(error).lower()}",
                hint="it is split as a shell would; quote arguments with spaces",
            ) from None
        if not self._words:
            raise ContractError("--command names no program")
        self._program = PurePath(self._words[0]).name
        if shutil.which(self._words[0]) is None:
            raise ContractError(
                f"--command: there is no program {self._words[0]!r} that can be run",
                hint="no shell runs it: give a program, or 'sh -c \"...\"'",
            )
        self.name = f"command:{self._program}:{digest_of(text)[:8]}"
        self._limit_s = limit_s

    def deliver(self, effect: Effect) -> None:
        try:
            # files instead of pipes, so that neither a program that reads nothing nor one that
            # leaves a child with open pipes blocks this process
            with tempfile.TemporaryFile() as message_file, tempfile.TemporaryFile() as errors:
                message_file.write(json.dumps(message(effect)).encode())
                message_file.seek(0)
                self._run(effect, message_file, errors)
        except OSError as error:
            raise MeasurementError(
                f"{self._program}: cannot be run: {error.strerror or error}"
            ) from None

    def _run(self, effect: Effect, message_file: IO[bytes], errors: IO[bytes]) -> None:
        variables = {"SERVANDA_EFFECT": effect.kind, "SERVANDA_IDEMPOTENCY_KEY": effect.key}
        process = subprocess.Popen(
            self._words,
            stdin=message_file,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **variables},
            start_new_session=True,  # a separate process group, which can be killed as a whole
        )
        code = None
        try:
            code = process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:  # the limit, or Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code is None:
            what = f"took longer than {self._limit_s:g} s and was ended"
        else:
            what = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
        if code != 0:
            raise MeasurementError(self._problem(what, errors))

    def _problem(self, what: str, errors: IO[bytes]) -> str:
        """The problem, with the last line of its output."""
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL))
        rows = [line(row, 200) for row in errors.read().decode(errors="replace").splitlines()]
        return ": ".join([self._program, what, *list(filter(None, rows))[-1:]])
