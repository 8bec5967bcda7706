# Servanda keeps the agreement between the kernel that trains a policy and the one that serves it.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from servanda._version import __version__ as __version__

if TYPE_CHECKING:
    from servanda import rl
    from servanda.contract import Contract
    from servanda.errors import (
        ContractError,
        EvidenceError,
        IdentityError,
        MeasurementError,
        ServandaError,
    )
    from servanda.evidence import Evidence
    from servanda.loading import compile, load
    from servanda.pairing import pair
    from servanda.plan import Plan
    from servanda.promotion.chain import advance
    from servanda.run import check, measure, weigh
    from servanda.verdict import Verdict, judge

# name -> module; imported when first used, so that `import servanda` stays light
_HOME = {
    "Contract": "contract",
    "ContractError": "errors",
    "Evidence": "evidence",
    "EvidenceError": "errors",
    "IdentityError": "errors",
    "MeasurementError": "errors",
    "Plan": "plan",
    "ServandaError": "errors",
    "Verdict": "verdict",
    "advance": "promotion.chain",
    "check": "run",
    "compile": "loading",
    "judge": "verdict",
    "load": "loading",
    "measure": "run",
    "pair": "pairing",
    "weigh": "run",
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
