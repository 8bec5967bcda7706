# llama.cpp itself against Transformers in float32, at the same weights.

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scripts.export_gguf import write_gguf
from scripts.servers import local_kernel

from servanda.contract.identity import same_policy
from servanda.contract.model import Kernel
from servanda.engines.kld_file import read_kld
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.runner import run
from servanda.runner.kld import compared_kld, written_kld
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.engines.checkpoints import LLAMA, QWEN3, TOKENIZER, numbers, write_checkpoint

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-lm"
WIDTH, SEED = 48, 7
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:24]
]


@pytest.fixture(scope="module")
def opened(venvs, tmp_path_factory):
    """Opens kernels of llama.cpp in their own environment, each once, and closes them.

    A model that is a folder is written as GGUF first.
    """
    files = tmp_path_factory.mktemp("gguf")
    workers = {}

    def open_kernel(**kernel):
        kernel = {"model": str(MODEL), "batch_size": 8, **kernel}
        key = json.dumps(kernel, sort_keys=True)
        if key not in workers:
            if Path(kernel["model"]).is_dir():
                place = files / str(len(workers))
                kernel = local_kernel("llamacpp", kernel.pop("model"), place, **kernel)
            told = {"engine": "llamacpp", "python": str(venvs / "llamacpp"), **kernel}
            workers[key] = spawn(Kernel(**told), "infer")
        return workers[key]

    yield open_kernel
    for worker in workers.values():
        worker.close()


@pytest.fixture(scope="module")
def train():
    worker = spawn(Kernel(engine="transformers", model=str(MODEL), batch_size=8), "train")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def prompts(train):
    ids = train.encode(PROMPTS)
    return Batch(tuple(range(len(ids))), tuple(map(tuple, ids)), WIDTH)


@pytest.fixture(scope="module")
def drawn(train, prompts):
    return train.generate(prompts, Sampling(), SEED)


def given(prompts, trace):
    return Batch(prompts.sequence_S, prompts.prompts, prompts.width, trace.continuations)


def cut(rows, at):
    """Rows of ids as a batch of prompts, and of what follows them."""
    prompts, rest = (tuple(tuple(r[part]) for r in rows) for part in (slice(at), slice(at, None)))
    return Batch(tuple(range(len(rows))), prompts, len(rest[0]), rest)


def distance(engine, train, batch, path):
    """|log ratio| of every token."""
    theirs = engine.score(batch, Sampling(), path).columns["logp"]
    return np.abs(train.score(batch, Sampling(), path).columns["logp"] - theirs)


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_in_float32_llama_cpp_is_the_same_kernel(opened, train, prompts, drawn, path):
    engine, batch = opened(), given(prompts, drawn)

    assert distance(engine, train, batch, path).max() < 1e-4

    theirs = np.concatenate(list(engine.logits(batch, path)))
    ours = np.concatenate(list(train.logits(batch, path)))
    assert theirs.shape == ours.shape
    assert np.abs(theirs - ours).max() < 1e-3


def test_a_coarser_file_is_farther_away(opened, train, prompts, drawn):
    batch = given(prompts, drawn)
    kernels = {"f32": {}, "f16": {"dtype": "float16"}}
    kernels |= {kind: {"quantization": kind} for kind in ("q8_0", "q4_1", "q4_k_m")}

    mean = {
        name: float(distance(opened(**kernel), train, batch, "decode").mean())
        for name, kernel in kernels.items()
    }

    assert mean["f32"] < 1e-5 < mean["f16"] < 1e-3 < mean["q8_0"] < 5e-3
    assert 5e-3 < min(mean["q4_1"], mean["q4_k_m"]) < max(mean["q4_1"], mean["q4_k_m"]) < 5e-2


@pytest.mark.parametrize(
    "kernel", [{"dtype": "bfloat16"}, {"quantization": "q4_0"}, {"attention": "sdpa"}], ids=str
)
def test_every_other_kind_runs_and_agrees_with_itself(opened, train, prompts, drawn, kernel):
    engine, batch = opened(**kernel), given(prompts, drawn)

    assert distance(engine, train, batch, "prefill").mean() < 5e-2
    assert distance(engine, engine, batch, "decode").max() == 0.0


