# Data quality checks of a dump, which need no limit and no contract.
#
# The temperature and the top-p of the sampler are tested where responses to one prompt begin alike
# (`siblings`).  Elsewhere the logprobs of sampled tokens cannot distinguish processing from another
# kernel, except by a mean weight above 1 (`coherence`).

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servanda.rl.dumps.checks import (  # noqa: F401 - importing a module registers its check
    columns,
    copies,
    derived_values,
    drawn,
    law,
    loss,
    outcome,
    pairs,
    routes,
)
from servanda.rl.dumps.checks.base import CHECKS, NEEDS, Check, Finding, State, errors_of, of_step
from servanda.traces.rollouts import Rollouts

__all__ = ["CHECKS", "Check", "Finding", "Soundness", "State", "errors_of", "of_step"]

_ORDER = (  # order in reports; others follow
    *("values", "coverage", "zeros", "line_up", "coherence", "copies", "piles", "ends"),
    *("precision", "prompts", "retokenised", "routes", "trained"),
)


def unasked() -> str:
    """The questions of the checks that need more than logprobs and the mask, in words."""
    return " and ".join(asks for _, asks in NEEDS.values() if asks)


class Soundness:
    """Every check over the chunks of a dump, in bounded memory.

    Args:
        alone: only checks that need no more than logprobs and the mask.
        but: names of checks that are left out.

    Parts of a dump may be checked apart, one or more steps each, and joined in their order; a part
    can be pickled.

    >>> [finding.state for finding in Soundness().findings()][:2]
    ['ok', 'unsound']
    """

    def __init__(self, *, alone: bool = False, but: Sequence[str] = ()) -> None:
        every = [name for name in dict.fromkeys((*_ORDER, *CHECKS)) if name not in but]
        names = [name for name in every if not (alone and NEEDS.get(name, ("", ""))[0])]
        self._checks: dict[str, Check] = {name: CHECKS[name]() for name in names}
        self._copies = copies.Copies()
        if "copies" in self._checks:
            self._checks["copies"] = self._copies

    @property
    def steps(self) -> dict[int, int]:
        """Content digest -> step, to continue in another process."""
        return self._copies.steps

    def add(self, rollouts: Rollouts) -> None:
        """Add a chunk; chunks come in the order of the dump."""
        with np.errstate(over="ignore", invalid="ignore"):  # a dump may contain any number
            for check in self._checks.values():
                check.add(rollouts)

    def join(self, later: Soundness) -> None:
        """Add the checks of later steps, as if this one had read both.

        The result has the same bits however the steps were divided; `later` is not used again.
        """
        for name, check in self._checks.items():
            check.join(later._checks[name])

    def findings(self) -> tuple[Finding, ...]:
        return self._found(copies.Copies())

    def findings_after(self, before: Soundness) -> tuple[Finding, ...]:
        """The findings on these steps alone; data of the steps of `before` counts as a copy."""
        return self._found(before._copies)

    def _found(self, earlier: copies.Copies) -> tuple[Finding, ...]:
        with np.errstate(over="ignore", invalid="ignore"):
            found = (
                check.finding(earlier) if isinstance(check, copies.Copies) else check.finding()
                for check in self._checks.values()
            )
            return tuple(finding for finding in found if finding.text)
