# Syncs that send differences, as runs do that change few values: transports and their faults.
#
# values:     indices of the values that changed, and the values.
# xor:        the bytes of a tensor before and after, combined by XOR and compressed.
# shards:     eight shards of each tensor, of which those with another checksum are sent whole.
# difference: changes as int8 with a scale per row, added to what the engine has; what rounding
#             leaves is sent with the next one.
# low rank:   one factor of each adapter; the other is frozen, and both sides draw it from a seed.
#
# Both sides hold bfloat16.  The sender remembers what it has sent, the snapshot.

import copy
import zlib
from typing import NamedTuple

import torch
import transformers

from servanda.engines.weight_sync import WeightSync
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs
from tests.rl.served_weights import LONGEST, TOKENS, small_model
from tests.trainers import adapt, trainer

KINDS = ("values", "xor", "shards", "difference", "low rank")
SHARDS, RANK, SEED = 8, 4, 11
SMALL = 1e-3  # a change that the fault `threshold` never sends
TURN, FAILOVER = 3, 5  # every which sync is lost; the sync before which an engine starts again


class Fault(NamedTuple):
    """How it is put; the kind that shows it first; the causes that are right ("error": the engine's
    answers are refused); the other kinds that can have it."""

    how: str
    kind: str
    causes: tuple
    others: tuple = ()


FAULTS = {
    "lost apply": Fault(
        "every third message is lost, and the snapshot goes on",
        *("values", ("dropped",), ("xor", "shards", "difference")),
    ),
    "pruned chain": Fault(
        "the engine reads the chain at every second sync, and it holds the last message alone",
        *("values", ("dropped", "late"), ("xor", "shards", "difference")),
    ),
    "wrong base": Fault(
        "before sync 5 the engine starts again from an older checkpoint",
        *("xor", ("not_repaired",), ("values", "shards", "difference")),
    ),
    "index off by one": Fault(
        "each value, or shard, is written one place further",
        *("values", ("misplaced", "sync_moves"), ("xor", "shards")),
    ),
    "wrong expert axis": Fault(
        "indices into stacked experts are those of another order of the axes",
        *("values", ("misplaced", "sync_moves"), ("xor",)),
    ),
    "NaN on grouped experts": Fault(
        "an expert without a change has the scale 0 / 0", "difference", ("error",)
    ),
    "scale left out": Fault(
        "differences are added without their scales, or factors without the adapter's",
        *("low rank", ("scaled",), ("difference",)),
    ),
    "version without transfer": Fault(
        "the version goes up and nothing is sent",
        *("shards", ("never_synced", "adapter_ignored"), ("values", "xor", "low rank")),
    ),
    "part of a fleet": Fault(
        "one of two engines never applies a message",
        *("values", ("stale_replicas",), ("xor", "shards", "difference", "low rank")),
    ),
    "tied alias": Fault(
        "the engine has the head as a tensor of its own, and only the embedding is sent",
        *("values", ("tied_head_stale",), ("xor", "shards", "difference")),
    ),
    "two deltas swapped": Fault(
        "two messages wait for each other, and the later one is applied first",
        *("values", ("dropped", "late"), ("shards",)),
    ),
    "threshold": Fault(
        "a change below 1e-3 is not sent, and the snapshot goes on",
        *("values", ("not_repaired", "sparse_updates"), ("difference",)),
    ),
    "stale seed": Fault(
        "the engine draws the frozen factor from the seed of another run",
        "low rank",
        ("misplaced", "sync_moves"),
    ),
    "dtype of the difference": Fault(
        "the change is a float8 that is added, and the snapshot is what it should have become",
        *("difference", ("wrong_cast",)),
    ),
}
# what Follow calls those for which it has a name
FOLLOWED = {
    "NaN on grouped experts": ("error",),
    "version without transfer": ("never_synced",),
    "part of a fleet": ("part_of_rows",),
    "tied alias": ("part",),
    "scale left out": ("scaled",),
    "two deltas swapped": ("dropped", "late"),
    # at a small learning rate no change is as large as 1e-3, or as the least float8
    "threshold": ("never_synced",),
    "dtype of the difference": ("never_synced",),
}
CASES = [(kind, fault) for fault, one in FAULTS.items() for kind in (one.kind, *one.others)]