def test_draws_are_coupled_to_those_of_transformers(opened, prompts, drawn):
    trace = opened().generate(prompts, Sampling(), SEED)

    same = [a == b for a, b in zip(trace.continuations, drawn.continuations, strict=True)]

    assert np.mean(same) >= 0.95
    assert trace.columns.keys() == drawn.columns.keys()
    assert trace.about == {**drawn.about, "path": "decode"}


def test_a_sequence_is_drawn_alike_alone_and_among_others(opened, prompts):
    engine, alone = opened(), opened(batch_size=1)
    few = prompts.take(range(4))

    together, one = (e.generate(few, Sampling(top_p=0.9), SEED) for e in (engine, alone))

    assert together.continuations == one.continuations
    assert np.abs(together.columns["logp"] - one.columns["logp"]).max() < 1e-4


def test_what_was_drawn_is_scored_as_it_was_drawn(opened, prompts):
    engine = opened(quantization="q8_0")
    trace = engine.generate(prompts, Sampling(temperature=0.8), SEED)

    again = engine.score(given(prompts, trace), Sampling(temperature=0.8), "decode")

    for name, column in trace.columns.items():
        assert np.array_equal(again.columns[name], column), name


def test_tokens_texts_and_ends_are_those_of_the_checkpoint(opened, train, prompts):
    engine, ours, theirs = opened(), train.describe(), opened().describe()

    assert (theirs.tokens, theirs.vocab_size, theirs.eos, theirs.context) == (
        (ours.tokens, ours.vocab_size, ours.eos, ours.context)
    )
    assert engine.encode(PROMPTS) == train.encode(PROMPTS)
    assert engine.vocabulary() == train.vocabulary()
    assert engine.decode(prompts.prompts) == train.decode(prompts.prompts)


def test_converted_weights_are_derived_and_not_verified(opened, train):
    assert same_policy(train.describe(), opened().describe()) == "derived"
    assert opened().describe().weights == train.describe().weights


@pytest.mark.parametrize(
    "config",
    [LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN3, {**QWEN3, "tie_word_embeddings": False}],
    ids=["llama", "llama, tied", "qwen3, tied", "qwen3"],
)
def test_every_architecture_that_is_written_is_computed_alike(opened, tmp_path, config):
    config = {**config, "head_dim": 8, "architectures": ["made by hand"]}
    write_checkpoint(tmp_path / "m", config, numbers(config))
    train = spawn(Kernel(engine="transformers", model=str(tmp_path / "m")), "train")
    rows = np.random.default_rng(2).integers(0, config["vocab_size"], (4, 24)).tolist()
    batch = Batch(
        (0, 1, 2, 3), tuple(tuple(r[:8]) for r in rows), 16, tuple(tuple(r[8:]) for r in rows)
    )

    try:
        for path in ("prefill", "decode"):
            far = distance(opened(model=str(tmp_path / "m")), train, batch, path)
            assert far.max() < 1e-3, path
    finally:
        train.close()


