# TRL: the engine of a trainer, and the test of its weight sync.
#
# A trainer with a separate engine copies its weights into it after an update.  The test uses the
# same sync as training: TRL's own into vLLM, or that of `rollouts`.

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names, open_engine
from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.theory.sampling import Sampling, seed_of
from servanda.traces.trace import Batch

if TYPE_CHECKING:
    from servanda.rl.sync_drill.report import Preflight
    from servanda.rl.sync_drill.trainee import Trainee

Rows = Sequence[Sequence[int]]
T = TypeVar("T")


class Rollouts:
    """Samples a trainer's rollouts with an engine of Servanda: TRL's `rollout_func`.

    The engine gets the trainer's weights before it samples, if they have changed, and returns the
    logprob with which each token was sampled.

    Args:
        engine: an engine that accepts weights, such as
            servanda.engines.transformers.TransformersEngine.
        sync: copies the weights into it; default: WeightSync of the trainer's module.
    """

    def __init__(self, engine: Any, sync: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self._sync = sync
        self._of: tuple[Any, Callable[[], None]] | None = None  # the last synced trainer
        self._synced: int | None = None
        self._calls = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        """Complete the prompts of a batch.

        Returns:
            prompt_ids, completion_ids and logprobs: one list per sequence.

        Raises:
            MeasurementError: prompts with images, or a penalty that the engine does not support.
        """
        if trainer.repetition_penalty != 1.0:
            raise MeasurementError(
                f"repetition_penalty is {trainer.repetition_penalty:g}, which rollouts(...) "
                "does not support",
                hint="leave it at 1, or sample with vLLM",
            )
        prompt_ids, images, _ = trainer._tokenize_prompts(list(prompts))
        if images is not None:
            raise MeasurementError(
                "the prompts have images, which rollouts(...) does not read", hint="use vLLM"
            )
        step, rank = trainer.state.global_step, trainer.accelerator.process_index
        sync = self.sync_of(trainer)
        if step != self._synced:
            sync()
            self._synced = step
        seed = seed_of(trainer.args.seed, f"rollouts|{step}|{rank}", self._calls)
        self._calls += 1
        batch = Batch(
            tuple(range(len(prompt_ids))),
            tuple(tuple(ids) for ids in prompt_ids),
            trainer.max_completion_length,
        )
        sampling = Sampling(
            temperature=trainer.temperature,
            top_k=trainer.top_k or None,
            top_p=trainer.top_p,
            min_p=trainer.min_p or 0.0,
        )
        trace = self.engine.generate(batch, sampling, seed)
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [list(ids) for ids in trace.continuations],
            "logprobs": [part.tolist() for part in _split(trace)],
        }

    def sync_of(self, trainer: Any) -> Callable[[], None]:
        """The function that copies the weights of a trainer into the engine."""
        if self._of is None or self._of[0] is not trainer:
            from servanda.engines.weight_sync import WeightSync

            self._of = (trainer, self._sync or WeightSync(module_of(trainer), self.engine))
            self._synced = None
        return self._of[1]

    @property
    def synced(self) -> int | None:
        """The trainer's step whose weights the engine has; None before the first sync."""
        return self._synced

    @property
    def build(self) -> str:
        """The engine's kernel string; "" if it has none."""
        kernel = getattr(self.engine, "kernel", None)
        return "" if kernel is None else str(kernel)

    def score(self, rows: Rows) -> list[np.ndarray]:
        """The engine's logprob of each token of a row except the first, at temperature 1, nats."""
        batch = Batch(
            tuple(range(len(rows))),
            tuple((row[0],) for row in rows),
            max(map(len, rows)) - 1,
            tuple(tuple(row[1:]) for row in rows),
        )
        return _split(self.engine.score(batch, Sampling(), "prefill"))  # type: ignore[call-arg]


def rollouts(engine: Any, sync: Callable[[], None] | None = None) -> Rollouts:
    """A `rollout_func` for GRPOTrainer: samples with an engine of Servanda, in this process.

    Args:
        engine: an engine that accepts weights, or its kernel string, such as
            transformers:models/tiny-lm@bfloat16.
        sync: see Rollouts.

    Raises:
        ContractError: an invalid kernel string, or an engine that does not accept weights.
    """
    if isinstance(engine, str):
        engine = open_engine(parse_kernel(engine, engines=engine_names(), name="engine"))
    if not hasattr(engine, "load"):
        raise ContractError(
            f"{_name(engine)} cannot take over a trainer's weights",
            hint="sample with transformers:MODEL@DTYPE",
        )
    return Rollouts(engine, sync)


