# TRL: is this version supported, what it knows of its engine, and what RLOO drops of it.
#
# Axes: B sequences of this rank, T tokens of a completion.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.clauses.loss_checks import declared_text
from servanda.rl.monitor.batch import SHARE
from servanda.rl.monitor.statistics import limited
from servanda.rl.monitor.step import named_actions
from servanda.rl.package_version import built, check_version, installed
from servanda.rl.trl_engine import Rollouts
from servanda.theory.stats.tally import mixed

if TYPE_CHECKING:
    from servanda.rl.monitor.monitor import Monitor


# TRL: which of a batch's sequences are scored, and how its columns are read.
#
# Axes: B sequences of this rank, T tokens of a completion, R rows of a part of them.


class Waiting:
    """A generation whose logprobs are computed by the losses of its parts.

    Args:
        given: the other arguments of the monitor.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.logp_BT: Any = None
        self.seen_B = np.zeros(len(given["mask_BT"]), dtype=bool)

    @property
    def complete(self) -> bool:
        return bool(self.seen_B.all())

    def add(self, rows: Any, logp_RT: Any) -> None:
        """Keep the logprobs of some rows, [R, T]."""
        if self.logp_BT is None:
            shape = (len(self.seen_B), logp_RT.shape[1])
            self.logp_BT = logp_RT.new_full(shape, float("nan"))
        self.logp_BT[rows] = logp_RT
        self.seen_B[rows.cpu().numpy()] = True


def share_of(monitor: Monitor, share: float | None) -> float | None:
    """The share of sequences that is scored in a forward pass of its own; None: that of the loss.

    Raises:
        ContractError: a share below 1 of a contract that corrects tokens; or no share at all.
    """
    named = named_actions(monitor.contract)
    if share is None:
        if "correct" in named:
            return 1.0
        return SHARE if "mask" in named else None
    if not 0 < share <= 1:
        raise ContractError(
            f"score_share is {share!r}", hint="a share of the sequences of a batch, such as 0.1"
        )
    if share < 1 and "correct" in named:
        raise ContractError(
            f"the contract says correct, which needs every token, and score_share={share:g} "
            "scores a share of them",
            hint="leave out score_share, or use a contract that does not correct",
        )
    return share


def rows_of(size: int, share: float, step: int) -> NDArray[np.bool_]:
    """The scored rows of a batch: decided by the step, before any data is examined."""
    order = np.random.Generator(np.random.Philox(key=step)).permutation(size)
    return order < max(1, int(share * size))


def whole_batch(out: Any) -> Any:
    """What TRL's trainer returned for a generation.

    Raises:
        MeasurementError: it is no batch of TRL's: ms-swift's trainer has the same method, and
            returns a list of micro-batches.
    """
    if isinstance(out, Mapping):
        return out
    raise MeasurementError(
        f"_generate_and_score_completions returned a {type(out).__name__}, and not TRL's batch: "
        "this GRPOTrainer is not TRL's (ms-swift's returns micro-batches)",
        hint="call Monitor.observe for each micro-batch, with its old_per_token_logps, "
        "rollout_per_token_logps and completion_mask (docs/how-to/monitor.md)",
    )


def loss_mask(out: Mapping[str, Any]) -> Any:
    """1 if the trainer learns from a token, [B, T]."""
    mask_BT = out["completion_mask"]
    return mask_BT * out["tool_mask"] if "tool_mask" in out else mask_BT


def tokens_of(out: Mapping[str, Any]) -> Any:
    """Prompts and completions, [B, P + T]; -1 is padding before a prompt."""
    import torch

    prompt_BP = out["prompt_ids"].masked_fill(out["prompt_mask"] != 1, -1)
    return torch.cat([prompt_BP, out["completion_ids"]], dim=1)


def weights_of(out: Mapping[str, Any], monitor: Monitor) -> Any:
    """TRL's importance weights, [B, 1] or [B, T].

    None if it has none, if the contract replaces them, or if it declares other ones in passing: a
    step is an error for its weights only where a clause is about them.
    """
    contract = monitor.contract
    if "correct" in named_actions(contract):
        return None
    if declared_text(contract) and not limited(contract):
        return None
    return out.get("importance_sampling_ratio")


def groups_of(out: Mapping[str, Any]) -> list[str]:
    """The prompt of each sequence, [B], as a digest of its ids, equal on every rank."""
    there_BP = out["prompt_mask"] == 1
    place_BP = there_BP.cumsum(dim=1)  # whatever the padding
    key_BP = mixed(mixed(out["prompt_ids"].long() + 1) + place_BP)
    return [str(key) for key in key_BP.masked_fill(~there_BP, 0).sum(dim=1).tolist()]


def column_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """A column of a batch, as texts; "" if missing in a row."""
    if not any(name in row for row in rows):
        raise EvidenceError(
            f"no row of the batch has the column {name!r} that slices= names",
            hint=f"the data set has the columns {', '.join(sorted(rows[0]))}" if rows else "",
        )
    return ["" if row.get(name) is None else str(row[name]) for row in rows]


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
