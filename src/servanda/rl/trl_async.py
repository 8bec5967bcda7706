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

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servanda.errors import MeasurementError
from servanda.rl.trl_setup import check_tokens_kept, check_trl, gathered

if TYPE_CHECKING:
    from servanda.rl.monitor.monitor import Monitor

    Base: Any = object
else:
    Base = object

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
            *_padded(responses), weights=int(self.state.global_step) - 1, **self._known(responses)
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


def _padded(responses: list[Response]) -> tuple[Array, Array, Array]:
    """Both logprobs and the mask, [B, T]."""
    train_BT, infer_BT = (
        _filled([getattr(r, side) for r in responses], np.nan) for side in ("train", "infer")
    )
    return train_BT, infer_BT, _filled([np.ones(len(r.train)) for r in responses], 0.0) > 0


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
