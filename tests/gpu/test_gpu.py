# The same numbers on a GPU as on the CPU, and the laws of engines, syncs and monitors there.

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.gpu_server import ServedByIpc
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.contract.model import Kernel
from servanda.engines import open_engine, tensor_sums
from servanda.engines.conformance import check_engine
from servanda.engines.faults import FAULTS
from servanda.engines.low_precision.model import take_over
from servanda.engines.transformers_modules import errors, module_classes, record, swapped
from servanda.engines.weight_sync import WeightSync
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError, ServandaError
from servanda.rl import Trainee, preflight
from servanda.theory.divergence.base import OF_SUMS
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.engines.interpreted import worked
from tests.engines.test_tensor_sums import DTYPES, NOISES, assert_same, drawn, hard, readable
from tests.rl.monitor.test_device import KINDS, judged_alike

MODELS = Path(__file__).parents[2] / "models"
ALL = ("tiny-lm", "tiny-qwen3", "tiny-moe")
WIDTH, PLAIN = 6, Sampling()


@lru_cache(maxsize=8)
def opened(model="tiny-lm", **kernel):
    fault = {name: FAULTS[name].default for name in [kernel.pop("fault", None)] if name}
    options = {"engine": "transformers", "model": str(MODELS / model), "batch_size": 4} | kernel
    return open_engine(Kernel(fault=fault or None, **options))


def batch(*lengths, seed=0, most=1024):
    """Seeded prompts of these lengths, with seeded continuations."""
    rng = np.random.default_rng(seed)
    prompts = tuple(tuple(rng.integers(1, most, n).tolist()) for n in lengths)
    more = tuple(tuple(rng.integers(1, most, WIDTH).tolist()) for _ in lengths)
    return Batch(tuple(range(len(lengths))), prompts, WIDTH, more)


MIXED = (7, 40, 21, 3)


def logits(engine, path, some=None):
    return np.concatenate([*engine.logits(some or batch(*MIXED), path)])


# metrics of tensors


@settings(max_examples=25)
@given(
    st.integers(0, 2**32), st.integers(1, 40_000), st.sampled_from(NOISES), st.sampled_from(DTYPES)
)
def test_every_metric_of_tensors_on_the_gpu_is_its_readable_formula(
    gpu, seed, vocabulary, noise, dtype
):
    case = drawn(seed, vocabulary, noise, dtype)
    assert_same(worked(*case, dtype, device=gpu), readable(*case), relative=1e-8)


def test_rows_that_need_care_are_the_same_on_the_gpu(gpu):
    case = hard()
    found = worked(*case, "float32", device=gpu)
    assert_same(found, readable(*case))
    assert np.isnan(np.stack([found[name][9:] for name in OF_SUMS])).all()


def test_triton_is_what_runs_there(gpu):
    rows = torch.randn(2, 40, device=gpu)
    assert tensor_sums._by_triton(rows)


def test_shards_on_the_gpu_add_up_to_the_whole_vocabulary(gpu):
    train_RV, infer_RV = drawn(1, 20_000, 0.1, "bfloat16")
    whole = worked(train_RV, infer_RV, "bfloat16", device=gpu)
    shards = worked(train_RV, infer_RV, "bfloat16", cuts=[1, 7_000, 16_385], device=gpu)
    assert_same(shards, whole, relative=1e-10)


# engines


@pytest.mark.parametrize("model", ALL)
@pytest.mark.parametrize("path", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("dtype", "attention", "within"),
    [
        ("float64", "eager", 5e-5),  # the rotations of positions are in float32, and so are logits
        ("float32", "eager", 2e-4),
        ("float32", "sdpa", 2e-4),
        ("float32", "sdpa_math", 2e-4),
        ("float32", "sdpa_efficient", 2e-4),
    ],
)
def test_an_engine_on_the_gpu_has_the_logits_of_the_cpu(gpu, model, path, dtype, attention, within):
    if model == "tiny-moe" and dtype == "float64":
        pytest.skip("the grouped products of experts have no float64")
    on_cpu = opened(model, dtype=dtype)
    on_gpu = opened(model, dtype=dtype, attention=attention, device=gpu)
    np.testing.assert_allclose(logits(on_gpu, path), logits(on_cpu, path), rtol=0, atol=within)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "sdpa_cudnn"])
@pytest.mark.parametrize("quantization", [None, "int8_weight_only", "int4_g32"])
def test_rounded_engines_differ_from_float32_by_their_rounding(gpu, attention, quantization):
    reference = opened(device=gpu)
    kernel = {"attention": attention, "quantization": quantization, "dtype": "bfloat16"}
    found = logits(opened(device=gpu, **kernel), "prefill")
    on_cpu = logits(opened(**kernel | {"attention": "eager"}), "prefill")
    exact = logits(reference, "prefill")
    own, cpu = (np.abs(side - exact).mean() for side in (found, on_cpu))
    assert 0.5 * cpu < own < 2 * cpu
    assert np.abs(found - on_cpu).mean() < 2 * cpu