def module_of(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def trainee(trainer: Any) -> Trainee:
    """A GRPOTrainer as a Trainee: its module, its sync, and the scores of its engine.

    Raises:
        ContractError: it has no separate engine, so there is no sync; or its rollout function does
            not define the sync of its engine.
    """
    from servanda.rl.sync_drill.trainee import Trainee

    draws = getattr(trainer, "rollout_func", None)
    if isinstance(draws, Rollouts):
        return Trainee(module_of(trainer), draws.sync_of(trainer), draws.score)
    if draws is not None:
        raise ContractError(
            f"rollout_func is {_name(draws)}, and Servanda does not know how its engine is synced",
            hint="call servanda.rl.preflight(trainer.model, sync=..., score=...), or sample with "
            "servanda.rl.trl.rollouts(engine)",
        )
    if not trainer.use_vllm:
        raise ContractError(
            "there is nothing to sync: TRL samples from the module that it trains (use_vllm=False)",
            hint="the sync test needs a trainer with an engine of its own: use_vllm=True, or "
            "rollout_func=servanda.rl.trl.rollouts(engine)",
        )
    vllm = trainer.vllm_generation
    return Trainee(module_of(trainer), vllm.sync_weights, lambda rows: _vllm_scores(vllm, rows))


def _vllm_scores(vllm: Any, rows: Rows) -> list[np.ndarray]:
    """vLLM's logprob of each token of a row except the first, in TRL's configuration."""
    ids = [list(row) for row in rows]
    if vllm.mode == "server":
        scores = vllm.vllm_client.get_sequence_logprobs(ids, [1] * len(ids), top_logprobs=0)
        return [np.array([logp for (logp,) in row]) for row in scores["actual_logprobs"]]
    from vllm import SamplingParams  # type: ignore[import-not-found]

    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": row} for row in ids]
    outputs = vllm.llm.generate(prompts, sampling_params=params, use_tqdm=False)
    return [
        np.array([at[t].logprob for at, t in zip(out.prompt_logprobs[1:], row[1:], strict=True)])
        for out, row in zip(outputs, ids, strict=True)
    ]


class _CameToTrain(BaseException):
    """A script has reached train; not caught by its own `except Exception`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


def drilled(path: str | Path, arguments: Sequence[str] = (), **options: Any) -> Preflight:
    """Run a training script up to GRPOTrainer.train, and test the weight sync instead of training.

    The script's code before that call is run; the code after it is not.

    Args:
        path: the script.
        arguments: its command line.
        options: arguments of `preflight`.

    Raises:
        ContractError: the script is not there, TRL is not installed, or train is never called.
        MeasurementError: the script failed before it reached train.
    """
    from servanda.rl.sync_drill.drill import preflight

    return instead_of_training(path, arguments, lambda target: preflight(target, **options))


def instead_of_training(
    path: str | Path, arguments: Sequence[str], call: Callable[[Trainee], T]
) -> T:
    """Run a script up to GRPOTrainer.train, and call a function with its trainee."""
    script = Path(path)
    if not script.is_file():
        raise ContractError(f"there is no file {script}", hint="pass the training script")
    try:
        base = import_module("trl").GRPOTrainer
    except ImportError:
        raise ContractError(
            "TRL is not installed here", hint="run it in the environment of the training script"
        ) from None
    with _replaced(base, call), _as_a_script(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _CameToTrain as done:
            return done.answer
        except ServandaError:
            raise
        except SystemExit as left:
            if left.code:
                raise MeasurementError(
                    f"{script} exited with {left.code!r} before it called train",
                    hint="run it alone first; its own arguments follow --, as in "
                    "servanda preflight --trl SCRIPT -- ARGS",
                ) from None
        except Exception as error:
            raise MeasurementError(
                f"{script} failed before it called train: {type(error).__name__}: {error}",
                hint="run it alone first",
            ) from error
    raise ContractError(
        f"{script} never calls GRPOTrainer.train",
        hint="pass the training script; run a script that calls preflight directly",
    )


@contextmanager
def _replaced(base: Any, call: Callable[[Trainee], Any]) -> Iterator[None]:
    """A class of trainers whose `train` is that call."""

    def train(self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise _CameToTrain(call(trainee(self)))

    own = base.__dict__.get("train")
    base.train = train
    try:
        yield
    finally:
        if own is None:
            del base.train
        else:
            base.train = own


@contextmanager
def _as_a_script(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set the command line and sys.path as for a script that Python runs."""
    argv, path = sys.argv, [*sys.path]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _name(what: Any) -> str:
    return getattr(what, "__name__", type(what).__name__)


def _split(trace: Any) -> list[np.ndarray]:
    return np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])
