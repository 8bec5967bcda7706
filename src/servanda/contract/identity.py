# Identity: fingerprints of kernels, provenance levels, and the evidence key.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from servanda.contract.workload import Path
from servanda.errors import IdentityError

DEFAULT = "default."  # prefix of fingerprint keys: default sampling parameters
_SHOWN = 8  # most keys of a config in a line
_DRAWS = 1  # increased when a version samples other tokens from the same seed

Grade = Literal["verified", "derived", "declared"]
GRADES: tuple[Grade, ...] = get_args(Grade)  # strongest first


def digest_of(value: object) -> str:
    """The digest of any JSON value, 16 bytes in hex."""
    data = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Description:
    """An engine's description of itself once its model is loaded.

    Args:
        fingerprint: everything that may change a number: versions, precision, threads.
        tensors: name -> digest of each weight tensor, cast to float32, before the kernel
            rounds or quantises it; empty if the engine does not see them.
        tokens: digest of the vocabulary, id by id, and of the tokenizer's rules; "" if unknown.
        vocab_size: rows of the output distribution; 0 if unknown.
        eos: ids that end a sequence; empty if unknown.
        context: largest number of tokens of a sequence; None: no limit.
        full_logits: whether `Engine.logits` works; timed: whether `Engine.time` does.
        top: number of top-k tokens of `Engine.top`; 0 if it does not work.
        capture: the format that logprobs are recorded in (law 9), see precision.py.
        weights_from: `weights` of the checkpoint from which the engine's own were converted; the
            fingerprint contains the converter.
        scores: the paths by which `Engine.score` works.
        encodes: whether `Engine.encode` works; decodes: whether `Engine.decode` does.
        config: the model's config.json by dotted keys, without keys that change no number; its
            digest is in the fingerprint.
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
    weights_from: str = ""
    scores: tuple[Path, ...] = ("prefill", "decode")
    encodes: bool = True
    decodes: bool = True
    config: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Description:
        """From the result of `dataclasses.asdict` after JSON, which turns tuples into lists."""
        lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})

    @property
    def digest(self) -> str:
        """The digest of everything that affects sampling and scoring."""
        rules = [self.tokens, self.vocab_size, list(self.eos), self.context, self.capture, _DRAWS]
        return digest_of([dict(self.fingerprint), rules])

    @property
    def weights(self) -> str:
        """Digest of the weights; "" if unknown."""
        return digest_of(dict(self.tensors)) if self.tensors else self.weights_from


@dataclass(frozen=True)
class EvidenceKey:
    """The scope of evidence (law 8)."""

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


def differences(train: Description, infer: Description) -> tuple[str, ...]:
    """The differences of config.json and sampling defaults between the sides, as sentences.

    Defaults are compared if one kind of engine reports both.

    >>> one, other = ({"rms_norm_eps": "1e-06", "rope_theta": theta} for theta in ("1", "2"))
    >>> made = (Description({}, {}, "", 0, (), config=config) for config in (one, other))
    >>> differences(*made)
    ('config.json differs (train / infer): rope_theta 1 / 2',)
    """
    lines = []
    if train.config and infer.config:
        lines += difference_lines("config.json differs", train.config, infer.config)
    else:
        sides = (train.fingerprint, infer.fingerprint)
        one, other = (side.get("config") or side.get("kernel.config") for side in sides)
        if one and other and one != other:
            lines.append(
                f"config.json differs (digest {one[:8]} on train, {other[:8]} on infer); a side "
                "does not tell its values"
            )
    for what, one, other in (
        ("the ids that are told to end a response differ", train.eos, infer.eos),
        ("the sizes of the vocabulary differ", train.vocab_size, infer.vocab_size),
        ("the longest sequences differ", train.context, infer.context),
    ):
        if one and other and one != other:
            sides = (", ".join(map(str, x)) if isinstance(x, tuple) else x for x in (one, other))
            lines.append("{} (train / infer): {} / {}".format(what, *sides))
    if train.fingerprint.get("engine") == infer.fingerprint.get("engine"):
        one, other = (
            {k.removeprefix(DEFAULT): v for k, v in d.fingerprint.items() if k.startswith(DEFAULT)}
            for d in (train, infer)
        )
        lines += difference_lines("sampling defaults differ", one, other)
    return tuple(lines)


def difference_lines(
    what: str,
    train: Mapping[str, str],
    infer: Mapping[str, str],
    sides: str = "train / infer",
) -> list[str]:
    """Keys with other values on the two sides, as one sentence; [] for none."""
    odd = [
        f"{key} {train.get(key, 'absent')} / {infer.get(key, 'absent')}"
        for key in sorted({*train, *infer})
        if train.get(key) != infer.get(key)
    ]
    more = f" and {len(odd) - _SHOWN} more keys" if len(odd) > _SHOWN else ""
    return [f"{what} ({sides}): {', '.join(odd[:_SHOWN])}{more}"] if odd else []


def same_policy(train: Description, infer: Description, side: str = "infer") -> Grade:
    """The provenance level of the weights of two sides, or a refusal (law 8).

    Properties that an engine does not know are not compared: a server's weights are only declared.

    Args:
        side: name of the second one in messages.

    Returns:
        verified: equal digests of all tensors.  derived: one side was converted from the weights of
            the other.  declared: not checked.

    Raises:
        IdentityError: different vocabularies or weights.
    """
    _refuse_other_vocabulary(train, infer, side)
    if train.tensors and infer.tensors:
        _refuse_other_tensors(train, infer)
        return "verified"
    if not train.weights or not infer.weights:
        return "declared"
    if train.weights != infer.weights:
        raise IdentityError(
            f"{side} was made from weights {infer.weights[:8]}, and train has "
            f"{train.weights[:8]}: a divergence would mix kernel and weights",
            hint="convert the checkpoint that train loads, or correct weights_from",
        )
    return "derived"


def _refuse_other_vocabulary(train: Description, infer: Description, side: str) -> None:
    known = all(d.tokens and d.vocab_size for d in (train, infer))
    if known and (train.tokens, train.vocab_size) != (infer.tokens, infer.vocab_size):
        raise IdentityError(
            f"the tokenizers differ: train has {train.vocab_size} ids (digest {train.tokens[:8]}), "
            f"{side} has {infer.vocab_size} (digest {infer.tokens[:8]})",
            hint="a token id must mean the same on both sides: use one tokenizer.json",
        )


def _refuse_other_tensors(train: Description, infer: Description) -> None:
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
            hint="sync the weights, or load the same checkpoint on both sides; `servanda tools "
            "weights A B` says what each tensor holds",
        )
