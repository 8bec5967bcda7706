# Lint of the bound chain: declarations that a metric needs, and limits that can hold and fail.

from __future__ import annotations

from collections.abc import Collection, Iterator

from servanda.contract.clause import Clause, Section
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.judgement.clauses.chain_metrics import CHAIN, chain_metric
from servanda.judgement.clauses.scope import known_by_name

_ORDER = ("request", "context", "outcome")
# declarations that a metric may need; errors in them are reported at their own place
_DECLARES = ("gradient", "reward", "workload", "workloads")


def chain(
    path: Path,
    section: Section,
    contract: Contract,
    clause: Clause,
    broken: Collection[Path] = (),
) -> Iterator[Finding]:
    """Check a clause of the chain: its section, limit, slices and required declarations.

    Args:
        broken: mappings with a value that was already rejected.
    """
    name, metric = clause.metric, chain_metric(contract, clause)
    if section != "statistical":
        message = f"{name} is judged from sampled tokens; it does not belong in {section}"
        yield Finding((*path, "metric"), message, "move the clause to statistical")
        return
    for key in ("aggregate", "clip"):
        if key not in metric.takes and getattr(clause, key) is not None:
            yield Finding((*path, key), f"{name} takes no {key}", f"remove {key}", key=True)
    known = known_by_name(contract)
    for j, slice_name in enumerate(clause.slices or ()):
        when = known.get(slice_name, "request")
        if _ORDER.index(when) > _ORDER.index(metric.known) and when != "outcome":
            message = f"{name} concerns whole answers, and slice {slice_name!r} is a part of one"
            hint = "name slices by labels.* or request.*, or [all]"
            if CHAIN[name].known != metric.known:
                hint += "; gradient: {loss: token_mean} concerns tokens"
            yield Finding((*path, "slices", j), message, hint)
    if clause.at_least is not None:
        message = f"a divergence is kept small: {name} takes at_most"
        hint = "remove at_least" if clause.at_most is not None else "write at_most"
        yield Finding((*path, "at_least"), message, hint, key=True)
    elif clause.at_most is None:
        hint = f"write {metric.example}"
        yield Finding(path, f"clause {clause.id!r} has no limit", hint)
    elif not isinstance(clause.at_most, float):
        message = f"{name} follows from what the contract declares: its limit is a number"
        yield Finding((*path, "at_most"), message, f"write {metric.example}")
    elif clause.at_most < 0 or (clause.at_most == 0 and clause.percentile is None):
        message = f"{name} is never negative, and no sample can show that it is 0"
        yield Finding((*path, "at_most"), message, "write a limit above 0")
    elif not _declared_amiss(contract, broken):
        for lack in metric.lacks(contract, clause):
            yield Finding((*path, lack.key), lack.message, lack.hint)


def _declared_amiss(contract: Contract, broken: Collection[Path]) -> bool:
    """Whether a required declaration is itself wrong, which is reported at its own place."""
    if any(path and path[0] in _DECLARES for path in broken):
        return True
    reward = contract.reward
    return reward is not None and reward.range[0] >= reward.range[1]
