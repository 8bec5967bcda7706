# What both tests of real servers do: draw, re-score with Transformers, and check a contract.

import os
import subprocess
import sys

import numpy as np
import pytest
from scripts.servers import MODEL, ROOT

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.http.engine import HTTPEngine
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, align

# `make test-engines` names the folder of the environments; nothing runs without it
needs_engines = pytest.mark.skipif("SERVANDA_VENVS" not in os.environ, reason="make test-engines")

TEXTS = ("hello import", "The list of ", "def load_units(units):\n    ", "12+34=")
WIDTH, SEED = 32, 5

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: served}}
kernels:
  train: {{engine: transformers, model: {model}, dtype: float32}}
  infer: {{engine: openai_http, url: "{url}", batch_size: 8}}
workload: {{prompts: {root}/data/prompts.jsonl, round: 16, sampling: {{max_new_tokens: 12}}}}
claim: realised
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.01}}
observability:
  record: [token_ids, processed_logprobs, sampling, path, batch_size]
  clauses:
    - {{id: faithful, metric: sampler_fidelity}}
    - {{id: coherent, metric: weight_mean_check}}
promotion: {{offline: {{prompt_groups: [32, 64]}}}}
"""


def opened(url, **fields):
    return HTTPEngine(Kernel(engine="openai_http", url=url, batch_size=8, **fields))


def drawn(engine, sampling=Sampling()):
    """Answers to TEXTS, and the same as a batch to score."""
    prompts = tuple(map(tuple, engine.encode(TEXTS)))
    sequences = tuple(range(len(TEXTS)))
    trace = engine.generate(Batch(sequences, prompts, WIDTH), sampling, SEED)
    return trace, Batch(sequences, prompts, WIDTH, trace.continuations)


def reference():
    return open_engine(Kernel(engine="transformers", model=str(MODEL), batch_size=8))


def furthest(ours, theirs):
    """The largest difference of a logprob, of two traces of the same tokens."""
    pair = align(theirs, ours)
    assert pair.usable_N.all()
    return np.abs(pair.train.columns["logp"] - pair.infer.columns["logp"]).max()


def checked(url, folder):
    """`servanda check` of Transformers in float32 against a server: exit code and words."""
    contract = folder / "served.kernelcontract.yaml"
    contract.write_text(CONTRACT.format(model=MODEL, root=ROOT, url=url))
    done = subprocess.run(
        [sys.executable, "-m", "servanda", "check", str(contract)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr
