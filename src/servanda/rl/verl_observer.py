# verl: the observer in its processes, with errors for steps that cannot be compared.

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from servanda.errors import ContractError, EvidenceError, MeasurementError, ServandaError
from servanda.judgement.clauses.gradient import psi_of
from servanda.rl.monitor.batch import SHARE, Batch
from servanda.rl.monitor.statistics import loss_metrics, loss_problem, loss_sums
from servanda.rl.package_version import built
from servanda.theory.stats.draft_counts import DraftCounts

# verl: the trainer's metadata of a batch, which its arrays lack.
#
# verl's V1 trainer passes keys (KVBatchMeta); the arrays are in a TransferQueue.


# of each sequence: drafts, their tokens, and the accepted ones
_SPEC = ("spec_num_verify_steps", "spec_num_draft_tokens", "spec_num_accepted_tokens")


def about(trainer: Any, batch: Any) -> dict[str, Any]:
    """Weights, staleness, prompts and labels of a batch, and whether verl accepts changes to it.

    Returns:
        weights: updates so far.  staleness: [B].  groups, labels, drafts: as in Monitor.observe,
            if verl has them.  hands_back: whether masks and weights reach the loss.
    """
    rollout_correction = trainer.config.algorithm.get("rollout_correction", None)
    updates = trainer.global_steps - 1  # verl counts the current step
    known = {
        "weights": updates,
        "staleness": np.array([_staleness(updates, tag) for tag in batch.tags]),
        "hands_back": rollout_correction is not None and not bypassed(trainer.config),
    }
    columns = fetched(batch, ["uid", "data_source", "extra_fields"])
    if "uid" in columns:
        known["groups"] = _texts(columns["uid"])
    extra = _values(columns["extra_fields"]) if "extra_fields" in columns else []
    if labels := labels_of(columns) | _engine_labels(trainer, batch.tags, extra):
        known["labels"] = labels
    known["drafts"] = drafts_of(extra)
    return known


def bypassed(config: Any) -> bool:
    """Whether verl takes the rollout's logprobs for `old_log_probs`, by its configuration."""
    rollout_correction = config.algorithm.get("rollout_correction", None)
    return bool(rollout_correction and rollout_correction.get("bypass_mode", False))


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


def chosen(trainer: Any, real: Sequence[int], share: float) -> list[int] | None:
    """Choose sequences by the step alone, in a number divisible by the actor's ranks.

    The number is rounded down, but every rank scores at least one.

    Args:
        real: the places of a batch that are no padding.

    Returns:
        The chosen places; None if the share is 0, or if there are fewer sequences than ranks.
    """
    group = trainer.actor_rollout_wg
    if "actor" not in group._dispatch_info:  # verl asks when it first dispatches
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    ranks = max(group._dispatch_info["actor"]) + 1
    count = min(ranks * max(1, int(share * len(real) / ranks)), len(real) - len(real) % ranks)
    if not (share and count):
        return None
    rng = np.random.default_rng([trainer.global_steps, len(real)])
    return [real[i] for i in sorted(rng.permutation(len(real))[:count])]


# unless its micro-batches are dynamic, verl refuses a number that they do not divide
_ONE_BY_ONE = {"micro_batch_size_per_gpu": 1}


def scored(trainer: Any, part: Any) -> Any:
    """Fields of some sequences, scored by the trainer as without bypass mode."""
    from verl.workers.utils.padding import (  # type: ignore[import-not-found]
        response_from_nested,
    )

    temperature = trainer.config.actor_rollout_ref.rollout.temperature
    own = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
    part.extra_info = {**part.extra_info, **own, **_ONE_BY_ONE}  # verl's dict is the whole batch's
    trainer.actor_rollout_wg.compute_log_prob(part)
    data = fetched(part, ["log_probs", "responses", "response_mask", "rollout_log_probs"])
    data["old_log_probs"] = response_from_nested(data.pop("log_probs"), data["response_mask"])
    return data


def labels_of(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"env": _texts(columns["data_source"])} if "data_source" in columns else {}


CONTRACT, STATE, DUMP = "SERVANDA_VERL", "SERVANDA_VERL_STATE", "SERVANDA_VERL_DUMP"
STOP, RECOMPUTE = "SERVANDA_VERL_STOP", "SERVANDA_VERL_RECOMPUTE"
ACTIVE = "servanda/active"
ASKED = "actor_rollout_ref.rollout.calculate_log_probs=True"


class Halted(ServandaError):  # noqa: N818 - the contract says so, and nothing went wrong
    """The contract's action is `halt`; verl can be stopped only by an exception."""


