# Adapters of PEFT, each applied, merged, unmerged, saved and loaded: the largest difference of a
# logprob from the adapter as it is applied, in nats.

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.hunt import architectures
from benchmarks.hunt.ways import apart

STEP = 0.08  # what is added to each trainable weight, so that the adapter does something
DENSE = ("llama", "llama-tied", "qwen3")
OTHERS = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "jamba", "lfm2", "gemma2")
OTHERS += ("gemma3_text", "gpt2", "bloom", "falcon", "phi3", "gpt_neox", "opt", "bamba")
NAMES = tuple(sorted((*DENSE, *OTHERS)))
LINEAR = ("q_proj", "v_proj", "down_proj", "gate_proj")
# of each tuner what it needs besides its target modules
TUNERS: dict[str, dict[str, Any]] = {
    "LoHaConfig": {},
    "LoKrConfig": {},
    "OFTConfig": {"oft_block_size": 8},
    "BOFTConfig": {"boft_block_size": 8, "boft_n_butterfly_factor": 1},
    "VeraConfig": {},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "HRAConfig": {},
    "MissConfig": {},
    "FourierFTConfig": {"n_frequency": 50},
    "WaveFTConfig": {"n_frequency": 50},
    "RandLoraConfig": {},
    "C3AConfig": {"block_size": 8},
    "AdaLoraConfig": {"total_step": 100},
    "VBLoRAConfig": {"num_vectors": 16, "vector_length": 8},
    "DeloraConfig": {},
    "GraloraConfig": {},
    "PsoftConfig": {},
    "TinyLoraConfig": {},
    "PveraConfig": {},
    "UniLoraConfig": {},
    "OSFConfig": {},
    "LilyConfig": {},
    "BeftConfig": {},
}


def kinds(name: str) -> Iterator[tuple[str, Any]]:
    """The adapters of an architecture: every tuner on dense ones, LoRA and DoRA on all."""

    def lora(targets: Any = LINEAR, **options: Any) -> Any:
        modules = targets if isinstance(targets, str) else [*targets]
        return LoraConfig(r=4, target_modules=modules, **options)

    yield "LoRA, all linear", lora("all-linear")
    yield "DoRA, all linear", lora("all-linear", use_dora=True)
    if name not in DENSE:
        return
    yield "LoRA", lora()
    yield "LoRA, rslora", lora(use_rslora=True)
    yield "LoRA, ranks by pattern", lora(rank_pattern={"q_proj": 7}, alpha_pattern={"q_proj": 3})
    yield "LoRA, embedding", lora((*LINEAR, "embed_tokens"))
    yield "LoRA, head", lora((*LINEAR, "lm_head"))
    yield "LoRA, embedding and head", lora((*LINEAR, "embed_tokens", "lm_head"))
    yield "DoRA, embedding", lora((*LINEAR, "embed_tokens"), use_dora=True)
    yield "LoRA, head saved whole", lora(modules_to_save=["lm_head"])
    yield "LoRA, embedding saved whole", lora(modules_to_save=["embed_tokens"])
    tied = {"ensure_weight_tying": True}
    yield "LoRA, embedding, weights kept tied", lora((*LINEAR, "embed_tokens"), **tied)
    yield (
        "LoRA, embedding saved whole, weights kept tied",
        lora(modules_to_save=["embed_tokens"], **tied),
    )
    yield "LoRA, some tokens", lora(trainable_token_indices=[3, 5, 700])
    yield "LoRA, PiSSA", lora(init_lora_weights="pissa")
    for tuner, options in TUNERS.items():
        yield (
            tuner.removesuffix("Config"),
            getattr(peft, tuner)(target_modules=["q_proj", "v_proj", "down_proj"], **options),
        )


@torch.no_grad()
def measured(name: str) -> dict[str, float | str]:
    """Of each adapter and each way the difference in nats, or why PEFT refuses it."""
    found: dict[str, float | str] = {}
    place = tempfile.mkdtemp()
    architectures.model(name).save_pretrained(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, config in kinds(name):
            for way in WAYS:
                try:
                    found[f"{kind}: {way}"] = float(f"{_difference(place, config, way):.3g}")
                except Exception as error:  # a library raises anything
                    text = (str(error).splitlines() or [""])[0]
                    found[f"{kind}: {way}"] = f"{type(error).__name__}: {text[:90]}"
    return found


WAYS = ("disabled", "saved and loaded", "merged", "merged and unmerged", "merged, saved and loaded")


def _difference(place: str, config: Any, way: str) -> float:
    ids = torch.randint(1, 1000, (2, 29), generator=torch.Generator().manual_seed(3))
    folder = tempfile.mkdtemp()

    def load(where: str = place) -> Any:
        return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()

    torch.manual_seed(0)  # of what the adapter starts with
    model = get_peft_model(load(), copy.deepcopy(config))
    noise = torch.Generator().manual_seed(5)
    for _, weight in model.named_parameters():
        if weight.requires_grad:
            weight.add_(STEP * torch.randn(weight.shape, generator=noise))
    model.eval()
    applied = model(ids).logits
    if way == "disabled":
        with model.disable_adapter():
            return apart(model(ids).logits, load()(ids).logits)
    if way == "saved and loaded":
        model.save_pretrained(folder)
        return apart(PeftModel.from_pretrained(load(), folder).eval()(ids).logits, applied)
    if way == "merged and unmerged":
        model.merge_adapter()
        model.unmerge_adapter()
        return apart(model(ids).logits, applied)
    merged = model.merge_and_unload()
    if way == "merged":
        return apart(merged(ids).logits, applied)
    merged.save_pretrained(folder)
    return apart(load(folder)(ids).logits, applied)
