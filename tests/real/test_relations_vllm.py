# `servanda relations` on a real vLLM: healthy, and with faults in its cache, batch and blocks.

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import servers

from tests.real.serving import needs_engines

pytestmark = needs_engines

PLUGIN = Path(__file__).parent / "vllm_faults"
BLOCK = 32  # the smallest of vLLM on a CPU
# fault -> the relation that finds it, and a part of its answer
FAULTS = {
    "foreign_block": ("prefix-cache", "(those of 64 tokens or more)"),
    "leaking_row": ("batching", "requests at once"),
    "temperature_by_batch": ("batching", "requests at once"),
    "lost_slot": ("prompt-length", "(those of 0 modulo 32 tokens, from 32 on)"),
}


@contextlib.contextmanager
def vllm(folder, fault="", *more):
    port = servers.free_port()
    options = ("--enable-prompt-tokens-details", "--block-size", str(BLOCK), *more)
    extra = {"PYTHONPATH": str(PLUGIN), "VLLM_FAULT": fault} if fault else {}
    command = servers.vllm_command(port, *options)
    with servers.running(command, port, folder / "log", extra) as url:
        yield url


def relations(*words):
    """(exit code, each relation of the JSON by its name)."""
    command = [sys.executable, "-m", "servanda", "relations", *words, "--quiet", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, {r["relation"]: r for r in json.loads(done.stdout)["relations"]}


def again(found):
    """The same by the command that the answer prints, which names one request."""
    _, _, *words = shlex.split(found["example"]["command"])
    return relations(*words)


def test_a_healthy_server_holds_bit_for_bit(tmp_path):
    with vllm(tmp_path) as url:
        code, seen = relations(url)
    outcomes = {name: r["outcome"] for name, r in seen.items()}
    assert outcomes.pop("update") == "untestable"
    assert (code, {*outcomes.values()}) == (0, {"holds"}), seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_holds_within_the_rounding_of_its_format(tmp_path, real_model, dtype):
    more = ("--model", str(real_model / dtype), "--dtype", dtype, "--max-model-len", "2048")
    with vllm(tmp_path, "", *more) as url:
        code, seen = relations(url, "--longest", "96")
    outcomes = {name: r["outcome"] for name, r in seen.items()}
    assert outcomes.pop("update") == "untestable"
    assert (code, {*outcomes.values()}) == (0, {"holds"}), seen


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_relation_and_by_one_command(tmp_path, fault):
    name, part = FAULTS[fault]
    with vllm(tmp_path, fault) as url:
        code, seen = relations(url, "--rounding", "float32")
        # which requests share a step is the server's choice, each time anew
        answers = (again(seen[name]) for _ in range(3))
        once_more, alone = next((one for one in answers if one[0] == 1), (0, {}))
    assert code == 1 and seen[name]["outcome"] == "violated", seen
    assert part in seen[name]["answer"]
    assert once_more == 1 and alone[name]["outcome"] == "violated"
    sound = {"replay", "order", "sampling"} | ({"prefix-cache", "prompt-length"} - {name})
    assert {seen[other]["outcome"] for other in sound} == {"holds"}, seen


def test_seeded_requests_that_are_prefilled_in_pieces_end_the_server_and_are_named(tmp_path):
    """vLLM 0.32 on a CPU: "CPU Generator does not use offset"."""
    pieces = 64
    with vllm(tmp_path, "", "--max-num-batched-tokens", str(pieces)) as url:
        code, seen = relations(url, "--only", "replay", "--only", "prefix-cache")
    replay = seen["replay"]
    assert (code, replay["outcome"], [*seen]) == (1, "violated", ["replay"])
    assert replay["answer"].startswith("the server stopped at a request of ")
    assert "with a seed" in replay["answer"]
    assert len(replay["example"]["prompt_ids"]) > pieces
    assert "CPU Generator does not use offset" in (tmp_path / "log").read_text(errors="replace")
