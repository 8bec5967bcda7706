# The route, as `servanda promote --command "python set_route.py route.json"` sets it.
#
# An effect comes as JSON on standard input.  It may come twice, for nobody can promise to deliver
# something once; and an older one may come after a newer, from a process that was slow.  Neither
# may move the traffic, so each has a run and a turn, and only a later one is written.

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KEPT = ("run", "turn", "at", "key", "leg", "share", "mirror", "sample")


def set_route(file: Path, effect: Mapping[str, Any]) -> bool:
    """Write the route of an effect; False where it is none, a repeat, or late."""
    if effect["kind"] != "route":
        return False
    route = {name: effect[name] for name in KEPT}
    with _alone(file):
        if not _later(route, json.loads(file.read_text()) if file.exists() else None):
            return False
        new = file.with_name(file.name + ".new")
        new.write_text(json.dumps(route, indent=1))
        new.replace(file)  # whoever reads sees the old one or the new one, and no half
    return True


def _later(route: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    if known is None:
        return True
    if route["run"] == known["run"]:
        return route["turn"] > known["turn"]
    return route["at"] > known["at"]  # of two runs, the one that was decided last


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    with open(file.with_name(file.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: set_route.py ROUTE.json  < effect")
    set_route(Path(sys.argv[1]), json.load(sys.stdin))
