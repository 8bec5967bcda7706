# TRL: the monitor inside GRPOTrainer.
#
#     class Trainer(Monitored, GRPOTrainer):
#         """A GRPOTrainer whose steps are checked against a contract."""
#
#     Trainer(..., monitor=Monitor("trl"), slices=("domain",)).train()
#
# It runs after TRL has sampled, scored and rewarded a batch, on every rank, before the batch is
# shuffled.  TRL is not imported here: the mixin is used with a TRL class.  Written for TRL 1.16.
# Axes: B sequences of this rank, T tokens of a completion.

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl.monitor import actions
from servanda.rl.trl_engine import drilled, instead_of_training, rollouts, trainee

if TYPE_CHECKING:
    from servanda.rl.monitor.monitor import Monitor, Step

    Base: Any = object
else:
    Base = object

__all__ = ["Monitored", "drilled", "gathered", "instead_of_training", "rollouts", "trainee"]

PREFIX = "servanda/"
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
        score_share: for batches whose logprobs TRL does not compute: the share of sequences that
            the trainer scores and the monitor judges, sampled by the step alone.  Below 1 the
            contract may neither weight nor mask tokens, because most have no weight.

    Raises:
        MeasurementError: TRL samples from the module that it trains, so the tokens have no sampler
            logprobs; or all of them are NaN; or this TRL's GRPOTrainer is not supported.
        ContractError: only a share of sequences is scored, but the contract acts on every token.
    """

    def __init__(
        self,
        *args: Any,
        monitor: Monitor,
        slices: Sequence[str] | Mapping[str, str] = (),
        score_share: float = 1.0,
        **kwargs: Any,
    ) -> None:
        _check_trl(self)
        _check_share(monitor, score_share)
        self.monitor, self.score_share = monitor, score_share
        self.slices = dict(
            slices if isinstance(slices, Mapping) else zip(slices, slices, strict=True)
        )
        self._batches, self._halt, self._scored = 0, False, 1.0
        super().__init__(*args, **kwargs)
        if not self.use_vllm and self.rollout_func is None:
            raise _no_logprobs(self, nan=False)  # its batches have no sampler logprobs
        if self.accelerator.num_processes > 1:
            monitor.across(gathered)
        self.add_callback(_watcher(self))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        if self.model.training:  # an evaluation has no gradient
            step = self._observe(inputs, out)
            self._batches += 1
            self._halt = self._halt or self._anywhere("halt" in step.action)
            share = {"share": self._scored} if self.score_share < 1 else {}
            for name, value in {**step.metrics, **share, "active": 1.0}.items():
                name = name if name.startswith(PREFIX) else PREFIX + name
                self._metrics["train"][name].append(float(value))
            self._act(out, step)
        return out

    def _observe(self, inputs: Sequence[Mapping[str, Any]], out: Mapping[str, Any]) -> Step:
        """Judge a batch and apply the contract's actions."""
        sampled_BT, mask_BT = out.get("sampling_per_token_logps"), _loss_mask(out)
        usable = sampled_BT is not None and bool((~sampled_BT.isnan() & mask_BT.bool()).any())
        if not self._anywhere(usable) and self._anywhere(bool(mask_BT.any())):
            raise _no_logprobs(self, nan=sampled_BT is not None)
        try:
            labels = {name: _column(inputs, column) for name, column in self.slices.items()}
        except EvidenceError as error:
            self.monitor.refuse(error)
            raise
        old_BT, self._scored = out.get("old_per_token_logps"), 1.0
        if old_BT is None:  # on policy, TRL does not compute them
            rows_B = _rows(len(mask_BT), self.score_share, int(self.state.global_step))
            self._scored = float(rows_B.mean())
            old_BT = self._score(out, rows_B)
            mask_BT = mask_BT * mask_BT.new_tensor(rows_B)[:, None]
        if sampled_BT is None:
            sampled_BT = old_BT.new_full(old_BT.shape, float("nan"))
        return self.monitor.observe(
            old_BT,
            sampled_BT,
            mask_BT,
            groups=_groups(out),
            labels=labels,
            advantages=out["advantages"],
            weights=int(self.state.global_step),
            tokens=out["completion_ids"],
        )

    def _score(self, out: Mapping[str, Any], rows_B: NDArray[np.bool_]) -> Any:
        """The trainer's logprobs before its update of the completions of some rows, [B, T]."""
        import torch

        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        attended = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        forward = {name: out[name] for name in _FORWARD if name in out}
        at = torch.as_tensor(rows_B if not forward else np.ones_like(rows_B), device=ids.device)
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
        return logp_BT

    def _act(self, out: dict[str, Any], step: Step) -> None:
        import torch

        if not {"correct", "mask"} & {*step.action}:
            return
        mask_BT = _loss_mask(out)
        weight_BT = torch.as_tensor(step.token_weights).to(mask_BT.device, torch.float32)
        if "mask" in step.action:
            # not the completion mask, which is also the attention mask
            trained_BT = (weight_BT > 0).to(mask_BT.dtype)
            out["tool_mask"] = out.get("tool_mask", torch.ones_like(mask_BT)) * trained_BT
            out["num_items_in_batch"] = self.accelerator.gather(_loss_mask(out).sum()).sum()
        if "correct" in step.action:
            if self.loss_type == "vespo":  # it multiplies the weights of a row, including padding
                weight_BT = weight_BT.where(_loss_mask(out).bool(), 1.0)
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
            if trainer._halt:
                control.should_training_stop = True

    return Watcher()


