# Servanda keeps the agreement between the kernel that trains a policy and the one that serves it.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from servanda._version import __version__ as __version__

if TYPE_CHECKING:
    from servanda import rl
    from servanda.contract.model import Contract
    from servanda.errors import (
        ContractError,
        EvidenceError,
        IdentityError,
        MeasurementError,
        ServandaError,
    )
    from servanda.judgement.evidence import Evidence
    from servanda.judgement.plan import Plan
    from servanda.judgement.verdict import Verdict, judge
    from servanda.promotion.api import advance
    from servanda.runner.load import compile, load
    from servanda.runner.run import check, measure, weigh
    from servanda.traces.trace import pair

# name -> module; imported when first used, so that `import servanda` stays light
_HOME = {
    "Contract": "contract.model",
    "ContractError": "errors",
    "Evidence": "judgement.evidence",
    "EvidenceError": "errors",
    "IdentityError": "errors",
    "MeasurementError": "errors",
    "Plan": "judgement.plan",
    "ServandaError": "errors",
    "Verdict": "judgement.verdict",
    "advance": "promotion.api",
    "check": "runner.run",
    "compile": "runner.load",
    "judge": "judgement.verdict",
    "load": "runner.load",
    "measure": "runner.run",
    "pair": "traces.trace",
    "weigh": "runner.run",
}

__all__ = [
    "Contract",
    "ContractError",
    "Evidence",
    "EvidenceError",
    "IdentityError",
    "MeasurementError",
    "Plan",
    "ServandaError",
    "Verdict",
    "advance",
    "check",
    "compile",
    "judge",
    "load",
    "measure",
    "pair",
    "rl",
    "weigh",
]


def __getattr__(name: str) -> Any:
    if name == "rl":
        return import_module("servanda.rl")
    if name not in _HOME:
        raise AttributeError(f"module 'servanda' has no attribute {name!r}")
    return getattr(import_module(f"servanda.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
