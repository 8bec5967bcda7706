"""Small inference servers, 20 with a fault and 20 without, in the dialect of vLLM 0.32.

Each server runs a bundled checkpoint with continuous batching, a paged KV cache, and a prefix cache
by blocks of 16 tokens. A healthy server rounds as its number format does, and nothing else changes
an answer. A fault is one wrong line in the engine, switched on by ``Options.fault``.

    python -m tests.field.unseen_servers --list
    python -m tests.field.unseen_servers NAME [PORT]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

MODELS = Path(__file__).parents[2] / "models"
BLOCK = 16
EOS = 0
MOST_LOGPROBS = 20
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True)
class Options:
    """How one server is built; the defaults are a healthy server in float32."""

    checkpoint: str = "tiny-lm"
    dtype: str = "float32"  # or "bfloat16": sums in float32, results rounded to bfloat16
    weights: str = ""  # "fp8_tensor", "fp8_block" or "int8_channel"
    activations: str = ""  # "fp8_tensor", "fp8_group" or "int8_token"
    kv: str = ""  # "fp8"
    noise: float = 0.0  # relative, uniform, on the output of each layer
    split_sums: bool = False  # matrix products in 1, 2 or 4 parts, by the number of rows
    slots: int = 16  # sequences that run together
    blocks: int = 512  # blocks of the KV cache
    budget: int = 512  # tokens of one step
    alone: bool = False  # each row of a step is computed by itself
    prefix_cache: bool = True
    host_blocks: int = 0  # blocks of a second tier, for what the first one evicts
    seconds: float = 0.0  # added to each step
    report_cached: bool = True
    tokenizer: bool = True
    max_model_len: int = 512
    defaults: dict = field(default_factory=dict)  # as generation_config.json gives them
    fault: str = ""


# --- the model, and the formats it computes in ---------------------------------------------------


def bf16(x):
    """Round to bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def fp8(x, scale):
    """Round to float8_e4m3 at a scale."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def int8(x, dim, bits=8):
    """Round to integers, symmetrically, with one scale for each slice along `dim`."""
    top = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-12) / top
    return (x / scale).round().clamp(-top, top) * scale


def amax_scale(x, *dims):
    """Return the scale at which the largest value is the largest number of float8_e4m3."""
    return x.abs().amax(dims, keepdim=True).clamp(min=1e-12) / 448


def rounded_weights(weight, kind):
    """Return a matrix as a checkpoint in `kind` holds it."""
    if kind == "fp8_tensor":
        return fp8(weight, amax_scale(weight))
    if kind == "fp8_block":
        tiles = weight.unfold(0, 128, 128).unfold(1, 128, 128)
        scales = amax_scale(tiles, -1, -2)[..., 0, 0]
        return fp8(weight, scales.repeat_interleave(128, 0).repeat_interleave(128, 1))
    return int8(weight, 1) if kind == "int8_channel" else weight


def rounded_activations(x, kind):
    """Return the input of a matrix product as a kernel for `kind` reads it."""
    if kind == "fp8_tensor":
        return fp8(x, amax_scale(x))  # one scale for all rows of the step
    if kind == "fp8_group":
        groups = x.unflatten(-1, (-1, 128))
        return fp8(groups, amax_scale(groups, -1)).flatten(-2)
    return int8(x, -1) if kind == "int8_token" else x


def load_model(options, step):
    """Load the checkpoint and give it the number format of `options`."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        MODELS / options.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    body = model.model
    linears = [m for layer in body.layers for m in layer.modules() if hasattr(m, "in_features")]
    for linear in linears:
        linear.weight.data = rounded_weights(linear.weight.data, options.weights)
        if options.activations:
            linear.register_forward_pre_hook(
                lambda _, args: (rounded_activations(args[0], options.activations),)
            )
        if options.split_sums:
            linear.forward = split_product(linear)
    if options.dtype == "bfloat16":
        norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        for module in [*linears, *norms, *body.layers, model.lm_head]:
            module.register_forward_hook(lambda _, __, out: bf16(out))
    if options.noise:
        draw = torch.Generator().manual_seed(time.time_ns() % 2**32)
        for layer in body.layers:
            layer.register_forward_hook(
                lambda _, __, out: bf16(
                    out * (1 + options.noise * (2 * torch.rand(out.shape, generator=draw) - 1))
                )
            )
    if options.fault == "wide_batch_gemm":
        for layer in body.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                linear.forward = by_width(linear, step)
    if options.fault == "split_k_remainder":
        body.layers[2].mlp.down_proj.register_forward_pre_hook(
            lambda _, args: (without_remainder(args[0], step),)
        )
    return model


def split_product(linear):
    """Return a product that adds up its parts in bfloat16; the number of parts is by the rows."""

    def forward(x):
        rows = x.shape[0] * x.shape[1]
        parts = 1 if rows == 1 else 2 if rows <= 4 else 4
        pieces = zip(x.chunk(parts, -1), linear.weight.chunk(parts, -1), strict=True)
        total = 0
        for a, b in pieces:
            total = bf16(total + bf16(F.linear(a, b)))
        return total

    return forward


def by_width(linear, step):
    """Take the weights in 5 bits per channel where 6 rows or more decode together (fault)."""
    coarse = int8(linear.weight.data, 1, bits=5)
    return lambda x: F.linear(x, coarse if step.decoding >= 6 else linear.weight)


