# Run by the Python of TRL on each of two ranks: torchrun --nproc-per-node 2 trl_ranks.py CONTRACT
#
# One rank's sampler is far off, so the contract says halt; both have to hear it.

import json
import os
import sys

from trl_runs import KERNEL, Monitor, Trainer, made, rollouts

RANK = int(os.environ["RANK"])


class Off(Trainer):
    def _judged(self, logp_train_BT, given):
        return super()._judged(logp_train_BT - (6.0 if RANK else 0.0), given)


trainer = made(
    Off,
    out=f"runs/{RANK}",
    monitor=Monitor(sys.argv[1], stop=True),
    rollout_func=rollouts(KERNEL),
)
trainer.train()
found = next(entry for entry in trainer.state.log_history if "servanda/active" in entry)
tokens = found["servanda/observed_tokens"]
with open(f"{sys.argv[2]}/{RANK}.json", "w") as file:
    json.dump({"steps": trainer.state.global_step, "tokens": tokens}, file)
