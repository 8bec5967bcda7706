"""Preflight tests of a trainer that DeepSpeed's ZeRO-3 shards; every process runs this.

torchrun --nproc-per-node N zero3_drills.py OUT.json
"""

import copy
import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import distributed

from servanda import rl
from tests.rl.sharded_faults import TOKENS, Engine, Small, all_but


class Gathering(Engine):
    """The sync of trainers with ZeRO-3: it gathers one parameter at a time."""

    def sync(self):
        weights = {}
        for name, parameter in self.trainer.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if self.rank == 0:
                    weights[name] = parameter.detach().clone()
        if self.rank == 0:
            self.sent.append(weights)
            self.take(self)


def old_head(engine):
    """The tied head is left out: the engine has an old copy of it."""
    kept = engine.model.lm_head.weight.detach().clone()
    engine.load(engine.sent[-1])
    engine.model.lm_head.weight = torch.nn.Parameter(kept, requires_grad=False)


def without_last(engine):
    """The last rank's parts are left out, as ZeRO-3 cuts: flattened, padded, in equal parts."""
    mine = engine.model.state_dict()
    weights = dict(engine.sent[-1])
    for name, tensor in weights.items():
        flat, old = tensor.reshape(-1).clone(), mine[name].reshape(-1)
        first = -(-flat.numel() // engine.world) * (engine.world - 1)
        flat[first:] = old[first:]
        weights[name] = flat.view(tensor.shape)
    engine.load(weights)


FAULTS = {
    "healthy": all_but(),
    "never synced": all_but(""),
    "one MLP": all_but("layers.1.mlp"),
    "last rank": without_last,
    "old head": old_head,
}
# small parameters stay gathered after a step, or none does, or all live on the host in bfloat16
KINDS = {
    "gathered": {"stage3_param_persistence_threshold": 100_000},
    "released": {"stage3_param_persistence_threshold": 0},
    "offloaded": {"offload_param": {"device": "cpu"}},
}


def trainer(kind):
    torch.manual_seed(0)
    module = Small().float()
    whole = copy.deepcopy(module)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, **KINDS[kind]},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    if kind == "offloaded":
        config["bf16"], whole = {"enabled": True}, whole.bfloat16()
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config
    )
    return engine, whole


def parts(module):
    return [p.ds_tensor.detach().clone().view(torch.uint8) for p in module.parameters()]


def stepped(engine):
    """A step of training, after which small parameters stay gathered."""
    logits = engine(torch.tensor(TOKENS[:1]))
    engine.backward(logits.square().mean())
    engine.step()


def drilled(fault, kind):
    engine, whole = trainer(kind)
    stepped(engine)
    served = Gathering(engine.module, whole, all_but())
    served.sync()  # the engine begins with the trainer's weights
    served.take = FAULTS[fault]
    before = parts(engine.module)
    found = rl.preflight(rl.Trainee.from_deepspeed(engine, served.sync, served.score, TOKENS))
    same = all(map(torch.equal, before, parts(engine.module)))
    stepped(engine)  # training goes on
    moved = not all(map(torch.equal, before, parts(engine.module)))
    lost = {part for group in found.groups for part in group.lost if group.mark == "violated"}
    return {
        "outcome": found.outcome,
        "cause": found.cause,
        "lost": sorted(lost),
        "restored": same,
        "goes on": moved,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rows = [(fault, kind, drilled(fault, kind)) for kind in KINDS for fault in FAULTS]
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
