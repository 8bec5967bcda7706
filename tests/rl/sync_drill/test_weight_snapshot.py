# Weights come back bit for bit, whatever they are.

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from servanda.errors import MeasurementError  # noqa: E402
from servanda.rl.sync_drill.noise import Sums  # noqa: E402
from servanda.rl.sync_drill.parallel.local_weights import same  # noqa: E402
from servanda.rl.sync_drill.parallel.weight_journal import (  # noqa: E402
    put_back,
    read_journal,
    refuse_journal,
    write_journal,
)
from servanda.rl.sync_drill.weight_snapshot import Weights  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@st.composite
def tensors(draw):
    """Any bits at all, so NaN with payloads, infinities, -0.0 and subnormals."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    size = rows * columns * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8)
    tensor = torch.from_numpy(data.copy()).view(dtype).reshape(rows, columns)
    return tensor.t() if draw(st.booleans()) else tensor


def held(*values):
    module = torch.nn.Module()
    for number, value in enumerate(values):
        module.register_parameter(f"p{number}", torch.nn.Parameter(value.clone()))
    return module


@given(st.lists(tensors(), min_size=1, max_size=3))
def test_whatever_was_done_to_them_weights_return_bit_for_bit(values):
    module = held(*values)
    weights = Weights(module)

    weights.poison()
    weights.restore()
    weights.anchor()
    weights.perturb(dict.fromkeys(weights.parameters, 0.5))
    weights.restore()

    for parameter, value in zip(module.parameters(), values, strict=True):
        assert same(parameter, value)


def test_each_row_of_a_tensor_may_have_a_size_of_its_own():
    value = torch.randn(4, 3, 2, dtype=torch.float64)
    module = held(value)
    weights = Weights(module)
    sizes = (0.5, 0.0, 1.0, 8.0)

    weights.perturb({"p0": 0.5})
    at_half = module.p0.detach() - value
    weights.perturb({"p0": sizes})

    scale_E = torch.tensor(sizes, dtype=torch.float64)[:, None, None] / 0.5
    torch.testing.assert_close(module.p0.detach() - value, scale_E * at_half)
    weights.restore()
    assert same(module.p0, value)


def test_a_share_of_the_values_changes_and_stays_in_a_larger_share():
    module = held(torch.randn(300, 400))
    weights, before = Weights(module, seed=3), module.p0.detach().clone()
    moved = {}
    for share in (0.005, 0.015, 0.065):
        weights.perturb({"p0": 1.0}, share)
        moved[share] = module.p0.detach() - before
        assert float((moved[share] != 0).double().mean()) == pytest.approx(share, rel=0.2)

    first = moved[0.005] != 0
    assert torch.equal(moved[0.065][first], moved[0.005][first])
    weights.restore()
    assert torch.equal(module.p0, before)


@given(tensors())
def test_a_journal_keeps_every_bit(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("journal") / "j"
    module = held(value)
    write_journal(path, Weights(module).local.kept)
    with torch.no_grad():
        module.p0.zero_()

    put_back(module, read_journal(path))

    assert same(module.p0, value)


def test_same_tells_nan_from_nan_and_zero_from_minus_zero():
    one = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    two = torch.tensor([0x7FC00002], dtype=torch.int32).view(torch.float32)

    assert same(one, one) and not same(one, two)
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("values", "mean", "scale"),
    [
        (torch.full((4,), 1.0), 1.0, 0.25),
        (torch.zeros(8, 4), 0.0, 0.5),
        (torch.tensor([1.0, 3.0]), 2.0, 1.0),
        (torch.tensor([1.0, 3.0, float("nan")]), 2.0, 1.0),
    ],
)
def test_a_tensor_that_does_not_vary_gets_the_spread_of_a_fresh_one(values, mean, scale):
    assert Sums.of(values).moments(values.shape) == (mean, scale)


def test_what_is_no_journal_is_said_and_a_shard_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"not a journal")
    with pytest.raises(MeasurementError, match="x is not a preflight journal"):
        read_journal(tmp_path / "x")
    with pytest.raises(MeasurementError, match="there is no journal"):
        read_journal(tmp_path / "y")
    with pytest.raises(MeasurementError, match="p0 has no values in this process"):
        Weights(held(torch.empty(0)))


def test_a_journal_whose_writer_is_alive_says_which_process_that_is(tmp_path, monkeypatch):
    path = tmp_path / "j"
    with monkeypatch.context() as other:
        other.setattr("os.getpid", os.getppid)
        write_journal(path, {"w": torch.ones(2)})

    with pytest.raises(MeasurementError) as caught:
        refuse_journal(path)

    (problem,) = caught.value.problems
    assert problem.message == (
        f"{path} is there already, and process {os.getppid()}, which wrote it, is alive"
    )
    assert problem.hint.startswith("wait for its test, or use another --journal")
