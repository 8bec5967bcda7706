# Run by the Python of TRL: drills of real GRPO trainers, each with a sync of SYNC_FAULTS.  Prints
# one JSON line for each.
#
#     python trl_drills.py FAULT ...
#
# A FAULT is "none", "none, LoRA", NAME or "NAME VALUE".

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.sync_matrix import of_preflight
from trl_runs import (
    KERNEL,
    LORA,
    SYNC_FAULTS,
    WeightSync,
    made,
    open_engine,
    parse_kernel,
    preflight,
    rollouts,
)

from servanda.rl.sync_drill.vocabulary import drawn

# few tokens: what is asked is whether a fault has its name, not how small a one has
TOKENS = drawn(1024, [], 6, 25, seed=3)


def drilled(fault):
    name, _, value = fault.partition(" ")
    engine = open_engine(parse_kernel(KERNEL, engines=["transformers"]))
    lora = LORA if "LoRA" in fault or name.startswith("adapter") else None
    trainer = made(peft=lora, rollout_func=rollouts(engine))
    if name in SYNC_FAULTS:
        entry = SYNC_FAULTS[name]
        given = type(entry.default)(value) if value else entry.default
        trainer.rollout_func._sync = entry.inject(WeightSync, given)(trainer.model, engine)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    found = preflight(trainer, tokens=TOKENS)
    now = dict(trainer.model.named_parameters())
    return of_preflight(found, all(bool((now[n] == p).all()) for n, p in before.items()))


if __name__ == "__main__":
    for one in sys.argv[1:]:
        print("\n" + json.dumps({"fault": one, **drilled(one)}), flush=True)
