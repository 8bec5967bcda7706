"""One side of a peer of `servanda bisect`, in the environment of the peers (make bench-bisect).

    python benchmarks/bisect_peers_side.py dump MODEL DTYPE TOKENS FOLDER
    python benchmarks/bisect_peers_side.py onnx MODEL DTYPE TOKENS FILE

`dump` runs the model on the tokens and keeps every tensor with SGLang's dumper; `onnx` exports it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def main(form: str, model_path: str, dtype: str, tokens: str, out: str) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    with open(tokens, encoding="utf-8") as file:
        ids = torch.tensor(json.load(file))
    if form == "dump":
        dumper = import_module("sglang.srt.debug_utils.dumper").dumper
        dumper.configure(enable=True, dir=out, exp_name="run", non_intrusive_mode="all")
        dumper.configure(enable_output_console=False)
        dumper.register_non_intrusive_dumper(model)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        dumper.step()
    else:
        torch.onnx.export(Logits(model), (ids,), out, dynamo=True, external_data=False)


main(*sys.argv[1:])
