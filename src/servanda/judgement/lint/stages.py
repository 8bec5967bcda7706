# Lint of the stages: of a promotion, and of a clause.

from __future__ import annotations

import itertools
from collections.abc import Iterator

from servanda.contract.clause import STAGES, Clause
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.contract.policy import StageRule

# keys of each stage, besides prompt_groups; other keys would have no effect
_ONLY = {"steps": ("canary",), "share": ("shadow",), "sample": STAGES[1:]}


def promotion(contract: Contract) -> Iterator[Finding]:
    """Check the sizes and shares of the stages, and the stable kernel."""
    for stage in STAGES:
        rule = getattr(contract.promotion, stage)
        if rule is not None:
            yield from _stage(("promotion", stage), stage, rule)
            if stage != "offline" and contract.stable is None:
                mirrors = stage == "shadow"
                needs = "answers what shadow mirrors" if mirrors else f"takes over if {stage} fails"
                message = f"there is no stable: kernel, which {needs}"
                hint = "declare stable: with the kernel that serves today, or end the promotion "
                yield Finding(("promotion", stage), message, hint + "offline", key=True)
    last = [stage for stage in STAGES if contract.promotion.has(stage)][-1]
    rule = getattr(contract.promotion, last)
    if rule is not None and rule.approval == "required":
        message = f"{last} is the last stage: no stage after it needs an approval"
        hint = "remove it" if last == STAGES[-1] else "add promotion.full, or remove it"
        yield Finding(("promotion", last, "approval"), message, hint, key=True)


def _stage(path: Path, stage: str, rule: StageRule) -> Iterator[Finding]:
    first, limit = rule.sequences
    at = (*path, "prompt_groups")
    if first < 1:
        message = f"the first evaluation at {stage} needs at least 1 prompt group, not {first}"
        yield Finding(at, message, "write [first evaluation, limit], such as [400, 6000]")
    elif first > limit:
        message = f"the first evaluation at {stage} ({first}) comes after the limit ({limit})"
        yield Finding(at, message, f"did you mean [{limit}, {first}]?")
    for name, stages in _ONLY.items():
        if getattr(rule, name) is not None and stage not in stages:
            message = f"{stage} has no {name}: that is a matter of {', '.join(stages)}"
            yield Finding((*path, name), message, "remove it", key=True)
    steps = rule.steps
    if steps is not None and stage in _ONLY["steps"]:
        rising = all(low < high for low, high in itertools.pairwise((0.0, *steps)))
        if not steps or not rising or steps[-1] > 1:
            message = "the steps of a canary are shares that increase, above 0 and at most 1"
            yield Finding((*path, "steps"), message, "write them in order, such as [0.01, 0.1]")


def stages(path: Path, contract: Contract, clause: Clause) -> Iterator[Finding]:
    """Check the stages of a clause: at least one, each once, and existing."""
    at = (*path, "stages")
    if not clause.stages:
        message = f"clause {clause.id!r} is judged at no stage"
        yield Finding(at, message, "remove stages: a clause is judged at every one")
    elif not any(contract.promotion.has(stage) for stage in clause.stages):
        named = ", ".join(dict.fromkeys(clause.stages))
        message = f"clause {clause.id!r} is judged at {named} only, which promotion does not have"
        hint = f"add promotion.{clause.stages[0]}, or remove stages"
        yield Finding(at, message, hint)
    for j, stage in enumerate(clause.stages):
        if stage in clause.stages[:j]:
            yield Finding((*at, j), f"stage {stage!r} is listed twice", "remove one")
