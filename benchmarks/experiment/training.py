# One run: roll out, measure, weight, update, sync; at checkpoints the true bias.

from __future__ import annotations

import dataclasses
import platform
import time
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

import servanda
from benchmarks.experiment import grpo, sums, truth
from benchmarks.experiment.policy import logprobs_of, mask_of, open_policy
from benchmarks.experiment.record import Run, name_of
from benchmarks.experiment.rollout import Rollout, open_infer, roll_out, sync_of
from benchmarks.experiment.settings import MODEL, Settings
from benchmarks.experiment.statistics import of_step
from benchmarks.experiment.tree import ModelSteps, grow
from benchmarks.experiment.watching import Followed, Watched, drill, entry
from benchmarks.experiment.weights import WEIGHTINGS
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.faults import FAULTS
from servanda.engines.weight_sync import WeightSync
from servanda.theory.sampling import seed_of

Floats = NDArray[np.float64]
LEAST, BREADTH = 5e-4, 32  # of the tree of a checkpoint: mass and breadth, see tree.grow


class Trained:
    """The state of a run."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.module = open_policy(MODEL, settings.adapter_rank, settings.seed)
        self.engine = open_infer(settings)
        self.sync = sync_of(settings.fault, self.module, self.engine)
        learned = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=settings.learning_rate, weight_decay=0.0)
        exact = Kernel(engine="transformers", model=MODEL, batch_size=settings.evaluated)
        self.exact = open_engine(exact)  # the trainer's own weights in float32
        self.exact_sync = WeightSync(self.module, self.exact)
        self.problems = sums.draw(settings.seed, "trained", settings.prompts, "train")
        self.unseen = sums.draw(settings.seed, "held out", settings.held_out, "heldout")

    def roll_out(self, step: int) -> Rollout:
        s = self.settings
        return roll_out(self.engine, self.problems, s.answers, seed_of(s.seed, "step", step), s)

    def evaluate(self) -> tuple[float, float]:
        """Mean reward on the run's own sums and on others; the same samples each time."""
        s, seed = self.settings, seed_of(self.settings.seed, "evaluation", 0)
        self.exact_sync()
        each = s.evaluated // s.prompts
        own = roll_out(self.exact, self.problems, each, seed, s)
        other = roll_out(self.exact, self.unseen, 1, seed, s)
        return float(own.reward_S.mean()), float(other.reward_S.mean())

    def checkpoint(self, step: int) -> dict[str, Any]:
        """The true bias at the weights of now, rollouts as the engine samples them."""
        s = self.settings
        problems = self.problems[: s.checkpoint_prompts]
        prompts = self.engine.encode([sums.prompt_of(problem, s.given) for problem in problems])

        def reward(prompt: int, answer: tuple[int, ...]) -> float:
            return sums.reward(problems[prompt], self.engine.decode([answer])[0])

        drawn_at = s.temperature
        if s.fault == "undisclosed_temperature":
            drawn_at = FAULTS[s.fault].default
        tree = grow(
            ModelSteps(self.module, s.temperature),
            ModelSteps(self.engine.model, drawn_at),
            prompts,
            reward,
            ends=self.engine.describe().eos,
            width=s.width,
            least=LEAST,
            breadth=BREADTH,
        )
        found = truth.checkpoint(tree, s.answers, self.module, prompts, s.temperature)
        return {"step": step, **found}


def train(settings: Settings) -> Run:
    """A run from the first step to the last, or to the step at which its arm halts it."""
    began = time.perf_counter()
    if settings.arm == "contract":
        return _drilled(settings, began)
    trained = Trained(settings)
    watched = Watched(stop=settings.arm == "monitor")
    followed = Followed(trained.module, trained.engine) if settings.arm == "none" else None
    follow = [followed.look(0)] if followed else []
    rows: list[dict[str, Any]] = []
    monitor: list[dict[str, Any]] = []
    evaluations: dict[str, list[Any]] = {"step": [], "trained": [], "held_out": []}
    checkpoints: list[dict[str, Any]] = []
    halted_at = None

    def evaluate(step: int) -> None:
        for name, value in zip(evaluations, (step, *trained.evaluate()), strict=True):
            evaluations[name].append(value)

    for step in range(settings.steps + 1):
        if step % settings.evaluate_every == 0 or step == settings.steps:
            evaluate(step)
        if step in settings.checkpoints:
            checkpoints.append(trained.checkpoint(step))
        if step == settings.steps:
            break
        row, looked, halted = _step(trained, watched, step)
        rows.append(row)
        monitor.append(looked)
        if halted:
            halted_at = step
            if evaluations["step"][-1] != step:
                evaluate(step)
            break
        if followed:
            follow.append(followed.look(step + 1))
    return Run(
        name=settings.name,
        settings=dataclasses.asdict(settings),
        versions=versions(),
        steps={name: [row[name] for row in rows] for name in rows[0]},
        evaluations=evaluations,
        monitor=monitor,
        follow=follow,
        halted_at=halted_at,
        checkpoints=checkpoints,
        seconds=time.perf_counter() - began,
    )


