# Engine `onnxruntime` against engine `transformers` on the same checkpoint folder, and its cache.

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers

from servanda.contract.model import Kernel
from servanda.engines import local_engine, onnx_export, open_engine
from servanda.engines.conformance import check_engine
from servanda.engines.onnxruntime import OnnxRuntimeEngine
from servanda.engines.transformers import TransformersEngine
from servanda.errors import MeasurementError
from servanda.runner.run import check, in_process
from servanda.traces.trace import Batch
from tests.engines.test_transformers import (
    CONTEXT,
    EOS,
    FILTERED,
    PLAIN,
    VOCAB,
    WIDTH,
    columns_equal,
    given,
    launched,
    refusal,
    save_model,
)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny-lm"
ROUNDING = 1e-5  # float32, nats

pytestmark = pytest.mark.slow  # models are exported first
PATHS = pytest.mark.parametrize("path", ["prefill", "decode"])
MODELS = pytest.mark.parametrize("name", ["llama", "qwen", "tiny"])


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One for all tests of this file: an export takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SERVANDA_CACHE", str(folder))
        yield folder


def save_qwen(folder):
    """A random Qwen3 of other sizes, with normalised queries and keys and a head of its own.

    Its second layer sees a window of eight tokens, fewer than a sequence of the tests has.
    """
    save_model(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=VOCAB,
                hidden_size=48,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=False,
                initializer_range=0.25,
                use_sliding_window=True,
                sliding_window=8,
                max_window_layers=1,
                eos_token_id=EOS[0],
            )
        )
    model.generation_config = transformers.GenerationConfig(eos_token_id=list(EOS))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    return {"llama": save_model(made / "llama"), "qwen": save_qwen(made / "qwen"), "tiny": TINY}


def kernel(folder, engine="onnxruntime", **more):
    return Kernel(engine=engine, model=str(folder), **{"batch_size": 4, **more})


@pytest.fixture(scope="session")
def pairs(folders):
    """Name of a model -> (transformers, onnxruntime), each opened when first asked for."""
    opened = {}

    def pair(name):
        if name not in opened:
            reference = TransformersEngine(kernel(folders[name], "transformers"))
            opened[name] = reference, OnnxRuntimeEngine(kernel(folders[name]))
        return opened[name]

    return pair


@pytest.fixture(scope="session")
def int8(folders):
    return OnnxRuntimeEngine(kernel(TINY, quantization="int8_dynamic"))


@pytest.fixture(scope="session")
def golden(pairs):
    """Golden texts of the shipped model: four tokens are the prompt, the rest is given."""
    lines = (ROOT / "data" / "golden.jsonl").read_text(encoding="utf-8").splitlines()[::4]
    ids = pairs("tiny")[0].encode([json.loads(line)["prompt"] for line in lines])
    texts = [tuple(text[:4]) for text in ids], [tuple(text[4:]) for text in ids]
    return Batch(tuple(range(len(ids))), tuple(texts[0]), max(map(len, texts[1])), tuple(texts[1]))


def logits_of(engine, batch, path):
    return np.concatenate(list(engine.logits(batch, path))).astype(np.float64)


def probabilities(logits_NV):
    p_NV = np.exp(logits_NV - logits_NV.max(axis=-1, keepdims=True))
    return p_NV / p_NV.sum(axis=-1, keepdims=True)


# what the numbers are


@PATHS
@MODELS
def test_float32_is_transformers_up_to_rounding(pairs, name, path):
    reference, engine = pairs(name)
    drawn = given(reference.generate(launched(), PLAIN, 3), launched())

    ours, theirs = engine.score(drawn, PLAIN, path), reference.score(drawn, PLAIN, path)

    assert ours.about == theirs.about
    assert ours.columns.keys() == theirs.columns.keys()
    gap_N = np.abs(ours.columns["logp"] - theirs.columns["logp"])
    assert 0 < gap_N.max() < ROUNDING  # another program, and the same function
    assert np.ptp(theirs.columns["logp"]) > 3  # the model has opinions
    p_NV, q_NV = (probabilities(logits_of(e, drawn, path)) for e in (reference, engine))
    assert np.abs(p_NV - q_NV).sum(axis=-1).max() / 2 < ROUNDING


