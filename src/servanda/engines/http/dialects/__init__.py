# The dialects that this version speaks, in the order in which a server is asked for them; one of an
# installed package is declared.

from __future__ import annotations

from servanda.contract.kernel_string import dialect_hint
from servanda.engines.http.dialects import llamacpp, lmdeploy, openai, sglang, vllm
from servanda.engines.http.dialects.base import DIALECTS, Dialect, Server
from servanda.engines.http.transport import Transport
from servanda.errors import MeasurementError

__all__ = ["DIALECTS", "Dialect", "Server", "detect"]

# plain is last: every one of the others also speaks a little of it
ORDER = (vllm.VLLM, sglang.SGLang, llamacpp.LlamaCpp, lmdeploy.LMDeploy, openai.Plain)


def detect(transport: Transport, dialect: str | None, served: str | None) -> tuple[Dialect, Server]:
    """The dialect of a server, declared or detected, and its description.

    Raises:
        MeasurementError: it does not answer, or not as the declared dialect does; there is no such
            dialect, or its package cannot be imported.
    """
    if dialect is not None and not DIALECTS.load(dialect):
        raise MeasurementError(f"there is no dialect {dialect!r}", hint=dialect_hint(dialect))
    kinds = ORDER if dialect is None else (DIALECTS[dialect],)
    for kind in kinds:
        speaker = kind()
        server = speaker.meet(transport, served)
        if server is not None:
            return speaker, server
    raise MeasurementError(
        f"{transport.url} does not answer as a server of dialect {dialect!r} does",
        hint="leave `dialect` out and the server is asked, or correct kernels.*.url",
    )
