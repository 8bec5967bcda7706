# Faults of the verification of drafts: what a kernel with speculation accepts, and what it draws.
#
# They have a registry of their own: a kernel that does not speculate has none of them.  Some leave
# the law of the output as it is, and cost speed: the acceptance of drafts shows those.  Log-ratios
# show none: the record of each token is the target's.

from __future__ import annotations

from dataclasses import replace
from typing import Any

from servanda.contract.model import Kernel
from servanda.contract.speculation import OPTION, speculation_of
from servanda.engines.faults.base import Between, Fault, OneOf, cannot, fault
from servanda.errors import MeasurementError
from servanda.registry import Registry

SPECULATION_FAULTS: Registry[Fault] = Registry("fault")


def _verifying(name: str, base: Any, *, drawn: bool = False, **changes: Any) -> Any:
    """The class with another rule; a kernel in which nothing would break is refused.

    Args:
        drawn: whether drafts have to be drawn by probabilities.
    """

    class Otherwise(base):
        _verification = replace(base._verification, **changes)

        def __init__(self, kernel: Kernel) -> None:
            if OPTION not in (kernel.options or {}):
                raise MeasurementError(
                    f"{cannot(name)} a kernel that verifies no drafts",
                    hint=f"give it options: {{{OPTION}: ...}}",
                )
            config = speculation_of(kernel.options)
            if drawn and config is not None and config.draft_sample_method == "greedy":
                raise MeasurementError(
                    f"{cannot(name)} a kernel whose drafts are certain of their tokens: nothing "
                    "would change",
                    hint=f"write {OPTION}: {{method: draft_model, model: FOLDER, "
                    "num_speculative_tokens: 4, draft_sample_method: probabilistic}",
                )
            super().__init__(kernel)

    return Otherwise


@fault(
    "draft_acceptance_rule",
    "Drafts are accepted by the target's probability alone; a rejected one is replaced by another "
    "token of the target (law_kept), or from the difference of both laws (law_broken).",
    default="law_broken",
    takes=OneOf(("law_kept", "law_broken")),
    seen="vllm-project/vllm#40149: rejection sampling is not given the draft's probabilities",
    strengths=("law_kept", "law_broken"),
    registry=SPECULATION_FAULTS,
)
def draft_acceptance_rule(base: Any, value: str) -> Any:
    replaces = {"law_kept": "others", "law_broken": "difference"}[value]
    name = "draft_acceptance_rule"
    return _verifying(name, base, drawn=True, accepts="target", replaces=replaces)


@fault(
    "draft_residual",
    "A rejected draft is replaced from the target itself, or from max(p - q, 0) without dividing "
    "by its sum, so that the rest goes to the last id (unnormalised).",
    default="target",
    takes=OneOf(("target", "unnormalised")),
    strengths=("target", "unnormalised"),
    registry=SPECULATION_FAULTS,
)
def draft_residual(base: Any, value: str) -> Any:
    return _verifying("draft_residual", base, accepts="ratio", replaces=value)


@fault(
    "draft_temperature",
    "Drafts are drawn at `value` times the temperature, and accepted as if they were not.",
    default=0.5,
    takes=Between(0, 10),
    seen="deepseek-ai/DeepSpec#31: drafts are drawn by other probabilities than those they are "
    "accepted by",
    strengths=(0.9, 0.8, 0.5),
    registry=SPECULATION_FAULTS,
)
def draft_temperature(base: Any, value: float) -> Any:
    rule = {"accepts": "ratio", "drawn_at": float(value)}
    return _verifying("draft_temperature", base, drawn=True, **rule)


@fault(
    "draft_verification_temperature",
    "The target's probabilities of drafted tokens are taken at `value` times the temperature.",
    default=0.5,
    takes=Between(0, 10),
    seen="vllm-project/vllm#55005: on the CPU the temperatures of drafted tokens are read from "
    "memory that was never written",
    strengths=(0.9, 0.8, 0.5),
    registry=SPECULATION_FAULTS,
)
def draft_verification_temperature(base: Any, value: float) -> Any:
    name = "draft_verification_temperature"
    return _verifying(name, base, read_at=float(value))


@fault(
    "draft_bonus",
    "The token after a draft that was accepted as a whole is drawn from the draft, or not at all "
    "(none), which leaves the law as it is and costs a token a draft.",
    default="draft",
    takes=OneOf(("draft", "none")),
    strengths=("none", "draft"),
    registry=SPECULATION_FAULTS,
)
def draft_bonus(base: Any, value: str) -> Any:
    return _verifying("draft_bonus", base, bonus=value)