def _check_trl(trainer: Any) -> None:
    """Refuse a TRL whose trainer differs from the mixin's assumptions."""
    for name in ("_generate_and_score_completions", "_get_per_token_logps_and_entropies"):
        if not hasattr(super(Monitored, trainer), name):
            try:
                has = f"TRL {version('trl')}"
            except PackageNotFoundError:
                has = "this trainer"
            raise MeasurementError(
                f"{has} has no GRPOTrainer.{name}: the monitor would see no batch",
                hint="Servanda supports TRL 1.16 (1.8 works too); pip install -U trl",
            )


def _check_share(monitor: Monitor, share: float) -> None:
    """Refuse to score a share if the contract weights or excludes single tokens."""
    if not 0 < share <= 1:
        raise ContractError(
            f"score_share is {share!r}", hint="a share of the sequences of a batch, such as 0.1"
        )
    acts = sorted({"correct", "mask"} & actions.named(monitor.contract))
    if share < 1 and acts:
        raise ContractError(
            f"the contract says {' and '.join(acts)}, which needs every token, and "
            f"score_share={share:g} scores a share of them",
            hint="leave out score_share, or use a contract that only judges",
        )


def _rows(size: int, share: float, step: int) -> NDArray[np.bool_]:
    """The scored rows of a batch: decided by the step, before any data is examined."""
    order = np.random.Generator(np.random.Philox(key=step)).permutation(size)
    return order < max(1, math.ceil(share * size))


def _no_logprobs(trainer: Any, nan: bool) -> MeasurementError:
    if nan:
        return MeasurementError(
            "every logprob of the sampler is NaN: nothing can be compared",
            hint="find out why the engine scores its own tokens as NaN; start a server with "
            "--logprobs-mode processed_logprobs",
        )
    if trainer.rollout_func is not None:
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
        hint="set use_vllm=True, or rollout_func=servanda.rl.trl.rollouts(engine)",
    )


def _loss_mask(out: Mapping[str, Any]) -> Any:
    """1 if the trainer learns from a token, [B, T]."""
    mask_BT = out["completion_mask"]
    return mask_BT * out["tool_mask"] if "tool_mask" in out else mask_BT


def _groups(out: Mapping[str, Any]) -> list[str]:
    """The prompt of each sequence, [B], as a digest of its ids, equal on every rank."""
    ids_BP, there_BP = (out[name].cpu().numpy() for name in ("prompt_ids", "prompt_mask"))
    rows = (ids[there == 1] for ids, there in zip(ids_BP, there_BP, strict=True))
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """A column of a batch, as texts; "" if missing in a row."""
    if not any(name in row for row in rows):
        raise EvidenceError(
            f"no row of the batch has the column {name!r} that slices= names",
            hint=f"the data set has the columns {', '.join(sorted(rows[0]))}" if rows else "",
        )
    return ["" if row.get(name) is None else str(row[name]) for row in rows]


def gathered(value: Any) -> list[Any]:
    """Gather the objects of all ranks of accelerate, in order: a monitor's `gather`."""
    from accelerate.utils import gather_object  # type: ignore[import-not-found]

    return gather_object([value])
