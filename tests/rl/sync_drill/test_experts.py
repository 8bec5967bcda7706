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

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        closed_E = torch.zeros(EXPERTS)
        closed_E[UNREACHED] = -torch.inf
        self.register_buffer("closed_E", closed_E)

    def forward(self, x):
        score, picked = (self.router(x) + self.closed_E).topk(PICKED)
        each = torch.einsum("...w,ewv->...ev", x, self.experts.up_proj).tanh()
        chosen = each.gather(-2, picked[..., None].expand(*picked.shape, WIDTH))
        return (chosen * score.softmax(-1)[..., None]).sum(-2)


def drilled(lost=None, seed=0):
    """A drill of a sync that leaves out one expert of the first layer."""
    module = Toy()
    module.layers[0].mlp = Routed().double()
    engine = copy.deepcopy(module).eval()

    def sync():
        mine = dict(engine.named_parameters())
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                kept = mine[name].clone()
                mine[name].copy_(tensor)
                if lost is not None and name.endswith("experts.up_proj"):
                    mine[name][lost] = kept[lost]

    return preflight(Trainee(module, sync, lambda rows: forward_logprobs(engine, rows)), seed=seed)


UNTESTED = f"expert {UNREACHED} of layers.0.mlp"


def untested(result):
    return [spot.text for spot in result.blind_spots if UNTESTED in spot.text]


@pytest.mark.parametrize("seed", range(3))
def test_a_sync_that_works_holds_and_says_which_expert_no_token_is_routed_to(seed):
    result = drilled(seed=seed)

    assert result.outcome == "holds", str(result)
    (text,) = untested(result)
    assert text == (
        f"no probe token changes with some parts, such as an expert that none is routed to: "
        f"{UNTESTED}; pass rows that reach them as tokens="
    )


@pytest.mark.parametrize("lost", [e for e in range(EXPERTS) if e != UNREACHED])
def test_an_expert_that_the_sync_leaves_out_is_named(lost):
    result = drilled(lost)

    assert result.cause == "experts_stale", str(result)
    (wrong,) = (group for group in result.groups if group.mark == "violated")
    assert (wrong.name, wrong.lost) == ("layers.0.mlp", (f"expert {lost}",))
    assert untested(result)


def test_an_expert_that_no_token_reaches_is_untested_and_never_called_synced():
    result = drilled(UNREACHED)

    assert result.outcome == "holds" and untested(result)
    (group,) = (group for group in result.groups if group.name == "layers.0.mlp")
    (part,) = (part for part in group.parts if part.name == f"expert {UNREACHED}")
    assert part.unseen and not part.deaf and not part.partly_deaf


def test_a_part_without_any_effect_is_neither_right_nor_wrong():
    part = Part("expert 3", float("nan"), float("inf"), 0.0)

    assert part.unseen and not part.deaf and not part.partly_deaf


def mixture_in_bfloat16(lost, seed=0):
    """A drill of models/tiny-moe against an engine whose rounding flips routes."""
    transformers = pytest.importorskip("transformers")
    with quiet():
        module = transformers.AutoModelForCausalLM.from_pretrained(MOE, dtype=torch.float32)
    engine = copy.deepcopy(module).bfloat16().eval()

    def sync():
        mine = dict(engine.named_parameters())
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                kept = mine[name].clone()
                mine[name].copy_(tensor)
                if lost is not None and f"layers.{lost[0]}.mlp.experts." in name:
                    mine[name][lost[1]] = kept[lost[1]]

    return preflight(Trainee(module, sync, lambda rows: forward_logprobs(engine, rows)), seed=seed)


def test_an_expert_of_few_tokens_is_named_among_the_noise_of_flipped_routes():
    result = mixture_in_bfloat16((0, 2))

    assert result.cause == "experts_stale", str(result)
    (wrong,) = (group for group in result.groups if group.mark == "violated")
    assert (wrong.name, wrong.lost) == ("layers.0.mlp", ("expert 2",))
