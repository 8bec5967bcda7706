# verl: the trainer's metadata of a batch, which its arrays lack.
#
# verl's V1 trainer passes keys (KVBatchMeta); the arrays are in a TransferQueue.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servanda.errors import EvidenceError
from servanda.rl.package_version import built
from servanda.theory.stats.draft_counts import DraftCounts

# of each sequence: drafts, their tokens, and the accepted ones
_SPEC = ("spec_num_verify_steps", "spec_num_draft_tokens", "spec_num_accepted_tokens")


def about(trainer: Any, batch: Any) -> dict[str, Any]:
    """Weights, staleness, prompts and labels of a batch, and whether verl accepts changes to it.

    Returns:
        weights: updates so far.  staleness: [B].  groups, labels, drafts: as in Monitor.observe,
            if verl has them.  hands_back: whether masks and weights reach the loss.
    """
    rollout_correction = trainer.config.algorithm.get("rollout_correction", None)
    bypass = bool(rollout_correction and rollout_correction.get("bypass_mode", False))
    updates = trainer.global_steps - 1  # verl counts the current step
    known = {
        "weights": updates,
        "staleness": np.array([_staleness(updates, tag) for tag in batch.tags]),
        "hands_back": rollout_correction is not None and not bypass,
    }
    columns = fetched(batch, ["uid", "data_source", "extra_fields"])
    if "uid" in columns:
        known["groups"] = _texts(columns["uid"])
    extra = _values(columns["extra_fields"]) if "extra_fields" in columns else []
    if labels := labels_of(columns) | _engine_labels(trainer, batch.tags, extra):
        known["labels"] = labels
    known["drafts"] = drafts_of(extra)
    return known


def _engine_labels(
    trainer: Any, tags: Sequence[Mapping[str, Any]], extra: Sequence[Any]
) -> dict[str, list[str]]:
    """What verl knows of the engine that sampled each sequence; "" where it does not."""
    labels = {
        "weight_version": [_versions(tag) for tag in tags],
        "cached_tokens": [_number(fields, "num_cached_tokens") for fields in extra],
        "engine": [built(str(trainer.config.actor_rollout_ref.rollout.get("name", "")))]
        * len(tags),
    }
    return {name: values for name, values in labels.items() if any(values)}


def _versions(tag: Mapping[str, Any]) -> str:
    """The updates of the weights that sampled a sequence, such as "12", or "11-12"."""
    ends = [tag.get(f"{end}_global_steps") for end in ("min", "max")]
    return "-".join(dict.fromkeys(str(end) for end in ends if end is not None))


def _number(fields: Any, name: str) -> str:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    return "" if value is None else str(int(value))


def drafts_of(extra: Sequence[Any]) -> DraftCounts | None:
    """The drafts of a batch, over the sequences of which verl counted them; None without any.

    Args:
        extra: verl's extra fields of each sequence.
    """
    counted = [fields for fields in extra if isinstance(fields, Mapping) and _SPEC[0] in fields]
    if not counted:
        return None
    drafts, proposed, accepted = (sum(int(f.get(name) or 0) for f in counted) for name in _SPEC)
    try:
        return DraftCounts(drafts, proposed, accepted)
    except EvidenceError:
        return None  # a count that verl did not finish is none


def _texts(column: Any) -> list[str]:
    return [str(value) for value in _values(column)]


def _values(column: Any) -> list[Any]:
    """A non-tensor column: tensordict returns a list, or an object that converts to one."""
    return [*(column.tolist() if hasattr(column, "tolist") else column)]


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
