# The exact metrics of torch tensors against the readable formulas, by eager torch and by Triton.

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import accuracy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from servanda.engines import tensor_sums
from servanda.errors import EvidenceError
from servanda.theory.divergence.base import DIVERGENCES, OF_SUMS, LogitRows
from tests import oracles
from tests.engines.interpreted import hidden_case, interpreter, worked

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install 'servanda[gpu]'"
)
SECOND_ORDER = {"kl_nats", "k3_nats", "kl_reverse_nats", "js_nats", "chi2", "hellinger2", "le_cam"}
LARGEST = np.finfo(np.float32).max
NOISES = [0.0, 1e-4, 1e-2, 1.0, 10.0, 60.0, 600.0]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.fixture(scope="module")
def interpreted():
    with interpreter() as asked:
        yield asked


@pytest.fixture(params=["eager", pytest.param("triton", marks=needs_triton)], scope="module")
def ask(request):
    return worked if request.param == "eager" else request.getfixturevalue("interpreted")


def held(rows_RV, dtype):
    """The numbers that a type makes of these, in float64."""
    return torch.from_numpy(rows_RV).to(getattr(torch, dtype)).double().numpy()


def readable(train_RV, infer_RV):
    rows = LogitRows(train_RV, infer_RV)
    with np.errstate(all="ignore"):
        found = {name: DIVERGENCES[name].forms["logits"](rows) for name in OF_SUMS}
    return {name: np.where(rows.usable_R, value_R, np.nan) for name, value_R in found.items()}


def assert_same(found, expected, relative=1e-9, first_order=1e-14, second_order=1e-22):
    """Absolute tolerances: what a rounding of the weights by 1e-16 moves."""
    for name, value_R in expected.items():
        least = second_order if name in SECOND_ORDER else first_order
        np.testing.assert_allclose(found[name], value_R, relative, least, err_msg=name)


def drawn(seed, vocabulary, noise, dtype, rows=3):
    """Rows with a common offset; of each but the first, some tokens are masked on a side."""
    rng = np.random.default_rng(seed)
    infer_RV = rng.normal(0, 4, (rows, vocabulary))
    train_RV = infer_RV + rng.normal(0, noise, infer_RV.shape) + rng.normal(0, 5, (rows, 1))
    for side_RV in (train_RV, infer_RV):
        masked_RV = rng.random(side_RV.shape) < 0.2
        masked_RV[0] = masked_RV[:, 0] = False
        side_RV[masked_RV] = -np.inf
    return held(train_RV, dtype), held(infer_RV, dtype)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 70), st.sampled_from(NOISES), st.sampled_from(DTYPES))
def test_every_metric_is_its_readable_formula(ask, seed, vocabulary, noise, dtype):
    case = drawn(seed, vocabulary, noise, dtype)
    assert_same(ask(*case, dtype), readable(*case))


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("noise", [1e-4, 1.0])
def test_the_error_is_within_the_stated_bound(ask, noise, offset):
    train_V, infer_V = accuracy.logits(noise, vocabulary=150)
    train_V = train_V + np.float32(offset)
    found = ask(*(side_V[None].astype(np.float64) for side_V in (train_V, infer_V)), "float32")
    for name in accuracy.TEXTBOOK:
        truth = float(oracles.exactly(name, train_V, infer_V))
        assert found[name][0] == pytest.approx(truth, rel=accuracy.BOUND), name


