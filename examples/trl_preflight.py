# Before a GRPO run of TRL: does what it trains reach the engine that draws its rollouts?
import sys

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from servanda.rl import preflight
from servanda.rl.trl import rollouts

trainer = GRPOTrainer(
    model="models/tiny-lm",
    args=GRPOConfig("runs/grpo", bf16=False, use_cpu=True),
    train_dataset=load_dataset("json", data_files="data/prompts.jsonl", split="train"),
    reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
    rollout_func=rollouts("transformers:models/tiny-lm@bfloat16"),
)
found = preflight(trainer)
print(found)
sys.exit(found.exit_code)
