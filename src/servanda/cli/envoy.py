# `servanda gateway envoy`: the services that Envoy asks where a request goes.

from __future__ import annotations

import os
import sys

import click

from servanda.cli.options import host_and_port, needing
from servanda.errors import ContractError


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
    """
    addresses = (host_and_port("--grpc", grpc_at), host_and_port("--http", http_at))
    key = os.environ.get("SERVANDA_GATEWAY_KEY", "").strip()
    if not key:
        raise ContractError(
            "the leader requires a key of gateways, and SERVANDA_GATEWAY_KEY is empty",
            hint="export it: the key of a holder with the role gateway in the leader's --keys",
        )
    with needing("the service for Envoy", "gateway,envoy"):
        from servanda.gateway.envoy import service
        from servanda.gateway.envoy.service import LeaderRoutes
    service.refuse_missing()
    service.serve(LeaderRoutes(leaders, key, click.echo), *addresses, click.echo)
    sys.exit(0)
