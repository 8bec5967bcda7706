# verl: the trainer's metadata of a batch, which its arrays lack.
#
# verl's V1 trainer passes keys (KVBatchMeta); the arrays are in a TransferQueue.

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def about(trainer: Any, batch: Any) -> dict[str, Any]:
    """Weights, staleness, prompts and labels of a batch, and whether verl accepts changes to it.

    Returns:
        weights: updates so far.  staleness: [B].  groups, labels: as in Monitor.observe, if verl
            has them.  hands_back: whether masks and weights reach the loss.
    """
    rollout_correction = trainer.config.algorithm.get("rollout_correction", None)
    bypass = bool(rollout_correction and rollout_correction.get("bypass_mode", False))
    updates = trainer.global_steps - 1  # verl counts the current step
    known = {
        "weights": updates,
        "staleness": np.array([_staleness(updates, tag) for tag in batch.tags]),
        "hands_back": rollout_correction is not None and not bypass,
    }
    columns = fetched(batch, ["uid", "data_source"])
    if "uid" in columns:
        known["groups"] = _texts(columns["uid"])
    if labels := labels_of(columns):
        known["labels"] = labels
    return known


def _texts(column: Any) -> list[str]:
    """A non-tensor column: tensordict returns a list, or an object that converts to one."""
    return [str(value) for value in (column.tolist() if hasattr(column, "tolist") else column)]


def _staleness(updates: int, tag: Mapping[str, Any]) -> float:
    """Updates between a sequence's oldest token and now; NaN if unknown."""
    oldest = tag.get("min_global_steps")
    return math.nan if oldest is None else float(max(updates - oldest, 0))


def fetched(batch: Any, fields: list[str]) -> Any:
    """Fields of a batch from verl's TransferQueue, without missing ones."""
    import transfer_queue as tq  # type: ignore[import-not-found]

    return tq.kv_batch_get(batch.keys, batch.partition_id, fields)


def padded(fields: Any) -> Any:
    """Fields of a batch in the form of verl's functions."""
    from verl import DataProto  # type: ignore[import-not-found]

    return DataProto(batch=fields.to_padded_tensor())


def chosen(trainer: Any, batch: Any, share: float) -> Any:
    """Choose sequences by the step alone, in a number divisible by the actor's ranks.

    The number is rounded down, but every rank scores at least one.

    Returns:
        Their keys; None if there are fewer sequences than ranks.
    """
    real = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    ranks = max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1
    count = min(ranks * max(1, int(share * len(real) / ranks)), len(real) - len(real) % ranks)
    if not count:
        return None
    rng = np.random.default_rng([trainer.global_steps, len(real)])
    return batch.select_keys([real[i] for i in sorted(rng.permutation(len(real))[:count])])


def real_sequences(batch: Any) -> int:
    """The number of sequences of a batch, without padding."""
    return sum(not tag.get("is_padding") for tag in batch.tags)


def scored(trainer: Any, part: Any) -> Any:
    """Fields of some sequences, scored by the trainer as without bypass mode."""
    from verl.workers.utils.padding import (  # type: ignore[import-not-found]
        response_from_nested,
    )

    temperature = trainer.config.actor_rollout_ref.rollout.temperature
    part.extra_info.update(
        {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
    )
    trainer.actor_rollout_wg.compute_log_prob(part)
    data = fetched(part, ["log_probs", "responses", "response_mask", "rollout_log_probs"])
    data["old_log_probs"] = response_from_nested(data.pop("log_probs"), data["response_mask"])
    return data


def labels_of(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"env": _texts(columns["data_source"])} if "data_source" in columns else {}
