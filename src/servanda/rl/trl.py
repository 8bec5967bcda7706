# TRL: the monitor inside GRPOTrainer.
#
#     class Trainer(Monitored, GRPOTrainer):
#         """A GRPOTrainer whose steps are checked against a contract."""
#
#     Trainer(..., monitor=Monitor("trl"), slices=("domain",)).train()
#
# The trainer's logprobs of a generation are, in this order:
#   those that TRL computes before its update anyway (old_per_token_logps);
#   those of the loss, if TRL updates once with the whole generation: no further forward pass;
#   those of a forward pass over some sequences, if the contract acts on tokens before the loss.
#
# TRL is not imported here: the mixin is used with a TRL class, GRPOTrainer or RLOOTrainer.  Written
# for TRL 1.16.
# Axes: B sequences of this rank, T tokens of a completion.

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.trl_engine import (
    Rollouts,
    drilled,
    instead_of_training,
    module_of,
    rollouts,
    trainee,
)
from servanda.rl.trl_setup import (
    SHARE,
    Recorder,
    Waiting,
    check_tokens_kept,
    check_trl,
    column_of,
    gathered,
    groups_of,
    labels_of,
    loss_mask,
    rows_of,
    share_of,
    tokens_of,
    weights_of,
    whole_batch,
)

if TYPE_CHECKING:
    from servanda.rl.follow.follow import Follow
    from servanda.rl.follow.follow_step import FollowStep
    from servanda.rl.monitor.monitor import Monitor, Step

    Base: Any = object
else:
    Base = object


# TRL: every generation of a GRPOTrainer as a dump for `servanda check DIR`.
#
#     class Trainer(Dumping, GRPOTrainer): ...
#
#     Trainer(..., dump="rollouts").train()


_NEEDED = {"sampling_per_token_logps": "sampler", "old_per_token_logps": "trainer"}


class Dumping(Base):
    """A mixin for GRPOTrainer, listed before it, that writes all its sequences to a folder.

    Without TRL's own logprobs before the update nothing could be compared, so this is an error;
    Monitor(dump=) has those of the loss.

    Args:
        dump: the folder, which `servanda check` reads.
        slices: as of Monitored.

    Raises:
        MeasurementError: a generation has no logprobs of the trainer or of the sampler.
    """

    def __init__(
        self,
        *args: Any,
        dump: str | Path,
        slices: Sequence[str] | Mapping[str, str] = (),
        **kwargs: Any,
    ) -> None:
        self.dump = Path(dump)
        self._written = (0, 0)  # a step, and its generations so far
        self.slices = dict(
            slices if isinstance(slices, Mapping) else zip(slices, slices, strict=True)
        )
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = whole_batch(super()._generate_and_score_completions(inputs))
        if self.model.training:  # an evaluation is not trained on
            self._write(inputs, out)
        return out

    def _write(self, inputs: Sequence[Mapping[str, Any]], out: Mapping[str, Any]) -> None:
        from servanda.rl.dumps.formats.parquet import Writer

        mask_BT = loss_mask(out)
        for name, side in _NEEDED.items():
            if name not in out or bool(out[name][mask_BT.bool()].isnan().all()):
                raise MeasurementError(
                    f"TRL's batch has no logprobs of the {side} ({name}): a dump would compare "
                    "nothing",
                    hint="TRL has both with vLLM and its importance-sampling correction; otherwise "
                    "use Monitored with Monitor(..., dump=)",
                )
        token_BT = tokens_of(out)
        labels = {name: column_of(inputs, column) for name, column in self.slices.items()}
        present_BT = token_BT >= 0
        present_BT[:, -mask_BT.shape[1] :] &= out["completion_mask"].bool()
        step = int(self.state.global_step) + 1  # as TRL logs it
        before = self._written[1] if self._written[0] == step else 0
        self._written = (step, before + 1)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        Writer(self.dump, rank=rank + ranks * before).step(  # a file of each generation
            step,
            token_BT,
            mask_BT,
            out["old_per_token_logps"],
            out["sampling_per_token_logps"],
            present=present_BT,
            groups=groups_of(out),
            labels=labels_of(self, len(mask_BT)) | labels,
            advantages=out["advantages"],
        )


