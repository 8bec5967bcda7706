# Mixtures whose router picks experts, and drills of a sync that leaves one out.

import copy
from pathlib import Path

import torch
from torch import nn

from servanda.engines.checkpoint import quiet
from servanda.rl.sync_drill.drill import preflight
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs
from tests.rl.sync_drill.toys import WIDTH

MOE = Path(__file__).parents[3] / "models" / "tiny-moe"
EXPERTS, PICKED, UNREACHED = 6, 2, 4


class Routed(nn.Module):
    """A mixture that sends each token to PICKED of its experts, and none to UNREACHED."""

    def __init__(self, stacked):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        weight = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        if stacked:
            self.experts = nn.Module()
            self.experts.up_proj = nn.Parameter(weight)
        else:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in weight)
        closed_E = torch.zeros(EXPERTS)
        closed_E[UNREACHED] = -torch.inf
        self.register_buffer("closed_E", closed_E)

    def forward(self, x):
        score, picked = (self.router(x) + self.closed_E).topk(PICKED)
        if isinstance(self.experts, nn.ModuleList):
            each = torch.stack([expert(x) for expert in self.experts], -2).tanh()
        else:
            each = torch.einsum("...w,ewv->...ev", x, self.experts.up_proj).tanh()
        chosen = each.gather(-2, picked[..., None].expand(*picked.shape, WIDTH))
        return (chosen * score.softmax(-1)[..., None]).sum(-2)


def drilled(module, engine, lost="", seed=0):
    """A drill of a sync into a copy that leaves out `lost`, as a part of a group is named."""
    row = int(lost.rpartition(" ")[2]) if lost.startswith("expert ") else None

    def sync():
        mine = dict(engine.named_parameters())
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                if not tensor.requires_grad or (row is None and lost and f"{lost}." in name):
                    continue
                kept = mine[name].clone()
                mine[name].copy_(tensor)
                if row is not None and ".experts." in name:
                    mine[name][row] = kept[row]

    def score(rows):
        return forward_logprobs(engine, rows)

    return preflight(Trainee(module, sync, score), seed=seed)


def tiny_moe(layer, lost="", seed=0):
    """A drill of one layer of models/tiny-moe; the engine's bfloat16 flips routes."""
    import transformers

    with quiet():
        module = transformers.AutoModelForCausalLM.from_pretrained(MOE, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(f"layers.{layer}.mlp." in name)
    return drilled(module, copy.deepcopy(module).bfloat16().eval(), lost, seed)
