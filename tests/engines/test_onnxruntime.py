# Engine `onnxruntime` on files of scripts/export_onnx.py, against engine `transformers` on the
# checkpoint folders that they were made from.

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
from scripts import export_onnx

from servanda.contract.identity import same_policy
from servanda.contract.model import Kernel
from servanda.engines import local_engine, open_engine
from servanda.engines.conformance import check_engine
from servanda.engines.onnxruntime import OnnxRuntimeEngine
from servanda.engines.transformers import TransformersEngine
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


@pytest.fixture(scope="session")
def files(folders, tmp_path_factory):
    """Name of a model -> its ONNX file, exported once: that takes seconds."""
    place, made = tmp_path_factory.mktemp("onnx"), {}

    def file(name, kind="f32"):
        path = made.setdefault((name, kind), place / name / kind / "model.onnx")
        if not path.is_file():
            export_onnx.write_onnx(folders[name], path, kind)
        return path

    return file


def kernel(folder, engine="onnxruntime", **more):
    return Kernel(engine=engine, model=str(folder), **{"batch_size": 4, **more})


@pytest.fixture(scope="session")
def pairs(folders, files):
    """Name of a model -> (transformers, onnxruntime), each opened when first asked for."""
    opened = {}

    def pair(name):
        if name not in opened:
            reference = TransformersEngine(kernel(folders[name], "transformers"))
            opened[name] = reference, OnnxRuntimeEngine(kernel(files(name)))
        return opened[name]

    return pair


@pytest.fixture(scope="session")
def int8(files):
    return OnnxRuntimeEngine(kernel(files("tiny", "int8_dynamic"), quantization="int8_dynamic"))


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
            fed.append((feed["input_ids"].shape(), feed["past_key_values.0.key"].shape()[2]))
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


def test_company_moves_float32_by_rounding_only(files, pairs):
    engine = pairs("llama")[1]
    drawn = given(engine.generate(launched(), PLAIN, 3), launched())
    alone = OnnxRuntimeEngine(kernel(files("llama"), batch_size=1))

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


def test_int8_dynamic_multiplies_integers(files):
    file, plain = files("tiny", "int8_dynamic"), files("tiny")
    graph = onnx.load(file).graph

    kinds = [node.op_type for node in graph.node]
    # of four layers, seven products each
    assert kinds.count("MatMulInteger") == 28
    assert kinds.count("DynamicQuantizeLinear") >= 16
    stored = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
    assert "INT8" in stored
    sizes = [sum(p.stat().st_size for p in f.parent.glob("model.onnx*")) for f in (file, plain)]
    assert sizes[0] < 0.5 * sizes[1]


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
        assert ours.weights == theirs.weights and same_policy(theirs, ours) == "derived"
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
    assert said["quantization"] == "none"
    assert f"torch {torch.__version__}" in said["converter"]
    assert said["architecture"] == "llama"
    assert said.keys() >= {"onnxruntime", "config", "cpu", "python", "dtype", "file"}
    assert "onnxruntime" in quantized.fingerprint["converter"]
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


# the file


def changed(files, folder, change, name="llama"):
    """A copy of the exported file with its graph changed, and the folder around it."""
    shutil.copytree(files(name).parent, folder)
    model = onnx.load(folder / "model.onnx")
    change(model)
    (folder / "model.onnx.data").unlink()
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def without(*begins):
    """Drops inputs and outputs by the beginnings of their names."""

    def change(model):
        for values in (model.graph.input, model.graph.output):
            for value in [v for v in values if v.name.startswith(begins)]:
                values.remove(value)

    return change


def test_a_folder_is_the_file_that_it_holds(pairs, files, tmp_path):
    file = files("llama")
    elsewhere = shutil.copytree(file.parent, tmp_path / "elsewhere")
    inside = tmp_path / "repository" / "onnx"
    inside.mkdir(parents=True)
    for part in file.parent.iterdir():  # as repositories of the Hub have it
        shutil.copy(part, inside if "onnx" in part.name else inside.parent)
    shutil.copy(file, inside / "model_q4.onnx")

    for model in (elsewhere, inside.parent, inside / "model.onnx"):
        assert OnnxRuntimeEngine(kernel(model)).describe() == pairs("llama")[1].describe()


