# prime-rl: token_exports/step_<n>/rank_<r>.jsonl, one packed sequence per line.
#
# Index i concerns token i; null is a value that was not finite.  The writer touches STABLE when
# every rank has written, so a step without it is skipped.  Tokens trained only by the cross-entropy
# part of the loss were not sampled by a policy: they have no mask here.

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from servanda.rl.dumps.formats import base, jsonl
from servanda.rl.dumps.formats.json_arrays import (
    NULL,
    Flags,
    Floats,
    Line,
    Unusable,
    flags,
    floats,
    floats_of,
    integers,
    packed_flags,
    packed_floats,
    packed_integers,
    require,
)
from servanda.rl.dumps.formats.rows import Rows
from servanda.rl.dumps.storage import Place
from servanda.traces.rollouts import Array

_FILE = re.compile(r"step_(?P<step>\d+)/rank_(?P<rank>\d+)\.jsonl(?:\.gz)?")
_NEEDED = ("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")
_KNOWN = (1, 2)
_READ = (
    *(*_NEEDED, "advantages", "entropy", "temperatures", "position_ids"),
    *("rl_weights", "ref_kl_weights", "env_name", "rank", "schema_version"),
)
_DERIVED = {  # read columns, and columns of no use here
    "micro_step", "micro_sequence_idx", "export_sequence_idx", "step", "sample_id",
    "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta",
    "is_masked", "is_masked_high", "is_masked_low", "ce_weights",
}  # fmt: skip
_line = msgspec.defstruct("_line", [(name, Any, None) for name in _READ])
_any_line = msgspec.json.Decoder(_line)
_OPTIONAL = {"advantage": "advantages", "entropy_nats": "entropy", "temperature": "temperatures"}


class _Plain(msgspec.Struct):
    """A line with every value that a row needs."""

    token_ids: list[int]
    loss_mask: Flags
    inference_logprobs: Floats
    trainer_logprobs: Floats
    advantages: msgspec.Raw = NULL
    entropy: Floats | None = None
    temperatures: msgspec.Raw = NULL
    position_ids: list[int] | None = None
    rl_weights: msgspec.Raw = NULL
    ref_kl_weights: msgspec.Raw = NULL
    env_name: str | None = None


_plain_line = msgspec.json.Decoder(_Plain)


@base.importer("prime-rl")
class PrimeImporter:
    framework = "prime-rl"
    looks_for = "token_exports/step_<N>/rank_<R>.jsonl"
    pickled = False

    def sniff(self, folder: Place) -> base.Detection | None:
        files = base.files_in(folder, "rank_*.jsonl*", _FILE)
        if not files:
            return None
        whole = {marker.parent for marker in folder.rglob("STABLE")}
        stable = [file for file in files if file.path.parent in whole]
        left = sorted({file.step for file in files} - {file.step for file in stable})
        notes = [f"steps without STABLE, left out: {', '.join(map(str, left))}"] if left else []
        if not stable:
            return base.Detection("prime-rl", folder, (), False, "no step has its STABLE marker")
        columns = jsonl.head(stable, _NEEDED)
        version = columns.get("schema_version")
        if version not in _KNOWN and columns.keys() >= {*_NEEDED}:
            notes.append(f"schema_version {version!r} is not known; read as {_KNOWN[-1]}")
        known = (*_READ, *_DERIVED)
        return base.detection(
            "prime-rl", folder, stable, columns, _NEEDED, known, notes, version=str(version)
        )

    def rows(
        self, files: Sequence[base.File], refused: base.Refused
    ) -> Iterator[base.Placed | Rows]:
        for file in files:
            rank = file.path.name.removeprefix("rank_").partition(".")[0]
            packed, rows = partial(_packed, rank=rank), partial(_rows, rank=rank)
            yield from jsonl.read(file, refused, _plain_line, packed, _any_line, rows)


