# Faults that depend on the request alone: its prefix was cached, or its length is odd.
#
# They have a registry of their own: most comparisons of two kernels switch caches off and meet
# few lengths, so no power of a contract is measured against them.  `servanda relations` finds them.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from servanda.engines.faults.base import Between, Fault, OneOf, fault
from servanda.registry import Registry

_FIRST_TIER = 64  # blocks of the tier that is read without a fault
REQUEST_FAULTS: Registry[Fault] = Registry("fault")


@fault(
    "prefix_hit",
    "A hit of the prefix cache is wrong: blocks of another text before (context), or the last "
    "block one token off, always (offset) or where 64 other blocks were used since (demoted).",
    default="context",
    takes=OneOf(("context", "offset", "demoted")),
    seen="sgl-project/sglang#39830: answers from a tier of the cache are fluent and wrong; "
    "vllm-project/tpu-inference#3412: gsm8k .01 with prefix caching, .97 without",
    strengths=("context", "offset", "demoted"),
    registry=REQUEST_FAULTS,
)
def prefix_hit(base: Any, value: str) -> Any:
    class WrongHit(base):
        def _prefix_key(self, salt: str, text: Sequence[int]) -> Hashable:
            if value != "context":
                return super()._prefix_key(salt, text)
            # a block's own tokens, and not those before it
            size = self.kernel.prefix_cache
            return super()._prefix_key(salt, (len(text), *text[-size:]))

        def _prefix(self, salt: str, prompt: Sequence[int]) -> Any:
            first = self._prefix_key(salt, prompt[: self.kernel.prefix_cache])
            demoted = value == "demoted" and self._prefixes.age(first) >= _FIRST_TIER
            blocks = super()._prefix(salt, prompt)
            # the first token of the block twice, and its last one not at all
            at_T = [max(t - 1, 0) for t in range(self.kernel.prefix_cache or 0)]
            if blocks and (value == "offset" or demoted):
                last = [tuple(x[:, :, at_T] for x in layer) for layer in blocks[-1]]
                blocks = [*blocks[:-1], last]
            return blocks

    return WrongHit


@fault(
    "lost_block",
    "A prompt whose last block of `value` tokens holds one token is answered by that block alone.",
    default=64,
    takes=Between(2, 10_000_000, whole=True),
    seen="vllm-project/vllm#48271: a block size switches at a length, and the numbers with it",
    strengths=(64, 16),
    registry=REQUEST_FAULTS,
)
def lost_block(base: Any, value: int) -> Any:
    class LostBlock(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            prefilled = ids_ST.shape[1] > 1 and options.get("logits_to_keep") == 1
            length_S = mask_ST.sum(dim=-1)
            odd_S = (length_S > value) & (length_S % value == 1)
            logits = super()._forward(ids_ST, mask_ST, **options)
            if not prefilled or not bool(odd_S.any()):
                return logits
            with torch.inference_mode():
                alone = self.model(input_ids=ids_ST[:, -1:], use_cache=False).logits
                return torch.where(odd_S[:, None, None], alone, logits)

    return LostBlock