@MODELS
def test_the_tokens_drawn_are_those_of_transformers(pairs, name):
    reference, engine = pairs(name)

    for sampling in (PLAIN, FILTERED):
        drew = engine.generate(launched(), sampling, 3)
        assert drew.continuations == reference.generate(launched(), sampling, 3).continuations


def test_golden_texts_of_the_shipped_model_are_scored_alike(pairs, golden):
    reference, engine = pairs("tiny")

    gap_N = np.abs(
        engine.score(golden, PLAIN, "prefill").columns["logp"]
        - reference.score(golden, PLAIN, "prefill").columns["logp"]
    )

    assert gap_N.mean() < 3e-6 and gap_N.max() < 3e-5


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_scoring_by_decode_repeats_generation_bit_for_bit(pairs, int8, sampling):
    for engine in (pairs("llama")[1], pairs("qwen")[1], int8):
        drew = engine.generate(launched(), sampling, seed=3)
        scored = engine.score(given(drew, launched()), sampling, "decode")
        assert np.isfinite(drew.columns["logp"]).all()
        assert columns_equal(drew, scored)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_decode_and_prefill_agree_up_to_rounding(pairs, name):
    engine = pairs(name)[1]
    drawn = given(engine.generate(launched(), PLAIN, 3), launched())

    decode, prefill = (engine.score(drawn, PLAIN, path) for path in ("decode", "prefill"))

    gap_N = np.abs(decode.columns["logp"] - prefill.columns["logp"])
    assert 0 < gap_N.max() < ROUNDING


def test_decoding_feeds_one_token_a_step_and_keeps_what_went_before(pairs, monkeypatch):
    engine, fed = pairs("llama")[1], []
    run = engine._session.run_with_ort_values

    class Listening:
        def run_with_ort_values(self, outputs, feed):
            fed.append((feed["input_ids"].shape(), feed["past.k.0"].shape()[2]))
            return run(outputs, feed)

    monkeypatch.setattr(engine, "_session", Listening())
    batch = launched().take(range(4))
    longest = max(map(len, batch.prompts))
    drew = engine.generate(batch, PLAIN, 3)

    steps = int(drew.length_S.max()) - 1
    assert fed == [([4, longest], 0), *(([4, 1], longest + step) for step in range(steps))]
    fed.clear()
    engine.score(given(drew, batch), PLAIN, "prefill")
    assert fed == [([4, longest + WIDTH], 0)]


def test_company_moves_float32_by_rounding_only(folders, pairs):
    engine = pairs("llama")[1]
    drawn = given(engine.generate(launched(), PLAIN, 3), launched())
    alone = OnnxRuntimeEngine(kernel(folders["llama"], batch_size=1))

    for path in ("prefill", "decode"):
        together_N = engine.score(drawn, PLAIN, path).columns["logp"]
        assert together_N == pytest.approx(
            alone.score(drawn, PLAIN, path).columns["logp"], abs=ROUNDING
        )


def test_logits_come_in_pieces(pairs, monkeypatch):
    engine = pairs("llama")[1]
    drawn = given(engine.generate(launched(), PLAIN, 3), launched())
    whole = logits_of(engine, drawn, "prefill")

    monkeypatch.setattr(local_engine, "CHUNK_ELEMENTS", 5 * VOCAB)
    pieces = list(engine.logits(drawn, "prefill"))

    assert {piece.dtype.name for piece in pieces} == {"float32"}
    assert max(map(len, pieces)) == 5
    assert np.array_equal(np.concatenate(pieces), whole)


# int8


