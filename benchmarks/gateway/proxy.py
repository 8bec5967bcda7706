"""The gateway alone, as `servanda serve` starts it beside a leader.

python -m benchmarks.gateway.proxy --port 9004 --infer URL --stable URL --leader URL
"""

from __future__ import annotations

import argparse

from servanda.gateway.http.listener import Listener, bind
from servanda.gateway.proxy.app import App
from servanda.gateway.proxy.config import Config, Upstream
from servanda.gateway.proxy.gateway import Gateway


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--infer", required=True)
    parser.add_argument("--stable", required=True)
    parser.add_argument("--leader", required=True)
    parser.add_argument("--leader-key", default="")
    parser.add_argument("--first-byte", type=float, default=300.0, help="seconds of a pool")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds between two parts")
    parser.add_argument("--show", action="store_true", help="replies say their pool")
    options = parser.parse_args()
    waits = {"first_byte_s": options.first_byte, "idle_s": options.idle}
    config = Config(
        infer=Upstream(options.infer, defaults={}, **waits),
        stable=Upstream(options.stable, **waits),
        controller=Upstream(options.leader, key=options.leader_key),
        name="proxy",
        shows=options.show,
    )
    with bind("127.0.0.1", options.port, "--port") as taken:
        Listener(App(Gateway(config)), taken, grace_s=5).run()


if __name__ == "__main__":
    main()
