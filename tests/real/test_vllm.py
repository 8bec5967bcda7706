# Engine `vllm` against engine `transformers`, both through the worker: two programs that share
# neither code nor process, on one checkpoint.

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from servanda.contract.identity import same_policy
from servanda.contract.model import Kernel
from servanda.engines.transformers import TransformersEngine
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.theory.sampling import BEST, Sampling, log_softmax, processed_logprobs
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "tiny-lm")
WIDTH, CONTEXT = 24, 512
PLAIN = Sampling()
FILTERED = Sampling(temperature=0.8, top_k=40, top_p=0.9)
ROUNDING = 1e-4  # nats, float32 of two programs
PATHS = pytest.mark.parametrize("path", ["prefill", "decode"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shipped model, which also ends a sequence with a full stop: so some do end."""
    place = shutil.copytree(MODEL, tmp_path_factory.mktemp("models") / "tiny-lm")
    ids = json.loads((place / "tokenizer.json").read_text())["model"]["vocab"]
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, ids["."]]}))
    return str(place)


@pytest.fixture(scope="module")
def train(folder):
    engine = TransformersEngine(Kernel(engine="transformers", model=folder, batch_size=8))
    yield engine
    engine.close()


def opened(vllm, folder, **kernel):
    options = {"engine": "vllm", "model": folder, "python": vllm, "batch_size": 4}
    return spawn(Kernel(**options | kernel), "infer")


@pytest.fixture(scope="module")
def infer(vllm, folder):
    engine = opened(vllm, folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def batch(train):
    """More prompts than run at once; with the last, the context is full to the last token."""
    lines = (ROOT / "data" / "prompts.jsonl").read_text().splitlines()[:7]
    prompts = train.encode([json.loads(line)["prompt"] for line in lines])
    prompts.append((prompts[0] * CONTEXT)[: CONTEXT - WIDTH])
    return Batch(tuple(range(len(prompts))), tuple(map(tuple, prompts)), WIDTH)


@pytest.fixture(scope="module")
def drawn(infer, batch):
    return infer.generate(batch, PLAIN, 7)


@pytest.fixture(scope="module")
def given(batch, drawn):
    return Batch(batch.sequence_S, batch.prompts, WIDTH, drawn.continuations)


def test_it_says_the_same_weights_and_tokens_as_transformers(train, infer):
    ours, theirs = train.describe(), infer.describe()
    assert same_policy(ours, theirs) == "verified"
    assert (ours.tokens, ours.eos, ours.vocab_size) == (
        theirs.tokens,
        theirs.eos,
        theirs.vocab_size,
    )
    assert theirs.context == CONTEXT


def test_it_says_what_may_change_a_number(infer):
    told = infer.describe().fingerprint
    assert told["attention"] == "CPU_ATTN"
    assert (told["dtype"], told["quantization"]) == ("float32", "none")
    assert (told["max_num_seqs"], told["prefix_caching"]) == ("4", "false")
    assert told["logprobs"] == "processed_logprobs"
    assert all(told.values())


def test_a_prompt_is_encoded_and_decoded_as_by_transformers(train, infer):
    texts = ["import sys", "  a\n\tb ."]
    assert infer.encode(texts) == train.encode(texts)
    assert infer.decode(infer.encode(texts)) == texts
    assert infer.vocabulary() == train.vocabulary()


def test_a_draw_is_recorded_with_the_probability_that_transformers_gives_it(train, given, drawn):
    again = train.score(given, PLAIN, "prefill")
    np.testing.assert_allclose(drawn.columns["logp"], again.columns["logp"], atol=ROUNDING)
    np.testing.assert_allclose(
        drawn.columns["entropy_nats"], again.columns["entropy_nats"], atol=ROUNDING
    )
    assert not drawn.lost_S.any()


def test_a_sequence_ends_with_its_end_token_or_at_the_width(infer, drawn):
    ends = set(infer.describe().eos)
    assert len(ends) == 2
    for tokens in drawn.continuations:
        assert not ends & set(tokens[:-1])
        assert tokens[-1] in ends or len(tokens) == WIDTH
    assert any(tokens[-1] in ends for tokens in drawn.continuations)
    assert any(len(tokens) == WIDTH for tokens in drawn.continuations)


def test_a_draw_depends_on_its_seed_and_sequence_and_not_on_its_company(infer, batch, drawn):
    rows = [5, 2]
    apart = infer.generate(batch.take(rows), PLAIN, 7)
    assert apart.continuations == tuple(drawn.continuations[row] for row in rows)
    assert infer.generate(batch.take(rows), PLAIN, 8).continuations != apart.continuations


def test_the_best_tokens_are_there_without_the_drawn_one_that_came_with_them(drawn):
    ids_NK, logp_NK = drawn.best
    assert ids_NK.shape[1] == BEST
    assert (np.diff(logp_NK, axis=1) <= 0).all()
    np.testing.assert_array_equal(ids_NK[:, 0], drawn.columns["top1"])
    among_N = (ids_NK == drawn.token_N[:, None]).any(axis=1)
    np.testing.assert_array_equal(among_N, drawn.columns["rank"] < BEST)
    assert not among_N.all()


@PATHS
def test_it_scores_as_transformers_does(train, infer, given, path):
    ours, theirs = (engine.score(given, PLAIN, path) for engine in (train, infer))
    np.testing.assert_allclose(theirs.columns["logp"], ours.columns["logp"], atol=ROUNDING)
    assert np.array_equal(theirs.columns["top1"], ours.columns["top1"])
    assert theirs.about["path"] == path


def test_forced_decoding_gives_the_logprobs_of_free_decoding_to_the_bit(infer, given, drawn):
    forced = infer.score(given, PLAIN, "decode")
    assert np.array_equal(forced.columns["logp"], drawn.columns["logp"])


@PATHS
def test_a_transform_is_applied_to_scores(train, infer, given, path):
    ours, theirs = (engine.score(given, FILTERED, path) for engine in (train, infer))
    logp_ours_N, logp_theirs_N = ours.columns["logp"], theirs.columns["logp"]
    assert np.isneginf(logp_ours_N).any()
    assert np.array_equal(np.isneginf(logp_ours_N), np.isneginf(logp_theirs_N))
    here_N = np.isfinite(logp_ours_N)
    np.testing.assert_allclose(logp_theirs_N[here_N], logp_ours_N[here_N], atol=ROUNDING)


def test_a_filtered_draw_is_recorded_with_the_probability_it_was_drawn_with(infer, train, batch):
    drawn = infer.generate(batch, FILTERED, 7)
    given = Batch(batch.sequence_S, batch.prompts, WIDTH, drawn.continuations)
    again = train.score(given, FILTERED, "decode")
    np.testing.assert_allclose(drawn.columns["logp"], again.columns["logp"], atol=ROUNDING)


@PATHS
def test_its_full_logits_are_the_distribution_of_transformers(train, infer, given, path):
    rows = [1, 3, 7]
    some = given.take(rows)
    ours, theirs = (
        np.exp(log_softmax(np.concatenate(list(engine.logits(some, path)))))
        for engine in (train, infer)
    )
    assert theirs.shape == (sum(len(given.continuations[row]) for row in rows), 1024)
    assert 0.5 * np.abs(ours - theirs).sum(axis=1).max() < 1e-5


@PATHS
def test_its_likeliest_tokens_are_those_of_its_full_logits(infer, given, path):
    some = given.take([0, 4])
    top = infer.top(some, path)
    logp_NV = log_softmax(np.concatenate(list(infer.logits(some, path))))
    ids_NK, logp_NK = top.best
    assert ids_NK.shape[1] == 20
    np.testing.assert_allclose(logp_NK, np.take_along_axis(logp_NV, ids_NK, axis=1), atol=1e-5)
    np.testing.assert_allclose(logp_NK, -np.sort(-logp_NV, axis=1)[:, :20], atol=1e-5)
    rows_N = np.arange(len(top.token_N))
    np.testing.assert_allclose(top.columns["logp"], logp_NV[rows_N, top.token_N], atol=1e-5)


@PATHS
def test_a_sequence_without_tokens_is_scored_as_nothing(infer, given, path):
    bare = Batch((4, 9), given.prompts[:2], WIDTH, ((), given.continuations[1]))
    trace = infer.score(bare, PLAIN, path)
    assert trace.length_S.tolist() == [0, len(given.continuations[1])]
    assert not trace.lost_S.any()


def test_every_token_of_a_batch_is_timed(infer, batch, drawn):
    for record in (False, True):
        timing = infer.time(batch, PLAIN, 7, record)
        assert len(timing.first_S) == len(batch)
        assert timing.tokens == len(drawn.token_N)
        assert min((*timing.first_S, *timing.gap_N)) >= 0
        # eight requests, four at a time: who waited has its first token later
        assert max(timing.first_S) > min(timing.first_S)
        assert timing.wall >= max(timing.first_S)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 96},
        {"async_scheduling": True},
        {"enable_prefix_caching": True, "block_size": 32},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_vllm_reach_it_and_change_no_score_beyond_rounding(
    vllm, folder, infer, given, options
):
    """Chunks of 96 tokens cut the longest prompt, whose scores need no seed."""
    other = opened(vllm, folder, options=options)
    try:
        facts = other.describe().fingerprint
        scored, again = (other.score(given, PLAIN, "prefill").columns["logp"] for _ in "ab")
    finally:
        other.close()

    assert {f"option.{name}": json.dumps(value) for name, value in options.items()}.items() <= (
        facts.items()
    )
    assert infer.score(given, PLAIN, "prefill").columns["logp"] == pytest.approx(
        scored, abs=ROUNDING
    )
    assert again == pytest.approx(scored, abs=ROUNDING)


def test_more_than_run_together_are_refused(infer, batch):
    with pytest.raises(MeasurementError, match="5 sequences are to run together") as refused:
        infer.generate(Batch(batch.sequence_S, batch.prompts, WIDTH, (), 5), PLAIN, 7)
    assert "started for 4" in str(refused.value)


@pytest.mark.parametrize("temperature", [0.001, 3.0])
def test_a_temperature_that_vllm_would_change_is_refused(infer, batch, temperature):
    with pytest.raises(MeasurementError, match=r"vLLM draws at temperatures from 0\.01 to 2\.0"):
        infer.generate(batch, Sampling(temperature=temperature), 7)


def test_min_p_is_applied_before_top_p_and_the_record_tells(infer, train, batch):
    """Here vLLM differs from the declared order: its top-p counts what min-p left.

    Where the two supports differ, vLLM's own report is another than that of the transform.
    """
    both = Sampling(temperature=1.0, top_p=0.8, min_p=0.2)
    drawn = infer.generate(batch, both, 7)
    given = Batch(batch.sequence_S, batch.prompts, WIDTH, drawn.continuations)
    raw_NV = np.concatenate(list(infer.logits(given, "decode")))
    logp_NV = log_softmax(raw_NV)
    least_N1 = logp_NV.max(axis=1, keepdims=True) + math.log(both.min_p)
    kept_NV = np.where(logp_NV >= least_N1, logp_NV, -np.inf)
    served_NV = processed_logprobs(kept_NV, Sampling(top_p=both.top_p))
    rows_N = np.arange(len(drawn.token_N))
    np.testing.assert_allclose(
        drawn.columns["logp"], served_NV[rows_N, drawn.token_N], atol=ROUNDING
    )
    declared_NV = processed_logprobs(logp_NV, both)
    assert np.abs(drawn.columns["logp"] - declared_NV[rows_N, drawn.token_N]).max() > 0.01


def test_bfloat16_differs_by_what_its_format_rounds(vllm, folder, train, given):
    weights = train.describe().weights
    engine = opened(vllm, folder, dtype="bfloat16", weights_from=weights)
    try:
        theirs = engine.score(given, PLAIN, "decode").columns["logp"]
        assert same_policy(train.describe(), engine.describe()) == "derived"
    finally:
        engine.close()
    apart_N = np.abs(theirs - train.score(given, PLAIN, "prefill").columns["logp"])
    assert 1e-3 < apart_N.mean() < 2e-2
    assert apart_N.max() < 0.5


CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: tiny-vllm}}
kernels:
  train: {{engine: transformers, model: {model}, dtype: float32, batch_size: 16}}
  infer: {{engine: vllm, model: {model}, python: {python}, dtype: {dtype}, batch_size: 16}}
workload:
  prompts: {data}/prompts.jsonl
  sampling: {{temperature: 1.0, max_new_tokens: 24, seed: 7}}
golden: {{prompts: {data}/golden.jsonl}}
confidence: 0.95
claim: population
numerical:
  - {{id: drift, metric: logit_osc_nats, aggregate: max, at_most: {osc}}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: {tv}}}
observability:
  record: [fingerprint, token_ids, processed_logprobs, sampling, path, batch_size]
  clauses:
    - {{id: fidelity, metric: sampler_fidelity}}
    - {{id: finite, metric: valid_ratio, at_least: 0.999}}
promotion:
  offline: {{prompt_groups: [200, 4000]}}
"""


@pytest.mark.parametrize(("dtype", "osc", "tv"), [("float32", 1e-3, 0.01), ("bfloat16", 2.0, 0.03)])
def test_a_contract_between_transformers_and_vllm_holds(vllm, tmp_path, dtype, osc, tv):
    path = tmp_path / "tiny-vllm.kernelcontract.yaml"
    text = CONTRACT.format(
        model=MODEL, python=vllm, data=ROOT / "data", dtype=dtype, osc=osc, tv=tv
    )
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "servanda", "check", path, "--run-dir", tmp_path / "run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HOLDS: " in done.stdout


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of PEFT
def test_an_adapter_is_that_of_the_other_engine(vllm, folder, tmp_path):
    """LoRA of PEFT in the one, vLLM's own in the other."""
    import torch
    import transformers

    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(base, config)
    for name, parameter in wrapped.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wrapped.save_pretrained(tmp_path)
    texts = Batch((0,), ((5, 9),), 5, ((40, 7, 300, 12, 8),))
    train = TransformersEngine(
        Kernel(engine="transformers", model=folder, adapter=str(tmp_path), batch_size=8)
    )
    infer = opened(vllm, folder, adapter=str(tmp_path))

    assert same_policy(train.describe(), infer.describe()) == "verified"
    given = [engine.score(texts, PLAIN, "prefill").columns["logp"] for engine in (train, infer)]
    infer.close()

    np.testing.assert_allclose(*given, atol=ROUNDING)
    plain = TransformersEngine(Kernel(engine="transformers", model=folder, batch_size=8))
    assert np.abs(plain.score(texts, PLAIN, "prefill").columns["logp"] - given[0]).max() > 0.01