def test_int8_dynamic_multiplies_integers(int8, cache):
    (folder,) = (cache / "onnx").glob("*-eager-int8_dynamic")
    graph = onnx.load(folder / "model.onnx").graph

    kinds = [node.op_type for node in graph.node]
    # of four layers, seven products each
    assert kinds.count("MatMulInteger") == 28
    assert kinds.count("DynamicQuantizeLinear") >= 16
    stored = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
    assert "INT8" in stored
    size = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
    (plain,) = (cache / "onnx").glob(f"{folder.name[:33]}-*-eager-float32")
    assert size < 0.5 * sum(file.stat().st_size for file in plain.glob("model.onnx*"))


@PATHS
def test_int8_dynamic_is_off_by_hundredths_of_a_nat(pairs, int8, golden, path):
    theirs_N = pairs("tiny")[0].score(golden, PLAIN, "prefill").columns["logp"]
    gap_N = np.abs(int8.score(golden, PLAIN, path).columns["logp"] - theirs_N)

    assert 1e-2 < gap_N.mean() < 2e-1


def test_int8_dynamic_depends_on_the_company_for_its_scale_is_the_batchs(int8, golden):
    alone = int8.score(golden.take([0]), PLAIN, "prefill").columns["logp"]
    together = int8.score(golden.take([0, 1, 2, 3]), PLAIN, "prefill").columns["logp"]

    assert np.abs(alone - together[: len(alone)]).max() > 100 * ROUNDING


# who it is


def test_what_it_says_of_the_model_is_what_transformers_says(pairs):
    for name in ("llama", "qwen", "tiny"):
        theirs, ours = (engine.describe() for engine in pairs(name))
        assert ours.tensors == theirs.tensors  # of the checkpoint: the grade is verified
        assert ours.tokens == theirs.tokens
        assert (ours.vocab_size, ours.eos, ours.context) == (
            theirs.vocab_size,
            theirs.eos,
            theirs.context,
        )
        assert ours.full_logits and ours.timed
        assert ours.digest != theirs.digest


def test_the_fingerprint_says_what_may_change_a_number(pairs, int8):
    plain, quantized = pairs("tiny")[1].describe(), int8.describe()

    said = plain.fingerprint
    assert said["optimizations"] == "ORT_ENABLE_ALL"
    assert said["provider"] == "CPUExecutionProvider"
    assert (said["threads"], said["execution"]) == ("1", "sequential")
    assert (said["attention"], said["quantization"]) == ("eager", "none")
    assert f"torch {torch.__version__}" in said["made_by"]
    assert said["architecture"] == "llama"
    assert said.keys() >= {"onnxruntime", "config", "cpu", "python", "dtype"}
    assert "onnxruntime" in quantized.fingerprint["made_by"]
    assert plain.weights == quantized.weights and plain.digest != quantized.digest


def test_texts_and_tokens_are_those_of_transformers(pairs):
    texts = ["t5 t6", "", "t7 what", "Kuldia lived near 3+4=7<|endoftext|>."]
    for name in ("llama", "tiny"):
        theirs, ours = pairs(name)
        assert ours.encode(texts) == theirs.encode(texts)
        assert ours.encode([]) == []
        assert ours.vocabulary() == theirs.vocabulary()
        ids = [[5, 6, 0, 7], [], [VOCAB - 1, 9]]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("record", [True, False])
def test_it_is_timed_by_its_own_clock(pairs, record):
    engine = pairs("llama")[1]

    timing = engine.time(launched(), PLAIN, 3, record)

    assert timing.tokens == engine.generate(launched(), PLAIN, 3).length_S.sum()
    assert all(s > 0 for s in (*timing.first_S, *timing.gap_N))


# the cache


def no_export(*_):
    raise AssertionError("this file was in the cache")


def files_of(cache, kind):
    return sorted((cache / "onnx").glob(f"*-{kind}/*"))


def test_a_second_opening_does_not_export(pairs, folders, monkeypatch):
    first = pairs("llama")[1]
    monkeypatch.setattr(onnx_export, "_export", no_export)

    again = OnnxRuntimeEngine(kernel(folders["llama"]))

    assert again.describe() == first.describe()
    assert columns_equal(*(e.generate(launched(), PLAIN, 3) for e in (first, again)))


