# Tensors that stay on their device, against the same numbers in NumPy; here the device is the CPU.

import numpy as np
import pytest

from servanda.errors import EvidenceError
from servanda.rl import Monitor
from servanda.rl.monitor import batch as device_batch
from servanda.rl.monitor.batch import Batch, DeviceBatch
from servanda.rl.monitor.statistics import contributions
from servanda.theory.bounds.importance_weights import PSI
from servanda.theory.stats import tally
from servanda.theory.stats.histogram import BINS, bin_of, edges
from tests.rl.monitor.made import step

torch = pytest.importorskip("torch")

SIDES = {np.float32: np.int32, np.float64: np.int64}


@pytest.fixture
def device(monkeypatch):
    """Tensors of the CPU are treated as those of an accelerator."""
    monkeypatch.setattr(device_batch, "_HOSTS", ())


def adversarial(real):
    """Every edge of a bin and its neighbours, odd values, and any bits at all."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        at = np.concatenate(edges()).astype(real)
        around = [np.nextafter(at, real(way)) for way in (-np.inf, np.inf)]
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -3e38], dtype=real)
    whole = SIDES[real]
    bits = rng.integers(np.iinfo(whole).min, np.iinfo(whole).max, 100_000, dtype=whole).view(real)
    return np.concatenate([at, -at, *around, odd, bits])


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_a_bin_is_the_same_in_torch_and_in_numpy(real):
    values = adversarial(real)
    found = tally.tensor_bins(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(found, bin_of(values))


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
def test_a_tally_is_the_same_in_torch_and_in_numpy(kind):
    rng = np.random.default_rng(1)
    values = adversarial(np.float64 if kind == "float64" else np.float32)
    with np.errstate(over="ignore"):
        sides = [torch.from_numpy(rng.permutation(values)) for _ in range(2)]
    sides = [side.to(getattr(torch, kind)).reshape(1, -1) for side in sides]
    mask = torch.from_numpy(rng.random(values.size) < 0.8).reshape(1, -1)
    atom = torch.from_numpy(rng.integers(0, 5, values.size)).reshape(1, -1)
    wide = [side if kind.endswith(("32", "64")) else side.float() for side in sides]
    found = tally.tally_of(*wide, mask, atom, 5)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the bits
        wanted = tally.tally(*(of.numpy() for of in (*wide, mask, atom)), 5)
    np.testing.assert_array_equal(found, wanted)
    assert found.sum() == mask.sum() and found[:, BINS].any()


def arrays(kind, rng, size=32, width=160):
    """Both logprobs, the mask, and more arguments of `observe`."""
    given = {"groups": [b // 4 for b in range(size)], "labels": {"env": ["a", "b"] * (size // 2)}}
    made = {
        "plain": {},
        "prompts": {"prompts": 5},
        "turns": {"prompts": 3, "turns": 3},
        "double": {"dtype": np.float64},
    }
    train, infer, mask = step(rng, size, width, tv=0.02, **made.get(kind, made["turns"]))
    train = np.minimum(train + rng.normal(0, 0.01, train.shape).astype(train.dtype), 0)
    if kind == "odd":
        infer[0, :40], train[1, 20:60], train[2, 30] = np.nan, np.nan, -np.inf
        train[~mask] = 7e3
    if kind == "columns":
        given["advantages"] = rng.normal(size=mask.shape)
        given["staleness"] = rng.integers(0, 3, mask.shape).astype(np.float64)
        given["staleness"][3, :9] = np.nan
    if kind == "rows":
        given["advantages"] = rng.normal(size=size).astype(np.float32)
        given["staleness"] = rng.integers(0, 3, size)
        given["selected"] = rng.random(size) < 0.5
    return train, infer, mask, given


KINDS = ["plain", "prompts", "turns", "double", "odd", "columns", "rows", "bfloat16"]


def judged_alike(kind, place, steps=3):
    """Steps of tensors at a place have the verdicts of the same steps in NumPy."""
    rng = np.random.default_rng(2)
    contract, other = Monitor("verl-async"), Monitor("verl-async")
    for weights in range(steps):
        train, infer, mask, given = arrays(kind, rng)
        tensors = [torch.from_numpy(of.copy()).to(place) for of in (train, infer, mask)]
        if kind == "bfloat16":
            tensors[0] = tensors[0].bfloat16()
            train = tensors[0].float().cpu().numpy()
        more = {
            name: torch.from_numpy(values).to(place) if isinstance(values, np.ndarray) else values
            for name, values in given.items()
        }
        wanted = contract.observe(train, infer, mask, weights=weights, **given)
        found = other.observe(*tensors, weights=weights, **more)
        assert isinstance(device_batch.batch_of(*tensors, weights=0, **more), DeviceBatch)
        assert str(found) == str(wanted)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-6)
        assert found.verdict.cells == wanted.verdict.cells
        np.testing.assert_array_equal(found.token_weights, wanted.token_weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_device_is_judged_as_in_numpy(device, kind):
    judged_alike(kind, "cpu")


def test_a_healthy_step_copies_counts_and_rows_but_no_tokens(device, monkeypatch):
    rng, monitor, copied = np.random.default_rng(3), Monitor("verl-async"), []
    own = torch.Tensor.cpu

    def cpu(tensor):
        copied.append(tensor.numel())
        return own(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.Tensor, "__array__", None)
    for weights in range(2):
        train, infer, mask, given = arrays("prompts", rng, 64, 1000)
        copied.clear()
        moved = rng.random(infer.shape).astype(np.float32)  # no two responses are alike
        train, infer = train - moved, infer - moved
        tensors = [torch.from_numpy(of) for of in (train, infer, mask)]
        stale, advantages = torch.zeros(64), torch.from_numpy(rng.normal(size=64))
        monitor.observe(*tensors, weights=weights, staleness=stale, advantages=advantages, **given)
    assert copied and max(copied) < mask.size / 4


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"mask": lambda m: m.float() * np.nan}, "the mask is NaN in places"),
        ({"mask": lambda m: m.long() * -100}, "the mask is -100 in places"),
        ({"mask": lambda m: m[0]}, "the mask has shape"),
        ({"infer": lambda i: i[:, 1:]}, "logp_infer has shape"),
        ({"staleness": lambda _: -torch.ones(32)}, "a token is -1 updates old"),
        ({"staleness": lambda _: torch.ones(7)}, "staleness has shape"),
        ({"tokens": lambda _: torch.zeros(32, 5, dtype=torch.int64)}, "tokens have shape"),
        ({"selected": lambda _: torch.ones(32)}, "selected is float32 of shape"),
        ({"groups": lambda _: ["a"]}, "32 sequences have 1 values of groups"),
    ],
)
def test_bad_arrays_of_a_device_are_told_as_those_of_numpy(device, wrong, told):
    train, infer, mask, _ = arrays("plain", np.random.default_rng(4))
    given = {"train": train, "infer": infer, "mask": mask}
    given = {name: torch.from_numpy(of) for name, of in given.items()}
    for name, change in wrong.items():
        given[name] = change(given.get(name))
    order = [given.pop(name) for name in ("train", "infer", "mask")]
    with pytest.raises(EvidenceError, match=told):
        Monitor("verl-async").observe(*order, weights=0, **given)


def spoilt(how):
    rng = np.random.default_rng(5)
    train, infer, mask, _ = arrays("plain", rng)
    infer -= rng.random(infer.shape).astype(np.float32)
    train = infer + rng.normal(0, 0.01, infer.shape).astype(np.float32)
    if how == "positive":
        train[3, :5] = 2.0
    if how == "filled":
        train[mask & (rng.random(mask.shape) < 0.2)] = 0.0
    if how == "repeated":  # at other columns, as padding on the left has it
        for row in range(16, 32):
            infer[row, 1:] = infer[row - 16, :-1]
            mask[row] = False
            mask[row, 1:] = mask[row - 16, :-1]
    if how == "copied":
        train = infer.copy()
    return train, infer, mask


@pytest.mark.parametrize("how", ["positive", "filled", "repeated", "copied", "one array"])
def test_unsound_data_of_a_device_are_an_error_as_in_numpy(device, how):
    train, infer, mask = spoilt(how)
    tensors = [torch.from_numpy(of) for of in (train, infer, mask)]
    if how == "one array":
        train, tensors[0] = infer, tensors[1]
    wanted = Monitor("verl-sync").observe(train, infer, mask, weights=0)
    found = Monitor("verl-sync").observe(*tensors, weights=0)
    assert found.outcome == wanted.outcome == "error"
    assert found.cause == wanted.cause != ""


@pytest.mark.parametrize(
    "psi",
    [
        *(PSI[name]() for name in ("naive", "is")),
        *(PSI["tis"](2.0), PSI["clip"](0.0), PSI["clip"](0.2), PSI["clip"](1.5)),
        *(PSI[name]((low, 2.0)) for name in ("mis", "reject") for low in (0.0, 0.5)),
    ],
    ids=lambda psi: f"{psi.name} {psi.bends}",
)
def test_a_weighting_is_the_same_in_torch_and_in_numpy(psi):
    rng = np.random.default_rng(6)
    w = np.r_[0.0, np.exp(rng.normal(0, 2, 1000)), 1e300, psi.bends, np.nextafter(2.0, 3), 0.5, 2.0]
    np.testing.assert_allclose(
        device_batch.weights(psi, torch.from_numpy(w)), psi.weight(w), rtol=1e-14
    )
    train, infer, mask, given = arrays("columns", rng)
    batch = Batch.of(train, infer, mask, weights=0, **given)
    tensors = [torch.from_numpy(of) for of in (train, infer, mask)]
    own = device_batch.on_device(*tensors, weights=0, **given)
    assert contributions(own, psi) == pytest.approx(contributions(batch, psi))


def test_tensors_of_the_cpu_are_numpy_views():
    train, infer, mask, _ = arrays("plain", np.random.default_rng(7))
    tensors = [torch.from_numpy(of) for of in (train, infer, mask)]
    batch = device_batch.batch_of(*tensors, weights=0)
    assert type(batch) is Batch and np.shares_memory(batch.logp_train_BT, train)


def test_what_the_loss_used_and_the_versions_are_the_same_on_a_device(device):
    train, infer, mask, _ = arrays("turns", np.random.default_rng(6))
    lag = np.random.default_rng(7).integers(0, 3, len(mask)).astype(np.float64)
    w = np.minimum(np.exp(train - infer), np.float32(1.1))
    w[0, mask[0]] = np.inf
    more = {"loss_weights": w, "loss_mask": mask, "versions": 5 - lag, "older": {1: infer}}

    here = Monitor("verl-async").observe(train, infer, mask, weights=5, **more)
    sides = [torch.from_numpy(of) for of in (train, infer, mask)]
    tensors = {n: torch.from_numpy(v) for n, v in more.items() if n != "older"}
    older = {1: sides[1]}
    there = Monitor("verl-async").observe(*sides, weights=5, **tensors, older=older)

    assert here.cause == there.cause and "is infinite" in here.cause
    assert here.metrics == there.metrics
    assert "servanda/lag/gap_nats" in here.metrics
