# Faults of the weight sync of a trainer that FSDP2 shards over gloo processes, and drills of them.
#
# FAULTS has each with how it is put in and what a drill calls it; `drilled` runs some of them in
# processes of its own.  The trainer and its engine are float64, so what is deaf is exactly deaf.

import copy
import os
import pickle
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import distributed, multiprocessing, nn

from servanda.rl.sync_drill.drill import preflight
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs
from tests.rl.sync_drill.carried import TOY, carried
from tests.rl.sync_drill.toys import VOCABULARY, WIDTH, Toy

TOKENS = (
    np.random.default_rng(0).permutation(np.resize(np.arange(VOCABULARY), 6 * 13)).reshape(6, 13)
)


class Experts(nn.Module):
    """A mixture of all experts: of one tensor each, or stacked in one."""

    def __init__(self, stacked, count=3):
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.stacked = stacked
        if stacked:
            self.experts = nn.Module()
            weight = torch.randn(count, WIDTH, WIDTH) / WIDTH**0.5
            self.experts.up_proj = nn.Parameter(weight)
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(count)
            )

    def forward(self, x):
        share = self.router(x).softmax(-1)
        if self.stacked:
            each = [torch.tanh(x @ weight) for weight in self.experts.up_proj]
        else:
            each = [expert(x) for expert in self.experts]
        return (torch.stack(each, -1) * share[..., None, :]).sum(-1)


class Small(Toy):
    """A Toy with a tensor of three values, of which the last of four processes has none."""

    def __init__(self, experts="", **options):
        super().__init__(**options)
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        if experts:
            self.layers[0].mlp = Experts(experts == "stacked").double()

    def forward(self, ids):
        x = self.dropout(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x * self.gain.repeat(3)[:WIDTH])


class Engine:
    """On rank 0 a copy of the whole module; a sync gathers one tensor at a time."""

    def __init__(self, module, whole, take):
        self.trainer, self.take = module, take
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.model = whole.eval() if self.rank == 0 else None
        self.models = [self.model]
        self.sent = []

    @property
    def syncs(self):
        return len(self.sent)

    def sync(self):
        weights = {}
        for name, parameter in self.trainer.named_parameters():
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.rank == 0:
                weights[name] = tensor.clone()
        if self.rank == 0:
            self.sent.append(weights)
            self.take(self)

    def cut(self, tensor):
        """The shards of a tensor, of one rank each, as FSDP2 cuts."""
        return [part.clone() for part in tensor.chunk(self.world)]

    def joined(self, parts, shape):
        return torch.cat(parts).reshape(shape)

    def load(self, weights):
        mine = self.model.state_dict()
        for name, value in weights.items():
            mine[name].copy_(value)

    def score(self, rows):
        assert self.rank == 0, "the engine is on rank 0"
        return forward_logprobs(self.model, rows)


def shards(engine, changed):
    """The newest weights with the shards of each tensor, a list of one a rank, changed in place."""
    weights = {}
    for name, tensor in engine.sent[-1].items():
        parts = engine.cut(tensor)
        changed(name, parts)
        weights[name] = engine.joined(parts, tensor.shape)
    return weights


def all_but(*parts):
    """Tensors whose names have one of these parts are left out."""

    def take(engine):
        weights = engine.sent[-1]
        engine.load({n: t for n, t in weights.items() if not any(part in n for part in parts)})

    return take


def without_shards(lost, only=""):
    """The shards of some ranks are left out, of tensors with `only` in their names."""

    def take(engine):
        mine = engine.model.state_dict()

        def changed(name, parts):
            old = engine.cut(mine[name])
            for rank in lost(engine.world):
                if rank < len(parts) and only in name:
                    parts[rank] = old[rank].clone()

        engine.load(shards(engine, changed))

    return take


def reordered(engine):
    engine.load(shards(engine, lambda _, parts: parts.reverse()))


def late(engine):
    if len(engine.sent) > 1:
        engine.load(engine.sent[-2])


def scaled(engine):
    engine.load({n: t * 0.8 if "mlp.2.weight" in n else t for n, t in engine.sent[-1].items()})


def without_expert(engine):
    old = {n: t.clone() for n, t in engine.model.state_dict().items()}
    engine.load(engine.sent[-1])
    for name, tensor in engine.model.state_dict().items():
        if "experts.1." in name:
            tensor.copy_(old[name])
        elif "experts.up_proj" in name:
            tensor[1].copy_(old[name][1])


