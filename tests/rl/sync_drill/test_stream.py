# The sync as a stream of (name, tensor): its names, and a drill that perturbs it on the way.

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from servanda.errors import MeasurementError  # noqa: E402
from servanda.rl import Stream, Trainee, preflight  # noqa: E402
from servanda.rl.sync_drill.stream import matched  # noqa: E402
from servanda.rl.sync_drill.trainee import forward_logprobs  # noqa: E402
from tests.rl.sync_drill.toys import VOCABULARY, Toy, bits  # noqa: E402

ROWS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 13)).tolist()


class Engine:
    """A copy of a module that loads a stream; `take` says what becomes of one."""

    def __init__(self, module, take=lambda engine, pairs: engine.load(pairs)):
        self.model, self.take, self.loads, self.held = copy.deepcopy(module).eval(), take, 0, []

    def __call__(self, pairs):
        self.loads += 1
        self.take(self, pairs)

    def load(self, pairs):
        mine = self.model.state_dict()
        for name, tensor in pairs:
            mine[name].copy_(tensor)

    def score(self, rows):
        return forward_logprobs(self.model, rows)


def but(*parts):
    """An engine that ignores tensors with these parts in their names."""

    def take(engine, pairs):
        engine.load((n, t) for n, t in pairs if not any(part in n for part in parts))

    return take


ALL = but()


def late(engine, pairs):
    engine.held.append([(n, t.clone()) for n, t in pairs])
    engine.load(engine.held[-2] if len(engine.held) > 1 else [])


def pair(take=ALL, without=(), **options):
    module = Toy(**options)
    engine = Engine(module, take)

    def pairs():
        return (
            pair for pair in module.named_parameters() if not any(w in pair[0] for w in without)
        )

    return module, engine, Stream(pairs, engine)


def test_a_stream_moves_the_engine_with_each_group_and_leaves_the_trainer_alone():
    module, engine, stream = pair()
    before = bits(module)

    result = preflight(stream, score=engine.score, tokens=ROWS)

    assert (result.outcome, result.exit_code, result.cause) == ("holds", 0, ""), str(result)
    assert {group.mark for group in result.groups} == {"moved"}
    assert all(group.left == 0 for group in result.groups) and result.returned == 0
    assert result.syncs == engine.loads == 2 + 2 * len(result.groups)
    assert bits(module) == before and bits(engine.model) == before
    assert "the size of each movement" in str(result)


@pytest.mark.parametrize(
    ("take", "cause", "still"),
    [
        (but("layers.1.mlp"), "deaf", {"layers.1.mlp"}),
        (but("norm"), "deaf", {"norms.norm"}),
        (but(""), "never_synced", None),
        (late, "late", None),
    ],
)
def test_what_does_not_arrive_does_not_move_the_engine(take, cause, still):
    _, engine, stream = pair(take)

    result = preflight(stream, score=engine.score, tokens=ROWS)

    assert (result.outcome, result.exit_code, result.cause) == ("violated", 1, cause), str(result)
    if still:
        assert {group.name for group in result.groups if group.mark == "not moved"} == still


def test_one_tensor_of_a_group_is_found_when_each_is_perturbed():
    _, engine, stream = pair(but("layers.0.mlp.2.bias"))

    by_group = preflight(stream, score=engine.score, tokens=ROWS)
    by_tensor = preflight(stream, score=engine.score, tokens=ROWS, each="tensor")

    assert by_group.outcome == "holds" and "one lost tensor of a group" in str(by_group)
    assert by_tensor.cause == "deaf"
    still = {group.name for group in by_tensor.groups if group.mark == "not moved"}
    assert still == {"layers.0.mlp.2.bias"}


def test_a_load_that_raises_says_what_the_engine_has():
    def take(engine, pairs):
        if engine.loads == 4:
            raise OSError("no space")
        engine.load(pairs)

    module, engine, stream = pair(take)

    with pytest.raises(MeasurementError, match="OSError: no space") as caught:
        preflight(stream, score=engine.score, tokens=ROWS)

    assert "unchanged weights were synced to the engine once more" in str(caught.value)
    assert bits(engine.model) == bits(module)


def test_a_trained_parameter_that_never_appears_is_named_before_any_scoring():
    module, engine, stream = pair(without=("layers.0.mlp.2.weight",))
    scored = []

    def score(rows):
        scored.append(engine.loads)
        return engine.score(rows)

    result = preflight(Trainee(module, stream, score, ROWS))

    assert result.stream.missing == ("layers.0.mlp.2.weight",) and result.stream.unknown == ()
    assert scored[0] == 0 and result.cause == "deaf"
    assert "trained, and never in it: layers.0.mlp.2.weight" in str(result)


