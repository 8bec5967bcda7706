# Kernels that are loaded in parts, beyond the default suite: more ranks and architectures, the laws
# of engines, packs made under torchrun, and memory.

import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.distributed.fsdp")

from benchmarks import large_reference

from servanda.engines import open_engine
from servanda.engines.conformance import check_engine
from servanda.engines.recorded import Pack
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from tests.engines import large

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])
MADE = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "softcap": {"kind": "Gemma2", "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "scaled": {"kind": "Cohere", "logit_scale": 0.25, "tie_word_embeddings": True},
    "divided": {"kind": "Granite", "logits_scaling": 4.0},
    "biased head": {"kind": "Phi"},
}


@RANKS
@pytest.mark.parametrize("kind", MADE)
def test_made_models_are_the_one_process_to_rounding(tmp_path, kind, ranks):
    folder = large.save_model(tmp_path, **MADE[kind])
    expected, one = large.in_one_process(folder, large.launched())

    engine = open_engine(large.kernel(folder, {"ranks": ranks}))
    try:
        large.assert_alike(large.everything(engine, large.launched()), expected, 1e-11)
        assert engine.describe().tensors == one.tensors
    finally:
        engine.close()


@RANKS
@pytest.mark.parametrize("model", ["tiny-lm", "tiny-qwen3", "tiny-moe"])
def test_shipped_models_are_the_one_process_to_rounding(model, ranks):
    folder, batch = ROOT / "models" / model, large.launched(size=1000)
    # the products of experts refuse float64
    dtype, error = ("float32", 1e-4) if model == "tiny-moe" else ("float64", 1e-11)
    expected, _ = large.in_one_process(folder, batch, dtype=dtype)

    engine = open_engine(large.kernel(folder, {"ranks": ranks}, dtype=dtype))
    try:
        large.assert_alike(large.everything(engine, batch), expected, error)
    finally:
        engine.close()


def test_logits_that_change_after_the_head_in_an_unknown_way_are_refused(tmp_path):
    folder = large.save_model(tmp_path, "FalconH1", lm_head_multiplier=0.5, num_hidden_layers=1)

    engine = open_engine(large.kernel(folder, {"ranks": 2}, dtype="float32"))
    try:
        with pytest.raises(MeasurementError, match=r"falcon_h1 changes the logits") as no:
            engine.score(large.given(large.launched()), large.PLAIN, "prefill")
        assert "offload: layers" in str(no.value)
    finally:
        engine.close()


@pytest.mark.parametrize("options", [{"offload": "layers"}, {"ranks": 2}])
def test_a_prefill_in_steps_is_the_one_process_to_rounding(tmp_path, options):
    folder = large.save_model(tmp_path)
    keys = {"prefill_chunk": 5, "batch_size": 3}
    expected, _ = large.in_one_process(folder, large.launched(), **keys)

    engine = open_engine(large.kernel(folder, options, **keys))
    try:
        large.assert_alike(large.everything(engine, large.launched()), expected, 1e-11)
    finally:
        engine.close()


@pytest.mark.parametrize("options", [{"offload": "layers"}, {"ranks": 2}])
def test_recorded_experts_are_replayed_as_in_one_process(options):
    keys = {"dtype": "float32", "routes": "replayed"}
    batch = large.given(large.launched(size=1000))
    places, model = sum(map(len, batch.continuations)), ROOT / "models" / "tiny-moe"
    rng = np.random.default_rng(1)
    routes = [
        rng.permuted(np.tile(np.arange(16), (len(tokens), 3, 1)), axis=-1)[..., :4]
        for tokens in batch.continuations
    ]
    batch = replace(batch, routes=tuple(route.astype(np.int16) for route in routes))
    expected = open_engine(large.kernel(model, **keys)).score(batch, large.PLAIN, "prefill")
    engine = open_engine(large.kernel(model, options, **keys))
    try:
        found = engine.score(batch, large.PLAIN, "prefill")
    finally:
        engine.close()

    assert found.columns.keys() == expected.columns.keys() and len(found.token_N) == places
    for name, value_N in expected.columns.items():
        np.testing.assert_allclose(found.columns[name], value_N, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("options", [{"offload": "layers"}, {"ranks": 2}])
def test_the_laws_of_engines_are_kept(options):
    kernel = large.kernel(ROOT / "models" / "tiny-lm", options, dtype="float32")

    report = check_engine(lambda: open_engine(kernel))
    assert len(report.those("kept")) > len(report.those("skipped"))


def servanda(*words, ranks=0):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = [sys.executable, *(torchrun if ranks else []), "-m", "servanda", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_pack_made_under_torchrun_is_that_of_one_process(tmp_path):
    sizes = ("--sequences", "24", "--max-new-tokens", "8", "--golden", "data/golden.jsonl")
    kernel = "transformers:models/tiny-lm@float64"
    assert not servanda(
        "tools", "measure", kernel, *sizes, "-o", str(tmp_path / "1.pack")
    ).returncode

    done = servanda(
        *("tools", "measure", f"{kernel},option.ranks=2", *sizes, "-o", str(tmp_path / "2.pack")),
        ranks=2,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.pack: transformers") == 1  # one rank writes, and says so
    one, two = (Pack.read(str(tmp_path / f"{n}.pack")).answers for n in (1, 2))
    assert two["generate"].continuations == one["generate"].continuations
    for verb in ("generate", "top"):
        logp_N = one[verb].columns["logp"]
        np.testing.assert_allclose(two[verb].columns["logp"], logp_N, atol=1e-11)


def test_torchrun_with_another_number_of_processes_is_refused(tmp_path):
    kernel = "transformers:models/tiny-lm@float32,option.ranks=3"

    done = servanda("tools", "measure", kernel, "-o", str(tmp_path / "x.pack"), ranks=2)

    assert done.returncode and "torchrun started 2 processes, and the kernel has 3" in done.stderr
    assert "option.ranks=2" in done.stderr and not [*tmp_path.iterdir()]


def test_no_rank_outlives_a_worker_that_is_killed(tmp_path):
    worker = spawn(large.kernel(large.save_model(tmp_path), {"ranks": 2}), "train")
    worker.describe()
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    ends = [os.pidfd_open(int(pid)) for pid in children]
    assert len(ends) == 2

    os.kill(worker.pid, signal.SIGKILL)

    for end in ends:  # readable once the process has ended
        assert select.select([end], [], [], 60)[0]
        os.close(end)
    worker.close()


def test_memory_grows_by_a_rank_s_share_of_the_layers_and_not_at_all_when_offloaded(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    large_reference.make_model(few, 1)
    more = 12 * large_reference.make_model(many, 13)  # MiB
    growth = {}
    for options in large_reference.SIDES[:3]:
        peaks = [large_reference.measured(folder, options)[0] for folder in (few, many)]
        growth[str(options)] = (peaks[1] - peaks[0]) / more

    whole, offloaded, halved = growth.values()
    assert whole > 1, growth
    assert offloaded < 0.25, growth  # one layer more at most, beside one of twelve
    assert halved < 0.8, growth
