# Each fault of a sync: it leaves behind what it says, and nothing else.

import pytest
import torch
import transformers

from servanda.engines.faults import FAULTS
from servanda.engines.faults.base import Switch
from servanda.engines.faults.sync import SYNC_FAULTS, sync_fault
from servanda.engines.weight_sync import WeightSync
from servanda.errors import MeasurementError
from tests.trainers import adapt, checkpoint, open_engine, trainer

EVERY = [*SYNC_FAULTS]
ADAPTED = ("q_proj", "v_proj")


def small(config):
    """A random model of another family, each of its tensors other than its neighbours'."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn(weight.shape)
    return model.eval()


SMALL = {
    "gpt2": transformers.GPT2Config(
        vocab_size=1024, n_embd=32, n_layer=3, n_head=2, n_positions=64, eos_token_id=0
    ),
    "opt": transformers.OPTConfig(
        vocab_size=1024,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
    ),
}
kinds = pytest.mark.parametrize("kind", ["llama", "qwen3", *SMALL])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> (a checkpoint, a trainer whose weights are all others)."""
    made = {}

    def of(kind):
        if kind not in made:
            old, new = (
                (small(SMALL[kind]), small(SMALL[kind]))
                if kind in SMALL
                else (trainer(kind), trainer(kind, seed=1))
            )
            with torch.no_grad():
                for weight in new.parameters():
                    weight += 0.5
            made[kind] = checkpoint(old, tmp_path_factory.mktemp("old") / kind), new
        return made[kind]

    return of


def tensors(engine):
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def synced(folder, module, name, value=None):
    """The engine's tensors before and after one broken sync."""
    entry = SYNC_FAULTS[name]
    engine = open_engine(folder)
    before = tensors(engine)
    entry.inject(WeightSync, entry.default if value is None else value)(module, engine)()
    return before, tensors(engine)


def left_behind(folder, module, name, value=None):
    """Which tensors are as they were; all others have to be the trainer's."""
    before, after = synced(folder, module, name, value)
    behind = {key for key in before if torch.equal(before[key], after[key])}
    healthy = open_engine(folder)
    WeightSync(module, healthy)()
    fresh = tensors(healthy)
    assert not any(torch.equal(before[key], fresh[key]) for key in before)
    assert all(torch.equal(after[key], fresh[key]) for key in after.keys() - behind)
    return behind


def names(folder, *parts):
    """The engine's tensors whose names have one of these parts."""
    return {n for n in tensors(open_engine(folder)) if any(part in n for part in parts)}


@kinds
def test_never_synced_leaves_everything(models, kind):
    folder, module = models(kind)
    assert left_behind(folder, module, "never_synced") == names(folder, "")


@kinds
def test_tied_head_stale_leaves_the_head_and_no_embedding(models, kind):
    assert left_behind(*models(kind), "tied_head_stale") == {"lm_head.weight"}


@pytest.mark.sampled(4)
@kinds
@pytest.mark.parametrize("value", [0, 1, 2])
def test_one_layer_leaves_that_layer(models, kind, value):
    folder, module = models(kind)
    behind = left_behind(folder, module, "one_layer", value)
    assert behind == names(folder, f".layers.{value}.", f".h.{value}.")


def test_one_mlp_leaves_the_mlp_of_that_layer(models):
    expected = {
        "llama": ".layers.1.mlp.",
        "qwen3": ".layers.1.mlp.",
        "gpt2": ".h.1.mlp.",
        "opt": ".layers.1.fc",
    }
    for kind, part in expected.items():
        folder, module = models(kind)
        assert left_behind(folder, module, "one_mlp") == names(folder, part)


def test_norms_stale_leaves_the_norms(models):
    """By whatever name: ln_1 in one family, q_norm in another."""
    expected = {
        "llama": ("layernorm.", "model.norm."),
        "qwen3": ("layernorm.", "model.norm.", ".q_norm.", ".k_norm."),
        "gpt2": (".ln_1.", ".ln_2.", ".ln_f."),
        "opt": ("_layer_norm.",),
    }
    for kind, parts in expected.items():
        folder, module = models(kind)
        assert left_behind(folder, module, "norms_stale") == names(folder, *parts)


def test_adapter_ignored_sends_the_weights_below_the_adapters(models):
    folder, _ = models("llama")
    module = adapt(trainer(seed=1), ADAPTED, fresh=False)
    _, broken = synced(folder, module, "adapter_ignored")
    healthy = open_engine(folder)
    WeightSync(module, healthy)()
    fresh = tensors(healthy)

    other = {name for name in fresh if not torch.equal(fresh[name], broken[name])}

    assert other == names(folder, *ADAPTED)
    base = trainer(seed=1).state_dict()
    assert all(torch.equal(broken[name], base[name]) for name in other)


@pytest.mark.parametrize("value", ["float8_e4m3fn", "float8_e5m2"])
def test_wrong_cast_rounds_every_tensor_on_its_way(models, value):
    folder, module = models("qwen3")
    _, broken = synced(folder, module, "wrong_cast", value)
    coarse = {n: w.to(getattr(torch, value)).float() for n, w in module.state_dict().items()}

    assert all(torch.equal(broken[name], coarse[name]) for name in broken)