def test_a_tokenizer_that_llama_cpp_lacks_leaves_a_kernel_of_ids(opened, tmp_path):
    config = {**LLAMA, "head_dim": 8}
    words = {**TOKENIZER, "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    write_checkpoint(tmp_path / "m", config, numbers(config), words)
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")
    engine = opened(model=str(tmp_path / "m.gguf"))

    described = engine.describe()

    assert (described.encodes, described.decodes, described.eos) == (False, False, (0, 3))
    assert engine.vocabulary() == []
    trace = engine.generate(Batch((0,), ((1, 2),), 4), Sampling(), SEED)
    assert len(trace.token_N) in range(1, 5)
    with pytest.raises(MeasurementError, match=r"holds a tokenizer that llama\.cpp does not have"):
        engine.encode(["a"])


def test_a_batch_that_does_not_fit_one_piece_is_fed_in_more(opened, train):
    """2,240 prompt tokens a chunk: more than one call takes, so the cache is read across calls."""
    rows = np.random.default_rng(3).integers(1, 1000, (8, 300)).tolist()

    for path in ("prefill", "decode"):  # random ids are improbable: a logprob of -20 is coarser
        assert distance(opened(), train, cut(rows, 280), path).max() < 1e-3


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_sequence_without_a_token_to_score_leaves_the_others_theirs(opened, train, path):
    batch = cut([[5, 6, 7, 8], [9, 10, 11, 12]], 2)
    nothing = replace(batch, continuations=((), batch.continuations[1]))

    trace = opened().score(nothing, Sampling(), path)

    assert trace.length_S.tolist() == [0, 2]
    assert distance(opened(), train, nothing, path).max() < 1e-4


def test_more_sequences_than_llama_cpp_runs_at_once_are_refused(opened):
    batch = cut([[5, 6]] * 300, 1)

    with pytest.raises(MeasurementError) as said:
        opened(batch_size=300).score(batch, Sampling(), "prefill")

    assert str(said.value) == (
        "infer: llama.cpp runs 256 sequences at once, not 300\n"
        "  hint: lower kernels.*.batch_size to 256 or less"
    )


def test_served_tokens_are_timed(opened, prompts, drawn):
    for record in (True, False):
        timing = opened().time(prompts, Sampling(), SEED, record)
        assert timing.tokens == int(opened().generate(prompts, Sampling(), SEED).length_S.sum())
        assert min(timing.first_S) > 0


# refusals


def refused(opened, **kernel):
    with pytest.raises(MeasurementError) as told:
        opened(**kernel).describe()
    return str(told.value)


def test_files_that_are_no_model_of_llama_cpp_are_named(opened, tmp_path):
    write_gguf(MODEL, tmp_path / "m.gguf", "f32")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:5_000_000])
    (tmp_path / "other.gguf").write_bytes(
        whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0zzzzz", 1)
    )
    (tmp_path / "text.gguf").write_text("GUF")
    again = (
        "\n  hint: copy or convert the file again, or build a llama.cpp that has this architecture"
    )

    short = refused(opened, model=str(tmp_path / "short.gguf"))
    assert short.startswith(f"infer: llama.cpp cannot load '{tmp_path / 'short.gguf'}': ")
    assert "model is corrupted or incomplete" in short and short.endswith(again)
    other = refused(opened, model=str(tmp_path / "other.gguf"))
    assert "unknown model architecture: 'zzzzz'" in other and other.endswith(again)
    assert refused(opened, model=str(tmp_path / "text.gguf")) == (
        f"infer: '{tmp_path / 'text.gguf'}' is no GGUF file: it begins with b'GUF'\n"
        "  hint: copy the file again, or convert the checkpoint with llama.cpp's "
        "convert_hf_to_gguf.py"
    )
    assert refused(opened, model=str(tmp_path / "m.gguf"), quantization="q8_0") == (
        f"infer: '{tmp_path / 'm.gguf'}' holds f32, and the kernel's quantization says q8_0\n"
        "  hint: write dtype: float32 for this file, or name one that holds q8_0"
    )
    assert "was made from weights" in refused(
        opened, model=str(tmp_path / "m.gguf"), weights_from="0" * 32
    )


def test_a_library_that_is_not_there_is_named(venvs, monkeypatch, tmp_path):
    write_gguf(MODEL, tmp_path / "m.gguf", "f32")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    worker = spawn(
        Kernel(engine="llamacpp", python=str(venvs / "llamacpp"), model=str(tmp_path)), "infer"
    )

    with pytest.raises(MeasurementError) as told:
        worker.describe()
    worker.close()

    assert "the library of llama.cpp cannot be loaded" in str(told.value)
    assert f"(LLAMA_CPP_LIB_PATH is '{tmp_path}')" in str(told.value)
    assert "let LLAMA_CPP_LIB_PATH name the folder of libllama" in str(told.value)


# the command line

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: llamacpp}}
kernels:
  train: {{engine: transformers, model: {model}, batch_size: 16}}
  infer: {{engine: llamacpp, python: {python}, model: {file}, quantization: q8_0, batch_size: 16}}
workload:
  prompts: {prompts}
  sampling: {{max_new_tokens: 24, seed: 7}}