# TRL: whether the engine of a GRPOTrainer follows its module, after the sync of a generation.


class EngineFollow:
    """Scores both sides after each sync; the first rank judges, each rank's engine is a replica.

    Args:
        trainer: a GRPOTrainer with an engine of its own, in this process or behind a server.
        follow: judges the scores; True: one with the default probes and limit.
        gather: sends one object and returns those of all ranks.

    Raises:
        ContractError: the trainer has no separate engine, or one of unknown sync.
        MeasurementError: its module is sharded.
    """

    def __init__(
        self, trainer: Any, follow: Follow | bool, gather: Callable[[Any], list[Any]]
    ) -> None:
        from servanda.rl.follow.follow import Follow
        from servanda.rl.follow.sent_weights import SentWeights
        from servanda.rl.sync_drill.weight_snapshot import Weights

        module = module_of(trainer)
        Weights(module, copy=False)  # refuses a part of a module
        self.follow = follow if isinstance(follow, Follow) else Follow(module)
        self.engine = trainee(trainer)
        self.train_scores = SentWeights(
            module, engine_dtype(trainer), lambda rows: exact_logprobs(module, rows)
        )
        self.gather, self.rank = gather, int(trainer.accelerator.process_index)
        self._judged: int | None = None  # the last step

    def after_sync(self, step: int) -> FollowStep | None:
        """The conclusion, the same on every rank; None if this step was judged or is left out."""
        if step == self._judged or step % self.follow.every:
            return None
        self._judged = step
        scores = self.gather(self.engine.score(self.follow.probes))
        infer = (
            {f"rank {i}": rows for i, rows in enumerate(scores)} if len(scores) > 1 else scores[0]
        )
        found = None
        if self.rank == 0:
            found = self.follow.observe(step, self.train_scores(self.follow.probes), infer)
        return self.gather(found)[0]


def exact_logprobs(module: Any, rows: Any) -> Any:
    """The logprobs of rows by the module's own forward pass, without accelerate's autocast."""
    from servanda.rl.sync_drill.trainee import forward_logprobs

    wrapped, own = vars(module).get("forward"), getattr(module, "_original_forward", None)
    if wrapped is None or own is None:
        return forward_logprobs(module, rows)
    module.forward = own
    try:
        return forward_logprobs(module, rows)
    finally:
        module.forward = wrapped


def engine_dtype(trainer: Any) -> str:
    """The format that weights are sent in; a quantised engine rounds them further."""
    draws = getattr(trainer, "rollout_func", None)
    if isinstance(draws, Rollouts):
        return str(draws.engine.kernel.dtype)
    engine = getattr(trainer.vllm_generation, "llm", None)
    dtype = getattr(
        getattr(getattr(engine, "llm_engine", None), "model_config", None), "dtype", None
    )
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")


# TRL: the monitor inside AsyncGRPOTrainer (trl.experimental.async_grpo).
#
#     class Trainer(MonitoredAsync, AsyncGRPOTrainer): ...
#
#     Trainer(..., monitor=Monitor("verl-async")).train()
#
# The trainer's logprobs are those of its loss: before the update, and without a forward pass of
# their own.  A batch of TRL does not name the weights that sampled a response; they are noted where
# the response is taken from the queue, and found again by its logprobs, of which no two are alike.
#
# Axes: B responses of this rank, T trained tokens.


_METHODS = ("compute_loss",)
_KEPT = 1 << 16  # responses whose weights are remembered: far more than a queue holds

Array = NDArray[Any]


class Response(NamedTuple):
    """The trained tokens of one response: both logprobs, and its advantage, [T] each."""

    train: Array
    infer: Array
    advantage: Array


class Origins:
    """Who sampled a response: TRL's queue of rollouts, which notes what it hands out."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.of: OrderedDict[bytes, tuple[int, str]] = OrderedDict()  # version, prompt group

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        trained_T = np.asarray(sample.completion_mask)[1:] != 0
        key = key_of(np.asarray(sample.old_log_probs)[1:][trained_T])
        self.of[key] = (int(sample.model_version), str(sample.group_id))
        if len(self.of) > _KEPT:
            self.of.popitem(last=False)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def key_of(infer_T: Array) -> bytes:
    """A key of a response, from the sampler's logprobs of its trained tokens."""
    data = np.ascontiguousarray(infer_T, dtype=np.float32).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


