# The sync drill on vLLM, through its own way of taking new weights: reload_weights.
#
# The trainer is transformers in float32, in this process; vLLM runs in its own environment.  A
# sync is save_pretrained to a folder, and a reload.

import json
import os
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import transformers
from safetensors.torch import load_file, save_file

from servanda.rl.sync_drill.drill import preflight
from servanda.rl.sync_drill.trainee import Trainee
from tests.trainers import MODELS

SERVE = """
import json, os, sys
from servanda.contract.model import Kernel
from servanda.engines.vllm import PLAIN, VllmEngine
from servanda.traces.trace import Batch

model, asked, told = sys.argv[1], os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w")
engine = VllmEngine(Kernel(engine="vllm", model=model, batch_size=16))
print("ready", file=told, flush=True)
for line in asked:
    todo = json.loads(line)
    if isinstance(todo, str):
        engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": todo})
        answer = "done"
    else:
        batch = Batch(
            tuple(range(len(todo))),
            tuple((row[0],) for row in todo),
            len(todo[0]) - 1,
            tuple(tuple(row[1:]) for row in todo),
        )
        answer = engine.score(batch, PLAIN, "prefill").columns["logp"].tolist()
    print(json.dumps(answer), file=told, flush=True)
"""


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@contextmanager
def served(vllm, folder, log):
    """Asks a vLLM that serves a folder: rows to score, or a folder to reload from."""
    asked, ask = os.pipe()
    tell, told = os.pipe()
    with open(ask, "w") as questions, open(tell) as answers, log.open("w") as noise:
        child = subprocess.Popen(
            [f"{vllm}/bin/python", "-c", SERVE, str(folder), str(asked), str(told)],
            pass_fds=(asked, told),
            stdout=noise,
            stderr=noise,
        )
        os.close(asked)
        os.close(told)

        def of(question):
            print(json.dumps(question), file=questions, flush=True)
            return json.loads(answers.readline() or "null")

        try:
            assert answers.readline() == "ready\n", log.read_text()[-2000:]
            yield of
        finally:
            questions.close()  # it has no more to answer, and ends
            child.wait()


def with_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-lm" / name, folder)
    return folder


def with_its_own_head(folder):
    """A tied checkpoint as an untied one: the head is written down, and equals the embedding."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def drilled(vllm, name, tmp_path, written=lambda folder: folder):
    """A drill of a shipped model; `written` is what is done to each checkpoint it is sent by."""
    module = load(MODELS / name)

    def save(folder):
        module.save_pretrained(folder)
        return str(written(with_tokenizer(folder)))

    with served(vllm, save(tmp_path / "first"), tmp_path / "log") as ask:

        def sync():
            assert ask(save(tmp_path / "next")) == "done"

        def score(rows):
            return np.reshape(ask(rows), (len(rows), -1))

        return preflight(Trainee(module, sync, score))


@pytest.mark.parametrize("name", ["tiny-lm", "tiny-qwen3"])
def test_reload_weights_leaves_the_tied_head_behind_and_the_drill_names_it(vllm, name, tmp_path):
    result = drilled(vllm, name, tmp_path)

    assert (result.outcome, result.cause) == ("violated", "tied_head_stale")
    (wrong,) = [group for group in result.groups if group.mark == "violated"]
    assert wrong.name == "embed/lm_head"
    assert [part.name for part in wrong.parts if part.deaf] == ["lm_head.weight"]
    # the sync of unchanged weights, and so the first step of a run, looks as it should
    assert result.found.idle < 1e-4


@pytest.mark.parametrize("name", ["tiny-lm", "tiny-qwen3"])
def test_a_checkpoint_with_a_head_of_its_own_is_a_way_around_it(vllm, name, tmp_path):
    result = drilled(vllm, name, tmp_path, with_its_own_head)

    assert (result.outcome, result.cause, result.warnings) == ("holds", "", ())
    assert all(group.follow == pytest.approx(1, abs=0.02) for group in result.groups)