def test_a_copy_of_the_folder_elsewhere_is_the_same_model(pairs, folders, tmp_path, monkeypatch):
    pairs("llama")
    monkeypatch.setattr(onnx_export, "_export", no_export)

    OnnxRuntimeEngine(kernel(shutil.copytree(folders["llama"], tmp_path / "elsewhere")))


@pytest.fixture
def written(monkeypatch, tmp_path):
    """An empty cache, and how often a stand-in for the exporter wrote into it."""
    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path / "cache"))
    times = []

    def export(folder, kernel, file):
        times.append(kernel.attention)
        file.write_bytes(b"a graph")
        file.with_name("model.onnx.data").write_bytes(b"tensors")
        return {"tensors": {}, "vocab_size": VOCAB}

    monkeypatch.setattr(onnx_export, "_export", export)
    return times


def kept(folder, **more):
    config = json.loads((folder / "config.json").read_text())
    return onnx_export.onnx_file(folder, config, kernel(folder, **more))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.onnx").write_bytes(b"a graqh"),
        lambda folder: (folder / "model.onnx.data").unlink(),
        lambda folder: (folder / "about.json").write_text("{"),
        lambda folder: (folder / "about.json").write_text("[]"),
        lambda folder: shutil.rmtree(folder),
    ],
    ids=["bytes", "missing", "syntax", "shape", "folder"],
)
def test_a_damaged_file_is_made_anew(folders, written, damage):
    first = kept(folders["llama"])
    assert kept(folders["llama"]) == first and len(written) == 1
    damage(first.path.parent)

    again = kept(folders["llama"])

    assert again == first and len(written) == 2
    assert again.path.read_bytes() == b"a graph"
    left = [f.name for f in first.path.parent.parent.iterdir() if f.suffix != ".lock"]
    assert left == [first.path.parent.name]  # nothing temporary stays


def test_each_attention_and_each_config_has_a_file_of_its_own(folders, written, tmp_path):
    other = shutil.copytree(folders["llama"], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))

    paths = {
        kept(folders["llama"]).path,
        kept(folders["llama"], attention="sdpa").path,
        kept(other).path,
    }

    assert len(paths) == 3
    assert written == ["eager", "sdpa", "eager"]


def test_a_failed_export_leaves_nothing_behind(folders, written, monkeypatch):
    def fails(folder, kernel, file):
        file.write_bytes(b"half a gra")
        raise MeasurementError("no")

    monkeypatch.setattr(onnx_export, "_export", fails)

    assert refusal(lambda: kept(folders["llama"])) == "no"
    left = [f.name for f in onnx_export.cache_folder("onnx").iterdir() if f.suffix != ".lock"]
    assert left == []


def test_a_cache_that_cannot_be_written_is_named(folders, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path / "file"))

    assert refusal(lambda: kept(folders["llama"])) == (
        f"'{tmp_path}/file/onnx' cannot be written: Not a directory\n"
        "  hint: free space, or let SERVANDA_CACHE name a folder that can be written"
    )


# what is wrong, and what to do


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"dtype": "bfloat16"},
            "engine 'onnxruntime' has no dtype 'bfloat16'\n"
            "  hint: it has float32; leave the key out, or add quantization: int8_dynamic",
        ),
        (
            {"quantization": "w8a8"},
            "engine 'onnxruntime' has no quantization 'w8a8'\n"
            "  hint: it has int8_dynamic; leave the key out for none",
        ),
    ],
    ids=["dtype", "quantization"],
)
def test_what_it_cannot_be_is_refused_before_anything_is_read(more, says):
    assert refusal(lambda: OnnxRuntimeEngine(kernel("no/such/folder", **more))) == says


@pytest.mark.parametrize("library", ["onnxruntime", "tokenizers"])
def test_a_missing_library_is_said_with_the_line_that_installs_it(folders, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)

    assert refusal(lambda: OnnxRuntimeEngine(kernel(folders["llama"]))) == (
        f"engine 'onnxruntime' needs more libraries: import of {library} halted; "
        "None in sys.modules\n"
        "  hint: pip install 'servanda[onnx,transformers]'"
    )


