"""Each architecture of Transformers, and the ways in which it computes the same logprobs.

python benchmarks/found/explore.py OUT.json [NAME ...]

Runs where Transformers is, without Servanda.  A model has random weights of float32; its head is
scaled so that logprobs spread as those of a trained model.  Each way is compared with one forward
pass over the whole sequence, and the largest difference of a logprob is kept, nats; or the error.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.utils import logging

SHAPES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
LENGTH, NEW, VOCABULARY = 24, 8, 1024
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SPREAD = 2.5  # standard deviation of the logits


def config_of(name: str, attention: str) -> Any:
    """The small configuration of an architecture: of our sizes those that it knows."""
    own = dict(SHAPES[name])
    kind = own.pop("model_type")
    base = AutoConfig.for_model(kind)
    known = {*base.to_dict(), *getattr(type(base), "attribute_map", {})}
    sizes = {key: value for key, value in (_SIZES | own).items() if value != "DEL"}
    sizes = {k: v for k, v in sizes.items() if k in own or k in known or k.endswith("token_id")}
    return AutoConfig.for_model(kind, **sizes, attn_implementation=attention)


def model_of(name: str, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, attention), dtype=torch.float32)
    return randomised(model.eval())


@torch.no_grad()
def randomised(model: Any) -> Any:
    random = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=random)
        if weight.ndim == 1:
            weight.add_(0.1 * noise)
        elif "A_log" in key or "conv" in key:
            weight.add_(0.05 * noise)
        else:
            embedding = "embed" in key or "wte" in key
            weight.copy_(noise if embedding else 1.2 / math.sqrt(min(weight.shape[-2:])) * noise)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=random)
    spread = float(model(ids, use_cache=False).logits.std())
    head = model.get_output_embeddings()
    if head is not None and math.isfinite(spread):
        tied = model.config.get_text_config().tie_word_embeddings
        head.weight.mul_(min(_SPREAD / spread, 1.0) if tied else _SPREAD / spread)
    return model


class Ways:
    """One architecture, and its logprobs of a sequence by each way, [LENGTH, V]."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, model_of(name)
        random = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, VOCABULARY, (1, LENGTH), generator=random)
        self.other = torch.randint(1, VOCABULARY, (1, LENGTH + 6), generator=random)

    def whole(self) -> Any:
        return self._logp(self.model(self.ids, use_cache=False))

    def sdpa(self) -> Any:
        return self._logp(model_of(self.name, "sdpa")(self.ids, use_cache=False))

    def batch(self) -> Any:
        rows = torch.cat([self.ids, self.other[:, :LENGTH]])
        return self._logp(self.model(rows, use_cache=False))

    def left_padding(self) -> Any:
        pad = self.other.shape[1] - LENGTH
        padded = torch.cat([torch.zeros(1, pad, dtype=torch.long), self.ids], 1)
        rows = torch.cat([self.other, padded])
        mask = torch.ones_like(rows)
        mask[1, :pad] = 0
        given = {"attention_mask": mask, "use_cache": False}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return self._logp(self.model(rows, **given), row=1)[pad:]

    def embeddings(self) -> Any:
        vectors = self.model.get_input_embeddings()(self.ids)
        return self._logp(self.model(inputs_embeds=vectors, use_cache=False))

    def decode(self) -> Any:
        return self._pieces(LENGTH // 2, 1)

    def pieces(self) -> Any:
        return self._pieces(LENGTH // 2, 5)

    def static_cache(self) -> Any:
        return self._pieces(LENGTH // 2, 1, StaticCache(self.model.config, max_cache_len=40))

    def packed(self) -> Any:
        """After another sequence in one row, with positions that begin again."""
        row = torch.cat([self.other, self.ids], 1)
        at = torch.cat([torch.arange(self.other.shape[1]), torch.arange(LENGTH)])[None]
        logp = self._logp(self.model(row, position_ids=at, use_cache=False))
        return logp[self.other.shape[1] :]

    def generate_static(self) -> Any:
        return self._drawn(cache_implementation="static")

    def generate_pieces(self) -> Any:
        return self._drawn(prefill_chunk_size=8)

    def _pieces(self, first: int, each: int, cache: Any = None) -> Any:
        found = self.model(self.ids[:, :first], use_cache=True, **_given(cache))
        parts = [found.logits]
        for at in range(first, LENGTH, each):
            found = self.model(self.ids[:, at : at + each], use_cache=True, **_given(found.cache))
            parts.append(found.logits)
        return torch.cat(parts, 1)[0].log_softmax(-1)

    def _drawn(self, **how: Any) -> Any:
        """Whether what it generates is what it would generate: logits of the same tokens."""
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "min_length": 64}
        answer = self.model.generate(
            self.ids, output_logits=True, return_dict_in_generate=True, **options, **how
        )
        whole = self.model(answer.sequences, use_cache=False).logits[0, LENGTH - 1 : -1]
        return torch.stack(answer.logits, 1)[0].log_softmax(-1), whole.log_softmax(-1)

    @staticmethod
    def _logp(output: Any, row: int = 0) -> Any:
        return output.logits[row].log_softmax(-1)


def _given(cache: Any) -> dict[str, Any]:
    return {} if cache is None else {"cache": cache}


WAYS: dict[str, Callable[[Ways], Any]] = {
    way.__name__: way
    for way in (
        *(Ways.sdpa, Ways.batch, Ways.left_padding, Ways.embeddings, Ways.decode, Ways.pieces),
        *(Ways.static_cache, Ways.packed, Ways.generate_static, Ways.generate_pieces),
    )
}


@torch.no_grad()
def explored(name: str) -> dict[str, float | str]:
    """The largest difference by each way, nats; or what was raised."""
    try:
        ways = Ways(name)
        whole = ways.whole()
    except Exception as error:
        return {"": f"{type(error).__name__}: {error}"[:200]}
    found: dict[str, float | str] = {}
    for key, way in WAYS.items():
        try:
            value = way(ways)
            a, b = value if isinstance(value, tuple) else (value, whole)
            found[key] = float((a - b).abs().max())
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"[:200]
    return found


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    out, names = Path(sys.argv[1]), sys.argv[2:] or sorted(SHAPES)
    found = {}
    for name in names:
        found[name] = explored(name)
        print(name, found[name], flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
