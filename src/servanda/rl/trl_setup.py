# TRL: is this version supported, what it knows of its engine, and what RLOO drops of it.
#
# Axes: B sequences of this rank, T tokens of a completion.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from servanda.errors import ContractError, MeasurementError
from servanda.rl.monitor.step import named_actions
from servanda.rl.package_version import built, check_version, installed
from servanda.rl.trl_engine import Rollouts

if TYPE_CHECKING:
    from servanda.rl.monitor.monitor import Monitor

_SUPPORTED, TESTED = ((1, 8), (2, 0)), "1.16.0"
_METHODS = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


def check_trl(
    trainer: Any,
    mixin: type,
    methods: Sequence[str] = _METHODS,
    supported: str = "GRPOTrainer and RLOOTrainer",
) -> None:
    """Refuse a TRL, or a trainer of it, that differs from the mixin's assumptions.

    Args:
        methods: those that the mixin overrides.
        supported: the trainers that have them.

    Raises:
        MeasurementError: too old or too new a TRL, or a trainer without the methods.
    """
    if _is_trls(trainer):
        check_version("trl", "TRL", _SUPPORTED, TESTED)
    for name in methods:
        if not hasattr(super(mixin, trainer), name):
            has = f"TRL {installed('trl')}" if _is_trls(trainer) else "this trainer"
            raise MeasurementError(
                f"{has} has no {_kind(trainer)}.{name}: the monitor would see no batch",
                hint=f"Servanda supports {supported} of TRL {TESTED}",
            )


def check_tokens_kept(monitor: Monitor, why: str) -> None:
    """Refuse a contract that acts on tokens, where a trainer takes no changed batch.

    Args:
        why: the reason, a sentence.

    Raises:
        ContractError: the contract says `correct` or `mask`.
    """
    acting = sorted({"correct", "mask"} & named_actions(monitor.contract))
    if acting:
        raise ContractError(
            f"the contract says {acting[0]}, and {why}",
            hint=f"take {acting[0]} out of the contract, or train with GRPOTrainer",
        )


def labels_of(trainer: Any, size: int) -> dict[str, list[str]]:
    """What TRL knows of the engine and the rank of a generation; without unknown ones.

    Returns:
        rank: of data parallelism.  replica: the engine, where each is in a process of the trainer.
        engine: its name and version.  weight_version: the updates of the weights that it has.
    """
    rank = int(trainer.accelerator.process_index)
    known: dict[str, Any] = {"rank": rank}
    draws = getattr(trainer, "rollout_func", None)
    if isinstance(draws, Rollouts):
        known |= {"replica": rank, "engine": draws.build, "weight_version": draws.synced}
    elif draws is None and trainer.use_vllm:
        known["weight_version"] = getattr(trainer, "_last_loaded_step", None)
        if getattr(trainer, "vllm_mode", "") == "colocate":
            share = int(getattr(trainer, "vllm_tensor_parallel_size", 1))
            known |= {"replica": rank // share, "engine": built("vllm")}
    return {name: [str(value)] * size for name, value in known.items() if value not in (None, "")}


def gathered(value: Any) -> list[Any]:
    """Gather the objects of all ranks of accelerate, in order: a monitor's `gather`."""
    from accelerate.utils import gather_object  # type: ignore[import-not-found]

    return gather_object([value])


class Recorder:
    """Keeps the logprobs of a generation that RLOOTrainer computes and drops.

    RLOO asks its engine for the logprobs of sampled tokens and ignores them, and sums its own
    before the update over each response.

    Args:
        engine: TRL's VLLMGeneration; its `generate` is wrapped.
    """

    def __init__(self, engine: Any) -> None:
        self._sampled: list[list[list[float | None]]] | None = None
        self._scored: Any = None
        self._on = False
        inner = engine.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs)
            if self._on:
                self._sampled = found[2]
            return found

        engine.generate = generate

    def begin(self) -> None:
        self._sampled, self._scored, self._on = None, None, True

    def scored(self, logp_BT: Any) -> None:
        """Keep the first logprobs of a generation: the others are of the reference model."""
        if self._on and self._scored is None:
            self._scored = logp_BT

    def end(self, completion_BT: Any) -> tuple[Any, dict[str, Any]]:
        """The trainer's logprobs before its update, [B, T], and what GRPO has in its batch.

        Raises:
            MeasurementError: RLOO did not compute them.
        """
        self._on = False
        if self._scored is None:
            raise MeasurementError(
                "RLOOTrainer scored no generation: the monitor has no logprobs of the trainer",
                hint=f"Servanda supports TRL {TESTED}",
            )
        if self._sampled is None:
            return self._scored, {}
        sampled_BT = self._scored.new_full(completion_BT.shape, float("nan"))
        for row, logps in enumerate(self._sampled):
            own = [float("nan") if top[0] is None else top[0] for top in logps]
            sampled_BT[row, : len(own)] = sampled_BT.new_tensor(own)
        return self._scored, {"sampling_per_token_logps": sampled_BT}


def _is_trls(trainer: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)


def _kind(trainer: Any) -> str:
    """The class of TRL, or the trainer's own."""
    own = (k for k in type(trainer).__mro__ if k.__module__.partition(".")[0] == "trl")
    return next(own, type(trainer)).__name__
