# Run by the Python of verl: `fit` of its legacy, one-step-off and fully asynchronous trainers, each
# with its own configuration, log and advantages, without Ray.
#
#     python verl_fits.py CONTRACT CALLS
#
# The rollout returns recorded responses, and the actor recorded logprobs, in micro-batches as
# verl's engine makes them; no weight is updated.  Prints one JSON line: scenario -> what came of
# it.

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

PROMPT = 3  # tokens of every prompt; the first names the sequence
GROUP, RANKS, MICRO = 4, 2, 4
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
FULLY_NEEDS = [
    "actor_rollout_ref.hybrid_engine=False",
    "async_training.trigger_parameter_sync_step=2",
]
COMMON = [
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.total_epochs=1",
    "trainer.logger=[file]",
    "algorithm.adv_estimator=grpo",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]


class Actor:
    """Scores what verl dispatches as its workers would: by rank, in micro-batches."""

    def __init__(self, logp_BT):
        self.logp_BT, self.asked, self.saved = logp_BT, [], 0
        self._dispatch_info = {}

    def _query_dispatch_info(self, role):
        assert role == "actor"
        return [*range(RANKS)]

    def save_model_to_cpu(self, number):
        self.saved += 1

    restore_model_from_cpu = clear_cpu_model = lambda *_: None

    def compute_log_prob(self, data):
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.utils import prepare_micro_batches

        for part in tu.chunk_tensordict(data, RANKS):
            defaults = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": MICRO}
            missing = {k: v for k, v in defaults.items() if k not in part.keys()}  # noqa: SIM118
            tu.assign_non_tensor(part, **missing)
            prepare_micro_batches(part)
        rows = [int(ids[0]) for ids in data["input_ids"].unbind()]
        self.asked.append(rows)
        pad = torch.zeros(1)
        logp = [torch.cat([pad.repeat(PROMPT - 1), self.logp_BT[row], pad]) for row in rows]
        nested = torch.nested.as_nested_tensor(logp, layout=torch.jagged)
        return tu.get_tensordict(
            {"log_probs": nested, "entropy": nested.clone()}, {"metrics": {"mfu": 0.0}}
        )

    def update_actor(self, data):
        from verl.utils import tensordict_utils as tu

        return tu.get_tensordict(
            {}, {"metrics": {"mfu": 0.0, "pg_loss": [0.5], "grad_norm": [1.0]}}
        )


def responses(given, logprobs):
    """A DataProto of what the rollout returns for the recorded prompts."""
    from verl import DataProto

    size = len(given["responses"])
    prompts = torch.tensor([[row, 7, 7] for row in range(size)])
    answers = torch.tensor(given["responses"])
    ids = torch.cat([prompts, answers], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": answers,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1]).repeat(size, 1),
        "response_mask": torch.ones_like(answers),
        "rm_scores": torch.arange(size)[:, None].float() * (torch.arange(answers.shape[1]) == 0),
    }
    if logprobs:
        tensors["rollout_log_probs"] = torch.tensor(given["rollout_log_probs"])
    columns = {
        "multi_modal_inputs": [{}] * size,
        "min_global_steps": [2] * size,
        "max_global_steps": [2 + row % 2 for row in range(size)],
    }
    non_tensors = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return DataProto.from_dict(tensors, non_tensors, {"timing": {}})


def members(given, actor, logprobs):
    """What a trainer has after `init_workers`, as far as a step needs it."""
    size = len(given["responses"]) // GROUP
    prompt = {"raw": torch.zeros(size), "data_source": np.array(["gsm8k"] * size, dtype=object)}
    nothing = lambda *_, **__: None  # noqa: E731
    return {
        "actor_rollout_wg": actor,
        "async_rollout_manager": SimpleNamespace(
            generate_sequences=lambda _: responses(given, logprobs)
        ),
        "checkpoint_manager": SimpleNamespace(update_weights=nothing, sleep_replicas=nothing),
        "resource_pool_manager": SimpleNamespace(get_n_gpus=lambda: RANKS),
        "train_dataloader": [prompt, prompt],
        "train_dataset": None,
        "total_training_steps": 2,
        "use_rm": False,
        "use_critic": False,
        "use_reference_policy": False,
        "use_prefix_grouper": False,
        "_dump_executor": SimpleNamespace(_shutdown=False, shutdown=nothing),
        "_dump_futures": [],
        "is_last_step": False,
        "epoch": 0,
        "timing_raw": {},
        "metrics": {},
    }


