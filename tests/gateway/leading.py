# A leader that serves no one, for routers of others.

from __future__ import annotations

import contextlib
import socket

import httpx2
from ruamel.yaml import YAML

from tests.gateway.running import WAIT_S, Serving


@contextlib.contextmanager
def leading(folder, pools):
    """A leader of the toy contract; keys: by role."""
    with Serving(folder, [pool.url for pool in pools], "--leader-only", keys=False) as leader:
        leader.line("the leader is running")
        rows = YAML(typ="safe").load((folder / "state" / "keys.yaml").read_text())
        leader.keys = {row["role"]: row["key"] for row in rows}
        yield leader


def pin(leader, name, to):
    asked = {"slice": name, "to": to, "ttl_s": 3600, "reason": "a test"}
    headers = {"authorization": f"Bearer {leader.keys['admin']}"}
    at = f"{leader.page}/v1/admin/pin"
    httpx2.post(at, json=asked, headers=headers, timeout=WAIT_S).raise_for_status()


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