def small_mixture(seed=0):
    """A mixture of experts of two layers; its experts are stacked."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3MoeForCausalLM(config).eval()


def model_of(kind, fault, seed=0, small=True):
    """The trainer's module: a small model, or a shipped one."""
    if "expert" in fault:
        module = small_mixture(seed)
    else:
        module = small_model(seed=seed) if small else trainer("llama", seed)
    if kind == "low rank":
        adapt(module, fresh=False, rank=RANK)
        for layer in lora(module):
            factor = layer.lora_A["default"].weight
            factor.requires_grad_(False).copy_(frozen(factor.shape, SEED))
    return module


def lora(module):
    return [layer for layer in module.modules() if hasattr(layer, "lora_A")]


def frozen(shape, seed):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise) / shape[1] ** 0.5


class Fleet:
    """Engines behind a sync of differences.

    Args:
        kind: of KINDS; fault: of FAULTS, "" for a sync that works.
    """

    def __init__(self, module, kind, fault=""):
        self.module, self.kind, self.fault = module, kind, fault
        self.snapshot, self.number, self.waiting = self._weights(), 0, []
        plain = copy.deepcopy(module)
        for path, layer in list(plain.named_modules()):
            if hasattr(layer, "lora_A"):
                plain.set_submodule(path, layer.base_layer)
        self.models = [
            copy.deepcopy(plain).bfloat16().eval() for _ in range(1 + (fault == "part of a fleet"))
        ]
        self.base = {n: t.detach().clone() for n, t in self._held(self.models[0]).items()}
        if fault == "tied alias":
            head = self.models[0].lm_head
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        for model in self.models:
            self._put(model, self.snapshot)

    def _weights(self):
        """What an engine should hold, in bfloat16."""
        tensors = WeightSync(self.module, None)._tensors()
        return {name: tensor.bfloat16().clone() for name, tensor in tensors}

    @staticmethod
    def _held(model):
        return dict(model.named_parameters())

    @torch.no_grad()
    def _put(self, model, weights):
        for name, held in self._held(model).items():
            if name in weights:
                held.copy_(weights[name])

    def sync(self):
        self.number += 1
        if self.fault == "version without transfer":
            return
        message = self._message()
        if self.fault == "lost apply" and self.number % TURN == 0:
            return
        self.waiting.append(message)
        if self.fault in ("pruned chain", "two deltas swapped"):
            if self.number % 2:
                return
            last = self.fault == "pruned chain"
            self.waiting = self.waiting[-1:] if last else self.waiting[::-1]
        behind = self.fault == "part of a fleet"
        for model in self.models[: len(self.models) - behind]:
            if self.fault == "wrong base" and self.number == FAILOVER:
                self._put(model, {n: 0.98 * t for n, t in self.base.items()})
            for one in self.waiting:
                self._apply(model, one)
        self.waiting = []

    def _message(self):
        """name -> what is sent of a tensor."""
        if self.kind == "low rank":
            modules = dict(self.module.named_modules())
            found = {path: m for path, m in modules.items() if hasattr(m, "lora_A")}
            return {
                f"{path}.weight": (
                    m.lora_B["default"].weight.detach().clone(),
                    m.scaling["default"],
                )
                for path, m in found.items()
            }
        message = {}
        for name, new in self._weights().items():
            old = self.snapshot[name]
            if self.fault == "threshold":
                far = (new.float() - old.float()).abs() >= SMALL
                sent = torch.where(far, new, old)
            else:
                sent = new
            if sent.equal(old) and self.fault != "NaN on grouped experts":
                self.snapshot[name] = new
                continue
            message[name] = encoded(self.kind, old, sent, self.fault)
            exact = self.kind != "difference" or self.fault in ("threshold", DTYPE)
            self.snapshot[name] = new if exact else decoded(self.kind, old, message[name])
        return message

    @torch.no_grad()
    def _apply(self, model, message):
        held = self._held(model)
        for name, sent in message.items():
            if self.kind == "low rank":
                factor, scale = sent
                columns = held[name].shape[1]
                stale, bare = self.fault == "stale seed", self.fault == "scale left out"
                other = frozen((RANK, columns), SEED + stale)
                held[name].copy_(
                    self.base[name].float() + (1.0 if bare else scale) * factor @ other
                )
            else:
                held[name].copy_(decoded(self.kind, held[name].detach(), sent, self.fault))

    def score(self, rows):
        one_by_one = [self.models[i % len(self.models)] for i in range(len(rows))]
        if len(self.models) == 1:
            return forward_logprobs(self.models[0], rows)
        return [forward_logprobs(m, [row])[0] for m, row in zip(one_by_one, rows, strict=True)]


DTYPE = "dtype of the difference"


def encoded(kind, old, new, fault=""):
    """What travels so that `old` becomes `new`, both bfloat16."""
    if kind == "values":
        at = (new != old).reshape(-1).nonzero()[:, 0]
        return at, new.reshape(-1)[at]
    if kind == "xor":
        bits = old.view(torch.int16) ^ new.view(torch.int16)
        return zlib.compress(bits.numpy().tobytes(), 1)
    if kind == "shards":
        pairs = zip(old.reshape(-1).chunk(SHARDS), new.reshape(-1).chunk(SHARDS), strict=True)
        return [(k, checksum(b), b) for k, (a, b) in enumerate(pairs) if checksum(a) != checksum(b)]
    change = new.float() - old.float()
    if fault == DTYPE:
        return change.to(torch.float8_e4m3fn), torch.ones(())
    rows = change.reshape(len(change), -1)
    scale = rows.abs().amax(1) / 127
    safe = scale if fault == "NaN on grouped experts" and new.dim() == 3 else scale.clamp(min=1e-30)
    counts = (rows / safe[:, None]).round()
    if not counts.isnan().any():
        counts = counts.to(torch.int8)
    return counts.reshape(change.shape), safe.reshape(-1, *[1] * (change.dim() - 1))


def checksum(shard):
    return zlib.crc32(shard.contiguous().view(torch.int16).numpy().tobytes())


def decoded(kind, held, sent, fault=""):
    """The tensor of an engine after a message."""
    new = held.clone().reshape(-1)
    by_one = fault == "index off by one"
    if kind == "values":
        at, values = sent
        if fault == "wrong expert axis" and held.dim() == 3:
            places = torch.arange(held.numel()).reshape(held.shape).transpose(0, 1).reshape(-1)
            at = places[at]
        new[(at + by_one) % len(new)] = values
    elif kind == "xor":
        bits = torch.frombuffer(bytearray(zlib.decompress(sent)), dtype=torch.int16)
        if fault == "wrong expert axis" and held.dim() == 3:
            experts, rows, columns = held.shape
            bits = bits.reshape(rows, experts, columns).transpose(0, 1).reshape(-1)
        new = (new.view(torch.int16) ^ bits.roll(int(by_one))).view(torch.bfloat16)
    elif kind == "shards":
        parts = [*new.chunk(SHARDS)]
        for k, sum_of, values in sent:
            assert checksum(values) == sum_of, "a shard was damaged on its way"
            place = (k + by_one) % len(parts)
            parts[place] = values if parts[place].shape == values.shape else parts[place]
        new = torch.cat(parts)
    else:
        counts, scale = sent
        bare = fault == "scale left out"
        new = (held.float() + counts.float() * (0.01 if bare else scale)).bfloat16()
    return new.reshape(held.shape)


def subject(kind, fault="", seed=0, small=True):
    """A trainee behind a sync of differences, and its engines."""
    module = model_of(kind, fault, seed, small)
    fleet = Fleet(module, kind, fault)
    return Trainee(module, fleet.sync, fleet.score), fleet
