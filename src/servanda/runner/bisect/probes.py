# Tests of a build or of settings: a command whose exit code answers, or one that serves or prepares
# a kernel for a sequential comparison.
#
# The k-th comparison has the share alpha / (k (k + 1)), so that all of them together, however many
# the search takes, are wrong with probability alpha at most.

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError
from servanda.runner.bisect.search import Outcome, Probe
from servanda.runner.compare.contract import Options, compare, prepare
from servanda.runner.measurement import Watch, unwatched
from servanda.runner.probe import Engines

ALPHA = 0.05
PLACE = "{}"  # in a command or a kernel string: the build, or the flags
_SKIP = (3, 4, 125)  # inconclusive, failed, and git's own
_WRONG, _CANNOT = 2, (126, 127)
_START_S = 600.0
_POLL_S = 0.2
_END_S = 10.0
_OUTCOMES: Mapping[str, Outcome] = {"holds": "good", "violated": "bad"}


@dataclass
class Prober:
    """Tests one state of a kernel after another, and keeps each answer.

    Args:
        command: shell command; {} in it is the build, or the flags of settings.
        options: of a comparison, whose B may have {} as well; None: the exit code answers.
        folder: where the command runs.
    """

    command: str | None
    options: Options | None
    folder: Path
    watch: Watch = unwatched
    probes: list[Probe] = field(default_factory=list)

    def judge(
        self, what: str, value: str, environment: Mapping[str, str], flags: str | None = None
    ) -> Outcome:
        """The outcome of one state.

        Args:
            what: its name; value: takes the place of {}.
            flags: takes the place of {} in the command, as words of a shell; None: the value.

        Raises:
            ContractError: a command that cannot be run, or says that it was called wrongly.
        """
        env = {**os.environ, **environment, "SERVANDA_BUILD": value}
        words = shlex.quote(value) if flags is None else flags
        line = None if self.command is None else self.command.replace(PLACE, words)
        if self.options is not None:
            probe = self._by_comparison(what, value, line, env, self.options)
        else:
            assert line is not None  # refused before
            probe = self._by_exit_code(what, line, env)
        self.probes.append(probe)
        return probe.outcome

    def _by_exit_code(self, what: str, line: str, env: Mapping[str, str]) -> Probe:
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=env, stdout=subprocess.PIPE, check=False
        )
        _refuse_code(done.returncode, line)
        tokens = _tokens(done.stdout)
        if done.returncode in _SKIP:
            return Probe(what, "skip", tokens, None, f"exit code {done.returncode}")
        return Probe(what, "bad" if done.returncode else "good", tokens)

    def _by_comparison(
        self, what: str, value: str, line: str | None, env: Mapping[str, str], options: Options
    ) -> Probe:
        number = len(self.probes) + 1
        alpha = ALPHA / (number * (number + 1))
        with tempfile.TemporaryDirectory(prefix="servanda-bisect-") as place:
            asked = replace(
                options,
                a=options.a.replace(PLACE, value),
                b=options.b.replace(PLACE, value),
                confidence=1 - alpha,
                run_dir=Path(place) / "run",
            )
            try:
                with self._prepared(asked.b, line, env), Engines(spawn) as engines:
                    comparison = prepare(asked, engines)
                    verdict = compare(comparison, engines, watch=self.watch)
            except MeasurementError as error:
                return Probe(what, "skip", None, alpha, error.problems[0].message)
        outcome = _OUTCOMES.get(verdict.outcome, "skip")
        why = verdict.outcome if outcome == "skip" else ""
        return Probe(what, outcome, verdict.tokens, alpha, why)

    @contextmanager
    def _prepared(self, kernel: str, line: str | None, env: Mapping[str, str]) -> Iterator[None]:
        """The command as a server for as long as B is measured, or done before."""
        url = parse_kernel(kernel, engines=engine_names(), name="B").url
        if line is None:
            yield
            return
        if url is None:
            done = subprocess.run(
                line, shell=True, cwd=self.folder, env=env, stdout=subprocess.DEVNULL, check=False
            )
            _refuse_code(done.returncode, line)
            if done.returncode:
                raise MeasurementError(f"the command ended with {done.returncode}: {line}")
            yield
            return
        _refuse_served(url)
        process = subprocess.Popen(
            line,
            shell=True,
            cwd=self.folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_for(url, process, line)
            yield
        finally:
            _end(process, url)


def _refuse_code(code: int, line: str) -> None:
    """Refuse an exit code that says nothing about the build."""
    if code == _WRONG or code in _CANNOT or code < 0 or code > 127:
        raise ContractError(
            f"the command ended with {code}: {line}",
            hint="0 is good, 1 bad, and 3, 4 or 125 skip a build; 2, 126, 127 and signals end the "
            "search",
        )


def _tokens(output: bytes) -> int | None:
    """The tokens of a verdict that the command printed as JSON."""
    with suppress(ValueError):
        data = json.loads(output)
        if isinstance(data, dict) and isinstance(data.get("tokens"), int):
            return data["tokens"]
    return None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # 503: it is still loading
    except (OSError, ValueError):
        return False


def _refuse_served(url: str) -> None:
    if _answers(url):
        raise ContractError(
            f"{url} is served before the command starts, so each build would be measured on it",
            hint="end that server, or leave --run out",
        )


def _wait_for(url: str, process: subprocess.Popen[bytes], line: str) -> None:
    end = time.monotonic() + _START_S
    while not _answers(url):
        if process.poll() is not None:
            raise MeasurementError(f"the command ended with {process.returncode}: {line}")
        if time.monotonic() > end:
            raise MeasurementError(f"{url} does not answer {_START_S:g} s after its start: {line}")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes], url: str) -> None:
    """End the command with everything that it started, and wait until its port is free.

    The shell ends before its children do, so its end shows nothing.
    """
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        end = time.monotonic() + _END_S
        while (_listens(url) or process.poll() is None) and time.monotonic() < end:
            time.sleep(_POLL_S)


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=5):
            return True
    except OSError:
        return False


def flags_and_variables(settings: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Settings as flags of a command line, and as environment variables.

    >>> flags_and_variables(["--enforce-eager", "VLLM_USE_V1=0"])
    ('--enforce-eager', {'VLLM_USE_V1': '0'})
    """
    flags = [setting for setting in settings if setting.startswith("-")]
    pairs = [s.partition("=") for s in settings if not s.startswith("-")]
    words = [word for flag in flags for word in shlex.split(flag)]
    return shlex.join(words), {name: value for name, _, value in pairs}
