# Kernels of vLLM that verify drafts.

import json
import math
from pathlib import Path

import pytest

from servanda.contract.model import Kernel
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "tiny-lm")
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
COPY = {"method": "draft_model", "num_speculative_tokens": 3, "model": MODEL}
PROMPTS = ((5, 6, 7, 5, 6, 7, 5), (9, 8), (3, 3, 3, 3, 3, 3))
BATCH = Batch((0, 1, 2), PROMPTS, 32)


def drawn(python, config, sampling=Sampling()):
    options = {"speculative_config": config}
    told = Kernel(engine="vllm", model=MODEL, python=str(python), options=options, batch_size=4)
    worker = spawn(told, "infer")
    try:
        trace = worker.generate(BATCH, sampling, 3)
        given = Batch(BATCH.sequence_S, PROMPTS, BATCH.width, trace.continuations)
        return trace, worker.score(given, sampling, "prefill"), worker.describe()
    finally:
        worker.close()


@pytest.mark.parametrize("config", [LOOKUP, COPY], ids=["lookup", "draft model"])
def test_vllm_counts_the_drafts_of_a_round(vllm, config):
    trace, scored, about = drawn(vllm, config)

    counts = json.loads(trace.about["drafts"])
    assert counts["drafts"] * 3 >= counts["proposed"] >= counts["accepted"]
    assert counts["accepted"] == sum(counts["by_depth"])
    assert about.scores == ("prefill",)
    assert all(map(math.isfinite, scored.columns["logp"]))
    assert MODEL not in about.fingerprint["option.speculative_config"]


def test_vllm_refuses_what_it_would_ignore_or_run_as_code(vllm):
    with pytest.raises(MeasurementError, match="ignores min_p beside speculation"):
        drawn(vllm, LOOKUP, Sampling(min_p=0.1))
    with pytest.raises(MeasurementError, match="a mapping with a method of vLLM"):
        drawn(vllm, {"method": "custom_class", "model": "a.b.C"})
