# The module at fault, among faults that are planted in one module of a small model.

import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from servanda.cli.bisect import module_lines  # noqa: E402
from servanda.cli.main import main  # noqa: E402
from servanda.contract.model import Kernel  # noqa: E402
from servanda.engines import open_engine  # noqa: E402
from servanda.engines.base import AROUND  # noqa: E402
from servanda.engines.checkpoint import quiet  # noqa: E402
from servanda.engines.low_precision.model import QUANTIZED, QuantizedLinear  # noqa: E402
from servanda.engines.transformers_modules import Key, Recording, errors  # noqa: E402
from servanda.errors import ContractError  # noqa: E402
from servanda.runner.bisect.modules import bisect_modules, drawn  # noqa: E402
from servanda.traces.trace import Batch  # noqa: E402
from tests.trainers import MODELS, checkpoint, trainer  # noqa: E402

PROMPTS = [(5, 9, 3, 44), (7, 8), (90, 4, 61, 2, 33, 12), (17, 300, 6)]
LLAMA = str(MODELS / "tiny-lm")


def opened(model=LLAMA, **fields):
    return open_engine(Kernel(engine="transformers", model=str(model), **fields))


def found(b, a=None, path="prefill", width=6):
    a = opened() if a is None else a
    return bisect_modules(a, b, drawn(b, PROMPTS, width), path)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A model of random weights whose scores and logits are capped."""
    config = transformers.Gemma2Config(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=1.0,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(3)
        model = transformers.Gemma2ForCausalLM(config)
    return checkpoint(model, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model with a recurrent layer and routed experts."""
    config = transformers.Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(3)
        model = transformers.Qwen3NextForCausalLM(config)
    return checkpoint(model, tmp_path_factory.mktemp("hybrid"))


def one_norm(engine):
    engine.model.model.layers[2].post_attention_layernorm.variance_epsilon = 0.3
    return "model.layers.2.post_attention_layernorm"


def rope(engine):
    engine.model.model.rotary_emb.inv_freq *= 0.9
    return "model.rotary_emb"


def stale_matrix(engine):
    weight = engine.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return "model.layers.1.mlp.up_proj"


def quantized_layer(engine):
    mlp = engine.model.model.layers[3].mlp
    mlp.down_proj = QuantizedLinear(mlp.down_proj, QUANTIZED["int4_g32"])
    return "model.layers.3.mlp.down_proj"


def scale_of_scores(engine):
    attention = engine.model.model.layers[1].self_attn
    attention.scaling *= 1.2
    return "model.layers.1.self_attn"


def lost_residual(engine):
    """A container's own code: what it does with what its children return."""
    layer = engine.model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.05
    return "model.layers.0"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "plant", [one_norm, rope, stale_matrix, quantized_layer, scale_of_scores, lost_residual]
)
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_fault_of_one_module_is_named_by_that_module_alone(plant, path):
    b = opened()
    name = plant(b)
    answer = found(b, path=path)
    assert answer.outcome == "named" and answer.cause == (name,)
    assert [module.name for module in answer.suspects] == [name]
    assert answer.first is not None and answer.first[0] == name
    assert answer.explained == pytest.approx(1, abs=1e-3)
    # what comes after it only passes the error on
    last = next(module for module in answer.modules if module.name == "lm_head")
    assert last.error <= last.noise * 2 < last.run_error


def test_a_container_is_swapped_without_its_children():
    """Else the layer alone would explain what the matrix in it does."""
    b = opened()
    layer = lost_residual(b)
    with torch.no_grad():
        b.model.model.layers[0].mlp.up_proj.weight *= 1.3
    answer = found(b)
    shares = {module.name: module.share for module in answer.suspects}
    assert answer.cause == ("model.layers.0.mlp.up_proj",) and shares.keys() == {
        layer,
        *answer.cause,
    }
    assert shares[layer] < 0.5 and answer.joint == pytest.approx(1)


def test_what_is_within_the_noise_of_a_module_is_no_difference():
    """A layer whose output depends on the batch by more than the two sides differ."""

    def noisy(engine, scale):
        layer = engine.model.model.layers[1]
        forward = layer.forward
        layer.forward = lambda x, *more, **options: (
            forward(x, *more, **options) * (1 + 0.01 * len(x) + scale)
        )
        return engine

    assert found(noisy(opened(), 0.001), noisy(opened(), 0.0)).suspects == ()
    answer = found(noisy(opened(), 0.2), noisy(opened(), 0.0))
    assert [module.name for module in answer.suspects] == ["model.layers.1"]


def test_a_cap_of_the_scores_is_the_attention_and_one_of_the_logits_the_model(gemma):
    b = opened(gemma)
    b.model.model.layers[1].self_attn.attn_logit_softcapping = None
    answer = found(b, opened(gemma))
    assert answer.cause == ("model.layers.1.self_attn",) == tuple(m.name for m in answer.suspects)
    b = opened(gemma)
    b.model.config.final_logit_softcapping = 3.0
    assert found(b, opened(gemma)).cause == ("",)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_router_and_a_recurrent_layer_are_named_and_are_equal_to_themselves(hybrid, path):
    a, b = opened(hybrid), opened(hybrid)
    assert found(b, a, path).outcome == "same"
    b.model.model.layers[0].linear_attn.dt_bias.data += 0.5
    assert found(b, a, path).cause == ("model.layers.0.linear_attn",)
    b = opened(hybrid)
    b.model.model.layers[1].mlp.gate.weight.data.neg_()
    answer = found(b, a, path)
    assert answer.cause == ("model.layers.1.mlp.gate",) and answer.joint == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "path", "tensor"),
    [
        ({"attention_window": 2}, "prefill", "attention_mask"),
        ({"mask_contamination": True}, "decode", "attention_mask"),
        ({"bf16_logits": True}, "prefill", "output.logits"),
    ],
)
def test_what_an_engine_does_around_its_model_is_named_with_the_tensor(fault, path, tensor):
    answer = found(opened(fault=fault), path=path)
    assert answer.cause == (AROUND,) and answer.first == (AROUND, tensor)
    assert answer.explained == pytest.approx(1)


