# Ways to run one model that have to give the same logprobs, each beside one forward pass without a
# cache in eager attention: the largest difference of a logprob over the whole vocabulary, in nats.

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.hunt import architectures

LIMIT = 1e-3  # nats; rounding in float32 stays two orders below it on most of these models
LENGTH, SHORT, NEW = 29, 18, 24
Way = Callable[[], float]


class RefusalError(Exception):
    """This way does not exist for the model, and the library says so."""


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest |difference of logprobs| [nats] of two tensors of logits [..., vocabulary]."""
    both = (x.double().log_softmax(dim=-1) for x in (one, other))
    return float((next(both) - next(both)).abs().max())


class Ways:
    """All ways of one architecture; `measured` runs them."""

    def __init__(self, name: str) -> None:
        noise = torch.Generator().manual_seed(3)
        draw = [torch.randint(1, 1000, (1, n), generator=noise) for n in (LENGTH, SHORT)]
        self.long_BT, self.short_BT = draw
        self.place = tempfile.mkdtemp()
        architectures.model(name).save_pretrained(self.place)
        self.attention = {"attn_implementation": "eager"}
        self.model = self.load(**self.attention)
        self.full = self.logits(self.long_BT)
        self.full_short = self.logits(self.short_BT)
        gap = LENGTH - SHORT
        self.padded_BT = torch.cat(
            [self.long_BT, torch.cat([torch.zeros(1, gap, dtype=torch.long), self.short_BT], 1)]
        )
        self.mask_BT = (torch.arange(LENGTH)[None] >= torch.tensor([[0], [gap]])).long()

    def load(self, **options: Any) -> Any:
        options.setdefault("dtype", torch.float32)
        return AutoModelForCausalLM.from_pretrained(self.place, **options).eval()

    def logits(self, ids_BT: torch.Tensor, model: Any = None, **given: Any) -> torch.Tensor:
        given.setdefault("use_cache", False)
        return (model or self.model)(input_ids=ids_BT, **given).logits

    # one forward pass
    def forward(self, **given: Any) -> float:
        return apart(self.logits(self.long_BT, **given), self.full)

    def last_logits(self) -> float:
        return apart(self.logits(self.long_BT, logits_to_keep=3)[:, -3:], self.full[:, -3:])

    def embedded(self) -> float:
        inputs = self.model.get_input_embeddings()(self.long_BT)
        return apart(self.model(inputs_embeds=inputs, use_cache=False).logits, self.full)

    def left_padded(self, model: Any = None) -> float:
        positions = (self.mask_BT.cumsum(-1) - 1).clamp_min(0)
        given = {"attention_mask": self.mask_BT, "position_ids": positions}
        both = self.logits(self.padded_BT, model, **given)
        return max(apart(both[1, -SHORT:], self.full_short[0]), apart(both[0], self.full[0]))

    def right_padded(self) -> float:
        ids, mask = self.padded_BT.clone(), self.mask_BT.clone()
        ids[1], mask[1] = ids[1].roll(SHORT - LENGTH), mask[1].roll(SHORT - LENGTH)
        both = self.logits(ids, attention_mask=mask)
        return apart(both[1, :SHORT], self.full_short[0])

    def packed(self, model: Any = None) -> float:
        positions = torch.cat([torch.arange(LENGTH), torch.arange(SHORT)])[None]
        ids = torch.cat([self.long_BT, self.short_BT], 1)
        packed = self.logits(ids, model, position_ids=positions)
        return apart(packed[0, LENGTH:], self.full_short[0])

    # calls that go on from a cache
    def in_pieces(self, first: int, rest: int, cache: Any = None, model: Any = None) -> float:
        model = model or self.model
        known = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        key = next((k for k in ("cache", "state") if k in known), None)
        if key is None:
            raise RefusalError("its forward pass takes no cache")
        carried, parts, at = cache and cache(config=model.config), [], 0
        while at < LENGTH:
            size = rest if at else first
            given = {} if carried is None else {key: carried}
            out = model(input_ids=self.long_BT[:, at : at + size], use_cache=True, **given)
            parts.append(out.logits)
            carried, at = out[key], at + size
        return apart(torch.cat(parts, 1), self.full)

    def static(self, config: Any) -> Any:
        return StaticCache(config=config, max_cache_len=40)

    # generate, and its scores beside one forward pass over what it drew
    def generated(self, model: Any = None, **options: Any) -> float:
        ids, mask = options.pop("ids", self.long_BT), options.pop("mask", None)
        usual = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
        asked = {"return_dict_in_generate": True, "output_logits": True}
        given = {"input_ids": ids, "attention_mask": mask, **usual, **asked, **options}
        out = (model or self.model).generate(**given)
        scores, row = torch.stack(out.logits, 1), out.sequences[-1:]
        if mask is not None:
            row = row[:, mask.shape[1] - int(mask[-1].sum()) :]
        whole = self.logits(row, model)[0, -scores.shape[1] - 1 : -1]
        return apart(scores[-1], whole)

    def proposed(self, **options: Any) -> float:
        plain, quick = (
            self.model.generate(
                input_ids=self.long_BT,
                do_sample=False,
                eos_token_id=None,
                **{"pad_token_id": 0, "max_new_tokens": NEW, **own},
            )
            for own in ({}, options)
        )
        return 0.0 if torch.equal(plain, quick) else float("inf")

    def second_turn(self) -> float:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        turn = self.model.generate(
            self.long_BT[:, :20], max_new_tokens=4, return_dict_in_generate=True, **options
        )
        if turn.get("cache") is None:
            raise RefusalError("generate returns no cache")
        ids = torch.cat([turn.sequences, self.short_BT], 1)
        return self.generated(ids=ids, cache=turn.cache, max_new_tokens=12)

    def beams(self) -> float:
        out = self.model.generate(
            input_ids=self.long_BT,
            num_beams=3,
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=12,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        told = self.model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        logp = self.logits(out.sequences)[:, LENGTH - 1 : -1].log_softmax(-1)
        drawn = logp.gather(-1, out.sequences[:, LENGTH:, None])[..., 0]
        return float((told - drawn).abs().max())

    # other code, and the same weights again
    def in_training(self, checkpointed: bool) -> float:
        self.model.train()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                if checkpointed:
                    self.model.gradient_checkpointing_enable()
                return apart(self.logits(self.long_BT.clone()).detach(), self.full)
        finally:
            if checkpointed:
                self.model.gradient_checkpointing_disable()
            self.model.eval()

    def other(self, run: Callable[[Any], float], **options: Any) -> float:
        return run(self.load(**options))

    def saved_again(self) -> float:
        folder = tempfile.mkdtemp()
        self.model.save_pretrained(folder)
        place, self.place = self.place, folder
        try:
            return apart(self.logits(self.long_BT, self.load(**self.attention)), self.full)
        finally:
            self.place = place

    def all(self) -> dict[str, Way]:
        """Each way, by its name; the last ones change the model."""
        left = {"ids": self.padded_BT, "mask": self.mask_BT}
        sdpa = {"attn_implementation": "sdpa"}
        ways: dict[str, Way] = {
            "again": self.forward,
            "cache written": lambda: self.forward(use_cache=True),
            "full mask given": lambda: self.forward(attention_mask=torch.ones_like(self.long_BT)),
            "last logits only": self.last_logits,
            "inputs_embeds": self.embedded,
            "left padding": self.left_padded,
            "right padding": self.right_padded,
            "packed": self.packed,
            "decode": lambda: self.in_pieces(10, 1),
            "decode from the first token": lambda: self.in_pieces(1, 1),
            "pieces": lambda: self.in_pieces(10, 7),
            "decode, dynamic cache of the config": lambda: self.in_pieces(10, 1, DynamicCache),
            "pieces, dynamic cache of the config": lambda: self.in_pieces(10, 7, DynamicCache),
            "decode, static cache": lambda: self.in_pieces(10, 1, self.static),
            "pieces, static cache": lambda: self.in_pieces(10, 7, self.static),
            "generate": self.generated,
            "generate, no cache": lambda: self.generated(use_cache=False),
            "generate, static cache": lambda: self.generated(cache_implementation="static"),
            "generate, prefill in chunks": lambda: self.generated(prefill_chunk_size=8),
            "generate, static cache and chunks": lambda: self.generated(
                prefill_chunk_size=8, cache_implementation="static"
            ),
            "generate, left padding": lambda: self.generated(**left),
            "generate, left padding and static cache": lambda: self.generated(
                cache_implementation="static", **left
            ),
            "generate, second turn on its cache": self.second_turn,
            "generate, beams": self.beams,
            "generate, prompt lookup": lambda: self.proposed(prompt_lookup_num_tokens=3),
            "generate, assistant": lambda: self.proposed(assistant_model=self.model),
            "saved and loaded": self.saved_again,
            "training mode": lambda: self.in_training(False),
            "gradient checkpointing": lambda: self.in_training(True),
            "sdpa": lambda: self.other(lambda m: self.forward(model=m), **sdpa),
            "sdpa, left padding": lambda: self.other(self.left_padded, **sdpa),
            "sdpa, packed": lambda: self.other(self.packed, **sdpa),
            "sdpa, decode": lambda: self.other(lambda m: self.in_pieces(10, 1, None, m), **sdpa),
            "sdpa, pieces": lambda: self.other(lambda m: self.in_pieces(10, 7, None, m), **sdpa),
            "sdpa, decode, static cache": lambda: self.other(
                lambda m: self.in_pieces(10, 1, self.static, m), **sdpa
            ),
            "sdpa, pieces, static cache": lambda: self.other(
                lambda m: self.in_pieces(10, 7, self.static, m), **sdpa
            ),
        }
        kinds = ("batched_mm", "grouped_mm")
        for kind in kinds if any("experts" in n for n, _ in self.model.named_modules()) else ():
            options = {"experts_implementation": kind, "attn_implementation": "eager"}
            ways[f"experts, {kind}"] = lambda options=options: self.other(
                lambda m: self.forward(model=m), **options
            )
        ways["float64"] = lambda: self.other(
            lambda m: self.forward(model=m), dtype=torch.float64, attn_implementation="eager"
        )
        return ways


@torch.no_grad()
def measured(name: str) -> dict[str, float | str]:
    """Of each way the largest difference in nats (3 digits), or why the library refuses it."""
    found: dict[str, float | str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way, run in Ways(name).all().items():
            try:
                found[way] = float(f"{run():.3g}")
            except Exception as error:  # a library raises anything
                text = str(error).splitlines() or [""]
                found[way] = f"{type(error).__name__}: {text[0][:90]}"
    return found