class MonitoredAsync(Base):
    """A mixin for AsyncGRPOTrainer, listed before it, to check each step against a contract.

    A step is judged after its update, by the logprobs before it; the contract can end the run
    (`halt`).  Staleness and weight versions are TRL's own, counted in updates.

    Args:
        monitor: judges the steps; this class connects its ranks.
        drafts: a DraftMeter of the engines, which the main process reads at each step.

    Raises:
        MeasurementError: this TRL or trainer is not supported, or a step computed no logprobs.
        ContractError: the contract acts on tokens before the loss.
    """

    def __init__(self, *args: Any, monitor: Monitor, drafts: Any = None, **kwargs: Any) -> None:
        check_trl(self, MonitoredAsync, _METHODS, "AsyncGRPOTrainer")
        check_tokens_kept(monitor, "AsyncGRPOTrainer's loss is computed before a step is judged")
        monitor.numbered_from(1)  # TRL logs a step after its update
        self.monitor = monitor
        self._responses: list[Response] = []
        self._version = 0  # of the weights before the update, in TRL's count
        super().__init__(*args, **kwargs)
        self._drafts = drafts if self.accelerator.is_main_process else None
        if self.rollout_queue is not None:
            self.rollout_queue = Origins(self.rollout_queue)
        if self.accelerator.num_processes > 1:
            monitor.across(gathered)
        self.add_callback(_judge(self))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda _module, _inputs, out: seen.append(out.log_probs))
        try:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            hook.remove()
        if model.training and seen:
            self._version = self.model_version
            self._responses += _responses_of(inputs, seen[0].detach().flatten())
        return loss

    def _judge_step(self) -> bool:
        """Judge the responses of a step, and log it; whether the run has to end."""
        if not self._responses:
            raise MeasurementError(
                f"step {self.state.global_step} ended without a loss whose logprobs were seen",
                hint="something replaced AsyncGRPOTrainer.compute_loss, or its fused head",
            )
        responses, self._responses = self._responses, []
        step = self.monitor.observe(
            _filled([r.train for r in responses], np.nan),
            _filled([r.infer for r in responses], np.nan),
            _filled([np.ones(len(r.train)) for r in responses], 0.0) > 0,
            weights=int(self.state.global_step) - 1,
            **self._known(responses),
        )
        for name, value in {**step.metrics, "servanda/active": 1.0}.items():
            self._metrics["train"][name].append(float(value))
        return "halt" in step.action

    def _known(self, responses: list[Response]) -> dict[str, Any]:
        """What is known of the responses beside their logprobs."""
        own = (self.rollout_queue.of, self._version) if self.rollout_queue is not None else None
        if self.accelerator.num_processes > 1:
            own = gathered(own)[0]
        origins, now = own or ({}, 0)
        found = [origins.get(key_of(response.infer)) for response in responses]
        updates = self.args.weight_sync_steps
        rank = str(self.accelerator.process_index)
        return {
            "groups": [f"{rank}.{b}" if o is None else o[1] for b, o in enumerate(found)],
            "staleness": [float("nan") if o is None else (now - o[0]) * updates for o in found],
            "labels": {
                "rank": [rank] * len(found),
                "weight_version": ["" if o is None else str(o[0]) for o in found],
            },
            "advantages": _filled([r.advantage for r in responses], 0.0),
            "drafts": self._drafts,
        }


def _responses_of(inputs: Any, logp_N: Any) -> list[Response]:
    """The responses of a micro-batch; a packed position can serve several of them."""
    selected = inputs["token_index"] >= 0
    train_M = logp_N[inputs["token_index"][selected]].float().cpu().numpy()
    infer_M, advantage_M, segment_M = (
        inputs[name][selected].cpu().numpy()
        for name in ("old_log_probs", "advantages", "segment_id")
    )
    starts = np.flatnonzero(np.diff(segment_M)) + 1
    columns = (np.split(column, starts) for column in (train_M, infer_M, advantage_M))
    return [Response(*parts) for parts in zip(*columns, strict=True)] if len(segment_M) else []


