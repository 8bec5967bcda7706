# The API layers of two servers, compared before their kernels.

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names
from servanda.engines.http import HTTPEngine
from servanda.runner.compare.contract import Options
from servanda.runner.compare.prompts import plain_texts
from servanda.runner.compare.surface.compare import compare_layers
from servanda.runner.compare.surface.dialects import Client
from servanda.runner.compare.surface.difference import LayerResult, conclusion, differs, lines

_TEXTS = 32  # of the workload, that both tokenizers are asked to encode


def compare_surface(options: Options, say: Callable[..., None]) -> tuple[LayerResult, ...]:
    """What differs above the kernels of two servers, said line by line; () of other kernels.

    Raises:
        ContractError, MeasurementError: as `prepare` and the servers do.
    """
    kernels = {
        name: parse_kernel(text, engines=engine_names(), name=name)
        for name, text in (("A", options.a), ("B", options.b))
    }
    if any(kernel.url is None for kernel in kernels.values()):
        return ()
    texts = plain_texts(options.prompts)[:_TEXTS]
    findings: list[LayerResult] = []
    with ExitStack() as opened:
        a, b = (
            Client(name, opened.enter_context(closing(HTTPEngine(kernel))))
            for name, kernel in kernels.items()
        )
        for finding in compare_layers(a, b, texts):
            findings.append(finding)
            say(*lines(finding))
            if finding.layer == "tokenizer" and finding.outcome == "differs":
                break
    differences = differs(findings)
    say(*([f"surface   ✗ {conclusion(differences)}"] if differences else []), "")
    return differences
