# Sharded trainers of several kinds, and drills of them that one rank stops.

import copy
import os
import signal
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from servanda import rl
from servanda.errors import Interrupted, MeasurementError
from servanda.rl.sync_drill.drill import preflight, restore
from servanda.rl.sync_drill.trainee import Trainee
from servanda.rl.sync_drill.vocabulary import drawn
from tests.rl.sharded_faults import TOKENS, Engine, Small, all_but, local_bits, sharded, trainee


class Adapted(nn.Module):
    """A linear layer with an adapter at its start."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False).to(base.weight)
        self.lora_B = nn.Linear(2, base.out_features, bias=False).to(base.weight)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def lora():
    module = Small().requires_grad_(False)
    for layer in module.layers:
        layer.attn = Adapted(layer.attn)
    return module


def frozen():
    module = Small()
    module.embed.requires_grad_(False)
    return module


def mixed(module):
    """Float32 parameters, and a forward pass in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def parallel(module, mesh=None):
    """The MLPs by tensor parallelism: columns and rows; all else whole on every rank."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in module.layers:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, plan)
    return module


def both(module):
    """FSDP2 over pairs of ranks, and tensor parallelism within each."""
    mesh = init_device_mesh(
        "cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("d", "t")
    )
    return sharded(parallel(module, mesh["t"]), mesh["d"])


KINDS = {  # kind -> (a whole module, how it is sharded, the type in which the engine computes)
    "bfloat16": (lambda: Small().bfloat16(), sharded, torch.bfloat16),
    "mixed precision": (lambda: Small().float(), mixed, torch.bfloat16),
    "adapters": (lora, sharded, torch.float64),
    "frozen": (frozen, sharded, torch.float64),
    "tensor parallel": (Small, parallel, torch.float64),
    "both": (Small, both, torch.float64),
}


def subject(kind, take):
    made, shard, dtype = KINDS[kind]
    module = made()
    whole = copy.deepcopy(module).to(dtype)
    module = shard(module)
    engine = Engine(module, whole, take)
    return Trainee(module, engine.sync, engine.score, TOKENS)


def drilled(kind, *lost):
    """(result, whether every bit is back) of a kind, without tensors of some names."""
    drill = subject(kind, all_but(*lost))
    before = local_bits(drill.module)
    return preflight(drill), local_bits(drill.module) == before


def stopped(rank, how, at, journal=None, timeout_s=300.0):
    """(error, text, whether every bit is back) of a drill that one rank stops in a sync, or all."""
    drill, _ = trainee("healthy")
    before, syncs = local_bits(drill.module), 0
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def sync():
        nonlocal syncs
        syncs += 1
        mine = syncs == at and rank in (None, distributed.get_rank())
        if mine and how == "alone":
            raise ValueError("alone in a collective")
        if mine and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        drill.sync()
        if mine and how == "raises":
            raise ValueError("not this time")
        if mine and how in ("SIGINT", "SIGTERM"):
            signal.raise_signal(getattr(signal, how))

    try:
        preflight(
            Trainee(drill.module, sync, drill.score, TOKENS), journal=journal, timeout_s=timeout_s
        )
    except (Interrupted, MeasurementError) as error:
        return type(error).__name__, str(error), local_bits(drill.module) == before, heard
    return "", "", local_bits(drill.module) == before, heard


def restored(journal):
    """(whether the weights are those of the journal, number of syncs), or the error."""
    drill, _ = trainee("healthy")
    before = local_bits(drill.module)
    syncs = []
    with torch.no_grad():
        for parameter in drill.module.parameters():
            parameter.to_local().add_(1.0)
    assert local_bits(drill.module) != before
    try:
        restore(Trainee(drill.module, lambda: syncs.append(1), drill.score), journal)
    except MeasurementError as error:
        return str(error)
    left = [path.name for path in Path(journal).parent.iterdir()]
    distributed.barrier()
    return local_bits(drill.module) == before, len(syncs), [n for n in left if "-of-" not in n]


def streamed(lost):
    """Results of the stream alone and of the module behind it, without a tensor on rank 0."""
    drill, engine = trainee("healthy")
    before = local_bits(drill.module)

    def pairs():
        for name, parameter in drill.module.named_parameters():
            yield name, parameter.detach().full_tensor()

    def load(sent):
        mine = engine.model.state_dict() if engine.rank == 0 else {}
        for name, tensor in sent:
            if name in mine and name != lost:
                mine[name].copy_(tensor)

    stream = rl.Stream(pairs, load)
    alone = rl.preflight(stream, score=drill.score, tokens=TOKENS, each="tensor")
    module = rl.preflight(rl.Trainee.from_fsdp(drill.module, stream, drill.score, TOKENS))
    assert local_bits(drill.module) == before
    return alone, module


def fsdp1():
    """The error of a drill of a trainer that FSDP1 shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(Small(tied=False), device_id=torch.device("cpu"))
    try:
        preflight(Trainee(module, lambda: None, lambda rows: rows, TOKENS))
    except MeasurementError as error:
        return str(error)
    return ""


def shipped(*lost):
    """A drill of a shipped model that FSDP2 shards, and of an engine in bfloat16 on rank 0."""
    from torch.distributed.fsdp import fully_shard

    from tests.trainers import KINDS as MODEL_KINDS
    from tests.trainers import MODELS, open_engine, score, trainer

    module = trainer("llama", moved=0.0)
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    first = distributed.get_rank() == 0
    engine = open_engine(MODELS / MODEL_KINDS["llama"][0], "bfloat16") if first else None

    def pairs():
        for name, parameter in module.named_parameters():
            yield name, parameter.detach().full_tensor()

    def load(sent):
        if engine is None:
            for _ in sent:
                pass
        else:
            engine.load((n, t.bfloat16()) for n, t in sent if not any(part in n for part in lost))

    before = local_bits(module)
    stream = rl.Stream(pairs, load)
    tokens = drawn(1024, [], 6, 25, seed=3)
    drill = rl.Trainee.from_fsdp(module, stream, lambda rows: score(engine, rows), tokens)
    return preflight(drill), local_bits(module) == before
