# An engine as a child process: its own interpreter, Arrow over a pipe.
#
# Two kernels never share a process: not their libraries, not their threads, not their
# crashes.  A message is a JSON head and a body of bytes, each led by its length; the head
# of a call names a verb of Engine, the head of a reply is {"ok"} or {"error"}.

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.engines import open_engine
from servanda.engines.arrow import from_bytes, from_table, to_bytes, to_table
from servanda.engines.base import verb_of
from servanda.engines.child_process import environment_of, interpreter_of
from servanda.errors import MeasurementError, ServandaError
from servanda.theory.sampling import Sampling
from servanda.traces import json_fields
from servanda.traces.trace import Batch, Timing, Trace

_HEAD = struct.Struct("<QQ")
# not `-m`, which would put the current folder first among the places to import from
_CHILD = "import sys; sys.path.pop(0); from servanda.engines.worker import main; main()"
_TAIL = 2000  # characters of a dead child's last words


def _send(pipe: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(head).encode()
    pipe.write(_HEAD.pack(len(text), len(body)) + text + body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None where the other side is gone."""
    lengths = pipe.read(_HEAD.size)
    if len(lengths) < _HEAD.size:
        return None
    head_size, body_size = _HEAD.unpack(lengths)
    text, body = pipe.read(head_size), pipe.read(body_size)
    if len(text) < head_size or len(body) < body_size:
        return None
    return json.loads(text), body


def _pack(batch: Batch) -> bytes:
    columns = {
        "sequence": pa.array(batch.sequence_S, pa.int64()),
        "prompt": pa.array(batch.prompts, pa.list_(pa.int64())),
    }
    if batch.continuations:
        columns["continuation"] = pa.array(batch.continuations, pa.list_(pa.int64()))
    if batch.routes:
        flat = [route_NLK.reshape(-1) for route_NLK in batch.routes]
        columns["route"] = pa.array(flat, pa.list_(pa.int16()))
    return to_bytes(pa.table(columns))


def _unpack(body: bytes, head: dict[str, Any]) -> Batch:
    table = from_bytes(body)

    def ids(name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, table[name].to_pylist())) if name in table.column_names else ()

    return Batch(
        tuple(table["sequence"].to_pylist()),
        ids("prompt"),
        head["width"],
        ids("continuation"),
        head["together"],
        tuple(head.get("salts", ())),
        head.get("warm", False),
        tuple(
            np.array(flat, dtype=np.int16).reshape(-1, *head["routed"])
            for flat in (table["route"].to_pylist() if "routed" in head else ())
        ),
    )


def _trace(reply: tuple[dict[str, Any], bytes]) -> Trace:
    return from_table(from_bytes(reply[1]))


class Worker:
    """The parent's end: an Engine whose verbs run in the child."""

    def __init__(
        self, kernel: Kernel, side: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.kernel, self.side = kernel, side
        interpreter = interpreter_of(kernel.python)
        with MeasurementError.of_system(
            f"the {side} worker cannot be started",
            hint="free memory, or space in the folder for temporary files",
        ):
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            self._process = subprocess.Popen(
                [interpreter, "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**environment_of(kernel), **(environment or {})},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        # sent now, answered when first asked: loading goes on while the caller does other things
        self._ask("open", kernel.model_dump(mode="json"))
        self._loading = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe(self) -> Description:
        return Description.of(self._call("describe")[0]["value"])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._call("encode", {"texts": list(texts)})[0]["value"]

    def vocabulary(self) -> list[str]:
        return self._call("vocabulary")[0]["value"]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self._call("decode", {"ids": [[*map(int, tokens)] for tokens in ids]})[0]["value"]

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        return _trace(self._run("generate", batch, sampling=sampling.model_dump(), seed=seed))

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        return _trace(self._run("score", batch, sampling=sampling.model_dump(), path=path))

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        head, body = self._run("logits", batch, path=path)
        while head["more"]:
            yield np.frombuffer(body, dtype=head["dtype"]).reshape(head["shape"])
            head, body = self._reply("logits")

    def top(self, batch: Batch, path: Path) -> Trace:
        return _trace(self._run("top", batch, path=path))

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        options = {"sampling": sampling.model_dump(), "seed": seed, "record": record}
        value = self._run("time", batch, **options)[0]["value"]
        return Timing(tuple(value["first_S"]), tuple(value["gap_N"]), value["wall"])

    def close(self) -> None:
        """End the child at once; it holds nothing that is worth waiting for."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._to, self._from):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._log.close()

    def _ask(self, verb: str, options: dict[str, Any] | None = None, body: bytes = b"") -> None:
        try:
            _send(self._to, {"verb": verb, **(options or {})}, body)
        except (BrokenPipeError, ValueError):
            raise self._death(verb) from None

    def _call(
        self, verb: str, options: dict[str, Any] | None = None, body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        if self._loading:
            self._reply("open")
            self._loading = False
        self._ask(verb, options, body)
        return self._reply(verb)

    def _run(self, verb: str, batch: Batch, **options: Any) -> tuple[dict[str, Any], bytes]:
        """A call about a batch, whose head says how wide it is, and whose body has its tokens."""
        options |= {"width": batch.width, "together": batch.together}
        options |= {"salts": batch.salts, "warm": batch.warm} if batch.salts else {}
        options |= {"routed": batch.routes[0].shape[1:]} if batch.routes else {}
        return self._call(verb, options, _pack(batch))

    def _reply(self, verb: str) -> tuple[dict[str, Any], bytes]:
        message = _receive(self._from)
        if message is None:
            raise self._death(verb)
        head, body = message
        if "error" in head:
            raise MeasurementError(f"{self.side}: {head['error']}", hint=head.get("hint", ""))
        return head, body

    def _death(self, verb: str) -> MeasurementError:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = "what was measured is kept: run the same command again to go on"
            if name == "SIGKILL":
                hint += "; if memory ran out, lower kernels.*.batch_size"
            return MeasurementError(
                f"the {self.side} worker (pid {self.pid}) was killed by {name} during {verb!r}",
                hint=hint,
            )
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL))
        words = self._log.read().decode(errors="replace").strip()
        if self.kernel.python is not None and "No module named 'servanda'" in words:
            return MeasurementError(
                f"{self.kernel.python} has no servanda: it runs the {self.side} engine",
                hint=f"{interpreter_of(self.kernel.python)} -m pip install servanda",
            )
        return MeasurementError(
            f"the {self.side} worker left with exit code {code} during {verb!r}:\n{words}",
            hint="finished rounds are kept; engine and kernel are named in the contract",
        )


class _Kept(Worker):
    """A worker whose child outlives `close`, and opens the next kernel of its side."""

    def open(self, kernel: Kernel) -> None:
        if kernel != self.kernel:  # the same kernel is loaded already
            self.kernel = kernel
            self._ask("open", kernel.model_dump(mode="json"))
            self._loading = True

    def close(self) -> None:
        """Nothing: calls in progress are answered, and the next run goes on with the child."""


@contextmanager
def kept() -> Iterator[Callable[[Kernel, str], Worker]]:
    """A `spawn` for several runs one after another: a side keeps its child until the block ends.

    So a library is imported once, and Transformers takes seconds for that.
    """
    workers: dict[tuple[str, str | None], _Kept] = {}

    def opened(kernel: Kernel, side: str) -> Worker:
        child = side, kernel.python
        if child in workers:
            workers[child].open(kernel)
        else:
            workers[child] = _Kept(kernel, side)
        return workers[child]

    try:
        yield opened
    finally:
        for worker in workers.values():
            Worker.close(worker)


def spawn(kernel: Kernel, side: str) -> Worker:
    """Begin to open a kernel in a child process; its first answer waits for the loading.

    Raises:
        MeasurementError: the child cannot be started, and later, from the first verb on:
            the engine refuses the kernel, or the child died.
    """
    return Worker(kernel, side)


def _serve(calls: IO[bytes], replies: IO[bytes]) -> None:
    engine: Any = None
    opened = contextlib.ExitStack()
    while (message := _receive(calls)) is not None:
        head, body = message
        verb = head.pop("verb")
        try:
            if verb == "open":
                opened.close()  # the kernel of the run before
                engine = open_engine(Kernel(**head))
                opened.callback(engine.close)
                _send(replies, {"ok": verb})
            elif verb == "logits":
                for piece in engine.logits(_unpack(body, head), head["path"]):
                    about = {"more": True, "shape": piece.shape, "dtype": piece.dtype.str}
                    _send(replies, about, np.ascontiguousarray(piece).tobytes())
                _send(replies, {"more": False})
            else:
                _send(replies, *_answer(engine, verb, head, body))
        except ServandaError as error:
            problem = error.problems[0]
            _send(replies, {"error": problem.message, "hint": problem.hint})
        except Exception as error:
            if not json_fields.hides_data():
                traceback.print_exc()
            said = json_fields.words(str(error))
            _send(
                replies,
                {
                    "error": f"{verb!r} failed: {type(error).__name__}: {said}",
                    "hint": "this is the engine's own failure; try a smaller batch_size, or "
                    "another dtype or attention",
                },
            )


def _answer(
    engine: Any, verb: str, head: dict[str, Any], body: bytes
) -> tuple[dict[str, Any], bytes]:
    if not body:  # it is about no batch: {"texts"}, {"ids"} or nothing
        value = verb_of(engine, verb)(*head.values())
        return {"value": asdict(value) if verb == "describe" else value}, b""
    batch = _unpack(body, head)
    if "sampling" in head:
        head["sampling"] = Sampling(**head["sampling"])
    names = ("sampling", "seed", "path", "record")
    result = verb_of(engine, verb)(batch, *(head[name] for name in names if name in head))
    if verb == "time":
        return {"value": asdict(result)}, b""
    return {"ok": verb}, to_bytes(to_table(result))


def main() -> None:
    # a library that prints must not speak into the pipe of replies
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):  # the parent may be gone
        _serve(sys.stdin.buffer, replies)
