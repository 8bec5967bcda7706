# Whether the data of a dump can be evidence at all: checks that need no limit and no contract.
#
# What is not tested: the temperature and the top-p of the sampler.  The logprobs of drawn tokens
# alone cannot tell a processed one from that of another kernel, but for weights whose mean is
# above 1 (`coherence`).

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

_ORDER = (  # as reports list them; others follow
    *("coverage", "zeros", "line_up", "coherence", "copies", "ends", "precision", "prompts"),
    *("retokenised", "trained", "values"),
)


class Soundness:
    """Every check over the chunks of a dump, in bounded memory.

    Args:
        before: of the step before these chunks, where each step has checks of its own; what was
            there already is a copy.

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
        """A digest of what each step has -> the step; for anyone who goes on in another process."""
        return self._copies.steps

    def add(self, rollouts: Rollouts) -> None:
        """See a chunk; chunks come in the order of the dump."""
        with np.errstate(over="ignore", invalid="ignore"):  # a dump may hold any number
            for check in self._checks.values():
                check.add(rollouts)

    def findings(self) -> tuple[Finding, ...]:
        with np.errstate(over="ignore", invalid="ignore"):
            return tuple(check.finding() for check in self._checks.values())
