# Who is being compared: fingerprints of kernels, grades of identity, the key of evidence.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from servanda.errors import IdentityError

_DRAWS = 1  # raised when a version draws other tokens from the same seed

Grade = Literal["verified", "derived", "declared"]


def digest_of(value: object) -> str:
    """Of any JSON value, 16 bytes in hex."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Description:
    """What an engine says of itself once its model is loaded.

    Args:
        fingerprint: everything that may change a number: versions, precision, threads.
        tensors: name -> digest of each weight tensor, cast to float32, before the kernel
            rounds or quantises it.
        tokens: digest of the vocabulary, id by id, and of the tokenizer's rules.
        vocab_size: rows of the output distribution.
        eos: ids that end a sequence.
        context: largest number of tokens of a sequence; None where there is no limit.
        full_logits: whether `Engine.logits` works; timed: whether `Engine.time` does.
        top: how many of the likeliest tokens `Engine.top` gives; 0 where it does not work.
        capture: the format that logprobs are recorded in (law 9), see capture.py.
    """

    fingerprint: Mapping[str, str]
    tensors: Mapping[str, str]
    tokens: str
    vocab_size: int
    eos: tuple[int, ...]
    context: int | None = None
    full_logits: bool = True
    top: int = 0
    timed: bool = False
    capture: str = "float64"

    @property
    def digest(self) -> str:
        """Of everything that decides which tokens are drawn and how they are scored."""
        rules = [self.tokens, self.vocab_size, list(self.eos), self.context, self.capture, _DRAWS]
        return digest_of([dict(self.fingerprint), rules])

    @property
    def weights(self) -> str:
        return digest_of(dict(self.tensors))


@dataclass(frozen=True)
class EvidenceKey:
    """Evidence speaks of this and of nothing else (law 8)."""

    contract: str
    corpus: str
    train: str
    infer: str
    weights: str
    attempt: int = 1
    grade: Grade = field(default="verified")
    stable: str = ""
    reward: str = ""

    def differences(self, other: EvidenceKey) -> list[str]:
        names = {"contract": "the contract", "corpus": "the prompts or golden texts"}
        names |= {"train": "the train kernel", "infer": "the infer kernel"}
        names |= {"stable": "the stable kernel", "weights": "the weights"}
        names |= {"reward": "the reward"}
        return [text for name, text in names.items() if getattr(self, name) != getattr(other, name)]


def same_policy(train: Description, infer: Description, side: str = "infer") -> Grade:
    """The grade of identity of two sides, or a refusal (law 8).

    Args:
        side: what the second one is called in messages.

    Raises:
        IdentityError: other vocabulary, other weights.
    """
    if (train.tokens, train.vocab_size) != (infer.tokens, infer.vocab_size):
        raise IdentityError(
            f"the tokenizers differ: train has {train.vocab_size} ids (digest {train.tokens[:8]}), "
            f"{side} has {infer.vocab_size} (digest {infer.tokens[:8]})",
            hint="a token id must mean the same on both sides: use one tokenizer.json",
        )
    if train.tensors.keys() != infer.tensors.keys():
        odd = sorted(train.tensors.keys() ^ infer.tensors.keys())
        raise IdentityError(
            f"the models have other tensors: {odd[0]!r} is on one side only ({len(odd)} such)",
            hint="both kernels must load the same architecture",
        )
    other = [name for name in train.tensors if train.tensors[name] != infer.tensors[name]]
    if other:
        raise IdentityError(
            f"the weights differ in {len(other)} of {len(train.tensors)} tensors, "
            f"first {other[0]!r}: a divergence would mix kernel and weights",
            hint="sync the weights, or load the same checkpoint on both sides",
        )
    return "verified"
