# A leader that leads nowhere: it hands out one snapshot, and takes every row that it is sent.

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from servanda.gateway.routing.model import SliceRoute, Snapshot
from servanda.judgement.slices.rules import Cut, Term
from servanda.traces.serialization import to_plain

DOMAINS = ("code", "law", "math", "prose")
_DAY_S = 86_400.0


def snapshot(
    *, sample: float = 0.0, routes: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
) -> Snapshot:
    """Four domains and the whole, all of them active, for a day.

    Args:
        sample: of every slice; routes: name -> what else is said of a slice.
    """
    cuts = [Cut(f"domain={d}", (Term("labels.domain", "in", (d,)),)) for d in DOMAINS]
    slices = tuple(
        SliceRoute(cut, **{"sample": sample, **(routes or {}).get(cut.name, {})})
        for cut in (*cuts, Cut("all", ()))
    )
    said = {
        "version": 1,
        "contract": "0" * 64,
        "name": "numbers",
        "valid_until": time.time() + _DAY_S,
        "salt": "5a" * 16,
        "slices": slices,
        "labels": {"domain": "request.metadata.domain"},
    }
    return Snapshot(**{**said, **more})


@dataclass
class Stub:
    """What a leader answers, and what it was sent.

    Args:
        keep: how many rows are kept to be looked at; counts: of each gateway, its latest;
        versions: of the snapshot that each one has.
    """

    snapshot: Snapshot | None
    keep: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    taken: dict[tuple[str, float], int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    connections: set[asyncio.WriteTransport] = field(default_factory=set)

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 26)

    def follow(self, message: Mapping[str, Any]) -> dict[str, Any]:
        start, rows = (message["gateway"], message["start"]), message["rows"]
        taken = self.taken.get(start, 0)
        new = rows[max(0, taken - message["first"]) :]
        self.rows = [*self.rows, *new][-self.keep :] if self.keep else []
        self.taken[start] = max(taken, message["first"] + len(rows))
        self.counts[message["gateway"]] = message["counts"]
        self.versions[message["gateway"]] = message["version"]
        own = self.snapshot
        newer = own is not None and own.version > message["version"]
        return {
            "taken": message["first"] + len(rows),
            "version": own.version if own else 0,
            "snapshot": to_plain(own) if newer else None,
            "now": time.time(),
        }

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer.transport)
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                lengths = [x for x in head.split("\r\n") if x.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0][15:]) if lengths else 0)
                data = json.dumps(self.follow(json.loads(body))).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(data), data)
                )
                await writer.drain()