def test_a_streamed_name_of_nothing_is_named_and_a_parameter_in_disguise_is_asked_about():
    module, engine, _ = pair()

    def pairs():
        for name, tensor in module.named_parameters():
            yield ("odd.scale" if name == "layers.1.attn.weight" else name), tensor

    def load(sent):
        engine.load((n if n != "odd.scale" else "layers.1.attn.weight", t) for n, t in sent)

    guessed = preflight(Trainee(module, Stream(pairs, load), engine.score, ROWS))
    names = {"layers.1.attn.weight": ["odd.scale"]}
    given = preflight(Trainee(module, Stream(pairs, load, names=names), engine.score, ROWS))

    assert guessed.stream.unknown == ("odd.scale",)
    assert guessed.outcome == "holds" and "pass their names as Stream(names=...)" in str(guessed)
    assert given.stream.missing == given.stream.unknown == () and given.warnings == ()


HF = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"] + [
    *("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    *("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
]


@pytest.mark.parametrize(
    ("parameters", "sent", "lost"),
    [
        (HF, HF, set()),
        (HF, [n for n in HF if "v_proj" not in n], {"model.layers.0.self_attn.v_proj.weight"}),
        (HF, [f"language_{n}" if n.startswith("model.") else n for n in HF], set()),
        (
            HF,
            [n for n in HF if "layers" not in n]
            + [f"model.layers.0.{n}.weight" for n in ("self_attn.qkv_proj", "mlp.gate_up_proj")],
            set(),
        ),
        (
            ["l.0.qkv_proj.weight"],
            ["l.0.q_proj.weight", "l.0.k_proj.weight"],
            {"l.0.qkv_proj.weight"},
        ),
        (
            ["base_model.model.layers.0.q_proj.lora_A.default.weight"],
            ["layers.0.q_proj.weight"],
            set(),
        ),
        (
            ["model.layers.0.mlp.experts.gate_up_proj"],
            [
                f"model.layers.0.mlp.experts.{e}.{n}_proj.weight"
                for e in (0, 1)
                for n in ("gate", "up")
            ],
            set(),
        ),
        (
            ["layers.1.norm.weight"],
            ["layers.11.norm.weight", "norm.weight"],
            {"layers.1.norm.weight"},
        ),
        (["_orig_mod.layers.0._checkpoint_wrapped_module.w"], ["layers.0.w"], set()),
    ],
)
def test_names_are_matched_over_prefixes_fused_tensors_adapters_and_experts(parameters, sent, lost):
    found = matched(parameters, sent, {})

    assert {name for name, names in found.items() if not names} == lost
    assert {name for names in found.values() for name in names} <= {*sent}


def exported(module, base, order):
    """A stream of a module whose layers take the names that `order` gives them."""
    tensors = {n: p.detach().float() for n, p in module.named_parameters()}
    save_file(tensors, base / "model.safetensors")
    engine = Engine(module)

    def pairs():
        for name, tensor in module.named_parameters():
            layer = name.split(".")[1] if name.startswith("layers.") else ""
            yield name.replace(f"layers.{layer}.", f"layers.{order.get(layer, layer)}."), tensor

    return engine, Stream(pairs, engine, checkpoint=base)


@pytest.mark.parametrize("order", [{}, {"0": "1", "1": "0"}])
def test_a_tensor_in_the_place_of_another_is_named_by_the_checkpoint(order, tmp_path):
    module = Toy()
    engine, stream = exported(module, tmp_path, order)
    with torch.no_grad():  # training goes on after the checkpoint
        for parameter in module.parameters():
            parameter += 0.02 * parameter.std() * torch.randn_like(parameter)
    alone = preflight(stream, score=engine.score, tokens=ROWS)
    whole = preflight(Trainee(module, stream, engine.score, ROWS))
    if not order:
        assert alone.outcome == "holds" and alone.misplaced == (), str(alone)
        assert whole.outcome == "holds" and whole.stream.misplaced == (), str(whole)
        return
    assert (alone.exit_code, alone.cause, whole.cause) == (1, "misplaced", "misplaced")
    sentence = next(s for s in alone.misplaced if s.startswith("layers.0."))
    assert "holds layers.1." in sentence and f"wrong    {sentence}" in str(alone)
    assert "not as in the checkpoint (A): " in str(whole)


def test_an_engine_that_wants_another_layout_and_follows_is_right(tmp_path):
    module = Toy()
    back = {"0": "1", "1": "0"}
    engine, stream = exported(module, tmp_path, back)

    def load(pairs):
        sent = dict(pairs)
        mine = engine.model.state_dict()
        for name in sent:
            layer = name.split(".")[1] if name.startswith("layers.") else ""
            place = name.replace(f"layers.{layer}.", f"layers.{back.get(layer, layer)}.")
            mine[place].copy_(sent[name])

    stream.load = load
    found = preflight(Trainee(module, stream, engine.score, ROWS))
    assert found.outcome == "holds" and found.stream.misplaced, str(found)


def test_a_checkpoint_that_is_not_there_is_said(tmp_path):
    module = Toy()
    engine = Engine(module)
    stream = Stream(module.named_parameters, engine, checkpoint=tmp_path / "base")
    with pytest.raises(MeasurementError, match="base' does not exist"):
        preflight(stream, score=engine.score, tokens=ROWS)
