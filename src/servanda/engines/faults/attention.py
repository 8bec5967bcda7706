# Faults of attention and of batches: a query sees other keys than it should, or sees them
# blurred; a sequence's numbers depend on the company it runs in.
# Axes: S rows, C columns that are fed, T columns so far, H heads of keys, D their width.

from __future__ import annotations

from typing import Any

from servanda.engines.faults.base import Between, OneOf, fault


@fault(
    "mask_contamination",
    "Left padding is attended to, so that a sequence depends on its batch's longest prompt.",
    seen="ml-explore/mlx-lm#1906 and Blaizzy/mlx-vlm#1946: the left-padding mask never "
    "reached attention, in prefill or in decoding",
)
def mask_contamination(base: Any, _: bool) -> Any:
    class Contaminated(base):
        def _attended(self, mask_ST: Any, columns: int) -> Any:
            # positions still count from the first real token; only the mask is lost
            return super()._attended(mask_ST.new_ones(mask_ST.shape), columns)

    return Contaminated


@fault(
    "attention_window",
    "Keys more than `value` - 1 tokens back are not attended to.",
    default=128,
    takes=Between(1, 10_000_000, whole=True),
    seen="vllm-project/vllm#49795: a sliding_window in the config was applied to layers that "
    "are declared full_attention, and prompts beyond it came back degenerate",
    field=512,
    field_source="the sliding_window of Gemma 3 1B",
    strengths=(512, 256, 128),
)
def attention_window(base: Any, value: int) -> Any:
    class Windowed(base):
        def _attended(self, mask_ST: Any, columns: int) -> Any:
            import torch

            if int(mask_ST.sum(dim=-1).max()) <= value:
                return super()._attended(mask_ST, columns)
            at_T = torch.arange(mask_ST.shape[1], device=mask_ST.device)
            back_CT = at_T[-columns:, None] - at_T
            near_CT = (back_CT >= 0) & (back_CT < value)
            # a column of padding sees itself: a row without a key would turn NaN
            seen_SCT = (near_CT & mask_ST[:, None, :].bool()) | (back_CT == 0)
            if self.kernel.attention.startswith("sdpa"):
                return seen_SCT[:, None]
            dtype = self.model.dtype
            return torch.where(seen_SCT, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]

    return Windowed


@fault(
    "kv_cache_int8",
    "Cached keys and values go through int8, with one scale a token, or one a head that the "
    "prompt fixes.",
    default="head",
    takes=OneOf(("token", "head")),
    seen="vllm-project/vllm#11906 and #54705: a quantised KV cache without calibrated scales "
    "clips outliers; the scales may come from the first input a layer sees",
    field="head",
    field_source="scales from the first input",
    strengths=("token", "head"),
)
def kv_cache_int8(base: Any, value: str) -> Any:
    class Int8Cache(base):
        def _cache(self) -> Any:
            cache = super()._cache()
            cache.__class__ = _int8(type(cache), value)
            cache.scales = {}
            return cache

    return Int8Cache


def _int8(base: Any, granularity: str) -> Any:
    """A class of cache whose keys and values come back as whole multiples of a scale."""

    class Int8(base):
        def update(self, keys: Any, values: Any, layer: int, *more: Any, **options: Any) -> Any:
            keys, values = (
                self._rounded(x, (layer, name)) for name, x in (("k", keys), ("v", values))
            )
            return super().update(keys, values, layer, *more, **options)

        def _rounded(self, x_SHTD: Any, key: tuple[int, str]) -> Any:
            x = x_SHTD.float()
            over = (-1,) if granularity == "token" else (2, 3)
            scale = (x.abs().amax(dim=over, keepdim=True) / 127).clamp_min(1e-30)
            if granularity == "head":
                scale = self.scales.setdefault(key, scale)  # the prompt's, from then on
            return ((x / scale).round().clamp(-127, 127) * scale).to(x_SHTD.dtype)

    return Int8


@fault(
    "batch_dependent",
    "A share `value` of each row's logits comes from its neighbour in the batch.",
    default=0.1,
    takes=Between(0, 1),
    seen="ml-explore/mlx-lm#1457: rows of a batched decode step returned corrupted logits; "
    "vllm-project/vllm#9567: logprobs that move with the batch by more than rounding",
    strengths=(0.001, 0.01, 0.1),
)
def batch_dependent(base: Any, value: float) -> Any:
    class Leaky(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            logits = super()._forward(ids_ST, mask_ST, **options)
            if len(logits) == 1:
                return logits
            with torch.inference_mode():
                return logits.lerp(logits.roll(1, dims=0), value)

    return Leaky
