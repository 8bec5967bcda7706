# Data quality checks of a dump, which need no limit and no contract.
#
# Not tested: the temperature and the top-p of the sampler.  The logprobs of sampled tokens alone
# cannot distinguish processing from another kernel, except by a mean weight above 1 (`coherence`).

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks import (  # noqa: F401 - importing a module registers its check
    coherence,
    copies,
    coverage,
    ends,
    line_up,
    loss_mask,
    precision,
    retokenisation,
    valid_logprobs,
    zeros,
)
from servanda.rl.dumps.checks.base import CHECKS, Check, Finding, State, errors_of, of_step
from servanda.traces.rollouts import Rollouts

__all__ = ["CHECKS", "Check", "Finding", "Soundness", "State", "errors_of", "of_step"]

_ORDER = (  # order in reports; others follow
    *("coverage", "zeros", "line_up", "coherence", "copies", "ends", "precision", "prompts"),
    *("retokenised", "trained", "values"),
)


class Soundness:
    """Every check over the chunks of a dump, in bounded memory.

    Args:
        before: checks of the previous step, if each step has its own; repeated data counts as a
            copy.

    >>> [finding.state for finding in Soundness().findings()][:2]
    ['unsound', 'ok']
    """

    def __init__(self, before: Soundness | None = None) -> None:
        names = dict.fromkeys((*_ORDER, *CHECKS))
        self._checks: dict[str, Check] = {name: CHECKS[name]() for name in names}
        self._copies = self._checks["copies"] = copies.Copies()
        if before is not None:
            self._copies.follow(before._copies)

    @property
    def steps(self) -> dict[int, int]:
        """Content digest -> step, to continue in another process."""
        return self._copies.steps

    def add(self, rollouts: Rollouts) -> None:
        """Add a chunk; chunks come in the order of the dump."""
        with np.errstate(over="ignore", invalid="ignore"):  # a dump may contain any number
            for check in self._checks.values():
                check.add(rollouts)

    def findings(self) -> tuple[Finding, ...]:
        with np.errstate(over="ignore", invalid="ignore"):
            return tuple(check.finding() for check in self._checks.values())
