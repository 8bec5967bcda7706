# TRL: which of a batch's sequences are scored, and how its columns are read.
#
# Axes: B sequences of this rank, T tokens of a completion, R rows of a part of them.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import ContractError, EvidenceError
from servanda.judgement.clauses.loss_checks import declared_text
from servanda.rl.monitor.batch import SHARE
from servanda.rl.monitor.statistics import limited
from servanda.rl.monitor.step import named_actions
from servanda.theory.stats.tally import mixed

if TYPE_CHECKING:
    from servanda.rl.monitor.monitor import Monitor


class Waiting:
    """A generation whose logprobs are computed by the losses of its parts.

    Args:
        given: the other arguments of the monitor.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.logp_BT: Any = None
        self.seen_B = np.zeros(len(given["mask_BT"]), dtype=bool)

    @property
    def complete(self) -> bool:
        return bool(self.seen_B.all())

    def add(self, rows: Any, logp_RT: Any) -> None:
        """Keep the logprobs of some rows, [R, T]."""
        if self.logp_BT is None:
            shape = (len(self.seen_B), logp_RT.shape[1])
            self.logp_BT = logp_RT.new_full(shape, float("nan"))
        self.logp_BT[rows] = logp_RT
        self.seen_B[rows.cpu().numpy()] = True


def share_of(monitor: Monitor, share: float | None) -> float | None:
    """The share of sequences that is scored in a forward pass of its own; None: that of the loss.

    Raises:
        ContractError: a share below 1 of a contract that corrects tokens; or no share at all.
    """
    named = named_actions(monitor.contract)
    if share is None:
        if "correct" in named:
            return 1.0
        return SHARE if "mask" in named else None
    if not 0 < share <= 1:
        raise ContractError(
            f"score_share is {share!r}", hint="a share of the sequences of a batch, such as 0.1"
        )
    if share < 1 and "correct" in named:
        raise ContractError(
            f"the contract says correct, which needs every token, and score_share={share:g} "
            "scores a share of them",
            hint="leave out score_share, or use a contract that does not correct",
        )
    return share


def rows_of(size: int, share: float, step: int) -> NDArray[np.bool_]:
    """The scored rows of a batch: decided by the step, before any data is examined."""
    order = np.random.Generator(np.random.Philox(key=step)).permutation(size)
    return order < max(1, int(share * size))


def loss_mask(out: Mapping[str, Any]) -> Any:
    """1 if the trainer learns from a token, [B, T]."""
    mask_BT = out["completion_mask"]
    return mask_BT * out["tool_mask"] if "tool_mask" in out else mask_BT


def tokens_of(out: Mapping[str, Any]) -> Any:
    """Prompts and completions, [B, P + T]; -1 is padding before a prompt."""
    import torch

    prompt_BP = out["prompt_ids"].masked_fill(out["prompt_mask"] != 1, -1)
    return torch.cat([prompt_BP, out["completion_ids"]], dim=1)


def weights_of(out: Mapping[str, Any], monitor: Monitor) -> Any:
    """TRL's importance weights, [B, 1] or [B, T].

    None if it has none, if the contract replaces them, or if it declares other ones in passing: a
    step is an error for its weights only where a clause is about them.
    """
    contract = monitor.contract
    if "correct" in named_actions(contract):
        return None
    if declared_text(contract) and not limited(contract):
        return None
    return out.get("importance_sampling_ratio")


def groups_of(out: Mapping[str, Any]) -> list[str]:
    """The prompt of each sequence, [B], as a digest of its ids, equal on every rank."""
    there_BP = out["prompt_mask"] == 1
    place_BP = there_BP.cumsum(dim=1)  # whatever the padding
    key_BP = mixed(mixed(out["prompt_ids"].long() + 1) + place_BP)
    return [str(key) for key in key_BP.masked_fill(~there_BP, 0).sum(dim=1).tolist()]


def column_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """A column of a batch, as texts; "" if missing in a row."""
    if not any(name in row for row in rows):
        raise EvidenceError(
            f"no row of the batch has the column {name!r} that slices= names",
            hint=f"the data set has the columns {', '.join(sorted(rows[0]))}" if rows else "",
        )
    return ["" if row.get(name) is None else str(row[name]) for row in rows]