def test_a_folder_without_such_a_file_or_with_several_is_refused(files, folders, tmp_path):
    assert refusal(lambda: OnnxRuntimeEngine(kernel(folders["llama"]))) == (
        f"ONNX Runtime reads ONNX files, and {str(folders['llama'])!r} holds none\n"
        "  hint: export the checkpoint with `optimum-cli export onnx --model CHECKPOINT FOLDER`, "
        "and name the file or its folder"
    )
    for name in ("a.onnx", "b.onnx"):
        shutil.copy(files("llama"), tmp_path / name)
    assert refusal(lambda: OnnxRuntimeEngine(kernel(tmp_path))) == (
        f"{str(tmp_path)!r} holds several .onnx files: a.onnx, b.onnx\n  hint: name one of them"
    )
    assert refusal(lambda: OnnxRuntimeEngine(kernel(tmp_path / "a.onnx"))) == (
        f"the model folder {str(tmp_path)!r} has no config.json\n"
        "  hint: save model and tokenizer into this folder with save_pretrained"
    )
    assert refusal(lambda: OnnxRuntimeEngine(kernel(tmp_path / "c"))) == (
        f"the model {str(tmp_path / 'c')!r} does not exist\n"
        "  hint: name a .onnx file, or a folder that holds one"
    )


def test_a_file_that_does_not_say_what_it_was_made_from_is_declared(pairs, files, tmp_path):
    theirs = pairs("llama")[0].describe()
    file = changed(files, tmp_path / "m", lambda model: model.ClearField("metadata_props"))

    bare = OnnxRuntimeEngine(kernel(file)).describe()
    said = OnnxRuntimeEngine(kernel(file, weights_from=theirs.weights)).describe()

    assert (bare.weights, same_policy(theirs, bare)) == ("", "declared")
    assert bare.fingerprint["converter"] == "pytorch"
    assert same_policy(theirs, said) == "derived"
    assert refusal(lambda: OnnxRuntimeEngine(kernel(files("llama"), weights_from="0" * 32))) == (
        f"{str(files('llama'))!r} was made from weights {theirs.weights[:8]}, and weights_from "
        "says 00000000\n  hint: leave weights_from out, or name the file of those weights"
    )


def test_a_file_that_holds_another_quantization_is_refused_with_what_to_write(files):
    plain, coarse = files("tiny"), files("tiny", "int8_dynamic")
    assert refusal(lambda: OnnxRuntimeEngine(kernel(coarse))) == (
        f"{str(coarse)!r} holds quantization int8_dynamic, and the kernel says none\n"
        "  hint: write quantization: int8_dynamic for this file, or name another"
    )
    assert refusal(lambda: OnnxRuntimeEngine(kernel(plain, quantization="int8_dynamic"))) == (
        f"{str(plain)!r} holds quantization none, and the kernel says int8_dynamic\n"
        "  hint: leave quantization out for this file, or name another"
    )