def hard():
    """Rows of which each needs care; the last four of them no one can use."""
    rng = np.random.default_rng(1)
    infer_RV = rng.normal(0, 4, (13, 40))
    train_RV = infer_RV + rng.normal(0, 0.1, infer_RV.shape)
    train_RV[0] = infer_RV[0]
    train_RV[1, 3:9] = infer_RV[1, 3:9] = -LARGEST  # masked by a finite number on both sides,
    train_RV[2, 5] = -LARGEST  # and on one
    infer_RV[3, 5] = -LARGEST
    train_RV[4, 0] += 5000
    train_RV[5, int(infer_RV[5].argmax())] = -np.inf
    train_RV[6], infer_RV[6] = [[*[7.0] * 3, *[-np.inf] * 37], [*[-np.inf] * 3, *[7.0] * 37]]
    train_RV[7, 4] = train_RV[7, 9] = infer_RV[7, 4] = infer_RV[7, 9] = 90.0  # ties
    infer_RV[8, 9] = 1e30
    infer_RV[9] = -np.inf
    train_RV[10, 7] = np.nan
    infer_RV[11, 7] = np.inf
    train_RV[12] = -np.inf
    return held(train_RV, "float32"), held(infer_RV, "float32")


def test_rows_that_need_care(ask):
    """Masked by infinite and by finite numbers, disjoint, ties; NaN, inf and no mass are NaN."""
    case = hard()
    found = ask(*case, "float32")
    assert_same(found, readable(*case))
    assert np.isnan(np.stack([found[name][9:] for name in OF_SUMS])).all()
    assert not np.isnan(np.stack([found[name][:9] for name in OF_SUMS])).any()
    assert found["tv"][6] == found["hellinger2"][6] == 1 and found["kl_nats"][6] == np.inf
    assert all(found[name][0] == 0 for name in OF_SUMS)


def test_the_normalisers_and_logprobs_are_those_of_the_rows(ask):
    train_RV, infer_RV = drawn(3, 60, 0.1, "float32")
    token_R = np.array([0, 59, 7])
    found = ask(train_RV, infer_RV, "float32", token_R)
    rows = LogitRows(train_RV, infer_RV)
    with np.errstate(invalid="ignore"):
        expected = dict(zip(("logp_train", "logp_infer"), rows.logp(token_R), strict=True))
        expected |= {"log_z": rows.log_z[1], "shift": rows.log_z[0] - rows.log_z[1]}
    expected["entropy"] = rows.infer_entropy_R
    assert_same(found, expected, relative=1e-13)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.sets(st.integers(1, 39), min_size=1, max_size=3),
    st.sampled_from(NOISES[:5]),
)
def test_shards_add_up_to_the_whole_vocabulary(seed, cuts, noise):
    """Two to four of any size, also without mass, from the last to the first."""
    train_RV, infer_RV = drawn(seed, 40, noise, "float32")
    train_RV[1, :20] = infer_RV[1, :20] = infer_RV[2, 20:] = -np.inf
    shards = worked(train_RV, infer_RV, "float32", cuts=sorted(cuts))
    assert_same(shards, worked(train_RV, infer_RV, "float32"), relative=1e-10)


@needs_triton
@pytest.mark.parametrize("cuts", [(), (150,), (75, 150, 225)])
def test_shards_spans_and_blocks_of_the_kernels_add_up(interpreted, cuts):
    case = drawn(5, 300, 0.01, "bfloat16", rows=2)
    found = interpreted(*case, "bfloat16", cuts=cuts, span=128, block=64)
    assert_same(found, readable(*case))


def test_a_row_has_the_same_bits_in_any_company(ask):
    case = drawn(2, 50, 1e-3, "float32", rows=4)
    whole, alone = ask(*case, "float32"), ask(*(side[2:3] for side in case), "float32")
    assert all(np.array_equal(alone[name], whole[name][2:3]) for name in whole)


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor) and operation is not torch.ops.aten.t.default:
                self.largest = max(self.largest, each.numel())
        return found


