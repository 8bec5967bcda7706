# `servanda gateway envoy`: the services that Envoy asks where a request goes.

from __future__ import annotations

import os
import sys

import click

from servanda.errors import ContractError, MeasurementError


@click.command()
@click.option(
    "--leader",
    "leaders",
    metavar="URL",
    multiple=True,
    required=True,
    help="Follow this leader, such as http://127.0.0.1:8081; repeated, the one of them that leads.",
)
@click.option(
    "--grpc",
    "grpc_at",
    metavar="HOST:PORT",
    default="127.0.0.1:9002",
    show_default=True,
    help="Where ext_proc and ext_authz are answered by gRPC.",
)
@click.option(
    "--http",
    "http_at",
    metavar="HOST:PORT",
    default="127.0.0.1:9003",
    show_default=True,
    help="Where ext_authz is answered by HTTP, below /authz; and /readyz.",
)
def envoy(leaders: tuple[str, ...], grpc_at: str, http_at: str) -> None:
    """Answer Envoy's ext_proc and ext_authz with the pool of each request.

    The header x-servanda-pool is set to infer or stable, by the routes of the leader,
    and Envoy's own routes follow it.  SERVANDA_GATEWAY_KEY is the key of a holder with the role
    gateway.  Requires pip install 'servanda[gateway,envoy]'.  Ctrl-C stops it.

    Exit codes: 0 it was stopped; 2 the call is wrong; 4 it could not start.
    """
    addresses = (_address("--grpc", grpc_at), _address("--http", http_at))
    key = os.environ.get("SERVANDA_GATEWAY_KEY", "").strip()
    if not key:
        raise ContractError(
            "the leader requires a key of gateways, and SERVANDA_GATEWAY_KEY is empty",
            hint="export it: the key of a holder with the role gateway in the leader's --keys",
        )
    try:
        from servanda.gateway.envoy import service
        from servanda.gateway.envoy.leader_routes import LeaderRoutes
    except ImportError as error:
        raise MeasurementError(
            f"the service for Envoy needs {error.name}, which is not installed",
            hint="pip install 'servanda[gateway,envoy]'",
        ) from None
    service.refuse_missing()
    service.serve(LeaderRoutes(leaders, key, click.echo), *addresses, click.echo)
    sys.exit(0)


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if ":" not in text or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option} is HOST:PORT, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)