def test_a_change_of_the_data_beside_the_file_is_another_kernel(pairs, files, tmp_path):
    folder = shutil.copytree(files("llama").parent, tmp_path / "m")
    data = bytearray((folder / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (folder / "model.onnx.data").write_bytes(data)

    assert (
        OnnxRuntimeEngine(kernel(folder)).describe().digest != pairs("llama")[1].describe().digest
    )


class Plain(torch.nn.Module):
    """A model that keeps no keys and values, and counts its positions by itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(input_ids, attention_mask, positions, use_cache=False).logits


def test_a_graph_without_keys_and_values_runs_the_whole_text_at_each_step(
    pairs, folders, files, tmp_path
):
    folder = shutil.copytree(files("llama").parent, tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders["llama"], attn_implementation="eager"
    )
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with export_onnx.silent():
        torch.onnx.export(
            Plain(model).eval(),
            tuple(fill((2, 5), dtype=torch.long) for fill in (torch.zeros, torch.ones)),
            folder / "model.onnx",
            dynamo=True,
            verbose=False,
            dynamic_shapes=(any_size, any_size),
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
        )
    reference, engine = pairs("llama")[0], OnnxRuntimeEngine(kernel(folder))

    drew = engine.generate(launched(), FILTERED, 3)

    assert drew.continuations == reference.generate(launched(), FILTERED, 3).continuations
    scores = (
        e.score(given(drew, launched()), FILTERED, "prefill").columns["logp"]
        for e in (engine, reference)
    )
    assert next(scores) == pytest.approx(next(scores), abs=ROUNDING)


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        (lambda model: setattr(model.graph.input[0], "name", "tokens"), "takes tokens, "),
        (without("present.0.key"), "gives logits, present.0.value, "),
        (lambda model: setattr(model.graph.output[0], "name", "scores"), "gives scores, "),
    ],
    ids=["input", "keys", "logits"],
)
def test_another_layout_is_refused_with_what_was_found(files, tmp_path, change, takes):
    def renamed(model):
        before = [value.name for value in (*model.graph.input, *model.graph.output)]
        change(model)
        after = [value.name for value in (*model.graph.input, *model.graph.output)]
        names = dict(zip(before, after, strict=False)) if len(before) == len(after) else {}
        for node in model.graph.node:
            for values in (node.input, node.output):
                for i, name in enumerate(values):
                    values[i] = names.get(name, name)

    file = changed(files, tmp_path / "m", renamed)

    said = refusal(lambda: OnnxRuntimeEngine(kernel(file)))

    assert said.startswith(f"{str(file)!r} has another layout than engine 'onnxruntime' reads: ")
    assert takes in said
    assert said.endswith("position_ids and past_key_values.* to logits and present.*")


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
def test_a_missing_library_is_said_with_the_line_that_installs_it(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)

    assert refusal(lambda: OnnxRuntimeEngine(kernel("nowhere"))) == (
        f"engine 'onnxruntime' needs more libraries: import of {library} halted; "
        "None in sys.modules\n"
        "  hint: pip install 'servanda[onnx]'"
    )


def test_a_model_that_cannot_be_exported_is_told_which_engine_runs_it(
    folders, monkeypatch, tmp_path, capsys
):
    def fails(*_, **__):
        try:
            raise ValueError("no operator for this\nand more")
        except ValueError as error:
            raise RuntimeError("Failed to export") from error

    monkeypatch.setattr(torch.onnx, "export", fails)

    assert export_onnx.main([str(folders["llama"]), str(tmp_path / "m.onnx")]) == 4
    assert capsys.readouterr().err == (
        f"the model '{folders['llama']}' cannot be exported to ONNX: no operator for this\n"
        "  hint: use engine: transformers for this architecture (llama)\n"
    )
    assert not [*tmp_path.iterdir()]


def test_a_graph_that_onnxruntime_cannot_read_is_named(files, tmp_path):
    folder = shutil.copytree(files("llama").parent, tmp_path / "m")
    (folder / "model.onnx").write_bytes(b"a graph")

    said = refusal(lambda: OnnxRuntimeEngine(kernel(folder)))

    assert said.startswith(f"'{folder}/model.onnx' cannot be read: ")
    assert said.endswith("  hint: copy the file again, with the data beside it")


def test_a_sequence_beyond_the_context_is_named_with_its_length(pairs):
    batch = Batch((3, 4), ((5,), (5,) * 40), WIDTH)

    assert refusal(lambda: pairs("llama")[1].generate(batch, PLAIN, 0)) == (
        "sequence 4 needs 52 tokens (40 of prompt and 12 new), and the model's context is 48\n"
        "  hint: shorten the prompt, or lower max_new_tokens"
    )


# with faults, and in a contract


def test_faults_of_the_sampler_and_the_record_can_be_injected_and_those_of_a_module_not(files):
    lost = open_engine(kernel(files("llama"), fault={"lost_top_token": 1.0}))
    drew = lost.generate(launched(), PLAIN, 3)
    assert not (drew.columns["top1"] == drew.token_N).any()

    assert refusal(lambda: open_engine(kernel(files("llama"), fault={"stale_weights": 1.0}))) == (
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
  infer: {{engine: onnxruntime, model: {file}}}
weights: {{identity: derived}}
workload:
  prompts: prompts.jsonl
  round: 16
  sampling: {{max_new_tokens: 12}}
claim: realised
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.05}}
promotion: {{offline: {{prompt_groups: [32, 64]}}}}
"""


def test_a_contract_between_transformers_and_onnxruntime_is_checked(files, tmp_path):
    lines = (ROOT / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line) < 200]
    (tmp_path / "prompts.jsonl").write_text("\n".join(short[:100]))
    path = tmp_path / "onnx.kernelcontract.yaml"
    path.write_text(CONTRACT.format(model=TINY, file=files("tiny")))

    verdict = check(path, run_dir=tmp_path / "run", open=in_process)

    assert verdict.tokens > 0 and verdict.lost == 0
    (cell,) = [c for c in verdict.cells if (c.clause, c.slice) == ("tv", "all")]
    assert 0 < cell.value < 1e-5 and verdict.key.grade == "derived"
    assert verdict.exit_code == 0


# the laws of engines


def test_a_throw_away_model_keeps_every_law_that_speaks_of_it(files):
    report = check_engine(lambda: open_engine(kernel(files("llama"))), sequences=24)
    assert [f.law for f in report.those("skipped")] == ["top_is_the_head"]


def test_int8_keeps_them_but_what_a_sequence_draws_depends_on_the_company(files):
    opened = kernel(files("tiny", "int8_dynamic"), quantization="int8_dynamic")
    check_engine(lambda: open_engine(opened), sequences=16, width=8, flips=0.3)