def test_the_routes_on_the_gpu_are_those_of_the_cpu(gpu):
    some = batch(*MIXED)
    found, wanted = (
        opened("tiny-moe", **where).score(some, PLAIN, "prefill").routes
        for where in ({"device": gpu}, {})
    )
    assert (found == wanted).mean() > 0.99 and found.shape == wanted.shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_the_gpu_keeps_the_laws_of_engines(gpu, dtype):
    kernel = Kernel(
        engine="transformers", model=str(MODELS / "tiny-lm"), dtype=dtype, device=gpu, batch_size=4
    )
    report = check_engine(lambda: open_engine(kernel))
    assert not report.broken, str(report)


def test_an_engine_in_a_process_of_its_own_says_which_gpu_it_ran_on(gpu):
    kernel = Kernel(engine="transformers", model=str(MODELS / "tiny-lm"), device=gpu)
    engine = spawn(kernel, "infer")
    facts = engine.describe().fingerprint
    engine.close()
    assert facts["device"] == torch.cuda.get_device_name() and facts["tf32"] == "False"
    assert "cpu" not in facts


def test_a_device_that_is_not_there_is_refused(gpu):
    with pytest.raises(MeasurementError, match=r"device cuda:99, and torch sees \d of them"):
        opened(device="cuda:99")


def test_a_backend_that_takes_no_mask_is_refused(gpu):
    with pytest.raises(MeasurementError, match="has no sdpa_flash for this kernel"):
        logits(opened(attention="sdpa_flash", dtype="bfloat16", device=gpu), "prefill")


@pytest.mark.parametrize("name", [*FAULTS])
def test_a_fault_on_the_gpu_is_the_one_on_the_cpu(gpu, name):
    """Or it is refused on both."""

    def found(**where):
        try:
            engine = opened(fault=name, attention="sdpa", **where)
            some = batch(*MIXED)
            engine.generate(some, PLAIN, 3)
            scored = engine.score(some, PLAIN, "decode").columns["logp"]
            return np.concatenate([scored, logits(engine, "decode").ravel()])
        except ServandaError as error:
            return str(error)

    on_cpu, on_gpu = found(), found(device=gpu)
    if isinstance(on_cpu, str):
        assert on_gpu == on_cpu
    elif name == "dropout_in_train":  # each device draws masks of its own
        healthy = logits(opened(attention="sdpa"), "decode").ravel()
        found, wanted = (
            np.abs(side[-healthy.size :] - healthy).mean() for side in (on_gpu, on_cpu)
        )
        assert found == pytest.approx(wanted, rel=0.5)
    else:
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=0, atol=5e-3)


def test_the_modules_of_two_attentions_are_compared_on_the_gpu(gpu):
    some = batch(*MIXED)
    a, b = (record(opened(attention=of, device=gpu), some, "prefill") for of in ("eager", "sdpa"))
    found = errors(a, b)
    assert 0 < max(found.values()) < 1e-2 and len(found) > 20


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_module_of_either_device_runs_in_the_place_of_one_of_the_gpu(gpu, where):
    some = batch(*MIXED)
    a, b = opened(attention="eager", device=where), opened(attention="sdpa", device=gpu)
    names = [name for name in module_classes(b) if name.startswith("model.layers.1.self_attn")]
    found = swapped(a, b, names, some, "prefill")
    np.testing.assert_allclose(found, logits(b, "prefill", some), rtol=0, atol=2e-4)


# monitors


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_the_gpu_is_judged_as_in_numpy(gpu, kind):
    judged_alike(kind, gpu)


# the drill, with an engine in a process of its own that takes weights by CUDA IPC


def model_of(name, dtype):
    return open_engine(
        Kernel(engine="transformers", model=str(MODELS / name), dtype=dtype, device="cuda")
    ).model


def drill(sync, dtype="bfloat16"):
    engine = ServedByIpc(
        partial(model_of, "tiny-lm", dtype), partial(take_over, dtype=getattr(torch, dtype))
    )
    try:
        module = model_of("tiny-lm", "float32")
        before = {name: tensor.clone() for name, tensor in module.named_parameters()}
        result = preflight(Trainee(module, sync(module, engine), engine.score))
        for name, tensor in module.named_parameters():
            assert torch.equal(tensor, before[name]), name
        return result
    finally:
        engine.close()


def test_a_sync_over_cuda_ipc_holds(gpu):
    assert drill(WeightSync).exit_code == 0


def test_a_sync_over_cuda_ipc_that_leaves_out_an_mlp_is_named(gpu):
    class Partial(WeightSync):
        def _tensors(self):
            return ((name, of) for name, of in super()._tensors() if "layers.1.mlp" not in name)

    result = drill(Partial)
    assert result.exit_code == 1 and "layers.1.mlp" in str(result)
