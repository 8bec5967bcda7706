# A trainer and its engine: shipped models after an update, checkpoints of them, and adapters.

import os
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

from servanda.contract.model import Kernel
from servanda.engines.checkpoint import quiet
from servanda.engines.transformers import TransformersEngine
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

MODELS = Path(__file__).parents[1] / "models"
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8_weight_only": {"dtype": "bfloat16", "quantization": "int8_weight_only"},
    "int4_g32": {"dtype": "bfloat16", "quantization": "int4_g32"},
    "int4_g32 in float32": {"dtype": "float32", "quantization": "int4_g32"},
}
KINDS = {
    "llama": ("tiny-lm", {}),
    "llama, untied": ("tiny-lm", {"tie_word_embeddings": False}),
    "llama, with biases": ("tiny-lm", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("tiny-qwen3", {}),
}
REAL = Path(os.environ.get("SERVANDA_REAL_MODEL", MODELS.parent / ".venvs/real-model")).absolute()
FOLDERS = {kind: MODELS / name for kind, (name, _) in KINDS.items()} | {"SmolLM2": REAL / "float32"}


def trainer(kind="llama", seed=0, moved=0.02):
    """A shipped model or the real one in float32, each of its tensors moved a little."""
    _, changes = KINDS.get(kind, ("", {}))
    folder = FOLDERS[kind]
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)  # for what the checkpoint lacks
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight += moved * torch.randn(weight.shape)
    return model.eval()


def checkpoint(model, folder):
    """A folder to open an engine on."""
    with quiet():
        model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-lm" / name, folder)
    return folder


def open_engine(folder, form="float32", rows=16):
    """An engine in one of FORMATS, or of bfloat16 in another quantisation."""
    kernel = {"engine": "transformers", "model": str(folder), "batch_size": rows}
    format_ = FORMATS.get(form, {"dtype": "bfloat16", "quantization": form})
    return TransformersEngine(Kernel(**kernel, **format_))


def score(engine, rows):
    """The engine's logprobs of each row's tokens but the first; rows of one length."""
    prompts, answers = tuple((row[0],) for row in rows), tuple(tuple(row[1:]) for row in rows)
    batch = Batch(tuple(range(len(rows))), prompts, len(rows[0]) - 1, answers)
    logp = engine.score(batch, Sampling(), "prefill").columns["logp"]
    return list(np.asarray(logp).reshape(len(rows), -1))


class Lora(torch.nn.Module):
    """W + scaling * B A, with the attributes of peft.tuners.lora.Linear."""

    def __init__(self, base_layer, names=("default",), rank=4, seed=0, spread=0.1):
        super().__init__()
        noise = torch.Generator().manual_seed(seed)

        def matrix(*shape):
            linear = torch.nn.utils.skip_init(torch.nn.Linear, *reversed(shape), bias=False)
            linear.weight.data.copy_(spread * torch.randn(shape, generator=noise))
            return linear

        self.base_layer = base_layer
        rows, columns = base_layer.weight.shape
        self.lora_A = torch.nn.ModuleDict({name: matrix(rank, columns) for name in names})
        self.lora_B = torch.nn.ModuleDict({name: matrix(rows, rank) for name in names})
        self.scaling = dict.fromkeys(names, 2.0)
        self.lora_variant, self.lora_bias = {}, {}
        self.active_adapters, self.merged_adapters = list(names[:1]), []
        self.disable_adapters = False

    def get_delta_weight(self, name):
        return self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight

    def forward(self, x):
        answer = self.base_layer(x)
        for name in self.active_adapters:
            answer = answer + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return answer


def adapt(model, kinds=("q_proj", "v_proj"), fresh=True, rank=8):
    """Adapters on every layer of these kinds, and nothing else to train; B is 0 where fresh."""
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        if path.rpartition(".")[2] in kinds:
            wrapped = Lora(layer, rank=rank, seed=len(path), spread=layer.in_features**-0.5)
            if fresh:
                torch.nn.init.zeros_(wrapped.lora_B["default"].weight)
            model.set_submodule(path, wrapped)
    return model