def test_from_hidden_states_no_tensor_is_as_large_as_the_logits():
    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.normal(0, 1, (90, 8)))
    heads = [torch.from_numpy(rng.normal(0, 1, (500, 8)) + i * 1e-3) for i in range(2)]
    token_R = torch.arange(90)
    whole = tensor_sums.row_sums_of(*(hidden @ head.T for head in heads), token_R)
    chunk = 10
    with Sizes() as sizes:
        found = tensor_sums.row_sums_of_hidden(
            hidden, heads[0], hidden, heads[1], token_R, chunk=chunk
        )
    assert found.keys() == whole.keys()
    for name, value_R in whole.items():
        np.testing.assert_allclose(found[name], value_R, 1e-9, 1e-12, err_msg=name)
    assert sizes.largest <= 2 * chunk * 500 < 90 * 500  # both sides, in one tensor


RANK = """
import sys
import torch
from torch import distributed
from servanda.engines.tensor_sums import row_sums_of_hidden
from tests import oracles
from tests.engines.interpreted import hidden_case

rank, ranks, store, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
hidden, heads, token_R = hidden_case()
own = slice(0, 70) if rank == 0 else slice(70, None)  # of unequal size
torch.save(row_sums_of_hidden(
    hidden, heads[0][own], hidden, heads[1][own], token_R, chunk=5, start=own.start,
    group=distributed.group.WORLD,
), f"{out}.{rank}")
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_tensor_parallel_ranks_have_the_sums_of_the_whole_vocabulary(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK,
                str(i),
                "2",
                str(tmp_path / "store"),
                str(tmp_path / "out"),
            ],
            env=env,
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    problems = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], problems
    hidden, heads, token_R = hidden_case()
    whole = tensor_sums.row_sums_of(*(hidden @ head.T for head in heads), token_R)
    for rank in range(2):
        found = torch.load(tmp_path / f"out.{rank}")
        for name, value_R in whole.items():
            np.testing.assert_allclose(found[name], value_R, 1e-9, 1e-12, err_msg=name)


def test_logits_may_be_views_without_rows_and_under_gradients():
    train_RV, infer_RV = (torch.from_numpy(side) for side in drawn(4, 30, 0.1, "float64"))
    whole = tensor_sums.row_sums_of(train_RV, infer_RV)
    wide = torch.cat([train_RV, infer_RV], dim=1).requires_grad_()
    view = tensor_sums.row_sums_of(wide[:, :30], infer_RV.T.contiguous().T)
    assert all(torch.equal(view[name], whole[name]) for name in whole)
    assert not any(value_R.requires_grad for value_R in view.values())
    assert tensor_sums.row_sums_of(train_RV[:0], infer_RV[:0])["tv"].shape == (0,)


def test_different_shapes_are_refused_with_the_next_move():
    with pytest.raises(
        EvidenceError, match=r"\(2, 3\) train logits for \(2, 4\) infer logits"
    ) as e:
        tensor_sums.row_sums_of(torch.zeros(2, 3), torch.zeros(2, 4))
    assert "[rows, vocabulary]" in e.value.problems[0].hint


def test_sides_on_two_devices_are_refused_with_the_next_move():
    with pytest.raises(EvidenceError, match="train logits on cpu, infer logits on meta") as e:
        tensor_sums.row_sums_of(torch.zeros(2, 3), torch.zeros(2, 3, device="meta"))
    assert e.value.problems[0].hint == "move one side to the device of the other"


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from servanda.engines import triton_kernels as kernels

def type_of(name):
    if name in ("train", "infer"):
        return "*bf16"
    if name in ("normalisers", "out"):
        return "*fp64"
    return "constexpr" if name.isupper() else "i32"

for kernel in (kernels._normalise, kernels._reduce):
    source = ASTSource(
        kernel,
        {name: type_of(name) for name in kernel.arg_names},
        {"SPAN": kernels.SPAN, "BLOCK": kernels.BLOCK},
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
    assert made.asm["cubin"] and not made.asm["ptx"].count("cvt.f64.f32 \\t%fd1, 0f")
"""


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """The interpreter knows no types; the compiler, which needs no GPU, does."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = tmp_path / "compiled.py"  # Triton reads the source of what it compiles
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