class Fault(NamedTuple):
    """A fault of a sharded trainer's sync.

    Args:
        how: what goes wrong.
        cause: what a drill calls it; "" for a sync that works.
        take: what the engine does with the weights of a sync.
        options: of Small.
    """

    how: str
    cause: str
    take: object
    options: dict = {}  # noqa: RUF012


FAULTS = {
    "healthy": Fault("all tensors arrive", "", all_but()),
    "healthy_untied": Fault("the same, with a head of its own", "", all_but(), {"tied": False}),
    "healthy_experts": Fault("the same, of an MoE", "", all_but(), {"experts": "apart"}),
    "never_synced": Fault("nothing arrives", "never_synced", all_but("")),
    "one_shard": Fault(
        "the shards of rank 1 are not sent", "shard_stale", without_shards(lambda _: [1])
    ),
    "not_gathered": Fault(
        "only rank 0's shards are sent", "shard_stale", without_shards(lambda w: range(1, w))
    ),
    "one_tensor": Fault("a tensor is left out", "deaf", all_but("layers.0.mlp.2.weight")),
    "one_layer": Fault("a layer is left out", "one_layer", all_but("layers.1.")),
    "one_expert": Fault(
        "an expert is left out", "experts_stale", without_expert, {"experts": "apart"}
    ),
    "one_stacked_expert": Fault(
        "an expert of a stacked tensor is left out",
        "experts_stale",
        without_expert,
        {"experts": "stacked"},
    ),
    "vocabulary_shard": Fault(
        "the rows of rank 1 in embedding and head are left out",
        "rows_stale",
        without_shards(lambda _: [1], only="embed"),
    ),
    "norms_stale": Fault("the norms are left out", "norms_stale", all_but("norm")),
    "late": Fault("a sync sends the weights of the one before", "late", late),
    "reordered": Fault("the shards are put together in the wrong order", "sync_moves", reordered),
    "scaled": Fault("a matrix of each MLP arrives times 0.8", "scaled", scaled),
}
FAULTS |= {name: Fault(*fault) for name, fault in carried(TOY).items() if name not in FAULTS}


def sharded(module, mesh=None):
    """The module, sharded by FSDP2: each layer, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def trainee(name, module=None):
    """A trainee of a fault, and its engine; every rank has one."""
    fault = FAULTS[name]
    module = module or Small(**fault.options)
    whole = copy.deepcopy(module)
    module = sharded(module)
    engine = Engine(module, whole, fault.take)
    return Trainee(module, engine.sync, engine.score, TOKENS), engine


def local_bits(module):
    """Every bit of this process's shards, and which tensors are one."""
    from servanda.rl.sync_drill.parallel.shards import local, reshard

    reshard(module)
    named = {n: local(p).clone() for n, p in module.named_parameters(remove_duplicate=False)}
    return bits_of(named), [name for name, _ in module.named_parameters()]


def bits_of(tensors):
    return {n: t.reshape(-1).view(torch.uint8).tolist() for n, t in tensors.items()}


def drill(names):
    """A drill of each fault; name -> (result, whether every bit of the shards is as before)."""
    results = {}
    for name in names:
        subject, _ = trainee(name)
        before = local_bits(subject.module)
        result = preflight(subject)
        results[name] = (result, local_bits(subject.module) == before)
    return results


def processes(world, work, *arguments, limit_s=600):
    """Values of `work(*arguments)` on each rank of a gloo group of processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder, work, arguments))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(limit_s)
            if process.is_alive():
                process.kill()
        values = []
        for rank in range(world):
            path = Path(folder) / f"{rank}"
            values.append(pickle.loads(path.read_bytes()) if path.exists() else None)
        for value in values:
            if isinstance(value, str) and value.startswith("Traceback"):
                raise AssertionError(value)
        return values


def _rank(rank, world, folder, work, arguments):
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    try:
        value = work(*arguments)
    except BaseException:
        value = traceback.format_exc()
    part = Path(folder) / f"{rank}.part"
    part.write_bytes(pickle.dumps(value))
    part.rename(Path(folder) / f"{rank}")
    distributed.destroy_process_group()
