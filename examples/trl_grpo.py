# A GRPO run of TRL that is held to examples/grpo.yaml: an engine in bfloat16 draws, with its
# logprobs, and the trainer learns in float32, each token weighed as the contract declares.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from servanda.rl import Monitor
from servanda.rl.trl import Monitored, rollouts


class Trainer(Monitored, GRPOTrainer): ...


Trainer(
    model="models/tiny-lm",
    args=GRPOConfig(
        "runs", bf16=False, logging_steps=1, max_completion_length=8, per_device_train_batch_size=64
    ),
    train_dataset=load_dataset(
        "json", data_files="data/prompts.jsonl", split="train[:8]"
    ).flatten(),
    reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
    rollout_func=rollouts("transformers:models/tiny-lm@bfloat16"),
    monitor=Monitor("examples/grpo.yaml", state="runs/steps.jsonl"),
    slices={"domain": "labels.domain"},
).train()