def _packed(line: _Plain, place: str, rank: str) -> Line:
    """The sequences of a plain line.

    Raises:
        ValueError: columns are not equally long, or there is no token.
    """
    tokens = len(line.token_ids)
    position, train = line.position_ids, line.trainer_logprobs
    loss, token = packed_flags(line.loss_mask), packed_integers(line.token_ids)
    rl, ref_kl = _known(line.rl_weights), _known(line.ref_kl_weights)
    if rl is not None or ref_kl is not None:
        loss = _drawn(rl, ref_kl, np.frombuffer(loss, bool)).tobytes()
    optional = {name: _known(getattr(line, key)) for name, key in _OPTIONAL.items()}
    per_token = {name: column for name, column in optional.items() if column is not None}
    columns = (loss, train, line.inference_logprobs, *per_token.values())
    if not tokens or {len(column) for column in columns} != {tokens}:
        raise ValueError
    starts = [0]
    if position is not None:  # in a packed line positions restart
        if len(position) != tokens:
            raise ValueError
        zeros = np.flatnonzero(np.frombuffer(packed_integers(position), np.int64) == 0)
        starts += [at for at in zeros.tolist() if at]
    for start in starts:
        if not loss[start]:  # the first token has no context
            train[start] = math.nan
    labels = {"rank": rank, **({"env": line.env_name} if line.env_name else {})}
    many = len(starts) > 1
    return Line(
        [f"{place}.{at + 1}" for at in range(len(starts))] if many else [place],
        [end - start for start, end in zip(starts, [*starts[1:], tokens], strict=True)],
        token,
        loss,
        packed_floats(train),
        packed_floats(line.inference_logprobs),
        labels,
        per_token={name: column.tobytes() for name, column in per_token.items()},
    )


def _known(column: msgspec.Raw | Floats | None) -> Array | None:
    """An optional column of a plain line; one that is null everywhere counts as missing.

    Args:
        column: a text, if it often repeats one number.
    """
    if column is None or column == NULL:
        return None
    packed = packed_floats(column) if isinstance(column, list) else floats_of(bytes(column))
    number_T = np.frombuffer(packed)
    return None if np.isnan(number_T).all() else number_T


def _rows(values: dict[str, Any], place: str, rank: str) -> Iterator[base.Placed]:
    """The sequences of any line.

    Raises:
        Unusable: a value is missing, or has another type or size.
    """
    require(values, _NEEDED)
    token = integers(values["token_ids"], "token_ids")
    loss = flags(values["loss_mask"], "loss_mask")
    train = floats(values["trainer_logprobs"], "trainer_logprobs")
    infer = floats(values["inference_logprobs"], "inference_logprobs")
    per_token = {
        name: column
        for name, key in _OPTIONAL.items()
        if (column := _optional(values, key)) is not None
    }
    drawn = _drawn(_optional(values, "rl_weights"), _optional(values, "ref_kl_weights"), loss)
    position = values.get("position_ids")
    columns = (loss, train, infer, drawn, *per_token.values())
    if any(len(column) != len(token) for column in columns):
        raise Unusable("token_ids, loss_mask and the logprobs are not equally long")
    starts = np.array([0])
    if position is not None:  # in a packed line positions restart
        place_N = integers(position, "position_ids")
        if len(place_N) != len(token):
            raise Unusable("position_ids and token_ids are not equally long")
        starts = np.unique(np.append(np.flatnonzero(place_N == 0), 0))
    env = values.get("env_name")
    if env is not None and not isinstance(env, str):
        raise Unusable("env_name is no text")
    labels = {"rank": rank, **({"env": env} if env else {})}
    for at, (start, end) in enumerate(zip(starts, [*starts[1:], len(token)], strict=True)):
        part = slice(int(start), int(end))
        mask = drawn[part]
        scored = train[part].copy()
        if len(mask) and not mask[0]:  # the first token has no context
            scored[0] = np.nan
        row = base.RolloutRow(
            token=token[part],
            mask=mask,
            logp_train=scored,
            logp_infer=base.drawn_only(infer[part], mask),
            prompt=int(np.argmax(mask)) if mask.any() else len(mask),
            labels=labels,
            per_token={name: column[part] for name, column in per_token.items()},
        )
        yield (f"{place}.{at + 1}" if len(starts) > 1 else place), row


def _optional(values: Mapping[str, Any], key: str) -> Array | None:
    """An optional column; one that is null everywhere counts as missing."""
    if not isinstance(values.get(key), list):
        return None
    column = floats(values[key], key)
    return None if np.isnan(column).all() else column


def _drawn(rl: Array | None, ref_kl: Array | None, loss: Array) -> Array:
    """Trained tokens sampled by a policy: those of the reinforcement or reference-KL part.

    Raises:
        Unusable: weights and the mask are not equally long.
    """
    for name, weight in {"rl_weights": rl, "ref_kl_weights": ref_kl}.items():
        if weight is not None and len(weight) != len(loss):
            raise Unusable(f"{name} and loss_mask are not equally long")
    drawn = np.ones_like(loss) if rl is None else np.nan_to_num(rl) != 0
    if ref_kl is not None:
        drawn = drawn | (np.nan_to_num(ref_kl) != 0)
    return loss & drawn
