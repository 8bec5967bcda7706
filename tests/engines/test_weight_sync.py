# A sync of weights: afterwards the engine is one that was opened on a checkpoint of them.

import json

import numpy as np
import pytest
import torch

from servanda.engines.weight_sync import WeightSync
from servanda.errors import MeasurementError
from tests.trainers import FORMATS, KINDS, MODELS, Lora, checkpoint, open_engine, score, trainer

TEXT = np.random.default_rng(0).integers(1, 1024, (2, 12)).tolist()
kinds = pytest.mark.parametrize("kind", [*KINDS])
formats = pytest.mark.parametrize("form", [*FORMATS])


def scores(engine):
    return np.concatenate(score(engine, TEXT))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> (a checkpoint to start from, the trainer after an update, its checkpoint)."""
    made = {}

    def of(kind):
        if kind not in made:
            place = tmp_path_factory.mktemp("weights")
            updated = trainer(kind, seed=1)
            old, new = place / "old", place / "new"
            made[kind] = checkpoint(trainer(kind), old), updated, checkpoint(updated, new)
        return made[kind]

    return of


# the oracle: an engine that was opened on those weights


@pytest.mark.sampled(3)
@kinds
@formats
def test_after_a_sync_it_scores_bit_for_bit_as_one_opened_on_the_weights(folders, kind, form):
    old, updated, new = folders(kind)
    engine = open_engine(old, form)
    before = scores(engine)

    WeightSync(updated, engine)()

    assert np.array_equal(scores(engine), scores(open_engine(new, form)))
    assert not np.array_equal(scores(engine), before)


@kinds
def test_all_of_its_tensors_are_those_of_one_opened_on_the_weights(folders, kind):
    old, updated, new = folders(kind)
    engine = open_engine(old, "int4_g32")

    WeightSync(updated, engine)()

    mine, fresh = engine.model.state_dict(), open_engine(new, "int4_g32").model.state_dict()
    assert mine.keys() == fresh.keys()
    assert [name for name in mine if not torch.equal(mine[name], fresh[name])] == []


def test_a_tied_head_stays_tied(folders):
    old, updated, _ = folders("qwen3")
    engine = open_engine(old, "int8_weight_only")
    head, embedding = engine.model.get_output_embeddings(), engine.model.get_input_embeddings()

    WeightSync(updated, engine)()

    assert head.weight is embedding.weight
    assert torch.equal(head.weight, updated.lm_head.weight.to(torch.bfloat16))


@formats
def test_a_sync_of_the_same_weights_changes_nothing(folders, form):
    _, updated, new = folders("llama")
    engine = open_engine(new, form)
    before = scores(engine)

    WeightSync(updated, engine)()

    assert np.array_equal(scores(engine), before)


@formats
def test_a_sync_leaves_the_trainer_as_it_was(folders, form):
    """Its weights, what it trains, and the random numbers it draws next."""
    old, updated, _ = folders("llama")
    engine = open_engine(old, form)
    weights = {name: w.detach().clone() for name, w in updated.named_parameters()}
    generator = torch.get_rng_state()

    WeightSync(updated, engine)()

    assert all(torch.equal(w, weights[name]) for name, w in updated.named_parameters())
    assert all(w.requires_grad and w.grad is None for w in updated.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_the_trainer_does_next_does_not_reach_the_engine(folders):
    old, _, _ = folders("llama")
    updated, engine = trainer(seed=2), open_engine(old)
    WeightSync(updated, engine)()
    before = scores(engine)

    with torch.no_grad():
        for weight in updated.parameters():
            weight.zero_()

    assert np.array_equal(scores(engine), before)


@formats
def test_what_is_not_sent_stays(folders, form):
    old, updated, _ = folders("llama")
    engine, untouched = open_engine(old, form), open_engine(old, form)
    name = "model.layers.1.mlp.up_proj.weight"

    assert engine.load([(name, updated.get_parameter(name))]) == {name}

    mine, theirs = engine.model.state_dict(), untouched.model.state_dict()
    moved = {key for key in mine if not torch.equal(mine[key], theirs[key])}
    assert moved
    assert all(key.startswith("model.layers.1.mlp.up_proj.") for key in moved)


def test_a_trainer_in_bfloat16_sends_what_it_has(folders, tmp_path):
    old, _, _ = folders("llama")
    updated, engine = trainer(seed=3).to(torch.bfloat16), open_engine(old)

    WeightSync(updated, engine)()

    fresh = open_engine(checkpoint(updated, tmp_path / "new"))
    assert np.array_equal(scores(engine), scores(fresh))


def test_after_a_sync_the_engine_has_no_digests_to_say(folders):
    """Those of the checkpoint it was opened on would be false, also if the sync broke off."""
    old, updated, _ = folders("llama")
    whole, part = open_engine(old), open_engine(old)
    assert whole.describe().tensors

    WeightSync(updated, whole)()
    with pytest.raises(MeasurementError):
        part.load([("model.norm.weight", updated.model.norm.weight), ("no.such", torch.ones(1))])

    assert whole.describe().tensors == part.describe().tensors == {}


# what is refused


@formats
def test_a_tensor_that_the_model_does_not_have_is_refused(folders, form):
    engine = open_engine(folders("llama")[0], form)
    before = scores(engine)

    for name in (
        "model.layers.7.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.scale",  # which only the quantised layer has
        "model.layers.0.mlp.up_proj.packed",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.forward",
        "base_model.model.model.norm.weight",
        "weight",
        "",
    ):
        with pytest.raises(MeasurementError) as refused:
            engine.load([(name, torch.ones(1))])
        (problem,) = refused.value.problems
        assert problem.message == f"the sync sends {name!r}, which the model does not have"
        assert problem.hint == "send tensors by the names of the checkpoint, adapters merged"
    assert np.array_equal(scores(engine), before)


@formats
def test_a_tensor_of_another_shape_is_refused(folders, form):
    old, _, _ = folders("llama")
    name = "model.layers.1.self_attn.k_proj.weight"

    with pytest.raises(MeasurementError) as refused:
        open_engine(old, form).load([(name, torch.ones(256, 128))])

    (problem,) = refused.value.problems
    assert problem.message == (
        f"the sync sends {name!r} as (256, 128), and the model has (128, 256)"
    )
    assert problem.hint == "send whole tensors, by the names of the checkpoint"


# names


class Wrapped(torch.nn.Module):
    """What torch.compile or data parallelism make of a model: the same under a longer name."""

    def __init__(self, name, module):
        super().__init__()
        self.add_module(name, module)


@pytest.mark.parametrize("names", [["_orig_mod"], ["module"], ["module", "_orig_mod"]])
def test_what_wraps_the_whole_module_is_not_part_of_a_name(folders, names):
    old, updated, new = folders("llama")
    engine, module = open_engine(old), updated
    for name in reversed(names):
        module = Wrapped(name, module)

    WeightSync(module, engine)()

    assert np.array_equal(scores(engine), scores(open_engine(new)))


def test_what_wraps_a_layer_is_not_part_of_a_name(folders):
    old, _, _ = folders("llama")
    updated, engine = trainer(seed=2), open_engine(old)
    layers = updated.model.layers
    layers[0] = Wrapped("_checkpoint_wrapped_module", layers[0])
    layers[1].mlp = Wrapped("_orig_mod", layers[1].mlp)

    WeightSync(updated, engine)()

    plain = open_engine(old)
    WeightSync(trainer(seed=2), plain)()
    assert np.array_equal(scores(engine), scores(plain))


# adapters: a layer with the attributes of PEFT's.  PEFT's own are in tests/real.


ADAPTED = "model.layers.1.self_attn.q_proj"


def with_adapter(names=("default",), seed=2):
    """A trainer, and its layer with an adapter on it."""
    updated = trainer(seed=seed)
    layer = Lora(updated.get_submodule(ADAPTED), names)
    updated.set_submodule(ADAPTED, layer)
    return updated, layer


def sent(module):
    """What a sync of a module sends, by name."""
    arrived = {}

    class Post:
        def load(self, named):
            arrived.update(named)
            return set(arrived)

    WeightSync(module, Post())()
    return arrived


def test_an_adapter_travels_merged_and_under_the_name_of_its_weight():
    updated, layer = with_adapter()
    plain = dict(trainer(seed=2).named_parameters())

    arrived = sent(updated)

    assert arrived.keys() == plain.keys()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = plain[f"{ADAPTED}.weight"] + 2.0 * b @ a
    torch.testing.assert_close(arrived.pop(f"{ADAPTED}.weight"), merged.detach())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in arrived.items())
    assert not any(tensor.requires_grad for tensor in arrived.values())


def test_only_adapters_that_are_on_and_not_merged_yet_are_added():
    updated, layer = with_adapter(("first", "second"))
    base = layer.base_layer.weight
    name = f"{ADAPTED}.weight"

    def delta(adapter):
        return layer.get_delta_weight(adapter)

    torch.testing.assert_close(sent(updated)[name], (base + delta("first")).detach())
    layer.active_adapters = ["first", "second", "of another layer"]
    both = base + delta("first") + delta("second")
    torch.testing.assert_close(sent(updated)[name], both.detach())
    layer.merged_adapters = ["first"]  # the base has it already
    torch.testing.assert_close(sent(updated)[name], (base + delta("second")).detach())
    layer.disable_adapters = True
    assert torch.equal(sent(updated)[name], base)


@pytest.mark.parametrize("attribute", ["lora_variant", "lora_bias"])
def test_an_adapter_that_is_more_than_a_sum_is_refused_until_it_is_merged(attribute):
    updated, layer = with_adapter()
    setattr(layer, attribute, {"default": True})

    with pytest.raises(MeasurementError) as refused:
        sent(updated)
    layer.merged_adapters = ["default"]

    (problem,) = refused.value.problems
    assert problem.message == (
        "adapter 'default' is not plain LoRA (DoRA, or with a bias), and the sync does not know "
        "how it is merged"
    )
    assert problem.hint == "call model.merge_adapter() before the sync, unmerge_adapter() after"
    assert torch.equal(sent(updated)[f"{ADAPTED}.weight"], layer.base_layer.weight)


class Saved(torch.nn.Module):
    """A layer that is trained whole, as peft's ModulesToSaveWrapper has it."""

    def __init__(self, original):
        super().__init__()
        self.original_module = original
        self.modules_to_save = torch.nn.ModuleDict()
        self.active_adapters = ["default"]


def test_of_a_layer_that_is_trained_whole_the_trained_one_travels():
    updated, plain = trainer(seed=2), trainer(seed=2)
    saved = Saved(updated.model.norm)
    for name, value in (("default", 2.0), ("other", 3.0)):
        saved.modules_to_save[name] = torch.nn.LayerNorm(256, bias=False)
        torch.nn.init.constant_(saved.modules_to_save[name].weight, value)
    updated.model.norm = saved

    arrived = sent(updated)

    assert arrived.keys() == dict(plain.named_parameters()).keys()
    assert torch.equal(arrived["model.norm.weight"], torch.full((256,), 2.0))


def test_the_trained_weights_of_the_shipped_models_are_those_of_their_config():
    """What this file and the drill's tests take for granted of models/."""
    for name, layers in (("tiny-lm", 4), ("tiny-qwen3", 3)):
        config = json.loads((MODELS / name / "config.json").read_text())
        assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (layers, True)
    tokenizers = {
        (MODELS / name / "tokenizer.json").read_bytes() for name in ("tiny-lm", "tiny-qwen3")
    }
    assert len(tokenizers) == 1