@pytest.mark.slow
def test_no_fault_changes_what_the_trainer_has(models):
    folder, module = models("llama")
    adapted = adapt(trainer(seed=1), ADAPTED, fresh=False)
    for name in EVERY:
        mine = adapted if name.startswith("adapter_") else module
        before = {key: tensor.clone() for key, tensor in mine.state_dict().items()}
        synced(folder, mine, name)
        assert all(torch.equal(tensor, before[key]) for key, tensor in mine.state_dict().items())


def test_one_norm_leaves_the_first_of_a_layer_and_a_class_one_of_each(models):
    folder, module = models("qwen3")
    first = {"model.layers.1.input_layernorm.weight"}
    assert left_behind(folder, module, "one_norm") == first
    behind = left_behind(folder, module, "norm_class_stale", "q_norm")
    assert behind == names(folder, ".q_norm.")


def test_rows_stale_leaves_the_last_rows(models):
    folder, module = models("llama")
    before, after = synced(folder, module, "rows_stale", 1 / 32)
    name, count = "model.embed_tokens.weight", len(before["model.embed_tokens.weight"]) // 32
    assert torch.equal(after[name][-count:], before[name][-count:])
    assert torch.equal(after[name][:-count], module.state_dict()[name][:-count])


def test_late_and_dropped_send_what_was_and_what_comes_next(models):
    folder, module = models("llama")
    for name, value, due in (("late", 2, [0, 0, 1, 2]), ("dropped", 3, [1, 2, 2, 4])):
        engine = open_engine(folder)
        sync = SYNC_FAULTS[name].inject(WeightSync, value)(module, engine)
        weight, start = module.model.norm.weight, module.model.norm.weight.detach().clone()
        old = engine.model.model.norm.weight.detach().clone()
        for number, expected in enumerate(due, 1):
            with torch.no_grad():
                weight.copy_(start + number)
            sync()
            wanted = start + expected if expected else old
            assert torch.equal(engine.model.model.norm.weight, wanted), (name, number)
        with torch.no_grad():
            weight.copy_(start)


@pytest.mark.slow
def test_scaled_multiplies_the_last_matrix_of_an_mlp(models):
    for kind, part in {"llama": "down_proj", "gpt2": "mlp.c_proj.weight", "opt": "fc2.w"}.items():
        folder, module = models(kind)
        _, after = synced(folder, module, "scaled", 0.5)
        for name, weight in module.state_dict().items():
            factor = 0.5 if part in name else 1
            assert torch.equal(after[name], factor * weight), name


def test_adapter_scaled_adds_an_adapter_twice(models):
    folder, _ = models("llama")
    module = adapt(trainer(seed=1), ADAPTED, fresh=False)
    base = trainer(seed=1).state_dict()
    _, after = synced(folder, module, "adapter_scaled")
    healthy = open_engine(folder)
    WeightSync(module, healthy)()
    for name, weight in tensors(healthy).items():
        torch.testing.assert_close(after[name], 2 * weight - base[name])


# what is refused


@pytest.mark.parametrize(
    ("kind", "name", "value", "lacks"),
    [
        ("llama, untied", "tied_head_stale", True, "a tied head"),
        ("llama", "one_layer", 4, "a layer 4"),
        ("qwen3", "one_mlp", 3, "an MLP in a layer 3"),
        ("llama", "adapter_ignored", True, "an adapter"),
        ("llama", "adapter_scaled", 2.0, "an adapter"),
        ("llama", "one_norm", 4, "norms with scales in a layer 4"),
        ("llama", "norm_class_stale", "q_norm", "norms of the name q_norm"),
    ],
)
def test_a_fault_that_would_break_nothing_is_refused(tmp_path, kind, name, value, lacks):
    module = trainer(kind)
    with pytest.raises(MeasurementError) as refused:
        synced(checkpoint(module, tmp_path / "model"), module, name, value)

    (problem,) = refused.value.problems
    assert problem.message == (f"fault {name!r} breaks nothing here: the model has not got {lacks}")
    assert problem.hint == "choose a fault of something that it has"


@pytest.mark.parametrize(
    ("name", "value", "takes", "default"),
    [
        ("never_synced", False, "true", "true"),
        ("one_layer", -1, "a whole number in [0, 10000]", "1"),
        ("wrong_cast", "float7", "float8_e4m3fn or float8_e5m2", '"float8_e4m3fn"'),
    ],
)
def test_a_value_that_a_fault_does_not_take_is_refused(name, value, takes, default):
    with pytest.raises(MeasurementError) as refused:
        SYNC_FAULTS[name].inject(WeightSync, value)

    (problem,) = refused.value.problems
    assert problem.message == f"fault {name!r} takes {takes}, found {value!r}"
    assert problem.hint == f"write fault: {{{name}: {default}}}"


def test_a_fault_of_a_sync_is_for_syncs():
    with pytest.raises(MeasurementError, match=r"cannot be injected into object, which has no"):
        SYNC_FAULTS["one_layer"].inject(object, 1)


# the catalogue


@pytest.mark.parametrize("name", EVERY)
def test_a_fault_takes_its_default_and_has_a_name_of_its_own(name):
    entry = SYNC_FAULTS[name]
    assert entry.problem(entry.default) is None
    assert entry.summary.endswith(".")
    assert name not in FAULTS


def test_a_fault_that_does_not_take_its_default_is_refused_at_once():
    with pytest.raises(ValueError, match=r"takes true, and not its default 3"):
        sync_fault("x", "X.", default=3, takes=Switch())(lambda base, _: base)
    assert "x" not in SYNC_FAULTS
