# Run by the Python of TRL: a real AsyncGRPOTrainer on models/tiny-lm.  Prints one JSON line.
#
#     python trl_async_run.py CONTRACT ACTING FOLDER
#
# TRL's attention over packed rows is a kernel of Flash Attention 3, which no CPU has: its place is
# taken by the same attention in float32, segment by segment.  Rollouts come from an engine in
# bfloat16 in this process, which gets the trainer's weights through TRL's own weight stream.

# ruff: noqa: E402 - torch and TRL read the environment when they are imported

import json
import os
import queue
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")

import numpy as np
import torch

torch.set_num_threads(1)

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing, vllm_client
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import open_engine
from servanda.errors import ServandaError
from servanda.rl import Monitor
from servanda.rl.trl import MonitoredAsync
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

MODEL = str(Path(__file__).parents[2] / "models" / "tiny-lm")
PROMPTS = [[12, 7, 30, 5], [44, 9, 3]]
WIDTH = 6


class Varlen:
    """The attention of segments over their paths, aligned at their ends."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, *_, softmax_scale=None, **_more):
        outs = []
        repeat = q.shape[1] // k.shape[1]
        for i in range(len(cu_q) - 1):
            mine, keys, values = (
                x[a:b].float().transpose(0, 1)
                for x, (a, b) in (
                    (q, cu_q[i : i + 2]),
                    (k, cu_k[i : i + 2]),
                    (v, cu_k[i : i + 2]),
                )
            )
            keys, values = (x.repeat_interleave(repeat, 0) for x in (keys, values))
            n, m = mine.shape[1], keys.shape[1]
            causal = torch.arange(m)[None] <= torch.arange(m - n, m)[:, None]
            scale = softmax_scale or mine.shape[-1] ** -0.5
            logits = (mine @ keys.transpose(1, 2) * scale).masked_fill(~causal, -torch.inf)
            outs.append((logits.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(outs).to(q.dtype)


packing._flash_attn = lambda: Varlen  # called by TRL's tree_attention
vllm_client.is_requests_available = lambda: True  # no server is asked
torch.cuda.get_device_name = lambda _: "cpu"  # for a metric of utilisation


class Worker:
    """Samples two responses of each prompt whenever it has new weights, four versions ahead."""

    def __init__(self, late):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.engine = open_engine(
            parse_kernel(f"transformers:{MODEL}@bfloat16", engines=["transformers"])
        )
        self.version, self.late, self.groups = 1, late, 0

    def start(self):
        self._sample()

    def stop(self):
        pass

    def check_health(self, stale_after_s):
        self._sample()  # the trainer waits

    def update_model_version(self, model_version):
        self.version = model_version

    def _sample(self):
        prompts = [p for p in PROMPTS for _ in range(2)]
        batch = Batch(tuple(range(len(prompts))), tuple(map(tuple, prompts)), WIDTH)
        trace = self.engine.generate(batch, Sampling(), seed=self.groups)
        logps = np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])
        for i, (prompt, ids, logp) in enumerate(
            zip(prompts, trace.continuations, logps, strict=True)
        ):
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array([*prompt, *ids]),
                    completion_mask=np.array([0] * len(prompt) + [1] * len(ids)),
                    old_log_probs=np.array([0.0] * len(prompt) + list(logp)),
                    advantage=1.0 if i % 2 else -1.0,
                    model_version=max(1, self.version - self.late),
                    group_id=self.groups + i // 2,
                    metrics={"reward": 1.0},
                )
            )
        self.groups += 2


class Transfer:
    """TRL's weight stream into that engine."""

    def __init__(self, worker):
        self.worker = worker

    def send_weights(self, iterator):
        self.worker.engine.load(iterator)

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer


class Trainer(MonitoredAsync, AsyncGRPOTrainer): ...


def made(contract, state=None, late=0):
    worker = Worker(late)
    return Trainer(
        model=MODEL,
        args=AsyncGRPOConfig(
            "runs",
            bf16=False,
            use_cpu=True,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            token_budget=-1,
            learning_rate=1e-4,
            dtype="float32",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        rollout_worker=worker,
        weight_transfer=Transfer(worker),
        monitor=Monitor(contract, state=state),
    )


def main(contract, acting, folder):
    found = {}
    for name, late in (("fresh", 0), ("late", 2)):
        trainer = made(contract, Path(folder) / f"{name}.jsonl", late)
        trainer.train()
        found[name] = trainer.state.log_history
    try:
        made(acting)
    except ServandaError as error:
        found["acting"] = str(error)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
