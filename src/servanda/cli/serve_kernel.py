# `servanda tools serve-kernel`: any engine behind the OpenAI API, for demos and tests of clients.

from __future__ import annotations

from pathlib import PurePath

import click

from servanda.cli.options import LOCAL, needing, shared
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Kernel
from servanda.engines import engine_names, open_engine
from servanda.engines.child_process import interpreter_of
from servanda.errors import ContractError, Where
from servanda.runner.compare.sides import refuse_missing


@click.command("serve-kernel")
@click.argument("kernel", metavar="KERNEL")
@shared("--host")
@shared("--port", default=8000)
@click.option(
    "--served",
    metavar="NAME",
    help="Name of the served model, such as my-model.  [default: that of its file]",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1, 4096),
    help="Largest number of requests per batch, such as 8.  [default: the kernel's batch_size]",
)
@click.option(
    "--wait-ms",
    type=click.FloatRange(0, 60_000),
    default=5.0,
    show_default=True,
    help="Time that a request waits for others to share its batch, in milliseconds.",
)
@click.option("--test-mode", is_flag=True, help="Add /servanda/misbehave, which injects faults.")
def serve_kernel_command(
    kernel: str,
    host: str,
    port: int,
    served: str | None,
    max_batch: int | None,
    wait_ms: float,
    test_mode: bool,
) -> None:
    """Serve a kernel behind the OpenAI API, as vLLM does; a server for demos and tests.

    KERNEL is a kernel string, such as transformers:models/tiny-lm@bfloat16.  It needs
    pip install 'servanda[serve]'.  Ctrl-C ends it.
    """
    spec = parse_kernel(kernel, engines=engine_names())
    refuse_missing(spec, kernel, "kernel")
    _refuse_elsewhere(spec, kernel)
    with needing("a server", "serve"):
        from servanda.engines.server.app import Limits
        from servanda.engines.server.process import serve
        from servanda.engines.server.sockets import address, bound
    name = served or PurePath(spec.model or "").name
    together = max_batch or spec.batch_size
    with bound(host, port) as listening_socket:
        at = f"http://{address(host, listening_socket.getsockname()[1])}"
        if spec.fault is not None:
            click.echo(f"it is wrong on purpose: fault={', '.join(spec.fault)}", err=True)
        if host not in LOCAL:
            click.echo(
                f"{host} is for all who can reach this machine: there is no key and no limit of "
                "clients" + (", and anybody may misbehave it" if test_mode else ""),
                err=True,
            )
        spec = spec.model_copy(update={"batch_size": together})
        engine = open_engine(spec)
        try:
            serve(
                engine,
                name,
                listening_socket,
                Limits(max_batch=together, wait_s=wait_ms / 1000),
                test_mode=test_mode,
                ready=lambda: click.echo(f"{name} at {at}  (Ctrl-C ends it)"),
                faulty=lambda fault: open_engine(
                    spec.model_copy(update={"fault": {**(spec.fault or {}), **fault}})
                ),
            )
        finally:
            engine.close()


def _refuse_elsewhere(kernel: Kernel, text: str) -> None:
    """A kernel that this process does not run."""
    if kernel.url is not None:
        raise ContractError(
            "a server is served already",
            where=Where("kernel", 1, 1, text),
            hint="serve the kernel behind it, or name a kernel that loads a model",
        )
    if kernel.python is not None:
        raise ContractError(
            "the server runs its engine itself, in the interpreter it was started with",
            where=Where("kernel", 1, text.find("python=") + 1, text),
            hint=f"start it there: {interpreter_of(kernel.python)} -m servanda tools "
            "serve-kernel ...",
        )
