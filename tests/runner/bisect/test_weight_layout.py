# What the tensors of one checkpoint hold of another's, on conversions that are planted.

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from servanda.cli.main import main
from servanda.runner.bisect.weight_layout import MISPLACED, Origins

HEADS, WIDTH, EXPERTS = 4, 16, 6


def random_checkpoint(seed=0):
    draw = np.random.default_rng(seed)
    tensors = {"embed.weight": (40, 24), "norm.weight": (24,)}
    for layer in range(2):
        at = f"layers.{layer}."
        tensors |= {f"{at}norm.weight": (24,), f"{at}q.bias": (HEADS * WIDTH,)}
        tensors |= {f"{at}q.weight": (HEADS * WIDTH, 24), f"{at}o.weight": (24, HEADS * WIDTH)}
        tensors |= {f"{at}square.weight": (24, 24), f"{at}gate_up.weight": (96, 24)}
        tensors |= {f"{at}experts.{e}.up.weight": (32, 24) for e in range(EXPERTS)}
    values = {n: draw.normal(size=s).astype(np.float32) for n, s in tensors.items()}
    norms = {n: 1 + v / 10 for n, v in values.items() if n.endswith("norm.weight")}
    biases = {n: 0 * v for n, v in values.items() if n.endswith("bias")}
    return values | norms | biases


def origins(a, b):
    found = Origins({n: (lambda v=v: v) for n, v in a.items()}, {n: v.shape for n, v in a.items()})
    return {origin.name: origin for origin in found.of(b.items())}


def changed(change, name="layers.1.q.weight"):
    """The origin of one tensor that a conversion has changed; all others have to be equal."""
    a = random_checkpoint()
    found = origins(a, a | {name: np.ascontiguousarray(change(a[name]))})
    assert {o.kind for n, o in found.items() if n != name} == {"equal"}
    return found[name]


def interleaved(weight):
    """Rotary halves of each head to pairs, as conversions of Llama do it."""
    return weight.reshape(HEADS, 2, WIDTH // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def paired(weight):
    return weight.reshape(HEADS, WIDTH // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(
    ("change", "name", "kind", "text"),
    [
        (interleaved, "layers.1.q.weight", "reordered", "rows: interleaved in blocks of 16"),
        (paired, "layers.1.q.weight", "reordered", "rows: split into even and odd ones in blocks"),
        (lambda w: np.roll(w, 48, 0), "layers.1.gate_up.weight", "reordered", "halves are swapped"),
        (lambda w: w[::-1], "embed.weight", "reordered", "rows: in reverse"),
        (lambda w: np.roll(w, -1, 0), "embed.weight", "reordered", "rows: shifted by 1"),
        (lambda w: w[:, ::-1], "layers.0.o.weight", "reordered", "columns: in reverse"),
        (lambda w: w.T, "layers.0.square.weight", "transposed", "is transposed"),
        (lambda w: w.T, "layers.0.o.weight", "transposed", "is transposed"),
        (lambda w: np.tile(w[:32], (2, 1)), "layers.1.q.weight", "repeated", "32 holds 0 of A"),
        (lambda w: 1.3 * w, "embed.weight", "scaled", "is 1.3 times that of A"),
        (lambda w: w[:20], "embed.weight", "other", "shape (20, 24), in A (40, 24)"),
        (lambda w: w * 0, "embed.weight", "other", "is all 0"),
        (lambda w: np.where(w > 2, np.nan, w), "embed.weight", "not finite", "% of its values"),
    ],
)
def test_a_conversion_is_named(change, name, kind, text):
    found = changed(change, name)
    assert found.kind == kind and text in found.text, found


def test_an_expert_in_the_place_of_another_is_named_by_its_values():
    a = random_checkpoint()
    b = a | {"layers.0.experts.5.up.weight": a["layers.0.experts.1.up.weight"]}
    found = origins(a, b)["layers.0.experts.5.up.weight"]
    assert (found.kind, found.source) == ("moved", "layers.0.experts.1.up.weight")
    swapped = {
        f"layers.1.experts.{e}.up.weight": a[f"layers.1.experts.{EXPERTS - 1 - e}.up.weight"]
        for e in range(EXPERTS)
    }
    kinds = [o.kind for n, o in origins(a, a | swapped).items() if n in swapped]
    assert kinds == ["moved"] * EXPERTS


@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-4, 0.01, 0.2]))
def test_training_and_rounding_misplace_nothing(seed, size):
    a, draw = random_checkpoint(seed), np.random.default_rng(seed + 1)
    trained = {n: v + size * v.std() * draw.normal(size=v.shape) for n, v in a.items()}
    kinds = {
        o.kind for o in origins(a, {n: v.astype(np.float32) for n, v in trained.items()}).values()
    }
    assert not kinds & {*MISPLACED} and not kinds & {"other", "only in A", "only in B"}
    halves = {n: v.astype(np.float16).astype(np.float32) for n, v in a.items()}
    assert {o.kind for o in origins(a, halves).values()} <= {"equal", "rounded"}