confidence: 0.95
claim: population
weights: {{identity: derived}}
statistical:
  - {{id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: {limit}}}
observability:
  clauses:
    - {{id: fidelity, metric: sampler_fidelity}}
promotion: {{offline: {{prompt_groups: [100, 1000]}}}}
"""


@pytest.mark.parametrize(("limit", "code"), [(0.1, 0), (0.0005, 1)])
def test_a_contract_is_checked_end_to_end(venvs, tmp_path, limit, code):
    kernel = local_kernel("llamacpp", MODEL, tmp_path, quantization="q8_0")
    contract = tmp_path / "q8.kernelcontract.yaml"
    contract.write_text(
        CONTRACT.format(
            model=MODEL,
            file=kernel["model"],
            prompts=ROOT / "data" / "prompts.jsonl",
            python=venvs / "llamacpp",
            limit=limit,
        )
    )

    verdict = run.check(contract, run_dir=tmp_path / "run")

    assert verdict.exit_code == code
    assert verdict.lost == 0


def test_the_type_of_the_cache_is_a_key_and_moves_scores_by_its_rounding(opened, prompts):
    """Each type rounds more than the one before it: float32, float16, q8_0, q4_0."""
    engine = opened(attention="sdpa")
    drawn = engine.generate(prompts, Sampling(), SEED)
    given = replace(prompts, continuations=drawn.continuations)
    exact = engine.score(given, Sampling(), "decode").columns["logp"]
    moved = []
    for kind in ("float32", "float16", "q8_0", "q4_0"):
        rounded = opened(attention="sdpa", kv_cache=kind)
        assert "cache" in rounded.describe().fingerprint
        moved.append(np.abs(rounded.score(given, Sampling(), "decode").columns["logp"] - exact))
    means = [float(of.mean()) for of in moved]
    assert means[0] == 0.0 and means[1] < 1e-3 and means[1] < means[2] < means[3]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ({"kv_cache": "q8_0"}, "fused attention only"),
        ({"kv_cache": "q8_1", "attention": "sdpa"}, "no KV cache of type 'q8_1'"),
    ],
)
def test_a_cache_that_llama_cpp_does_not_have_is_refused(opened, kernel, message):
    with pytest.raises(MeasurementError, match=message):
        opened(**kernel).describe()


def test_base_files_are_those_of_llama_perplexity(opened, train, venvs, tmp_path):
    """Each reads what the other wrote, and finds the same statistics."""
    binary = venvs / "llamacpp" / "llama.cpp" / "bin" / "llama-perplexity"
    model = tmp_path / "model.gguf"
    write_gguf(MODEL, model, "f32")
    lines = (ROOT / "data" / "golden.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    (tmp_path / "text.txt").write_text("\n".join(json.loads(line)["prompt"] for line in lines))
    ours, theirs = tmp_path / "ours.kld", tmp_path / "theirs.kld"

    def perplexity(*options):
        call = [str(binary), "-m", str(model), "-c", "128", "-t", "1", *map(str, options)]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    perplexity("-f", tmp_path / "text.txt", "--kl-divergence-base", theirs)
    texts = read_kld(theirs).token_CT
    written_kld(ours, train, texts, width=128, bos=None, batch_size=8)
    printed = perplexity("--kl-divergence", "--kl-divergence-base", ours)
    same = compared_kld(read_kld(theirs), train, bos=None, batch_size=8)
    coarse = compared_kld(read_kld(ours), opened(dtype="bfloat16"), bos=None, batch_size=8)

    assert read_kld(ours).token_CT.tolist() == texts.tolist()
    for mine, its in zip(read_kld(ours).rows(), read_kld(theirs).rows(), strict=True):
        assert np.abs(mine - its).mean() < 1e-3  # nats; codes are 16 / 65535 apart
    mean, top = (
        float(re.search(pattern, printed)[1])
        for pattern in (r"Mean +KLD: +(\S+)", r"Same top p: +(\S+)")
    )
    assert abs(mean) < 1e-5 and top > 99.5
    assert abs(same.kld_nats) < 1e-5 and same.same_top > 0.995
    assert same.kld_nats + 1e-7 < coarse.kld_nats < 1e-3