def without_remainder(x, step):
    """Leave out half of the sum of the last row where it is the third of a tile of 4 (fault)."""
    if step.decoding % 4 == 3:
        x = x.clone()
        x[step.decoding - 1, :, x.shape[-1] // 2 :] = 0
    return x


# --- the KV cache ---------------------------------------------------------------------------------


class Blocks:
    """Blocks of 16 slots for keys and values; finished ones stay until their place is needed."""

    def __init__(self, options, config):
        self.o, n = options, options.blocks
        shape = (n * BLOCK + 1, config.num_key_value_heads, config.head_dim)  # the last is trash
        dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
        layers = range(config.num_hidden_layers)
        self.k = [torch.zeros(shape, dtype=dtype) for _ in layers]
        self.v = [torch.zeros(shape, dtype=dtype) for _ in layers]
        self.trash = n * BLOCK
        self.scale = 0.05 if options.fault == "kv_scale_of_today" else 0.04
        self.free = list(range(n))[::-1]
        self.refs = [0] * n
        self.key = [None] * n
        self.known = {}  # key -> block
        self.idle = OrderedDict()  # known blocks that no sequence holds, oldest first
        self.host = OrderedDict()  # key -> keys and values of each layer

    def stores(self):
        return zip(self.k, self.v, strict=True)

    def available(self):
        return len(self.free) + len(self.idle)

    def take(self):
        """Return an empty block."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.idle.popitem(last=False)
            self.demote(block)
        self.refs[block] = 1
        return block

    def demote(self, block):
        """Forget a known block, or keep it in the second tier."""
        key, self.key[block] = self.key[block], None
        del self.known[key]
        if self.o.host_blocks:
            here = slice(block * BLOCK, (block + 1) * BLOCK)
            self.host[key] = [(k[here].clone(), v[here].clone()) for k, v in self.stores()]
            while len(self.host) > self.o.host_blocks:
                self.host.popitem(last=False)

    def promote(self, key):
        """Bring a block back from the second tier."""
        copy = self.host.pop(key)
        block = self.take()
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        if self.o.fault == "host_tier_unfinished":
            copy = copy[:-1]  # the copy of the last layer is not waited for
        for (k, v), (old_k, old_v) in zip(self.stores(), copy, strict=False):
            k[here], v[here] = old_k, old_v
        self.learn(block, key)
        return block

    def hold(self, block):
        if self.refs[block] == 0:
            self.idle.pop(block)
        self.refs[block] += 1
        return block

    def release(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.key[block] is None:
                self.free.append(block)
            else:
                self.idle[block] = None

    def learn(self, block, key):
        """Enter a computed block into the prefix cache."""
        if key not in self.known and self.key[block] is None:
            self.known[key], self.key[block] = block, key

    def keys(self, seq, count):
        """Return the keys of the first `count` blocks of a sequence."""
        root = (seq.request.salt, seq.replica)
        while len(seq.keys) < count:
            at = len(seq.keys)
            content = tuple(seq.tokens[at * BLOCK : (at + 1) * BLOCK])
            parent = seq.keys[-1] if seq.keys else root
            if self.o.fault == "key_without_parent":
                parent = root
            key = hash((parent, content))
            if self.o.fault == "short_key":
                key %= 4096
            seq.keys.append(key)
        return seq.keys[:count]

    def lookup(self, seq):
        """Hold and return the blocks of the longest known prefix, short of the last token."""
        hits = []
        for key in self.keys(seq, (len(seq.tokens) - 1) // BLOCK):
            if key in self.known:
                hits.append(self.hold(self.known[key]))
            elif key in self.host and self.available() > 1:
                hits.append(self.promote(key))
            else:
                break
        return hits

    def seen(self, amax):
        """Follow the range of the keys and values of new prompts (fault: old blocks do not)."""
        if self.o.fault == "kv_scale_of_today":
            self.scale += 0.06 * (float(amax) / 160 - self.scale)


class View:
    """What one forward pass sees as its cache: where it writes, and where it reads."""

    def __init__(self, blocks, write, read):
        self.blocks, self.write, self.read, self.amax = blocks, write.flatten(), read, 0.0

    def get_seq_length(self, layer_idx=0):
        return 0

    def update(self, k, v, layer, *_, **__):
        new = []
        for store, x in ((self.blocks.k[layer], k), (self.blocks.v[layer], v)):
            rows = x.transpose(1, 2).flatten(0, 1)
            if self.blocks.o.kv == "fp8":
                self.amax = max(self.amax, rows.abs().amax())
                rows = fp8(rows, self.blocks.scale) / self.blocks.scale
            store[self.write] = rows.to(store.dtype)
            out = store[self.read].transpose(1, 2).to(x.dtype)
            new.append(out * self.blocks.scale if self.blocks.o.kv == "fp8" else out)
        return tuple(new)


# --- requests and their sequences -----------------------------------------------------------------


class Call:
    """One prompt of one HTTP request: its parameters, and the queue its handler reads."""

    def __init__(self, body, prompt, options, put):
        self.body, self.prompt, self.put = body, prompt, put
        named = {k: body[k] for k in NEUTRAL if body.get(k) is not None}
        for k, value in {**NEUTRAL, **options.defaults, **named}.items():
            setattr(self, k, value)
        if options.fault == "min_p_always":
            self.min_p = max(self.min_p, 0.05)
        self.n = body.get("n") or 1
        self.seed = body.get("seed")
        self.salt = body.get("cache_salt") or ""
        self.max_tokens = 16 if body.get("max_tokens") is None else body["max_tokens"]
        self.min_tokens = body.get("min_tokens") or 0
        self.logprobs, self.prompt_logprobs = body.get("logprobs"), body.get("prompt_logprobs")
        stop = body.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else stop
        self.ends = set(body.get("stop_token_ids") or [])
        self.ignore_eos = bool(body.get("ignore_eos"))
        self.penalised = (
            self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        )
        self.cached, self.table, self.scores, self.gone = 0, None, None, False


class Sequence:
    """One answer in the making; `table` lists its blocks, `computed` counts its cached tokens."""

    def __init__(self, request, index, replica):
        self.request, self.index, self.replica = request, index, replica
        self.tokens, self.keys, self.table = list(request.prompt), [], []
        self.computed, self.slot, self.parent = 0, None, None
        self.rng = np.random.default_rng(
            None if request.seed is None else [request.seed % 2**63, index]
        )
        self.answer, self.reported, self.finish, self.reason = [], [], None, None

    def places(self):
        """Return the slot of the cache of each position."""
        return (np.array(self.table)[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def ranked(logp, k, token):
    """Return the `k` likeliest tokens with their logprobs, and the given token's rank."""
    best = np.argsort(-logp, kind="stable")[:k]
    return [(int(t), float(logp[t])) for t in best], int((logp > logp[token]).sum()) + 1


# --- the engine -----------------------------------------------------------------------------------


class Engine:
    """A loop that admits requests, computes one step for all that run, and draws their tokens."""

    def __init__(self, options):
        self.o = options
        self.step_now = SimpleNamespace(decoding=0)
        self.models = [load_model(options, self.step_now)]
        if options.fault == "stale_replica":
            self.models.append(self.before_last_update())
        config = self.models[0].config
        self.vocabulary = config.vocab_size
        self.blocks = Blocks(options, config)
        self.waiting, self.running, self.slots = [], [], [None] * options.slots
        self.counts = np.zeros((options.slots, self.vocabulary))  # answers' tokens, by slot
        self.last_token = [EOS] * options.slots
        self.buffer = np.zeros((options.max_model_len, self.vocabulary), np.float32)
        self.graph = []  # the rows that decoded last, as a captured graph keeps them
        self.longest = 0
        self.number = itertools.count()
        self.queries = self.hits = 0
        self.wake, self.stopping = threading.Condition(), False
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def before_last_update(self):
        """Return the model of a replica that the last update of one layer did not reach (fault)."""
        model = load_model(self.o, self.step_now)
        draw = torch.Generator().manual_seed(3)
        for linear in (model.model.layers[1].mlp.down_proj, model.model.layers[1].self_attn.o_proj):
            w = linear.weight.data
            w += 0.2 * w.std() * torch.randn(w.shape, generator=draw)
        return model

    def submit(self, call):
        with self.wake:
            self.waiting.append(call)
            self.wake.notify()

    def stop(self):
        with self.wake:
            self.stopping = True
            self.wake.notify()
        self.thread.join()

    def loop(self):
        torch.set_num_threads(1)
        while True:
            with self.wake:
                idle = not self.running
                self.wake.wait_for(lambda: self.waiting or self.running or self.stopping)
                if self.stopping:
                    return
            if idle:
                time.sleep(0.005)  # requests that arrive together run together
            with torch.inference_mode():
                self.admit()
                self.step()
            if self.o.seconds:
                time.sleep(self.o.seconds)

    def admit(self):
        """Give waiting requests slots and blocks, in the order in which they came."""
        while self.waiting:
            call = self.waiting[0]
            total = -(-(len(call.prompt) + call.max_tokens) // BLOCK)
            spare = [i for i, seq in enumerate(self.slots) if seq is None]
            if len(spare) < call.n or self.blocks.available() < total * call.n + 1:
                return
            self.waiting.pop(0)
            number = next(self.number)
            replica = 1 if self.o.fault == "stale_replica" and number % 4 == 3 else 0
            family = [Sequence(call, i, replica) for i in range(call.n)]
            first, prompt_blocks = family[0], len(call.prompt) // BLOCK
            reads_cache = call.prompt_logprobs is None or self.o.fault == "scores_from_cache"
            if self.o.prefix_cache and reads_cache:
                first.table = self.blocks.lookup(first)
                first.computed = call.cached = len(first.table) * BLOCK
                self.queries += len(call.prompt)
                self.hits += call.cached
            first.table += [self.blocks.take() for _ in range(total - len(first.table))]
            for seq in family[1:]:  # they share the prompt's full blocks, and copy the last one
                seq.parent = first
                shared = prompt_blocks
                if self.o.fault == "fork_without_copy" and len(call.prompt) % BLOCK:
                    shared += 1
                seq.table = [self.blocks.hold(block) for block in first.table[:shared]]
                seq.table += [self.blocks.take() for _ in range(total - shared)]
            for seq, slot in zip(family, spare, strict=False):
                seq.slot, self.slots[slot] = slot, seq
                if self.o.fault != "penalty_outlives":
                    self.counts[slot] = 0
                self.running.append(seq)

    def step(self):
        """Compute the next tokens of what runs: one token each, then prompts in the budget left."""
        ready = [seq for seq in self.running if seq.parent is None]
        ones = [seq for seq in ready if len(seq.tokens) - seq.computed == 1]
        budget = self.o.budget - len(ones)
        longer = []
        for seq in ready:
            need = min(len(seq.tokens) - seq.computed, budget)
            if seq not in ones and need > 0:
                longer.append((seq, need))
                budget -= need
        for group, decoding in (([(seq, 1) for seq in ones], True), (longer, False)):
            for replica in range(len(self.models)):
                rows = [(seq, take) for seq, take in group if seq.replica == replica]
                for part in [[row] for row in rows] if self.o.alone else [rows]:
                    if part:
                        self.forward(part, self.models[replica], decoding)

    def forward(self, rows, model, decoding):
        """Run one padded batch, and draw a token for each row whose tokens are all computed."""
        inputs = [self.row(seq, take, decoding) for seq, take in rows]
        if decoding:
            inputs = self.padded(inputs)
        T, S = max(len(row[0]) for row in inputs), max(len(row[3]) for row in inputs)
        ids, at = torch.zeros(len(inputs), T, dtype=int), torch.zeros(len(inputs), T, dtype=int)
        write = torch.full((len(inputs), T), self.blocks.trash)
        read = torch.full((len(inputs), S), self.blocks.trash)
        for i, (tokens, positions, to, from_) in enumerate(inputs):
            ids[i, : len(tokens)] = torch.tensor(tokens)
            at[i, : len(tokens)] = torch.from_numpy(positions)
            write[i, : len(tokens)] = torch.from_numpy(to)
            read[i, : len(from_)] = torch.from_numpy(from_)
        mask = torch.arange(S) <= at[:, :, None]
        if self.o.fault == "lone_query_tile" and not decoding:
            for i, (tokens, positions, _, _) in enumerate(inputs):
                if len(tokens) % 64 == 1:  # the last tile has one query, and misses a tile of keys
                    end = positions[-1]
                    mask[i, len(tokens) - 1, end - 32 : end] = False
        if self.o.fault == "rope_keeps_longest":
            self.stretch(model, max(len(row[3]) for row in inputs))
        self.step_now.decoding = len(rows) if decoding else 0
        view = View(self.blocks, write, read)
        hidden = model.model(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=at,
            past_key_values=view,
            use_cache=True,
        ).last_hidden_state
        if not decoding:
            self.blocks.seen(view.amax)
        drawing = []
        for i, (seq, take) in enumerate(rows):
            if seq.request.prompt_logprobs is not None and not seq.answer:
                self.score_prompt(seq, torch.log_softmax(model.lm_head(hidden[i, :take]), -1), take)
            seq.computed += take
            self.publish(seq)
            if seq.computed == len(seq.tokens):
                drawing.append((seq, hidden[i, take - 1]))
        if drawing:
            logits = model.lm_head(torch.stack([h for _, h in drawing])).float()
            self.draw_all([seq for seq, _ in drawing], logits)

    def row(self, seq, take, decoding):
        """Return the tokens, positions, and slots to write and to read of one row."""
        start, end, places = seq.computed, seq.computed + take, seq.places()
        tokens, write = seq.tokens[start:end], places[start:end]
        if self.o.fault == "token_from_slot" and decoding:
            tokens = [self.last_token[seq.slot]]  # right only if this row has drawn a token
        if self.o.fault == "wrapped_slot_index":
            write = write % 1024
        if self.o.fault == "ragged_chunk" and end < len(seq.tokens):
            write = write.copy()
            write[take - take % 16 :] = self.blocks.trash  # whole tiles of 16 are stored
        return tokens, np.arange(start, end), write, places[:end]

    def padded(self, inputs):
        """Pad the rows that decode to the size of a captured graph (a power of two)."""
        size = 1 << (len(inputs) - 1).bit_length()
        if self.o.fault == "stale_graph_rows":
            self.graph[: len(inputs)] = inputs
            return self.graph[:size]
        zero, trash = np.zeros(1, int), np.full(1, self.blocks.trash)
        return inputs + [([0], zero, trash, trash)] * (size - len(inputs))

    def stretch(self, model, length):
        """Stretch the rotation for long sequences, and never back (fault)."""
        self.longest = max(self.longest, -(-length // 64) * 64)
        rotary, config = model.model.rotary_emb, model.config
        base, dim = config.rope_parameters["rope_theta"], config.head_dim
        factor = max(1.0, 1.5 * self.longest / 128 - 0.5)
        base *= factor ** (dim / (dim - 2))
        rotary.inv_freq = 1 / base ** (torch.arange(0, dim, 2).float() / dim)

    def publish(self, seq):
        """Enter the full blocks of a sequence into the prefix cache."""
        if self.o.prefix_cache:
            full = seq.computed // BLOCK
            for block, key in zip(seq.table, self.blocks.keys(seq, full), strict=False):
                self.blocks.learn(block, key)

    def score_prompt(self, seq, logp, take):
        """Keep the logprobs of the prompt's tokens, and report them once all are there."""
        start, call = seq.computed, seq.request
        if call.table is None:  # a fault: the one table is never cleared
            fresh = self.o.fault != "scores_from_cache"
            call.table = np.zeros_like(self.buffer) if fresh else self.buffer
        call.table[start : start + take] = logp.float().numpy()
        if start + take == len(seq.tokens):
            k = self.vocabulary if call.prompt_logprobs == -1 else call.prompt_logprobs
            call.scores = [None]
            for i, token in enumerate(call.prompt[1:]):
                best, rank = ranked(call.table[i], k, token)
                row = {token: (float(call.table[i][token]), rank)}
                for place, (t, value) in enumerate(best):
                    row.setdefault(t, (value, place + 1))
                call.scores.append(row)

    def draw_all(self, seqs, logits):
        """Draw the next token of each row; the siblings of a prompt start from its logits."""
        rows = []
        for i, seq in enumerate(seqs):
            rows.append((seq, i))
            for child in [s for s in self.running if s.parent is seq]:
                self.fork(child)
                rows.append((child, i))
        logp = torch.log_softmax(logits, -1).numpy()
        logits = logits.numpy()
        for seq, i in rows:
            rng = rows[0][0].rng if self.o.fault == "generator_of_batch" else seq.rng
            narrow = self.o.fault == "candidates_of_wide_batch" and len(rows) >= 4
            token = self.draw(seq, logits[i].astype(np.float64), rng, narrow)
            self.accept(seq, token, logp[i])

    def fork(self, child):
        """Start a sibling where the prompt of its parent ends."""
        parent, child.parent = child.parent, None
        child.computed, full = parent.computed, len(child.tokens) // BLOCK
        source, target = parent.table[full:][:1], child.table[full:][:1]
        if source != target and len(child.tokens) % BLOCK:
            a, b = source[0] * BLOCK, target[0] * BLOCK
            for store in (*self.blocks.k, *self.blocks.v):
                store[b : b + BLOCK] = store[a : a + BLOCK]

    def draw(self, seq, x, rng, narrow):
        """Draw a token from logits, with the parameters of its request."""
        call, counts = seq.request, self.counts[seq.slot]
        if call.ignore_eos is False and len(seq.answer) < call.min_tokens:
            x[EOS] = -np.inf
        if call.penalised:
            seen = counts > 0
            seen[call.prompt] = True
            scaled = np.where(x > 0, x / call.repetition_penalty, x * call.repetition_penalty)
            x = np.where(seen, scaled, x)
            x -= call.frequency_penalty * counts + call.presence_penalty * (counts > 0)
        if call.temperature < 1e-5:
            return int(x.argmax())
        x /= call.temperature
        if narrow:
            x[x < np.sort(x)[-32]] = -np.inf  # what fits the memory of the fused kernel
        if call.min_p > 0:
            x[x < x.max() + np.log(call.min_p)] = -np.inf
        if 0 < call.top_k < len(x):
            x[x < np.sort(x)[-call.top_k]] = -np.inf
        p = np.exp(x - x.max())
        if call.top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= call.top_p * p.sum()]] = 0
        return int((p / rng.exponential(size=len(p))).argmax())

    def accept(self, seq, token, logp):
        """Append a token to an answer, and end the answer if it is the last one."""
        call = seq.request
        seq.tokens.append(token)
        seq.answer.append(token)
        self.counts[seq.slot][token] += 1
        self.last_token[seq.slot] = token
        best = ranked(logp, call.logprobs or 0, token)[0]
        if token not in dict(best):
            best.insert(0, (token, float(logp[token])))
        seq.reported.append((token, float(logp[token]), best))
        if token == EOS and not call.ignore_eos:
            seq.finish = "stop"
        elif token in call.ends:
            seq.finish, seq.reason = "stop", token
        elif len(seq.answer) >= call.max_tokens:
            seq.finish = "length"
        reason = call.put(seq, False)
        if reason is not None:
            seq.finish, seq.reason = "stop", reason
        if seq.finish or call.gone:
            self.end(seq)

    def end(self, seq):
        """Give back what a sequence holds."""
        for block in reversed(seq.table):
            self.blocks.release(block)
        if seq.finish == "length":
            self.counts[seq.slot] = 0
        self.slots[seq.slot] = None
        self.running.remove(seq)
        seq.request.put(seq, True)


# --- HTTP -----------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A request that the server answers with an error of its own."""


def refuse(message, code=400):
    kind = {400: "BadRequestError", 404: "NotFoundError"}[code]
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, code)


class Api:
    """The endpoints of a server."""

    def __init__(self, options):
        self.o = options
        self.tok = AutoTokenizer.from_pretrained(MODELS / options.checkpoint)
        self.engine = Engine(options)
        self.ids = itertools.count()
        routes = [
            Route("/version", self.version),
            Route("/health", lambda _: Response()),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        if options.tokenizer:
            routes += [
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
            ]
        self.app = Starlette(routes=routes)

    async def version(self, _):
        return JSONResponse({"version": "0.32.0"})

    async def models(self, _):
        model = {"id": "m", "object": "model", "max_model_len": self.o.max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, _):
        values = {"num_requests_running": len(self.engine.running)}
        values["num_requests_waiting"] = len(self.engine.waiting)
        if self.o.report_cached and self.o.prefix_cache:
            values["prefix_cache_queries_total"] = self.engine.queries
            values["prefix_cache_hits_total"] = self.engine.hits
        lines = [f'vllm:{name}{{engine="0",model_name="m"}} {n}.0' for name, n in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def tokenize(self, request: Request):
        body = await request.json()
        ids = self.encode(body["prompt"], body.get("add_special_tokens", True))
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self.o.max_model_len}
        )

    async def detokenize(self, request: Request):
        return JSONResponse({"prompt": self.tok.decode((await request.json())["tokens"])})

    def encode(self, text, special=True):
        return self.tok(text, add_special_tokens=special)["input_ids"]

    def text(self, ids):
        return self.tok.decode(ids, skip_special_tokens=True)

    def prompts(self, body):
        """Return the prompts of a request as lists of ids, or refuse it."""
        prompt = body.get("prompt")
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt or not all(prompt):
            raise RefusedError("prompt must not be empty")
        prompts = [self.encode(p) if isinstance(p, str) else list(p) for p in prompt]
        for name in ("logprobs", "prompt_logprobs"):
            asked, what = body.get(name) or 0, "sample" if name == "logprobs" else "prompt"
            if asked > MOST_LOGPROBS:
                raise RefusedError(
                    f"Requested {what} logprobs of {asked}, "
                    f"which is greater than max allowed: {MOST_LOGPROBS}"
                )
        if body.get("stream") and body.get("prompt_logprobs") is not None:
            raise RefusedError("`prompt_logprobs` are not available when `stream=True`.")
        new, n = body.get("max_tokens"), body.get("n") or 1
        new = 16 if new is None else new
        if new < 1 or n < 1:
            raise RefusedError(f"max_tokens and n must be at least 1, got {new} and {n}.")
        for ids in prompts:
            if not all(isinstance(t, int) and 0 <= t < self.engine.vocabulary for t in ids):
                raise RefusedError("Token id is out of vocabulary")
            if len(ids) + new > self.o.max_model_len:
                raise RefusedError(
                    f"This model's maximum context length is {self.o.max_model_len} tokens. "
                    f"However, you requested {len(ids) + new} tokens ({len(ids)} in the prompt, "
                    f"{new} in the completion)."
                )
            blocks = n * -(-(len(ids) + new) // BLOCK) + 1
            if n > self.o.slots or blocks > self.o.blocks:
                raise RefusedError(f"The request needs {n} slots and {blocks} blocks.")
        return prompts

    async def completions(self, request: Request):
        try:
            body = await request.json()
            prompts = self.prompts(body)
        except (RefusedError, ValueError) as error:
            return refuse(str(error))
        if body.get("model") not in (None, "m"):
            return refuse(f"The model `{body['model']}` does not exist.", 404)
        queue, here = asyncio.Queue(), asyncio.get_running_loop()
        calls = []
        for prompt in prompts:
            call = Call(body, prompt, self.o, None)
            call.put = self.put(queue, here, len(calls) * call.n, bool(body.get("stream")))
            calls.append(call)
        for call in calls:
            self.engine.submit(call)
        head = {
            "id": f"cmpl-{next(self.ids)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": "m",
        }
        left = sum(call.n for call in calls)
        if body.get("stream"):
            return StreamingResponse(
                self.stream(calls, head, queue, left), media_type="text/event-stream"
            )
        done = []
        while len(done) < left:
            done.append(await queue.get())
        done.sort(key=lambda item: item[0])
        choices = [self.choice(seq, at, 0, len(seq.answer)) for at, seq, _, _ in done]
        return JSONResponse({**head, "choices": choices, "usage": self.usage(calls, done)})

    def put(self, queue, here, base, streaming):
        """Return what tells the handler of a token or of an end; it knows stop strings too."""

        def put(seq, ended):
            if not ended and seq.request.stop:
                text = self.text(seq.answer)
                for stop in seq.request.stop:
                    if stop in text:
                        return stop
            if ended or (streaming and not seq.finish):
                item = (base + seq.index, seq, len(seq.answer), ended)
                with contextlib.suppress(RuntimeError):  # the server has stopped
                    here.call_soon_threadsafe(queue.put_nowait, item)
            return None

        return put

    async def stream(self, calls, head, queue, left):
        """Yield the tokens of a request as they come."""
        sent, done = {}, []
        try:
            while len(done) < left:
                at, seq, until, ended = await queue.get()
                start, sent[at] = sent.get(at, 0), until
                choice = self.choice(seq, at, start, until, whole=False)
                choice["finish_reason"] = seq.finish if ended else None
                choice["stop_reason"] = seq.reason if ended else None
                if ended:
                    done.append((at, seq, until, ended))
                yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
            if (calls[0].body.get("stream_options") or {}).get("include_usage"):
                last = {**head, "choices": [], "usage": self.usage(calls, done)}
                yield f"data: {json.dumps(last)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            for call in calls:
                call.gone = True

    def choice(self, seq, at, start, until, whole=True):
        """Return the tokens from `start` to `until` of an answer as vLLM writes them."""
        call, body = seq.request, seq.request.body
        before, text = self.text(seq.answer[:start]), self.text(seq.answer[:until])
        if isinstance(seq.reason, str) and seq.reason in text:
            text = text[: text.index(seq.reason)]
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        name = (lambda t: f"token_id:{t}") if as_ids else (lambda t: self.tok.decode([t]))
        choice = {"index": at, "text": text[len(before) :], "logprobs": None}
        if call.logprobs is not None:
            rows = seq.reported[start:until]
            widths = [len(self.text(seq.answer[:i])) for i in range(start, until)]
            choice["logprobs"] = {
                "text_offset": widths,
                "tokens": [name(t) for t, _, _ in rows],
                "token_logprobs": [value for _, value, _ in rows],
                "top_logprobs": [{name(t): value for t, value in best} for _, _, best in rows],
            }
        choice.update(finish_reason=seq.finish, stop_reason=seq.reason)
        ids = bool(body.get("return_token_ids"))
        choice["token_ids"] = seq.answer[start:until] if ids else None
        choice["prompt_token_ids"] = call.prompt if ids and start == 0 else None
        if whole:
            choice["prompt_logprobs"] = call.scores and [
                row
                and {
                    str(t): {"logprob": value, "rank": rank, "decoded_token": self.tok.decode([t])}
                    for t, (value, rank) in row.items()
                }
                for row in call.scores
            ]
        return choice

    def usage(self, calls, done):
        prompt = sum(len(call.prompt) for call in calls)
        new = sum(len(seq.answer) for _, seq, _, _ in done)
        cached = {"cached_tokens": sum(call.cached for call in calls)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": cached if self.o.report_cached else None,
        }


# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A server, what is wrong with it, and the relations that are right to report it."""

    name: str
    kind: str  # "fault" or "healthy"
    relations: frozenset
    description: str
    options: Options


def fault(name, relations, description, **options):
    """Return a case whose fault has the case's name."""
    return Case(
        name, "fault", frozenset(relations.split()), description, Options(fault=name, **options)
    )


def healthy(name, description, **options):
    return Case(name, "healthy", frozenset(), description, Options(**options))


EVERY = "replay batching prefix-cache order prefill-decode prompt-length like"  # but sampling

SERVERS = [
    fault(
        "wrapped_slot_index",
        "batching",
        "Writing the KV cache keeps too few bits of a slot's index: with more than 1024 slots in"
        " use, tokens overwrite those of others. Lever: the number of cache slots in use at once,"
        " counted with max_tokens, as by 16 requests of 60 + 12 tokens.",
        prefix_cache=False,
        slots=32,
    ),
    fault(
        "stale_graph_rows",
        "batching",
        "Decoding runs at 1, 2, 4, 8 or 16 rows, and the rows that fill up keep what they held:"
        " they write an old token to a place that a new request may own. Lever: a number of"
        " running requests that is no power of two, after a larger one.",
        prefix_cache=False,
    ),
    fault(
        "split_k_remainder",
        "batching",
        "One matrix product adds up half of the sum for the last row where 3, 7 or 11 rows decode"
        " together. Lever: the number of running requests modulo 4.",
    ),
    fault(
        "wide_batch_gemm",
        "batching",
        "From 6 rows that decode together on, the MLP takes a kernel with 5 bits per weight. Lever:"
        " the number of requests at once. Mild.",
    ),
    fault(
        "ragged_chunk",
        "batching prefix-cache",
        "A prompt that waits for the next step stores whole tiles of 16 tokens only. Its pieces are"
        " multiples of 16, unless others use up a part of the 64 tokens of a step. Lever: prompts"
        " of more than 64 tokens together, or one that arrives while other requests run.",
        budget=64,
    ),
    fault(
        "generator_of_batch",
        "batching replay",
        "All rows of a step draw from the generator of the first one. Lever: requests with seeds"
        " and a temperature at the same time; alone, a seed fixes the draw.",
    ),
    fault(
        "key_without_parent",
        "prefix-cache order replay like",
        "The key of a cached block holds its 16 tokens and the salt, not what comes before. Lever:"
        " a prompt that shares its first block with one earlier request and its second with"
        " another, or a warm prompt that repeats a block.",
    ),
    fault(
        "token_from_slot",
        "prefix-cache order replay prompt-length batching like",
        "A row with one token to compute takes it from its slot, where the last token of the"
        " request before still is. Lever: a prompt of 1 modulo 16 tokens whose other tokens are"
        " all in the prefix cache, or a prompt of one token.",
    ),
    fault(
        "kv_scale_of_today",
        EVERY,
        "Keys and values are kept in fp8 at a scale that follows the range of the last prompts,"
        " and cached blocks are read at the scale of today. Lever: the number of requests between"
        " the fill of the cache and the hit, most of all among the first 40 requests.",
        kv="fp8",
    ),
    fault(
        "host_tier_unfinished",
        "prefix-cache",
        "A block that comes back from the second tier of the prefix cache lacks the copy of its"
        " last layer. Lever: 1024 tokens or more of other requests between the fill and the hit.",
        blocks=64,
        host_blocks=512,
    ),
    fault(
        "short_key",
        EVERY,
        "Keys of the prefix cache have 12 bits, so a cold request of 17 tokens or more can hit a"
        " block of another text, and claims the hit. Lever: the number of requests so far; with"
        " 400 cached blocks it meets about one cold request in 10.",
    ),
    fault(
        "stale_replica",
        EVERY,
        "Each fourth request is answered by a replica that missed the last update of one layer."
        " Lever: the number of the request modulo 4. Mild.",
    ),
    fault(
        "rope_keeps_longest",
        EVERY,
        "Beyond 128 tokens of context the rotation of positions is stretched, and it stays so for"
        " shorter requests. Lever: a request of more than 128 tokens that is longer than all"
        " before it (in steps of 64), between two answers.",
    ),
    fault(
        "lone_query_tile",
        "prompt-length prefill-decode prefix-cache like",
        "Where the last tile of 64 queries of a prompt has one query, that query misses the 32"
        " keys before it. Lever: a prompt whose uncached part has 1 modulo 64 tokens, and more"
        " than one.",
    ),
    fault(
        "top_k_by_default",
        "sampling",
        "The checkpoint's generation_config sets top_k to 40, and the server applies it where a"
        " request does not name top_k. Lever: requests that name no parameters, many draws.",
        defaults={"top_k": 40},
    ),
    fault(
        "candidates_of_wide_batch",
        "sampling batching",
        "The sampler of a step with 4 rows or more keeps the 32 likeliest tokens of a row. Lever:"
        " 4 requests or choices or more with a temperature at once.",
    ),
    fault(
        "min_p_always",
        "sampling",
        "The server applies a min_p of 0.05 whatever a request names. Lever: many draws.",
    ),
    fault(
        "fork_without_copy",
        "like prefill-decode",
        "The choices of one request write to the same partial block after the prompt. Lever: n of"
        " 2 or more, a prompt that is no multiple of 16, three tokens or more.",
    ),
    fault(
        "penalty_outlives",
        "order like replay",
        "The counts of answered tokens stay in a slot after an answer that ended by a stop, and a"
        " later request with a penalty in that slot adds to them. Lever: a presence, frequency or"
        " repetition penalty after an answer that ended with the end token or a stop.",
    ),
    fault(
        "scores_from_cache",
        "prefix-cache replay order prefill-decode like",
        "Prompt logprobs read the prefix cache, and rows of cached tokens are those of the last"
        " request that computed these positions. Lever: prompt logprobs of a cached prompt of 17"
        " tokens or more (same salt or none), after other prompt logprobs.",
    ),
    healthy("float32", "float32, padded batches, a prefix cache"),
    healthy("float32_uncached", "float32 without a prefix cache", prefix_cache=False),
    healthy("float32_alone", "float32, each row computed by itself", alone=True),
    healthy("bfloat16", "bfloat16, a prefix cache", dtype="bfloat16"),
    healthy("qwen3_float32", "tiny-qwen3 in float32", checkpoint="tiny-qwen3"),
    healthy("qwen3_bfloat16", "tiny-qwen3 in bfloat16", checkpoint="tiny-qwen3", dtype="bfloat16"),
    healthy(
        "fp8_weights",
        "weights in fp8 with a scale per tensor, bfloat16 activations",
        weights="fp8_tensor",
        dtype="bfloat16",
    ),
    healthy(
        "fp8_blockwise",
        "weights in fp8 by blocks of 128 x 128, activations in fp8 by groups of 128",
        weights="fp8_block",
        activations="fp8_group",
        dtype="bfloat16",
    ),
    healthy(
        "fp8_dynamic",
        "weights and activations in fp8; one activation scale for all rows of a step",
        weights="fp8_tensor",
        activations="fp8_tensor",
        dtype="bfloat16",
    ),
    healthy("int8_weights", "weights in int8 per channel, float32", weights="int8_channel"),
    healthy(
        "int8_dynamic",
        "weights in int8 per channel, activations in int8 per token, bfloat16",
        weights="int8_channel",
        activations="int8_token",
        dtype="bfloat16",
    ),
    healthy("fp8_kv_cache", "keys and values in fp8 at a fixed scale", kv="fp8", dtype="bfloat16"),
    healthy("two_slots", "two sequences at a time; the others wait", slots=2),
    healthy(
        "small_pool",
        "64 blocks with a second tier, pieces of 48 tokens, 48 slots: evictions and waits",
        blocks=64,
        host_blocks=64,
        budget=48,
        slots=48,
    ),
    healthy("slow", "30 ms more for each step", seconds=0.03),
    healthy(
        "hits_not_told", "cached tokens are neither in usage nor in metrics", report_cached=False
    ),
    healthy("no_tokenizer", "no /tokenize and no /detokenize", tokenizer=False),
    healthy("short_context", "at most 128 tokens, bfloat16", max_model_len=128, dtype="bfloat16"),
    healthy(
        "sums_by_batch",
        "bfloat16; matrix products are added up in 1, 2 or 4 parts, by the number of rows",
        dtype="bfloat16",
        split_sums=True,
    ),
    healthy(
        "noisy",
        "bfloat16 with random rounding in each layer: no two runs are equal",
        dtype="bfloat16",
        noise=2**-8,
    ),
]


@contextlib.contextmanager
def serve(case, port=0):
    """Run the server of a case in threads of this process, and yield its URL."""
    api = Api(case.options)
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    config = uvicorn.Config(
        api.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        api.engine.stop()
        listener.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=[case.name for case in SERVERS])
    parser.add_argument("port", nargs="?", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    args = parser.parse_args()
    if args.list or not args.name:
        for case in SERVERS:
            print(f"{case.name:26}{case.kind:9}{','.join(sorted(case.relations)) or '-'}")
            print(f"    {case.description}")
        return
    case = next(case for case in SERVERS if case.name == args.name)
    with serve(case, args.port) as url, contextlib.suppress(KeyboardInterrupt):
        print(url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