def legacy(config, has, given, logprobs):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = object.__new__(RayPPOTrainer)
    vars(trainer).update(has, config=config)
    trainer.fit()


def one_step_off(config, has, given, logprobs):
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    async def generate_sequences(_):
        return responses(given, logprobs)

    trainer = object.__new__(OneStepOffRayTrainer)
    manager = SimpleNamespace(generate_sequences=generate_sequences)
    vars(trainer).update(has, config=config, async_rollout_manager=manager)
    asyncio.run(trainer.fit())


def fully_async(config, has, given, logprobs):
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer

    class Trainer(FullyAsyncTrainer.__ray_metadata__.modified_class):
        left = 4

        async def _get_samples_from_queue(self):
            self.left -= 1
            batch = responses(given, logprobs)
            groups = [str(row // GROUP) for row in range(len(batch))]
            batch.non_tensor_batch["uid"] = np.array(groups, dtype=object)
            batch.meta_info["trajectory_param_versions"] = [2] * len(batch)
            batch.meta_info["global_token_num"] = [1] * len(batch)
            return (0, batch) if self.left >= 0 else (None, None)

        async def _fit_update_weights(self):  # the other side of a sync is another process
            return {} if self.local_trigger_step == 1 else None

    trainer = Trainer(config, None, {}, None, device_name="cpu")
    queue = SimpleNamespace(get_queue_size_sync=lambda: 0)
    bar = SimpleNamespace(update=lambda _: None, close=lambda: None)
    has = {name: value for name, value in has.items() if name != "total_training_steps"}
    vars(trainer).update(has, message_queue_client=queue, rollouter=True, progress_bar=bar)
    asyncio.run(trainer.fit())


def run(contract, calls, fit, main, *overrides, recompute, logprobs):
    """Two steps of a trainer, or four of the fully asynchronous one."""
    from servanda.rl import Monitor
    from servanda.rl import verl as plugin
    from servanda.rl.verl_coverage import _composed

    given = {name.removeprefix("given/"): calls[name] for name in calls if "given/" in name}
    watch = plugin.install()
    vars(watch).clear()  # each scenario begins anew
    asked = Namespace(config_name=None, config_path=None, overrides=[*COMMON, *overrides])
    config = _composed(main, asked)
    actor = Actor(torch.tensor(given["old_log_probs"]))
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.jsonl"
        watch.__init__(Monitor(contract, state=str(state)), recompute)
        os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/log.jsonl"
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            fit(config, members(given, actor, logprobs), given, logprobs)
        log = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
        lines = state.read_text().splitlines() if state.exists() else []
    metrics = [line["data"] for line in log if "actor/pg_loss" in line["data"]]
    said = [line for line in said.getvalue().splitlines() if "\r" not in line]
    return {
        "metrics": metrics,
        "asked": actor.asked,
        "saved": actor.saved,
        "steps": [json.loads(line)["step"] for line in lines],
        "said": "\n".join(said),
    }


def main(contract, path):
    calls = dict(np.load(path))
    old, ppo = "trainer.use_v1=False", "verl.trainer.main_ppo"
    bypass = [f"algorithm.rollout_correction.bypass_mode={on}" for on in (False, True)]
    scenarios = {
        "legacy": (legacy, ppo, old, bypass[1]),
        "legacy decoupled": (legacy, ppo, old),
        "legacy silent": (legacy, ppo, old),
        "legacy unscored": (legacy, ppo, old, bypass[1]),
        "one_step_off": (one_step_off, ONE_STEP),
        "one_step_off decoupled": (one_step_off, ONE_STEP, bypass[0]),
        "one_step_off silent": (one_step_off, ONE_STEP, bypass[0]),
        "fully_async": (fully_async, FULLY, *FULLY_NEEDS),
        "fully_async decoupled": (fully_async, FULLY, *FULLY_NEEDS, bypass[0]),
        "fully_async silent": (fully_async, FULLY, *FULLY_NEEDS, bypass[0]),
    }
    found = {}
    for name, (fit, *arguments) in scenarios.items():
        share = 0.0 if name.endswith("unscored") else 0.25
        logprobs = not name.endswith("silent")
        found[name] = run(contract, calls, fit, *arguments, recompute=share, logprobs=logprobs)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3])
