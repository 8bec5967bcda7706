# Advice on a violated contract, from the tokens that its run measured.

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from servanda.contract.kernel_string import moved_path
from servanda.contract.model import Contract
from servanda.judgement.breakdown import Advice
from servanda.judgement.causes.catalogue import CAUSES, RAW, REMEDIES, UNEXPLAINED, Sides
from servanda.judgement.causes.forecast import advise
from servanda.judgement.causes.gap_cause import explain
from servanda.judgement.causes.token_table import TokenTable
from servanda.judgement.evidence import Round
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.runner.round_files import SIDES
from servanda.traces.trace import TracePair

_TOKENS = 400_000  # the first ones of a run are examined
_DISTANCES = ("tv", "weight_gap")  # metrics with a limit in the unit of a token's gap
# tokens that were not drawn from the reported distribution say nothing about the two kernels
_DRAWS = ("sampler_fidelity", "served_fidelity")
_ONLY_FIXED = "unexplained: no token was sampled that both kernels have scored"


def advised(plan: Plan, rounds: Iterable[Round], verdict: Verdict) -> Verdict:
    """A violated verdict with its likely cause and what to do; any other as it is."""
    red = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    if verdict.outcome != "violated" or all(c.section == "runtime" for c in red):
        return verdict
    sides = sides_of(plan.contract)
    drawn = [c.note for c in red if c.metric in _DRAWS]
    table = None if drawn else TokenTable.of(_pairs(plan, rounds))
    if table is None:
        name = RAW if drawn else UNEXPLAINED
        cause = f"{CAUSES[RAW].words}; {drawn[0]}" if drawn else _ONLY_FIXED
        experiment, command = CAUSES[name].experiment if drawn else "", REMEDIES[name].test(sides)
        switch = REMEDIES[name].switch
        advice = Advice(name, cause, experiment=experiment, command=command, switch=switch)
        return replace(verdict, advice=advice)
    limits = [c.limit for c in red if c.metric in _DISTANCES and c.limit is not None]
    return replace(verdict, advice=advice_of(table, plan.contract, min(limits, default=0.0)))


def advice_of(table: TokenTable, contract: Contract, limit: float = 0.0) -> Advice:
    """The advice on the gap of two kernels, with commands that name them.

    Args:
        limit: of the mean gap, which a slice has to exceed.
    """
    sides, found = sides_of(contract), explain(table, limit)
    return advise(table, found, len(table), lambda name: REMEDIES[name].test(sides))


def sides_of(contract: Contract) -> Sides:
    """The kernels of a contract for commands, with short paths, and its file if it is there."""
    where = contract.where()
    file = where.file if where is not None and Path(where.file).is_file() else ""
    kernels = {
        side: kernel.model_copy(update={"model": moved_path(os.path.normpath, kernel.model)})
        for side in SIDES
        if (kernel := getattr(contract.kernels, side)).model is not None
    }
    return Sides(contract.kernels.model_copy(update=kernels), file)


def _pairs(plan: Plan, rounds: Iterable[Round]) -> Iterator[tuple[int, TracePair, Sequence[str]]]:
    """The pair of each round with the groups and labels of its sequences."""
    schedules = {schedule.name: schedule for schedule in plan.schedules}
    left = _TOKENS
    for closed in rounds:
        if left <= 0:
            return
        prompts = schedules[closed.workload].corpus.prompts
        of_S = [prompts[unit.row] for unit in closed.units]
        names = sorted({name for prompt in of_S for name in prompt.labels})
        pair = replace(
            closed.pair,
            group_S=tuple(f"{closed.workload} {unit.group}" for unit in closed.units),
            labels={name: tuple(str(p.labels.get(name, "")) for p in of_S) for name in names},
        )
        yield 1, pair, [f"{closed.workload}, round {closed.index}"] * len(of_S)
        left -= len(pair.infer.token_N)
