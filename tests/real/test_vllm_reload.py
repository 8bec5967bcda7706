# A weight sync that leaves a tied head behind: vLLM 0.32's reload_weights on the CPU.
#
# It returns success.  What it serves then is the new model's hidden states under the old
# model's head, which no log and no digest of the checkpoint shows; logprobs do.

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import transformers

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-lm"
TEXT = [51, 78, 310, 282, 409, 662, 267, 986, 79, 581, 14, 505]
SIGMA = 0.002  # of the perturbation, an optimizer step or a few
HEAD, REST = "lm_head", "all but lm_head"

RELOAD = """
import json, sys
from servanda.contract.model import Kernel
from servanda.engines.vllm import PLAIN, VllmEngine
from servanda.traces.trace import Batch

old, new, text, out = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
given = Batch((0,), (tuple(text[:1]),), len(text) - 1, (tuple(text[1:]),))

def logp(engine):
    return engine.score(given, PLAIN, "prefill").columns["logp"].tolist()

engine = VllmEngine(Kernel(engine="vllm", model=old, batch_size=4))
before = logp(engine)
engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": new})
after = logp(engine)
json.dump({"before": before, "after": after}, open(out, "w"))
"""


def served(model):
    """Logprobs of the text by transformers, one a token but the first."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([TEXT])).logits[0, :-1]
    logp_TV = logits_TV.double().log_softmax(dim=-1).numpy()
    return logp_TV[np.arange(len(TEXT) - 1), TEXT[1:]]


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def with_head_of(model, other):
    """The model under the head of another: what only a tied head can be without."""
    mixed = load(model)
    mixed.lm_head.weight = torch.nn.Parameter(load(other).lm_head.weight.detach().clone())
    return mixed


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """The model after a step of training: every tensor moved a little, and the head still tied."""
    model = load(MODEL)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += SIGMA * torch.randn(weight.shape, generator=noise)
    place = tmp_path_factory.mktemp("synced") / "tiny-lm"
    model.save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).write_text((MODEL / name).read_text())
    return place


@pytest.fixture(scope="module")
def measured(vllm, synced, tmp_path_factory):
    """What vLLM said before and after the sync."""
    out = tmp_path_factory.mktemp("measured") / "logp.json"
    arguments = [str(MODEL), str(synced), json.dumps(TEXT), str(out)]
    done = subprocess.run(
        [f"{vllm}/bin/python", "-c", RELOAD, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: np.array(values) for name, values in json.loads(out.read_text()).items()}


@pytest.fixture(scope="module")
def candidates(synced):
    """What vLLM may be serving, by which tensors it was deaf to."""
    return {
        "": served(load(synced)),
        HEAD: served(with_head_of(synced, MODEL)),
        REST: served(with_head_of(MODEL, synced)),
        "everything": served(load(MODEL)),
    }


def test_the_head_of_the_model_is_tied():
    model = load(MODEL)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_before_the_sync_it_serves_the_old_weights(measured, candidates):
    np.testing.assert_allclose(measured["before"], candidates["everything"], atol=1e-4)


def test_the_sync_succeeds_and_the_head_stays_the_old_one(measured, candidates):
    after = measured["after"]
    np.testing.assert_allclose(after, candidates[HEAD], atol=1e-4)
    assert np.abs(after - candidates[""]).max() > 1e-3
