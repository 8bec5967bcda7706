# A language model that fits on a screen, and an engine that is a copy of it: both float64, so
# what follows follows exactly, and what is deaf is deaf to the last bit.

import copy

import torch
from torch import nn

from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs

VOCABULARY, WIDTH = 23, 8


def nothing(name):
    return False


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.attn = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        past = torch.cumsum(x, 1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + self.attn(self.norm(past))
        return x + self.mlp(x)


class Toy(nn.Module):
    def __init__(self, layers=2, tied=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.dropout = nn.Dropout(0.5)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.double()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, ids):
        x = self.dropout(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Engine:
    """A copy of a module that takes over what a sync sends, and counts what it is asked."""

    def __init__(self, module, left_out=nothing, tied=True):
        self.model = copy.deepcopy(module).eval()
        self.left_out = left_out
        if not tied:
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.trainer = module
        self.scored, self.synced = 0, 0

    def sync(self):
        self.synced += 1
        mine = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.trainer.named_parameters():
                if not self.left_out(name):
                    mine[name].copy_(tensor)

    def score(self, rows):
        self.scored += 1
        return forward_logprobs(self.model, rows)


def pair(left_out=nothing, *, tied=True, **options):
    """A trainee, and the engine behind it."""
    module = Toy(**options)
    engine = Engine(module, left_out, tied=tied)
    return Trainee(module, engine.sync, engine.score), engine


def bits(module):
    return {
        name: tensor.detach().clone().reshape(-1).view(torch.uint8).tolist()
        for name, tensor in module.state_dict().items()
    }
