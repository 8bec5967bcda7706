# Records what the trainers really pass around, for tests that run without them.
#
#     .venvs/trl/bin/python scripts/record_trainer_calls.py trl
#     .venvs/verl/bin/python scripts/record_trainer_calls.py verl
#
# trl writes tests/data/trl_calls.npz: batches of a real GRPOTrainer on models/tiny-lm, whose
# rollouts an engine in bfloat16 draws.  "engine": as TRL returns them without vLLM.  "vllm": by
# the code that TRL runs with vLLM, so with its importance ratio.  "environment": with tokens
# that no policy drew.
# verl writes tests/data/verl_calls.npz: what its own functions make of the second of them.

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
MODEL = str(ROOT / "models" / "tiny-lm")
STEPS = 2
THRESHOLD, BAND = 1.02, "0.98_1.02"  # that verl's functions do something to


def trl_calls(kind):
    """The batches of a short run: what came of each call, and what it was given."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    from servanda.rl.trl import rollouts

    calls = []

    class Recorder(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            calls.append((self.state.global_step, [{**row} for row in inputs], {**out}))
            if "old_per_token_logps" not in out:
                ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
                seen = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
                width = out["completion_ids"].shape[1]
                with torch.no_grad():
                    logps = self._get_per_token_logps_and_entropies(self.model, ids, seen, width)
                calls[-1][2]["scored"] = logps[0]
            return out

    draws = rollouts(f"transformers:{MODEL}@bfloat16")

    def with_environment(prompts, trainer):
        found = draws(prompts, trainer)
        masks = [[int(t % 4 > 0) for t in range(len(ids))] for ids in found["completion_ids"]]
        return {**found, "env_mask": masks}

    data = load_dataset("json", data_files=str(ROOT / "data/prompts.jsonl"), split="train[:4]")
    trainer = Recorder(
        model=MODEL,
        args=GRPOConfig(
            output_dir=str(ROOT / "runs"),
            bf16=False,
            use_cpu=True,
            max_steps=STEPS,
            save_strategy="no",
            learning_rate=1e-4,
            max_completion_length=12,
            per_device_train_batch_size=16,
            num_generations=4,
        ),
        train_dataset=data.flatten(),
        reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
        rollout_func=with_environment if kind == "environment" else draws,
    )
    if kind == "vllm":
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.vllm_importance_sampling_mode = "token_truncate"
    trainer.train()
    return calls


def record_trl():
    arrays = {}
    for kind in ("engine", "vllm", "environment"):
        for number, (step, rows, out) in enumerate(trl_calls(kind)):
            place = f"{kind}/{number}"
            arrays[f"{place}/step"] = np.array(step)
            arrays[f"{place}/rows"] = np.array(json.dumps(rows))
            for name, value in out.items():
                arrays[f"{place}/out/{name}"] = value.detach().numpy()
    np.savez_compressed(DATA / "trl_calls.npz", **arrays)


def record_verl():
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.debug.metrics import calculate_debug_metrics

    trl = np.load(DATA / "trl_calls.npz")
    given = {
        "responses": trl["vllm/1/out/completion_ids"],
        "response_mask": trl["vllm/1/out/completion_mask"],
        "old_log_probs": trl["vllm/1/out/old_per_token_logps"],
        "rollout_log_probs": trl["vllm/1/out/sampling_per_token_logps"],
    }
    uid = np.array([str(s // 4) for s in range(len(given["responses"]))], dtype=object)
    data = DataProto.from_single_dict(
        {**{name: torch.tensor(values) for name, values in given.items()}, "uid": uid}
    )
    measured = calculate_debug_metrics(data)
    config = {
        "rollout_is": "token",
        "rollout_is_threshold": THRESHOLD,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": BAND,
    }
    corrected, told = compute_rollout_correction_and_add_to_batch(data, config)
    arrays = {f"given/{name}": values for name, values in given.items()}
    arrays["given/uid"] = uid.astype(str)
    arrays["measured"] = np.array(json.dumps(measured))
    arrays["told"] = np.array(json.dumps({k: float(v) for k, v in told.items()}))
    for name in ("response_mask", "rollout_is_weights"):
        arrays[f"corrected/{name}"] = corrected.batch[name].numpy()
    np.savez_compressed(DATA / "verl_calls.npz", **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trl": record_trl, "verl": record_verl}[sys.argv[1]]()