@given(seed=st.integers(0, 10**6), fault=st.sampled_from([interleaved, paired]))
def test_a_fault_is_named_after_training_and_rounding_too(seed, fault):
    a, draw = random_checkpoint(seed), np.random.default_rng(seed + 1)
    b = {n: v + 0.05 * v.std() * draw.normal(size=v.shape) for n, v in a.items()}
    b |= {"layers.0.q.weight": fault(b["layers.0.q.weight"])}
    found = origins(a, {n: v.astype(np.float16).astype(np.float32) for n, v in b.items()})
    assert {n for n, o in found.items() if o.kind in MISPLACED} == {"layers.0.q.weight"}
    assert "in blocks of 16" in found["layers.0.q.weight"].text


def test_names_of_one_side_are_told_from_a_new_name():
    a = random_checkpoint()
    b = {f"model.{name}": values for name, values in a.items() if name != "embed.weight"}
    b["new.weight"] = np.ones((7, 5), np.float32)
    found = origins(a, b)
    kinds = {name: origin.kind for name, origin in found.items()}
    assert kinds.pop("embed.weight") == "only in A" and kinds.pop("new.weight") == "only in B"
    biases = {
        name for name in kinds if name.endswith("bias")
    }  # zeros have no values to be known by
    assert {kind for name, kind in kinds.items() if name not in biases} == {"renamed"}


def folder(path, tensors):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return str(path)


def weights(*words):
    return CliRunner().invoke(main, ["tools", "weights", *words])


def test_two_folders_on_the_command_line(tmp_path):
    a = random_checkpoint()
    moved = {
        f"layers.{n}.experts.3.up.weight": a[f"layers.{n}.experts.0.up.weight"] for n in range(2)
    }
    one, other = folder(tmp_path / "a", a), folder(tmp_path / "b", a | moved)
    same = weights(one, one)
    assert same.exit_code == 0 and same.output.endswith(
        "answer    the weights of B are those of A\n"
    )
    found = weights(one, other)
    assert found.exit_code == 1
    assert (
        "✗ 2 tensors: in the place of another tensor\n"
        "    layers.0.experts.3.up.weight  holds layers.0.experts.0.up.weight of A"
        "  (and 1 more such)"
    ) in found.output
    data = json.loads(weights(one, other, "--format", "json").output)
    assert not data["same"] and sum(t["kind"] == "moved" for t in data["tensors"]) == 2


def test_another_config_is_no_pass(tmp_path):
    a = random_checkpoint()
    folders = [folder(tmp_path / side, a) for side in "ab"]
    for theta, side in zip((1e4, 5e3), folders, strict=True):
        (Path(side) / "config.json").write_text(json.dumps({"rope_theta": theta, "dtype": side}))
    found = weights(*folders)
    assert found.exit_code == 1
    assert "✗ config.json differs (A / B): rope_theta 10000.0 / 5000.0\n" in found.output


def test_what_is_no_checkpoint_is_said(tmp_path):
    one = folder(tmp_path / "a", random_checkpoint())
    found = weights(one, str(tmp_path / "nothing"))
    assert found.exit_code == 4 and "does not exist" in found.output
    (tmp_path / "empty").mkdir()
    found = weights(one, str(tmp_path / "empty"))
    assert found.exit_code == 4 and "has no model.safetensors" in found.output
