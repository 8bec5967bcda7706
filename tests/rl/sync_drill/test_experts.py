# Experts that a router picks: one that a sync leaves out is named, and one that no probe token is
# routed to is said to be untested.

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from servanda.engines.checkpoint import quiet  # noqa: E402
from servanda.rl.sync_drill.drill import preflight  # noqa: E402
from servanda.rl.sync_drill.result import Part  # noqa: E402
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs  # noqa: E402
from tests.rl.sync_drill.toys import WIDTH, Toy  # noqa: E402

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

    score = lambda rows: forward_logprobs(engine, rows)  # noqa: E731
    return preflight(Trainee(module, sync, score), seed=seed)


def toy(stacked, lost=None, seed=0):
    module = Toy()
    module.layers[0].mlp = Routed(stacked).double()
    named = "" if lost is None else expert(stacked, lost)
    return drilled(module, copy.deepcopy(module).eval(), named, seed)


def expert(stacked, number):
    return f"expert {number}" if stacked else f"mlp.experts.{number}"


def untested(result, stacked):
    what = f"{expert(stacked, UNREACHED)} of layers.0.mlp"
    return [spot.text for spot in result.blind_spots if what in spot.text]


layouts = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])


@layouts
@pytest.mark.parametrize("seed", range(3))
def test_a_sync_that_works_holds_and_says_which_expert_no_token_is_routed_to(stacked, seed):
    result = toy(stacked, seed=seed)

    assert result.outcome == "holds", str(result)
    (text,) = untested(result, stacked)
    assert text == (
        "no probe token changes with some parts, such as an expert that none is routed to: "
        f"{expert(stacked, UNREACHED)} of layers.0.mlp; pass rows that reach them as tokens="
    )


@layouts
@pytest.mark.parametrize("lost", [e for e in range(EXPERTS) if e != UNREACHED])
def test_an_expert_that_the_sync_leaves_out_is_named(stacked, lost):
    result = toy(stacked, lost)

    assert result.cause == "experts_stale", str(result)
    (wrong,) = (group for group in result.groups if group.mark == "violated")
    assert (wrong.name, wrong.lost) == ("layers.0.mlp", (expert(stacked, lost),))
    assert untested(result, stacked)


@layouts
def test_an_expert_that_no_token_reaches_is_untested_and_never_called_synced(stacked):
    result = toy(stacked, UNREACHED)

    assert result.outcome == "holds" and untested(result, stacked)
    (group,) = (group for group in result.groups if group.name == "layers.0.mlp")
    (part,) = (part for part in group.parts if part.name == expert(stacked, UNREACHED))
    assert part.unseen and not part.deaf and not part.partly_deaf


def test_a_part_without_any_effect_is_neither_right_nor_wrong():
    part = Part("expert 3", float("nan"), float("inf"), 0.0)

    assert part.unseen and not part.deaf and not part.partly_deaf


def tiny_moe(layer, lost="", seed=0):
    """A drill of one layer of models/tiny-moe; the engine's bfloat16 flips routes."""
    transformers = pytest.importorskip("transformers")
    with quiet():
        module = transformers.AutoModelForCausalLM.from_pretrained(MOE, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(f"layers.{layer}.mlp." in name)
    return drilled(module, copy.deepcopy(module).bfloat16().eval(), lost, seed)


# of the 16 experts of a layer, those of fewest probe tokens
@pytest.mark.parametrize(("layer", "lost"), [(0, "expert 14"), (0, "expert 2"), (2, "expert 4")])
def test_an_expert_of_few_tokens_is_named_where_rounding_flips_routes(layer, lost):
    result = tiny_moe(layer, lost)

    assert result.cause == "experts_stale", str(result)
    (wrong,) = result.groups
    assert wrong.lost == (lost,)


def test_a_sync_of_a_mixture_in_bfloat16_holds():
    result = tiny_moe(1)

    assert result.outcome == "holds", str(result)