def as_unguarded(settings: Settings, unguarded: Run) -> Run | None:
    """The arm `monitor` without a new run, if no action was due in the arm `none`.

    The two are then the same run; None if an action was due.
    """
    if any(seen["action"] or seen["would"] for seen in unguarded.monitor):
        return None
    return Run(settings.name, dataclasses.asdict(settings), versions(), same_as=unguarded.name)


def _drilled(settings: Settings, began: float) -> Run:
    """The arm `contract`: a preflight sync test, and then a run of the arm `monitor`."""
    trained = Trained(settings)
    found = drill(trained.module, trained.sync, trained.engine, settings.seed)
    fault = "healthy" if found["refused"] else settings.fault
    return Run(
        name=settings.name,
        settings=dataclasses.asdict(settings),
        versions=versions(),
        same_as=name_of(fault, settings.engine, "monitor", settings.seed),
        preflight=found,
        seconds=time.perf_counter() - began,
    )


def _step(trained: Trained, watched: Watched, step: int) -> tuple[dict[str, Any], Any, bool]:
    """Roll out, evaluate the monitor, update, sync.

    Returns:
        values of `Run.steps`, an entry of `Run.monitor`, whether the run is halted.
    """
    s, began = trained.settings, time.perf_counter()
    rollout = trained.roll_out(step)
    logp_SW = logprobs_of(
        trained.module, rollout.prompts, rollout.answers, rollout.group_S, s.temperature
    )
    mask_SW = mask_of(rollout.answers).numpy()
    train_SW = logp_SW.detach().double().numpy()
    infer_SW = np.zeros_like(train_SW)
    infer_SW[mask_SW] = rollout.logp_N
    advantage_S = grpo.advantages(rollout.reward_S, rollout.group_S)
    looked = watched.look(rollout, train_SW, infer_SW, mask_SW, advantage_S, step)
    if s.arm == "monitor":
        weight_SW = looked.token_weights.astype(np.float64)
    else:
        weight_SW = WEIGHTINGS[s.arm].weight(np.exp(train_SW - infer_SW))
        weight_SW = np.where(mask_SW, weight_SW, 0.0)
    loss = grpo.loss_of(logp_SW, advantage_S, weight_SW, s.width)
    trained.optimizer.zero_grad()
    loss.backward()
    halted = "halt" in looked.action
    if not halted:
        for group in trained.optimizer.param_groups:
            group["lr"] = s.learning_rate * min(1.0, (step + 1) / s.warmup)
        trained.optimizer.step()
        trained.sync()
    row = {
        "step": step,
        "reward_mean": float(rollout.reward_S.mean()),
        "groups_mixed": grpo.mixed_share(rollout.reward_S, rollout.group_S),
        "entropy_nats": float(rollout.entropy_N.mean()),
        "loss": float(loss.detach()),
        "grad_norm": _grad_norm(trained.optimizer),
        "tokens": int(mask_SW.sum()),
        "sequences": len(rollout.answers),
        "weight_mean": float(weight_SW[mask_SW].mean()),
        "weight_zero": float((weight_SW[mask_SW] == 0).mean()),
        **of_step(train_SW[mask_SW], rollout.logp_N, rollout.length_S),
        "seconds": time.perf_counter() - began,
    }
    return row, entry(looked, cells=s.arm in ("none", "monitor")), halted


def _grad_norm(optimizer: torch.optim.Optimizer) -> float:
    squares = [
        float((p.grad**2).sum())
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    return float(np.sqrt(sum(squares)))


def versions() -> dict[str, str]:
    return {
        "servanda": servanda.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
