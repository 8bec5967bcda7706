# A small trainer and its engine, drilled in a process of its own that somebody stops.
#
# The process says on a pipe which call the drill makes of it, and waits there for a word, so
# that nothing is left to how fast a machine is.

import copy
import hashlib
import os
import signal
import sys
from contextlib import suppress

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from servanda.errors import Interrupted
from servanda.rl.sync_drill.drill import preflight, restore
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs
from tests.trainers import adapt

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 18)).tolist()
EXIT = 7  # of a trainer that leaves by its own handler


def module(seed=0, adapted=False):
    """A Llama with a tied head; adapted, it has adapters at their start, whose B are zero."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        model = LlamaForCausalLM(config)
    return adapt(model, rank=4) if adapted else model


def digest(model):
    """Of every bit of a module, and of which of its tensors are one."""
    sha = hashlib.sha256()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().numpy().tobytes())
    sha.update(repr([name for name, _ in model.named_parameters()]).encode())
    return sha.hexdigest()


class Copied:
    """An engine that is a copy of the module, and a sync into it."""

    def __init__(self, model):
        self.model, self.copy = model, copy.deepcopy(model)

    def sync(self):
        self.copy.load_state_dict(self.model.state_dict())

    def score(self, rows):
        with torch.no_grad():
            return forward_logprobs(self.copy, rows)


def trainee(model, before=lambda _: None):
    """What is drilled; `before` is told of each sync and score, before it happens."""
    engine = Copied(model)

    def sync():
        before("sync")
        engine.sync()

    def score(rows):
        before("score")
        return engine.score(rows)

    return Trainee(model, sync, score, TOKENS)


def drilled(mouth, ear, journal, adapted, handler):
    """Run a drill, say of each call (its number, what, digest), and wait for leave to go on.

    Leave is one byte, the number of a signal that the drill gets then, or 0.  In the middle of a
    longer message a signal would leave the rest of it in the pipe, for the next call to read.

    `handler` is what a trainer does about SIGTERM: "exit" by itself, or "" for nothing.
    """
    model = module(adapted=adapted)
    if handler == "exit":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT))
    calls = 0

    def before(what):
        nonlocal calls
        calls += 1
        mouth.send((calls, what, digest(model)))
        if signum := os.read(ear.fileno(), 1)[0]:
            signal.raise_signal(signum)

    try:
        with suppress(Interrupted):
            preflight(trainee(model, before), journal=journal)
    finally:
        mouth.send(("end", "", digest(model)))
        mouth.close()


def restored(mouth, _, journal, adapted):
    """Put a journal back into a module whose trained weights are others."""
    model = module(adapted=adapted)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 1
    syncs = []
    restore(trainee(model, syncs.append), journal)
    mouth.send((digest(model), syncs))
    mouth.close()