def _filled(rows: list[Array], rest: float) -> Array:
    filled_BT = np.full((len(rows), max(map(len, rows))), rest, dtype=np.float32)
    for row, values in zip(filled_BT, rows, strict=True):
        row[: len(values)] = values
    return filled_BT


def _judge(trainer: MonitoredAsync) -> Any:
    from transformers import TrainerCallback

    class Judge(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer._judge_step():
                control.should_training_stop = True

    return Judge()


__all__ = [
    "Dumping",
    "Monitored",
    "MonitoredAsync",
    "drilled",
    "gathered",
    "instead_of_training",
    "rollouts",
    "trainee",
]

PREFIX = "servanda/"
_ROW = "servanda_row"  # in a batch of TRL: the row of the generation
# further arguments of the trainer's forward pass, if a batch has them
_FORWARD = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes"),
    *("num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


class Monitored(Base):
    """A mixin for GRPOTrainer, listed before it, to check each generation against a contract.

    The contract's actions change the batch: tokens are weighted (`correct`), excluded from the loss
    (`mask`), or the run ends after the step (`halt`).  All metrics go to TRL's log under
    `servanda/`; servanda/active is 1 if the monitor received the step.

    Args:
        monitor: judges the steps; this class connects its ranks.
        slices: columns of the data set, or of a rollout function's result, that become labels: the
            slices of a contract name them `labels.<column>`.  A mapping gives labels of other
            names, such as {"env": "task"}: presets slice by `env`.
        score_share: the share of sequences that the trainer scores for the monitor in a forward
            pass of its own, where TRL has not computed their logprobs; sampled by the step alone,
            at least one sequence of each rank.  Default: none, because the logprobs of the loss
            are judged; SHARE if the contract masks slices; 1 if it corrects tokens.
        drafts: a DraftMeter of the engines, which the main process reads at each step.
        follow: whether both sides score probe tokens after each sync: True, or a servanda.rl.Follow
            with your limit, probes and state file.

    Raises:
        MeasurementError: TRL samples from the module that it trains, so the tokens have no sampler
            logprobs; or all of them are NaN; or this TRL or trainer is not supported.
        ContractError: only a share of sequences is scored, but the contract corrects every token;
            or it acts on tokens, and the loss of the trainer is one of whole responses.
    """

    def __init__(
        self,
        *args: Any,
        monitor: Monitor,
        slices: Sequence[str] | Mapping[str, str] = (),
        score_share: float | None = None,
        drafts: Any = None,
        follow: Follow | bool = False,
        **kwargs: Any,
    ) -> None:
        check_trl(self, Monitored)
        monitor.numbered_from(1)  # TRL logs a step after its update
        self.follow = follow
        self._following: EngineFollow | None = None
        self.monitor = monitor
        self.score_share = share_of(monitor, score_share)
        self.slices = dict(
            slices if isinstance(slices, Mapping) else zip(slices, slices, strict=True)
        )
        self._batches, self._halt = 0, False
        self._waiting: Waiting | None = None
        self._rows: Any = None  # the rows of the current loss
        self._began, self._scoring = 0.0, 0.0  # of the last generation, seconds
        super().__init__(*args, **kwargs)
        if self.score_share is None and getattr(self, "use_liger_kernel", False):
            self.score_share = SHARE  # the losses of older TRL then compute no logprobs
        if not self.use_vllm and getattr(self, "rollout_func", None) is None:
            raise _no_logprobs(self, nan=False)  # its batches have no sampler logprobs
        self._recorder: Recorder | None = None
        if not hasattr(self, "rollout_func"):  # RLOO drops what it does not need
            check_tokens_kept(monitor, "RLOO's loss is one of whole responses, one weight each")
            self._recorder = Recorder(self.vllm_generation)
        self._drafts = drafts if self.accelerator.is_main_process else None
        if self.accelerator.num_processes > 1:
            monitor.across(gathered)
        self.add_callback(_watcher(self))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began, last = time.perf_counter(), self._began
        if self._recorder is not None:
            self._recorder.begin()
        out = whole_batch(super()._generate_and_score_completions(inputs))
        if self._recorder is not None:
            seen = self._recorder.end(out["completion_ids"])
            if self.model.training:
                self._act(out, self._judged(seen[0], self._given(inputs, {**out, **seen[1]})))
                self._batches += 1
            return out
        if not self.model.training:  # an evaluation has no gradient
            return out
        if self._scoring:
            self._log({"score_seconds_share": self._scoring / (began - last)})
        self._began, self._scoring = began, 0.0
        self._batches += 1
        given = {**self._given(inputs, out), "follow": self._followed()}
        old_BT = out.get("old_per_token_logps")
        if old_BT is None and self.score_share is None:
            self._waiting = Waiting(given)
            out[_ROW] = out["completion_ids"].new_tensor([*range(len(out["completion_ids"]))])
            return out
        if old_BT is None:
            share = 1.0 if self.score_share is None else self.score_share
            given["selected"] = rows_of(len(given["mask_BT"]), share, int(self.state.global_step))
            old_BT = self._score(out, given["selected"])
        self._act(out, self._judged(old_BT, given))
        return out

    def _given(self, inputs: Sequence[Mapping[str, Any]], out: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the monitor, except the trainer's logprobs."""
        sampled_BT, mask_BT = out.get("sampling_per_token_logps"), loss_mask(out)
        usable = sampled_BT is not None and bool((~sampled_BT.isnan() & mask_BT.bool()).any())
        if not self._anywhere(usable) and self._anywhere(bool(mask_BT.any())):
            raise _no_logprobs(self, nan=sampled_BT is not None)
        try:
            labels = {name: column_of(inputs, column) for name, column in self.slices.items()}
        except EvidenceError as error:
            self.monitor.refuse(error)
            raise
        if sampled_BT is None:  # on this rank
            sampled_BT = mask_BT.new_full(
                mask_BT.shape, float("nan"), dtype=out["advantages"].dtype
            )
        return {
            "logp_infer_BT": sampled_BT,
            "mask_BT": mask_BT,
            "groups": groups_of(out),
            "labels": labels_of(self, len(mask_BT)) | labels,
            "advantages": out["advantages"],
            "weights": int(self.state.global_step),
            "tokens": tokens_of(out),
            "loss_weights": weights_of(out, self.monitor),
            "drafts": self._drafts,
        }

    def _followed(self) -> FollowStep | None:
        """Whether the engine, which was just synced, has the module's weights."""
        if not self.follow:
            return None
        if self._following is None:
            alone = self.accelerator.num_processes == 1
            gather = (lambda value: [value]) if alone else gathered
            self._following = EngineFollow(self, self.follow, gather)
        return self._following.after_sync(int(self.state.global_step))

    def _judged(self, logp_train_BT: Any, given: Mapping[str, Any]) -> Step:
        step = self.monitor.observe(logp_train_BT, **given)
        self._halt = self._halt or self._anywhere("halt" in step.action)
        self._log({**step.metrics, "active": 1.0})
        return step

    def _log(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            name = name if name.startswith(PREFIX) else PREFIX + name
            self._metrics["train"][name].append(float(value))

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        self._rows = inputs.get(_ROW) if self._waiting else None
        loss = super()._compute_loss(model, inputs)
        if self._waiting and self._waiting.complete:
            self._judge_waiting()
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._recorder is not None:
            self._recorder.scored(found[0])
        if self._waiting and self._rows is not None:  # the forward pass of the loss
            self._waiting.add(self._rows, found[0].detach())
            self._rows = None
        return found

    def _judge_waiting(self) -> None:
        """Judge the generation by the logprobs of its losses, before or after the update."""
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        if waiting.logp_BT is None:
            step = waiting.given["weights"] + 1
            raise MeasurementError(
                f"step {step} ended without a loss whose logprobs were seen",
                hint="something replaced GRPOTrainer._compute_loss, or the batches that it gets: "
                f"pass score_share={SHARE:g}, and the trainer scores that share of the sequences",
            )
        seen = {} if waiting.complete else {"selected": waiting.seen_B}
        self._judged(waiting.logp_BT, {**waiting.given, **seen})

    def _score(self, out: Mapping[str, Any], rows_B: NDArray[np.bool_]) -> Any:
        """The trainer's logprobs before its update of the completions of some rows, [B, T]."""
        import torch

        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        attended = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        forward = {name: out[name] for name in _FORWARD if name in out}
        at = torch.as_tensor(rows_B if not forward else np.ones_like(rows_B), device=ids.device)
        ids.flatten()[:1].cpu()  # earlier work of the device is not part of the scoring
        began = time.perf_counter()
        with torch.no_grad():
            logps_BT = self._get_per_token_logps_and_entropies(
                self.model,
                ids[at],
                attended[at],
                out["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
                **forward,
            )[0]
        logp_BT = logps_BT.new_full((len(ids), logps_BT.size(1)), float("nan"))
        logp_BT[at] = logps_BT
        logp_BT.flatten()[:1].cpu()
        self._scoring = time.perf_counter() - began
        return logp_BT

    def _act(self, out: dict[str, Any], step: Step) -> None:
        import torch

        if not {"correct", "mask"} & {*step.action}:
            return
        mask_BT = loss_mask(out)
        weight_BT = torch.as_tensor(step.token_weights).to(mask_BT.device, torch.float32)
        if "mask" in step.action:
            # not the completion mask, which is also the attention mask
            trained_BT = (weight_BT > 0).to(mask_BT.dtype)
            out["tool_mask"] = out.get("tool_mask", torch.ones_like(mask_BT)) * trained_BT
            out["num_items_in_batch"] = self.accelerator.gather(loss_mask(out).sum()).sum()
        if "correct" in step.action:
            if self.loss_type == "vespo":  # it multiplies the weights of a row, including padding
                weight_BT = weight_BT.where(loss_mask(out).bool(), 1.0)
                out["importance_sampling_ratio"] = weight_BT
            elif "importance_sampling_ratio" in out:
                out["importance_sampling_ratio"] = weight_BT
            else:  # the losses of TRL are linear in advantages, and accept one per token
                out["advantages"] = out["advantages"].reshape(len(mask_BT), -1) * weight_BT

    def _anywhere(self, here: bool) -> bool:
        """Whether a condition is true on any rank; every rank must call it."""
        return here if self.accelerator.num_processes == 1 else any(gathered(here))


def _watcher(trainer: Monitored) -> Any:
    """Ends the run on request, and if its first step bypassed the monitor."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not trainer._batches:
                raise MeasurementError(
                    f"step {state.global_step} ended without a batch for the monitor",
                    hint="something replaced GRPOTrainer._generate_and_score_completions, as "
                    "Unsloth does: patch before the class is derived, or train without it",
                )
            if trainer._waiting:  # its other parts come after the update
                trainer._judge_waiting()
            if trainer._halt:
                control.should_training_stop = True

    return Watcher()


def _no_logprobs(trainer: Any, nan: bool) -> MeasurementError:
    if nan:
        return MeasurementError(
            "every logprob of the sampler is NaN: nothing can be compared",
            hint="find out why the engine scores its own tokens as NaN; start a server with "
            "--logprobs-mode processed_logprobs",
        )
    if getattr(trainer, "rollout_func", None) is not None:
        return MeasurementError(
            "rollout_func returned no logprobs: nothing can be compared",
            hint="return in `logprobs` the logprob that each token was sampled with",
        )
    if trainer.use_vllm:
        return MeasurementError(
            "the batch has no logprobs of the sampler: nothing can be compared",
            hint="TRL 1.16 asks vLLM for them always: is generate of vllm_generation replaced?",
        )
    return MeasurementError(
        "TRL samples from the module that it trains (use_vllm=False), so the tokens have no "
        "sampler's logprobs: nothing can be compared",
        hint="set use_vllm=True"
        + (", or rollout_func=servanda.rl.trl.rollouts(engine)" * hasattr(trainer, "rollout_func")),
    )
