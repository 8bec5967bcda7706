# The sync drill on real vLLM servers, over HTTP: reload from disk by their development endpoints.

import json
import shutil

import pytest
from scripts import servers

pytest.importorskip("torch")

import torch
import transformers
from safetensors.torch import load_file, save_file

from servanda.engines.checkpoint import quiet
from servanda.rl import Trainee, preflight
from servanda.rl.sync_drill.servers.checkpoint_sync import write_checkpoint
from tests.real.serving import needs_engines
from tests.trainers import MODELS

pytestmark = needs_engines

TIED = MODELS / "tiny-lm"


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """The same model with its head written down, which starts as a copy of the embedding."""
    folder = tmp_path_factory.mktemp("untied") / "tiny-lm"
    shutil.copytree(TIED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """Starts a vLLM server of a folder in development mode."""

    def started(folder):
        port, log = servers.free_port(), tmp_path_factory.mktemp("vllm") / "log"
        command = servers.vllm_command(port, "--model", str(folder))
        return servers.running(["env", "VLLM_SERVER_DEV_MODE=1", *command], port, log)

    return started


def load(folder):
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def test_a_reload_of_a_tied_model_leaves_its_head_and_the_drill_names_it(serving, tmp_path):
    """And a sync of one's own that does not reset the prefix cache is told so besides."""
    module = load(TIED)
    with serving(TIED) as url:

        def reload_without_reset():
            place = tmp_path / "next"
            write_checkpoint(module, place)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
            trainee.replicas.all[0].engine.transport.ask("/collective_rpc", body)

        trainee = Trainee.from_urls(module, url, sync=reload_without_reset)
        result = preflight(trainee)

    assert (result.outcome, result.cause) == ("violated", "tied_head_stale")
    assert [g.name for g in result.groups if g.mark == "violated"] == ["embed/lm_head"]
    assert result.found.idle < 1e-4
    claims, cache = result.warnings
    assert "claims the weight version 'default' before and after every sync" in claims
    assert "its prefix cache outlives a sync" in cache
    (digests,) = result.digests
    # the packed matrices of a CPU have no bytes in the parameters that are digested
    assert "16 digests of empty tensors, which show nothing" in digests


def test_a_reload_of_a_model_with_a_head_of_its_own_is_clean(serving, untied):
    with serving(untied) as url:
        result = preflight(Trainee.from_vllm(load(untied), [url]))

    assert (result.outcome, result.cause, result.warnings) == ("holds", "", ())
    assert all(group.follow == pytest.approx(1, abs=0.02) for group in result.groups)
