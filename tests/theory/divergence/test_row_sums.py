# The compiled sums against the readable formulas, which other tests hold to the definitions.

import platform
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from servanda.runner.golden import reduced
from servanda.theory.divergence import row_sums
from servanda.theory.divergence.base import DIVERGENCES, OF_SUMS, LogitRows

ROOT = Path(__file__).parents[3]
needs_compiled = pytest.mark.skipif(
    row_sums.compiled() is None, reason="the package was installed without a C compiler"
)
SECOND_ORDER = {"kl_nats", "k3_nats", "kl_reverse_nats", "js_nats", "chi2", "hellinger2", "le_cam"}
EXACT = sorted(name for name, metric in DIVERGENCES.items() if "logits" in metric.forms)


def columns(train_RV, infer_RV, token_R, *, compiled):
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(row_sums, "compiled", lambda: None)
        return reduced(LogitRows(train_RV, infer_RV), token_R)


def drawn(seed, rows, vocabulary, noise, dtype=np.float32):
    rng = np.random.default_rng(seed)
    infer_RV = rng.normal(0, 4, (rows, vocabulary))
    train_RV = infer_RV + rng.normal(0, noise, infer_RV.shape) + rng.normal(0, 5)
    return train_RV.astype(dtype), infer_RV.astype(dtype), rng.integers(0, vocabulary, rows)


def assert_alike(fast, slow, noise):
    """Equal to 1e-10, or to what the rounding of a log weight moves.

    A term of second order is the difference of exp(x) - 1 and x, each rounded at the size of x,
    which is five times the noise at most.
    """
    second = max(1e-22, 5 * noise * np.finfo(np.float64).eps)
    assert fast.keys() == slow.keys()
    for name, values_R in slow.items():
        least = second if name.removeprefix("joint.") in SECOND_ORDER else 1e-14
        np.testing.assert_allclose(fast[name], values_R, 1e-10, least, err_msg=name)


def test_where_there_is_a_compiler_it_is_compiled():
    assert shutil.which("cc") is None or row_sums.compiled() is not None


def test_every_exact_metric_has_its_form_on_row_sums():
    assert sorted(OF_SUMS) == EXACT


@needs_compiled
@given(
    st.integers(0, 2**32),
    st.integers(1, 70),  # also less than a vector of numbers, and what a vector leaves over
    st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1.0, 10.0, 60.0]),
    st.sampled_from([np.float32, np.float64]),
)
@example(8670328, 66, 1e-6, np.float32)  # the rounding of one token's weight
def test_the_compiled_sums_are_the_readable_formulas(seed, vocabulary, noise, dtype):
    case = drawn(seed, 5, vocabulary, noise, dtype)
    fast, slow = (columns(*case, compiled=compiled) for compiled in (True, False))
    assert_alike(fast, slow, noise)


@needs_compiled
def test_rows_that_need_care_are_left_to_the_readable_formulas():
    """Masked on both sides, on one, wholly; NaN; inf; weights that no float holds."""
    train_RV, infer_RV, token_R = drawn(1, 9, 40, 0.1)
    train_RV[1, 3:9] = infer_RV[1, 3:9] = -np.inf
    train_RV[2, 5] = -np.inf
    infer_RV[3, 5] = -np.inf
    infer_RV[4] = -np.inf
    train_RV[5, 7] = np.nan
    infer_RV[6, 7] = np.inf
    train_RV[7, 0] += 5000
    train_RV[8, int(infer_RV[8].argmax())] = -np.inf
    fast, slow = (columns(train_RV, infer_RV, token_R, compiled=c) for c in (True, False))
    for name, values_R in slow.items():
        np.testing.assert_allclose(fast[name], values_R, 1e-11, 1e-14, err_msg=name)
    # it is no vacuous comparison: the library did work the rows of the first two kinds
    plain = LogitRows(train_RV, infer_RV)._plain
    assert plain is not None and plain[0].tolist() == [True] * 2 + [False] * 7


@needs_compiled
def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads(monkeypatch):
    train_RV, infer_RV, token_R = drawn(2, 12, 1000, 1e-3)
    whole = columns(train_RV, infer_RV, token_R, compiled=True)
    monkeypatch.setattr(row_sums, "_WORTH_THREADS", 0)
    for threads in ("1", "2", "5", "40"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        again = columns(train_RV, infer_RV, token_R, compiled=True)
        assert all(np.array_equal(again[name], whole[name]) for name in whole)
    for part in (slice(3, 4), slice(5, None, 2)):
        alone = columns(train_RV[part], infer_RV[part], token_R[part], compiled=True)
        assert all(np.array_equal(alone[name], whole[name][part]) for name in whole)


# torch's names of what a processor can do, from least to most, and the level that each has
LEVELS = {"DEFAULT": "x86-64", "AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}


@needs_compiled
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize("capability", LEVELS)
def test_each_instruction_set_gives_the_same_sums_without_a_scalar_step(
    capability, tmp_path, monkeypatch
):
    levels = list(LEVELS)
    if levels.index(capability) > levels.index(torch.backends.cpu.get_cpu_capability()):
        pytest.skip(f"this processor lacks {capability}")
    hook = types.SimpleNamespace(BuildHookInterface=object)  # hatchling is not installed
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", hook)
    flags = [*runpy.run_path(str(ROOT / "hatch_build.py"))["FLAGS"], "-DWIDEST="]
    flags += [f"-march={LEVELS[capability]}", f'-DSOURCE="{row_sums.source_digest()}"']
    library = tmp_path / "row_sums.so"
    subprocess.run(["cc", *flags, "-o", library, row_sums.SOURCE, "-lm"], check=True)
    instructions = subprocess.run(
        ["objdump", "--disassemble", library], check=True, capture_output=True, text=True
    ).stdout
    # an integer that becomes a double one token at a time: a loop that was not vectorised
    assert "cvtsi2sd" not in instructions
    case = drawn(3, 20, 1003, 1e-3)
    usual = columns(*case, compiled=True)
    monkeypatch.setattr(row_sums, "LIBRARY", library)
    monkeypatch.setattr(row_sums, "compiled", row_sums.compiled.__wrapped__)
    assert_alike(columns(*case, compiled=True), usual, 1e-3)


@needs_compiled
def test_a_build_of_another_source_is_not_used_and_said(monkeypatch, tmp_path):
    changed = tmp_path / "row_sums.c"
    changed.write_text(row_sums.SOURCE.read_text() + "\n")
    monkeypatch.setattr(row_sums, "SOURCE", changed)
    with pytest.warns(
        UserWarning, match="compiled from another version.*install the package again"
    ):
        assert row_sums.compiled.__wrapped__() is None


@pytest.mark.parametrize("compiler", ["/no/such/cc", "false"])
def test_without_a_compiler_the_build_says_so_and_goes_on(compiler, tmp_path):
    for name in ("hatch_build.py", str(row_sums.SOURCE.relative_to(ROOT))):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    script = (
        "import sys, types\n"
        "hook = types.ModuleType('hook'); hook.BuildHookInterface = object\n"
        "sys.modules['hatchling.builders.hooks.plugin.interface'] = hook\n"
        "for name in ('hatchling', 'hatchling.builders', 'hatchling.builders.hooks',\n"
        "             'hatchling.builders.hooks.plugin'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "from hatch_build import CompiledMetrics\n"
        "build = CompiledMetrics(); build.root, build.target_name = '.', 'wheel'\n"
        "data = {'artifacts': []}; build.initialize('standard', data); print(data)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"CC": compiler, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{'artifacts': []}\n"
    assert "is not compiled, its slower formulas are used" in done.stderr
