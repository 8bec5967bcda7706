# TRL: whether the engine of a GRPOTrainer follows its module, after the sync of a generation.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from servanda.rl.trl_engine import Rollouts, module_of, trainee

if TYPE_CHECKING:
    from servanda.rl.follow.follow import Follow
    from servanda.rl.follow.follow_step import FollowStep


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
        exact = all(p.dtype.itemsize >= 4 for p in module.parameters())
        self.follow = follow if isinstance(follow, Follow) else Follow(module, exact=exact)
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
    """The format that the engine rounds the weights to."""
    draws = getattr(trainer, "rollout_func", None)
    if isinstance(draws, Rollouts):
        return str(draws.engine.kernel.dtype)
    engine = getattr(trainer.vllm_generation, "llm", None)
    dtype = getattr(
        getattr(getattr(engine, "llm_engine", None), "model_config", None), "dtype", None
    )
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")