def test_a_cache_is_around_the_model_though_no_tensor_of_the_engine_shows_it():
    answer = found(opened(fault={"kv_cache_int8": "head"}), path="decode")
    assert answer.cause == (AROUND,) and answer.explained == pytest.approx(1)
    assert {module.kind for module in answer.suspects} == {"LlamaAttention"}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_kernel_against_itself_has_no_difference(path):
    answer = found(opened(), path=path)
    assert answer.outcome == "same" and answer.suspects == () and answer.first is None
    assert answer.kl_nats == 0 and len(answer.modules) > 50


def test_a_fault_is_named_through_another_precision_and_another_attention():
    b = opened(dtype="bfloat16", attention="sdpa")
    head = b.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight * 1.1, requires_grad=False)
    answer = found(b)
    assert answer.cause == ("lm_head",) and answer.explained > 0.9
    assert len(answer.suspects) > 50  # each rounds


@pytest.mark.slow
def test_a_precision_is_spread_and_no_module_is_blamed():
    answer = found(opened(dtype="bfloat16"))
    assert answer.outcome == "spread" and answer.joint == pytest.approx(1)
    assert not answer.outliers


@pytest.mark.slow
@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.o_proj"])
def test_a_fault_that_hides_in_rounding_stands_out(part):
    b = opened(dtype="bfloat16")
    name = f"model.layers.2.{part}"
    module = b.model.get_submodule(name)
    module.weight = torch.nn.Parameter(module.weight * 1.05, requires_grad=False)
    answer = found(b)
    assert [module.name for module, _ in answer.outliers] == [name]
    line = f"outlier   {name} (Linear): its local error is "
    printed = any(text.startswith(line) for text in module_lines(answer))
    assert printed if answer.outcome == "spread" else name in answer.cause


def test_another_attention_is_the_attention_of_all_layers():
    answer = found(opened(attention="sdpa"))
    assert {module.name.rpartition(".")[2] for module in answer.suspects} == {"self_attn"}


def test_both_models_are_as_before():
    a, b = opened(), opened()
    one_norm(b)
    batch = drawn(b, PROMPTS, 4)
    before = [next(engine.logits(batch, "prefill")) for engine in (a, b)]
    bisect_modules(a, b, batch, "prefill")
    after = [next(engine.logits(batch, "prefill")) for engine in (a, b)]
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert not any("forward" in vars(module) for module in b.model.modules())


def test_what_the_weights_hold_is_said():
    b = opened()
    module = b.model.get_submodule("model.layers.1.mlp.up_proj")
    module.weight = torch.nn.Parameter(module.weight.flip(0), requires_grad=False)
    line = "weights   model.layers.1.mlp.up_proj.weight rows: in reverse"
    assert line in module_lines(found(b))


def test_one_sequence_is_enough():
    b = opened()
    name = rope(b)
    batch = Batch((0,), (PROMPTS[2],), 3, ((8, 9, 10),))
    assert bisect_modules(opened(), b, batch, "prefill").cause == (name,)


def test_two_architectures_are_refused():
    with pytest.raises(ContractError, match="A is a LlamaForCausalLM and B a Qwen3ForCausalLM"):
        found(opened(MODELS / "tiny-qwen3"))


# the command


def servanda(*words):
    return CliRunner().invoke(main, ["bisect", *map(str, words)], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_names_the_stale_matrix_of_a_checkpoint(tmp_path):
    model = trainer(moved=0.0)
    with torch.no_grad():
        model.model.layers[2].mlp.gate_proj.weight *= 1.2
    folder = checkpoint(model, tmp_path / "stale")
    sides = (f"transformers:{LLAMA}@float32", f"transformers:{folder}@float32")
    small = ("--sequences", 4, "--max-new-tokens", 4, "--quiet")
    done = servanda(*sides, *small)
    assert done.exit_code == 1
    assert (
        "cause     model.layers.2.mlp.gate_proj (Linear) explains 100 % of the difference"
        in done.stdout
    )
    data = json.loads(servanda(*sides, *small, "--format", "json").stdout)
    assert data["outcome"] == "named" and data["cause"] == ["model.layers.2.mlp.gate_proj"]
    page = servanda(*sides, *small, "--format", "html").stdout
    assert "The module that differs: model.layers.2.mlp.gate_proj" in page and "<svg" in page
    done = servanda(sides[0], sides[0], *small)
    assert done.exit_code == 0 and "no difference beyond the noise in 59 modules" in done.stdout


def test_a_server_has_no_modules_that_can_be_reached():
    done = servanda(f"transformers:{LLAMA}", "http://127.0.0.1:9")
    assert done.exit_code == 2
    assert "B runs outside of this process, where its modules cannot be reached" in done.stderr
    assert "hint: modules are swapped between two kernels of transformers" in done.stderr


def test_a_tensor_without_an_axis_of_tokens_is_compared_as_a_whole():
    """ALiBi is [sequences, heads, 1, tokens], and no axis is that of the padded tokens."""
    key = Key("h.0", "h.0.self_attention", 0, "input", "alibi")
    real_ST = torch.tensor([[True, True, False, False], [True, False, False, False]])
    alibi = torch.arange(16.0).reshape(2, 2, 1, 4)[..., :3]
    once, twice = (Recording({key: times * alibi}, {key: real_ST}) for times in (1, 2))

    assert errors(once, once) == {key: 0.0}
    assert errors(once, twice)[key] > 0.5
