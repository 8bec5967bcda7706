# A small model, and servers of it in another process, for tests of live syncs.

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx2
import torch
import transformers

from servanda.engines.checkpoint import quiet
from servanda.rl.sync_drill.servers.checkpoint_sync import CheckpointSync
from servanda.rl.sync_drill.servers.replicas import opened_at
from servanda.rl.sync_drill.trainee import Trainee

ROOT = Path(__file__).parents[2]
TOKENS, LONGEST = 96, 512
SHARD = "20KB"  # so that even this checkpoint has several files
TIMEOUT_S = 60.0


def small_model(tied=True, seed=0):
    """A Llama of two layers with weights wide enough that its logprobs differ."""
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


@contextmanager
def serving(folder, form, replicas=1):
    """URLs of servers of a checkpoint, which end afterwards."""
    command = [sys.executable, "-m", "tests.rl.weight_server", str(folder), form, str(replicas)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            ports = json.loads(process.stdout.readline())
            yield [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            process.kill()


def saved(model, folder):
    with quiet():
        model.save_pretrained(folder)
    return folder


def begun(url, fault="none"):
    """A server as it was started, with a fault."""
    httpx2.post(f"{url}/test/begin", json={"fault": fault}, timeout=TIMEOUT_S, trust_env=False)


def trained(module, urls, dialect="vllm", timeout_s=TIMEOUT_S, sync=None):
    """A trainee of servers; its checkpoints have several files."""
    servers = opened_at(urls, served=None, dialect=dialect, key_env=None, timeout_s=timeout_s)
    sync = sync or CheckpointSync(module, servers, shard=SHARD)
    return Trainee(module, sync, servers.score, replicas=servers)
