# The trainer with one group of its weights as at the start: what an engine computes that this
# group never reached.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from servanda.rl.sync_drill.trainee import Rows, Score, forward_logprobs, modes_kept
from servanda.rl.sync_drill.weight_groups import weight_groups
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.theory.sampling import Floats


class StaleParts:
    """Scores of a module with one group of weights as they were when this object was made.

    It copies the trained weights to host memory.  A call runs one forward pass per group, and
    restores the weights bit for bit, also if the forward pass raises.

    Args:
        module: the trainer's; its parameters must be complete in this process.
        logprobs: rows of token ids -> the module's logprobs; default: its forward pass.

    Raises:
        MeasurementError: nothing is trained, or a parameter is sharded.
    """

    def __init__(self, module: Any, logprobs: Score | None = None) -> None:
        self.module, self.weights = module, Weights(module)
        self.groups = weight_groups(self.weights.aliases)
        self.logprobs = logprobs or (lambda rows: forward_logprobs(module, rows))

    @property
    def names(self) -> list[str]:
        """The names of the groups."""
        return [group.name for group in self.groups]

    def scores(self, rows: Rows, names: Sequence[str] | None = None) -> dict[str, list[Floats]]:
        """Group -> the logprobs of each row's tokens except the first, nats.

        Args:
            names: of the groups that are scored; None: all.
        """
        found: dict[str, Any] = {}
        with modes_kept(self.module), torch.no_grad():
            self.module.eval()
            for group in self.groups:
                if names is not None and group.name not in names:
                    continue
                now = {n: self.weights.parameters[n].detach().clone() for n in group.tensors}
                try:
                    self.weights.settle(group.tensors)
                    found[group.name] = self.logprobs(rows)
                finally:
                    for name, tensor in now.items():
                        self.weights.parameters[name].copy_(tensor)
        return found