def test_exporting_without_onnxscript_is_said_too(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    assert refusal(lambda: OnnxRuntimeEngine(kernel(folders["llama"]))) == (
        "exporting a model to ONNX needs more libraries: import of onnxscript halted; "
        "None in sys.modules\n"
        "  hint: pip install 'servanda[onnx,transformers]'"
    )


def test_a_model_that_cannot_be_exported_is_told_which_engine_runs_it(
    folders, monkeypatch, tmp_path
):
    def fails(*_, **__):
        try:
            raise ValueError("no operator for this\nand more")
        except ValueError as error:
            raise RuntimeError("Failed to export") from error

    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.onnx, "export", fails)

    assert refusal(lambda: OnnxRuntimeEngine(kernel(folders["llama"]))) == (
        f"the model '{folders['llama']}' cannot be exported to ONNX: no operator for this\n"
        "  hint: use engine: transformers for this architecture (llama)"
    )


def test_a_graph_that_onnxruntime_cannot_read_is_named(folders, written):
    said = refusal(lambda: OnnxRuntimeEngine(kernel(folders["llama"])))

    assert said.startswith(f"'{onnx_export.cache_folder('onnx')}/")
    assert said.endswith("  hint: delete its folder: it is made anew")


def test_a_sequence_beyond_the_context_is_named_with_its_length(pairs):
    batch = Batch((3, 4), ((5,), (5,) * 40), WIDTH)

    assert refusal(lambda: pairs("llama")[1].generate(batch, PLAIN, 0)) == (
        "sequence 4 needs 52 tokens (40 of prompt and 12 new), and the model's context is 48\n"
        "  hint: shorten the prompt, or lower max_new_tokens"
    )


# with faults, and in a contract


def test_faults_of_the_sampler_and_the_record_can_be_injected_and_those_of_a_module_not(folders):
    lost = open_engine(kernel(folders["llama"], fault={"lost_top_token": 1.0}))
    drew = lost.generate(launched(), PLAIN, 3)
    assert not (drew.columns["top1"] == drew.token_N).any()

    assert refusal(lambda: open_engine(kernel(folders["llama"], fault={"stale_weights": 1.0}))) == (
        "fault 'stale_weights' cannot be injected into OnnxRuntimeEngine, which has no "
        "'_load_state' to break\n"
        "  hint: use engine: transformers for this fault"
    )


CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: onnx}}
kernels:
  train: {{engine: transformers, model: {model}}}
  infer: {{engine: onnxruntime, model: {model}}}
workload:
  prompts: prompts.jsonl
  round: 16
  sampling: {{max_new_tokens: 12}}
claim: realised
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.05}}
promotion: {{offline: {{prompt_groups: [32, 64]}}}}
"""


def test_a_contract_between_transformers_and_onnxruntime_is_checked(pairs, tmp_path):
    pairs("tiny")  # exported
    lines = (ROOT / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line) < 200]
    (tmp_path / "prompts.jsonl").write_text("\n".join(short[:100]))
    path = tmp_path / "onnx.kernelcontract.yaml"
    path.write_text(CONTRACT.format(model=TINY))

    verdict = check(path, run_dir=tmp_path / "run", open=in_process)

    assert verdict.tokens > 0 and verdict.lost == 0
    (cell,) = [c for c in verdict.cells if (c.clause, c.slice) == ("tv", "all")]
    assert 0 < cell.value < 1e-5 and verdict.key.grade == "verified"
    assert verdict.exit_code == 0


# the laws of engines


def test_a_throw_away_model_keeps_every_law_that_speaks_of_it(folders):
    report = check_engine(lambda: open_engine(kernel(folders["llama"])), sequences=24)
    assert [f.law for f in report.those("skipped")] == ["top_is_the_head"]


def test_int8_keeps_them_but_what_a_sequence_draws_depends_on_the_company():
    opened = kernel(TINY, quantization="int8_dynamic")
    check_engine(lambda: open_engine(opened), sequences=16, width=8, flips=0.3)