class Watch:
    """The observer of this process: one monitor and the current batch.

    Args:
        monitor: default: from the environment variables, created on first use.
        recompute: in bypass mode, the share of sequences that the trainer scores; default: SHARE.
    """

    def __init__(self, monitor: Any = None, recompute: float | None = None) -> None:
        self._given = (monitor, recompute)
        self._known: dict[str, Any] = {}  # metadata of the batch, from the trainer
        self._measured: tuple[Any, Any] | None = None  # (logprobs, step)
        self._mask_BT: Any = None  # before verl rejects tokens
        self._observed: tuple[Any, Any, Any] | None = None  # (logprobs, mask, step)
        self._steps = 0
        self._logged = False  # the first step of verl's own log
        self._lacks_rollout = False  # whether the last updated batch has no logprobs of the rollout
        self._began, self._scoring = 0.0, 0.0  # of the last scored batch, seconds
        self._printed: set[str] = set()

    # read on first use: verl suppresses errors while plug-ins are loaded

    @cached_property
    def monitor(self) -> Any:
        monitor = self._given[0]
        if monitor is None:
            from servanda.rl.monitor.monitor import Monitor

            monitor = Monitor(
                os.environ[CONTRACT],
                state=os.environ.get(STATE) or None,
                dump=os.environ.get(DUMP) or None,
                stop=os.environ.get(STOP) == "1",
            )
        monitor.numbered_from(1)  # verl counts the current step
        return monitor

    @cached_property
    def recompute(self) -> float:
        return _share() if self._given[1] is None else self._given[1]

    @contextmanager
    def working_on(self, trainer: Any, batch: Any) -> Iterator[None]:
        """Provide the trainer's metadata of a batch while its logprobs are computed."""
        self._known, self._measured = about(trainer, batch), None
        try:
            yield
        finally:
            self._known = {}

    def observe(self, data: Any) -> dict[str, float]:
        """Judge a batch with both logprobs: a DataProto from verl's metrics.

        Returns:
            Metrics for verl's log.

        Raises:
            ContractError: the contract has an action for which verl accepts no changed batch.
            Halted: the contract's action is `halt`.
        """
        if self._measured is not None:  # and the batch was not taken back
            _check_hands_back(self._measured[1].action)
        train_BT = data.batch["old_log_probs"]
        step = self._judged(data, train_BT)
        self._measured = (train_BT, step)
        if self._known.get("hands_back") is False:
            _check_hands_back(step.action)
        return self._metrics(step, 1.0)

    def without_train(self, data: Any) -> dict[str, float]:
        """Judge a batch without the trainer's logprobs: none, instead of the rollout's."""
        infer_BT = data.batch["rollout_log_probs"]
        step = self._judged(data, infer_BT.new_full(infer_BT.shape, float("nan")))
        hint = (
            f"leave out {RECOMPUTE}=0: the trainer then scores {100 * SHARE:g} % of the sequences"
        )
        if self.recompute:
            hint = "a batch needs at least one sequence for each rank of the actor"
        self.print_once(
            "verl runs in bypass mode, where old_log_probs are those of the rollout: there are no "
            f"train logprobs, and nothing is compared.\n  hint: {hint}"
        )
        return self._metrics(step, 0.0)

    def of_bypass(self, trainer: Any, batch: Any) -> dict[str, float]:
        """Judge a batch for which verl's V1 trainer computed no logprobs.

        Raises:
            ContractError: the rollout computed none either.
        """
        if not trainer.config.actor_rollout_ref.rollout.calculate_log_probs:
            raise ContractError(
                "verl does not ask its rollout for logprobs: nothing can be compared",
                hint=f"set {ASKED}",
            )
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        places = chosen(trainer, real, self.recompute)
        if places is None:
            fields = ["responses", "response_mask", "rollout_log_probs"]
            return self.without_train(padded(fetched(batch, fields)))
        part = batch.select_keys([batch.keys[i] for i in places])
        known = {**about(trainer, part), "selected_from": len(real)}
        return self._share_judged(known, lambda: padded(scored(trainer, part)))

    def of_update(self, trainer: Any, batch: Any, score: Any) -> dict[str, float]:
        """Judge a DataProto before its update, if verl's trainer computed no logprobs for it.

        Every trainer that is no V1 trainer updates its actor by one method of `RayPPOTrainer`.

        Args:
            score: that class's method which scores a batch with the present weights.  The fully
                asynchronous trainer's own swaps two copies of all weights for it.
        """
        self._lacks_rollout = "rollout_log_probs" not in batch.batch
        if self._lacks_rollout or not bypassed(trainer.config):
            return {}
        places = chosen(trainer, range(len(batch)), self.recompute)
        if places is None:
            return self.without_train(batch)

        def part_scored() -> Any:
            part = batch.select_idxs(places)
            part.meta_info = {**part.meta_info, **_ONE_BY_ONE}
            part.batch["old_log_probs"] = score(trainer, part)[0].batch["old_log_probs"]
            return part

        known = {"weights": trainer.global_steps - 1, "hands_back": False}
        return self._share_judged({**known, "selected_from": len(batch)}, part_scored)

    def _share_judged(self, known: dict[str, Any], score: Callable[[], Any]) -> dict[str, float]:
        """Judge what `score` returns, and log the share of its seconds between two steps."""
        began, last, scoring = time.perf_counter(), self._began, self._scoring
        data = score()
        self._began, self._scoring = began, time.perf_counter() - began
        seconds = {"servanda/score_seconds_share": scoring / (began - last)} if scoring else {}
        self._known, self._measured = known, None
        try:
            return {**self.observe(data), **seconds}
        finally:
            self._known = {}

    def of_log(self, data: Mapping[str, Any], step: Any) -> None:
        """Print once if the first step of verl's log that has values of the actor is not judged.

        Validation has none, nor has the warm-up of a critic.
        """
        if self._logged or not any(name.startswith("actor/") for name in data):
            return
        self._logged = True
        if ACTIVE not in data:
            why, hint = (
                "its trainer calls no function of verl that is watched",
                ("`python -m servanda.rl.verl --check` lists the trainers that are judged"),
            )
            if self._lacks_rollout:
                why, hint = "its rollout returned no logprobs", f"set {ASKED}"
            self.print_once(
                f"error: step {step} of verl's log has no {ACTIVE}: {why}, and this run is not "
                f"judged.\n  hint: {hint}"
            )

    def corrected(self, data: Any) -> Any:
        """Apply the contract's mask and token weights to a batch.

        Raises:
            MeasurementError: it is not the last measured batch.
        """
        measured, self._measured = self._measured, None
        if measured is None or not _same(measured[0], data.batch["old_log_probs"]):
            raise MeasurementError(
                "verl corrects a batch that the monitor has not measured",
                hint=f"set {ASKED}: verl then hands over each batch with both logprobs",
            )
        step, mask_BT = measured[1], data.batch["response_mask"]
        self._observed = measured[0], self._mask_BT, step
        if {"mask", "correct"} & {*step.action}:
            weight_BT = mask_BT.new_tensor(step.token_weights, dtype=measured[0].dtype)
            if "mask" in step.action:
                data.batch["response_mask"] = mask_BT * (weight_BT > 0)
            if "correct" in step.action:
                data.batch["rollout_is_weights"] = weight_BT
        return data

    def of_loss(self, data: Any) -> dict[str, float]:
        """Metrics of what the loss will use of the last corrected batch.

        verl weighs and rejects tokens after the monitor has judged the step, so this does not
        change its verdict: weights that contradict the contract are printed.
        """
        observed, self._observed = self._observed, None
        if observed is None:
            return {}
        train_BT, mask_BT, step = observed
        sums = loss_sums(
            Batch.of(
                train_BT,
                data.batch["rollout_log_probs"],
                mask_BT,
                weights=step.weights,
                loss_weights=data.batch.get("rollout_is_weights", None),
                loss_mask=data.batch["response_mask"][:, -mask_BT.shape[1] :],
            ),
            psi_of(self.monitor.contract),
        )
        problem = loss_problem(sums, self.monitor.contract)
        if problem and not {"correct", "mask"} & {*step.action}:
            self.print_once(problem)
        return loss_metrics(sums, self.monitor.contract)

    def print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print(f"servanda: {text}", file=sys.stderr, flush=True)

    def _judged(self, data: Any, train_BT: Any) -> Any:
        known, infer_BT = self._known, data.batch["rollout_log_probs"]
        weights = known.get("weights", self._steps)
        self._steps = weights + 1
        self._mask_BT = data.batch["response_mask"][:, -infer_BT.shape[1] :]
        return self.monitor.observe(
            train_BT,
            infer_BT,
            self._mask_BT,
            groups=known.get("groups", data.non_tensor_batch.get("uid")),
            labels=known.get("labels", labels_of(data.non_tensor_batch)),
            staleness=known.get("staleness"),
            weights=weights,
            tokens=data.batch.get("responses", None),
            selected_from=known.get("selected_from"),
            drafts=known.get("drafts"),
        )

    def _metrics(self, step: Any, compared: float) -> dict[str, float]:
        if "halt" in step.action:
            raise Halted(f"the contract says halt at step {step.step}:\n{step}")
        own = {ACTIVE: 1.0, "servanda/compared": compared}
        return {**{name: float(value) for name, value in step.metrics.items()}, **own}


def _share() -> float:
    """SERVANDA_VERL_RECOMPUTE as a number."""
    text = os.environ.get(RECOMPUTE) or f"{SHARE:g}"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ContractError(f"{RECOMPUTE} is {text!r}", hint="a share of sequences, such as 0.05")
    return share


def _same(own: Any, other: Any) -> bool:
    return own.shape == other.shape and bool(
        own.isclose(other, rtol=0, atol=0, equal_nan=True).all()
    )


def _check_hands_back(action: tuple[str, ...]) -> None:
    wanted = [name for name in action if name in ("mask", "correct")]
    if wanted:
        raise ContractError(
            f"the contract says {wanted[0]}, and verl takes no batch back: rollout correction is "
            "off, or in bypass mode",
            hint="set algorithm.rollout_correction, and not its bypass_mode, or take "
            f"{wanted[0]} out of the contract",
        )
