# Lint of slices that are known only after the token: the metrics allowed on them.

from __future__ import annotations

from collections.abc import Iterator, Mapping

from servanda.contract.clause import Clause, Relative, Section
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.judgement.clauses.scope import OUTCOME_METRICS, of_outcomes, slices_of
from servanda.judgement.slices.rules import Known

_DEFINED = " and ".join(OUTCOME_METRICS)


def outcomes(
    path: Path, contract: Contract, section: Section, clause: Clause, known: Mapping[str, Known]
) -> Iterator[Finding]:
    """A contribution needs a slice of outcomes, and such a slice a contribution."""
    contribution = of_outcomes(clause.metric)
    if contribution and section != "statistical":
        message = (
            f"{clause.metric} is estimated from sampled tokens; it does not belong in {section}"
        )
        yield Finding((*path, "metric"), message, "move the clause to statistical")
        return
    for j, name in enumerate(clause.slices or ()):
        at = (*path, "slices", j)
        if not contribution and known.get(name) == "outcome":
            message = f"slice {name!r} is known only after the token is drawn, so an average over "
            message += f"it says nothing: a kernel that halves the mass there reads {clause.metric}"
            message += " 0"
            yield Finding(at, message, f"promise {_DEFINED} there, or slice by context.*")
        elif clause.metric == "mass_gap" and known.get(name, "outcome") != "outcome":
            message = f"both kernels have the same mass on slice {name!r}: all of it"
            hint = "name a slice by outcome.*, such as {match: {outcome.rank: {gte: 10}}}"
            yield Finding(at, message, hint)
    if contribution and clause.slices is None and not slices_of(contract, section, clause):
        message = f"{clause.metric} is what a slice of outcomes contributes, and none is declared"
        hint = "add one, such as {name: rare, match: {outcome.rank: {gte: 10}}}"
        yield Finding((*path, "metric"), message, hint)


def mass_gap(path: Path, clause: Clause) -> Iterator[Finding]:
    """A mass gap has one limit for both signs: no clip, and no aggregate except the mean."""
    if clause.aggregate not in (None, "mean"):
        at = (*path, "aggregate")
        message = "mass_gap is a difference of two probabilities: only its mean is defined"
        yield Finding(at, message, "write aggregate: mean")
    for name in ("clip", "at_least"):
        if getattr(clause, name) is not None:
            message = f"mass_gap takes no {name}: at_most bounds it on both sides of 0"
            yield Finding((*path, name), message, f"remove {name}", key=True)
    limit = clause.at_most
    if limit is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", "add at_most: 0.01")
    elif isinstance(limit, Relative) or not 0 < limit < 1:
        message = "the limit of a mass gap is a number between 0 and 1"
        yield Finding((*path, "at_most"), message, "write at_most: 0.01")
