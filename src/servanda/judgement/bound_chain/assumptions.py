# The assumptions of a chain, and the state of each.  A test can only reject.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servanda.contract.clause import WHOLE, printed_metric
from servanda.contract.model import Contract
from servanda.judgement.verdict import Verdict
from servanda.theory.bounds.assumptions import ASSUMPTIONS

State = Literal["kept", "not rejected", "rejected", "open", "declared", "untested", "not testable"]

_DECLARED = ("reward_range", "advantage", "score_norm")
_BY_DEFAULT = "sampler_fidelity"  # a validity check in every plan with sampled tokens


@dataclass(frozen=True)
class Rest:
    """An assumption of the chain with its state.

    Args:
        said: the state as text, with its tests and their sample sizes.
    """

    name: str
    text: str
    state: State
    said: str


def rest(name: str, contract: Contract, verdict: Verdict | None) -> Rest:
    """The state of an assumption for a contract or a run of it."""
    text = ASSUMPTIONS[name].text
    return Rest(name, text, *_state(name, contract, verdict))


def _state(name: str, contract: Contract, verdict: Verdict | None) -> tuple[State, str]:
    assumption = ASSUMPTIONS[name]
    if assumption.kept_by:
        if any(w.source == "trainer" for w in contract.all_workloads.values()):
            return "untested", "a trainer samples the tokens, and nothing here tests it"
        return "kept", f"kept by construction: {assumption.kept_by}"
    if name == "same_filters":
        return _filters(contract)
    if name == "same_reward" and contract.reward is not None and contract.reward.of is not None:
        of = contract.reward.of
        return "kept", f"kept by construction for {of}: one function for both kernels' responses"
    if name == "reward_range" and contract.reward is None:
        return "untested", "no range is declared: read the drift as a share of it"
    if name == "one_ratio":
        if contract.gradient is not None and contract.gradient.ratio == "bypass":
            return "declared", "declared, not tested"
        return "untested", "not declared: write gradient: {ratio: bypass} where it is so"
    if assumption.tested_by:
        tested = _tested(assumption.tested_by, contract, verdict)
        if tested is not None:
            return tested
        if name in _DECLARED:
            return "declared", "declared, not tested"
        return (
            "untested",
            f"not tested; {' or '.join(map(printed_metric, assumption.tested_by))} could reject it",
        )
    if name in _DECLARED:
        return "declared", "declared, not tested"
    return "not testable", "not testable by any run"


def _filters(contract: Contract) -> tuple[State, str]:
    kernels = contract.kernels
    own = [k.sampling for k in (kernels.train, kernels.infer) if k.sampling is not None]
    given = [*own, *(workload.sampling for workload in contract.all_workloads.values())]
    if not any(sampling.filters for sampling in given):
        if any(w.source == "trainer" for w in contract.all_workloads.values()):
            return "declared", "declared: nothing is filtered, and a trainer samples the tokens"
        return "kept", "kept by construction: the contract filters nothing"
    if kernels.train.mask == "replayed":
        return "declared", "declared: the train kernel reuses the tokens that the infer kernel kept"
    return "untested", "not tested: each side keeps its own tokens; mask: replayed shares them"


def _tested(
    by: tuple[str, ...], contract: Contract, verdict: Verdict | None
) -> tuple[State, str] | None:
    """The results of the metrics that can reject it; None without such a metric."""
    if verdict is None:
        metrics = {clause.metric for _, _, clause in contract.clauses()}
        if contract.statistical:
            metrics.add(_BY_DEFAULT)
        there = [printed_metric(name) for name in by if name in metrics]
        return ("open", f"tested by {' and '.join(there)} as it runs") if there else None
    cells = [cell for cell in verdict.cells if cell.metric in by and cell.place == WHOLE]
    cells = [cell for cell in cells if cell.outcome != "not applicable"]
    for cell in cells:
        # a measured reward outside its range is an error; a large gap breaks no assumption
        rejecting = ("error",) if cell.metric == "reward_gap" else ("violated", "error")
        if cell.outcome in rejecting:
            return "rejected", f"REJECTED by {printed_metric(cell.metric)}"
    tried = [cell for cell in cells if cell.outcome in ("holds", "violated")]
    if tried:
        counts = (f"{cell.n:,} {cell.units}, by {printed_metric(cell.metric)}" for cell in tried)
        return "not rejected", f"not rejected on {' and on '.join(counts)}"
    return ("open", f"{printed_metric(cells[0].metric)} has not decided yet") if cells else None
