# Recorded calls of TRL (scripts/record_trainer_calls.py), and a GRPOTrainer that gives them back.

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

PATH = Path(__file__).parents[2] / "data" / "trl_calls.npz"


class Call:
    """One call of _generate_and_score_completions: what it was given and what it returned."""

    def __init__(self, kind, number=1):
        with np.load(PATH) as file:
            place = f"{kind}/{number}/"
            self.step = int(file[f"{place}step"])
            self.rows = json.loads(str(file[f"{place}rows"]))
            self.out = {
                name.removeprefix(f"{place}out/"): file[name]
                for name in file.files
                if name.startswith(f"{place}out/")
            }
        self.scored = self.out.pop("scored", None)
        self.vllm = kind == "vllm"

    @property
    def logp_train_BT(self):
        return self.out["old_per_token_logps"] if self.scored is None else self.scored

    @property
    def mask_BT(self):
        return self.out["completion_mask"] * self.out.get("tool_mask", 1)

    @property
    def ratio_BT(self):
        sampled_BT = self.out["sampling_per_token_logps"].astype(np.float64)
        return np.exp(self.logp_train_BT.astype(np.float64) - sampled_BT)


class Trainer:
    """Stands in for GRPOTrainer: it has what the mixin reads, and returns a recorded call."""

    def __init__(self, call, **settings):
        self.call = call
        self.accelerator = SimpleNamespace(
            num_processes=1, process_index=0, is_main_process=True, gather=lambda value: value
        )
        self.model = SimpleNamespace(training=True)
        self.state = SimpleNamespace(global_step=call.step)
        self.args = SimpleNamespace(per_device_train_batch_size=16)
        self.use_vllm, self.rollout_func = call.vllm, None if call.vllm else print
        self.loss_type = "dapo"
        self.callbacks, self.asked = [], []
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        vars(self).update(settings)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def _generate_and_score_completions(self, inputs):
        import torch

        return {name: torch.tensor(values) for name, values in self.call.out.items()}

    def _get_per_token_logps_and_entropies(self, model, ids, attended, width, batch_size=None):
        import torch

        self.asked.append((ids.numpy(), attended.numpy(), width, batch_size))
        out = self.call.out
        whole = np.hstack([out["prompt_ids"], out["completion_ids"]])
        at = [int(np.flatnonzero((whole == row).all(axis=1))[0]) for row in ids.numpy()]
        return torch.tensor(self.call.scored[at], requires_grad=torch.is_grad_enabled()), None, None

    def _compute_loss(self, model, inputs):
        import torch

        ids, attended = (
            torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], dim=1)
            for of in ("ids", "mask")
        )
        width = inputs["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(model, ids, attended, width)[0].sum()

    def generate(self):
        """One batch, as TRL has it after the call."""
        return self._generate_and_score_completions([{**row} for row in self.call.rows])

    def learn(self, out, parts=2, of=None):
        """The losses of a generation, shuffled and in parts as TRL has it; returns the rows."""
        order = np.random.default_rng(0).permutation(len(out["completion_ids"]))
        for rows in np.array_split(order, parts)[:of]:
            self._compute_loss(self.model, {k: v[rows] if v.ndim else v for k, v in out.items()})
        return order

    def end_step(self):
        """What callbacks make of the end of a step."""
        control = SimpleNamespace(should_training_stop=False)
        for callback in self.callbacks:
            callback.on_step_end(self.args, self.state, control)
        return control
