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

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.trl_async import MonitoredAsync
from servanda.rl.trl_batch import (
    SHARE,
    Waiting,
    column_of,
    groups_of,
    loss_mask,
    rows_of,
    share_of,
    tokens_of,
    weights_of,
)
from servanda.rl.trl_dump import Dumping
from servanda.rl.trl_engine import drilled, instead_of_training, rollouts, trainee
from servanda.rl.trl_follow import EngineFollow
from servanda.rl.trl_setup import Recorder, check_tokens_kept, check_trl, gathered, labels_of

if TYPE_CHECKING:
    from servanda.rl.follow.follow import Follow
    from servanda.rl.follow.follow_step import FollowStep
    from servanda.rl.monitor.monitor import Monitor, Step

    Base: Any = object
else:
    Base = object

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
        out = super()._generate_and_score_completions(inputs)
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
