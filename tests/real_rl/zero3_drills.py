# Run by the Python of TRL, on every rank: drills of a trainer that DeepSpeed's ZeRO-3 shards, each
# with a sync of sharded_faults.FAULTS.  Rank 0 prints one JSON line for each.
#
#     python -m torch.distributed.run --nproc-per-node N zero3_drills.py KIND FAULT ...

import copy
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch
from benchmarks.sync_matrix import of_preflight
from torch import distributed

from servanda import rl
from tests.rl.sharded_faults import FAULTS, TOKENS, Engine, Small, all_but

# small parameters stay gathered after a step, or none does, or all live on the host in bfloat16
KINDS = {
    "gathered": {"stage3_param_persistence_threshold": 100_000},
    "released": {"stage3_param_persistence_threshold": 0},
    "offloaded": {"offload_param": {"device": "cpu"}},
}


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

    def cut(self, tensor):
        """As ZeRO-3 cuts: the flattened tensor, padded, in equal parts."""
        size = -(-tensor.numel() // self.world)
        padded = tensor.new_zeros(size * self.world)
        padded[: tensor.numel()] = tensor.reshape(-1)
        return [part.clone() for part in padded.split(size)]

    def joined(self, parts, shape):
        return torch.cat(parts)[: shape.numel()].reshape(shape)


def trainer(kind, options):
    torch.manual_seed(0)
    module = Small(**options).float()
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


def same(module, before):
    """Whether every bit of all ranks is as before."""
    ranks = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, all(map(torch.equal, before, parts(module))))
    return all(ranks)


def drilled(kind, name):
    fault = FAULTS[name]
    engine, whole = trainer(kind, fault.options)
    stepped(engine)
    served = Gathering(engine.module, whole, all_but())
    served.sync()  # the engine begins with the trainer's weights
    served.take = fault.take
    before = parts(engine.module)
    found = rl.preflight(rl.Trainee.from_deepspeed(engine, served.sync, served.score, TOKENS))
    row = of_preflight(found, same(engine.module, before))
    stepped(engine)
    assert not same(engine.module, before), "training does not go on"
    return row


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    for one in sys.argv[2:]:
        line = {"fault": one, **drilled(sys.argv[1], one)}
        if distributed.get_rank() == 0:
            print("\n" + json.dumps(line), flush=True)
