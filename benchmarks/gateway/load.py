"""A load generator: keep-alive connections over a bare asyncio protocol, and the CPU of others.

Each connection sends its next request when the last one is answered.  After the warm-up the CPU
time of the processes that it is told to watch is read, and once more at the end.

    python -m benchmarks.gateway.load --port 9002 --connections 32 --requests 4000 --pid 123
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway.answers import WORDS

TURNS = 10  # requests of a session


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond (Linux)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def body(stream: bool, tokens: int, size: int, chat: bool = False) -> bytes:
    """A request of about `size` bytes."""
    words = " ".join(WORDS[at % (len(WORDS) - 1)] for at in range(size // 2))
    asked: dict[str, Any] = {"model": "fake", "max_tokens": tokens, "temperature": 1.0}
    asked["metadata"] = {"domain": "math"}
    said = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    return json.dumps(asked | said | ({"stream": True} if stream else {})).encode()


class Connection(asyncio.Protocol):
    """One client; counts answers and the events of streams."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.buffer = bytearray()
        self.began = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        if self.load.next():
            self.began = time.perf_counter()
            self.transport.write(self.load.request(self.number))
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        load = self.load
        load.events += data.count(b"data: ")
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end]).lower()
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            stop = head.find(b"\r\n", at + 2)
            if len(self.buffer) < end + 4 + int(head[at + 17 : stop if stop >= 0 else None]):
                return
        elif not self.buffer.endswith(b"0\r\n\r\n"):
            if len(self.buffer) > 1 << 16:  # the head, and enough to see the end
                del self.buffer[end + 4 : -8]
            return
        load.statuses[int(head[9:12])] = load.statuses.get(int(head[9:12]), 0) + 1
        self.buffer.clear()
        load.finished(time.perf_counter() - self.began)
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.closed += 1
        if self.load.closed == self.load.connections:
            self.load.over.set()


class Load:
    def __init__(self, options: argparse.Namespace) -> None:
        self.connections: int = options.connections
        self.left: int = options.warm + options.requests
        self.warm: int = options.warm
        self.pids: list[int] = options.pid
        self.key: str = options.key
        self.data = body(options.stream, options.tokens, options.size, options.chat)
        path = "/v1/chat/completions" if options.chat else "/v1/completions"
        self.head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self.latencies: list[float] = []
        self.statuses: dict[int, int] = {}
        self.closed = self.events = self.done = self.sent = 0
        self.over = asyncio.Event()
        self.start: dict[int, float] = {}
        self.events_before = 0
        self.began = 0.0
        if not self.warm:
            self.mark()

    def request(self, number: int) -> bytes:
        self.sent += 1
        user = f"x-session-id: {number}-{self.sent // TURNS}\r\n"
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        length = f"content-length: {len(self.data)}\r\n\r\n"
        return (self.head + user + key + length).encode() + self.data

    def next(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def mark(self) -> None:
        self.start = {pid: cpu_s(pid) for pid in self.pids}
        self.began = time.perf_counter()
        self.events_before = self.events

    def finished(self, took: float) -> None:
        self.done += 1
        if self.done > self.warm:
            self.latencies.append(took)
        if self.done == self.warm:
            self.mark()

    async def run(self, port: int) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        for number in range(self.connections):
            await loop.create_connection(lambda n=number: Connection(self, n), "127.0.0.1", port)
        await self.over.wait()
        spent = [cpu_s(pid) - self.start[pid] for pid in self.pids]
        took = time.perf_counter() - self.began
        latencies = sorted(self.latencies)
        return {
            "requests": len(latencies),
            "events": self.events - self.events_before,
            "seconds": took,
            "cpu_s": spent,
            "p50_s": statistics.median(latencies),
            "p99_s": latencies[int(0.99 * (len(latencies) - 1))],
            "statuses": self.statuses,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--warm", type=int, default=0, help="requests before the measurement")
    parser.add_argument("--pid", type=int, nargs="*", default=[], help="whose CPU is measured")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--size", type=int, default=1000, help="bytes of a prompt, about")
    parser.add_argument("--key", default="")
    options = parser.parse_args()

    async def run() -> dict[str, Any]:
        return await Load(options).run(options.port)

    import uvloop

    loop = uvloop.new_event_loop()
    print(json.dumps(loop.run_until_complete(run())))


if __name__ == "__main__":
    main()
