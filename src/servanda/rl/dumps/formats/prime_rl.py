# prime-rl: token_exports/step_<n>/rank_<r>.jsonl, one packed sequence a line.
#
# Index i speaks of token i; null is a value that was not finite.  The writer touches STABLE
# when every rank has written, so a step without it is left out.  Tokens that only the
# cross-entropy part of the loss trains were drawn by no policy: they have no mask here.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from servanda.rl.dumps.formats.base import File, Found, Refused, Row, drawn_only, importer
from servanda.rl.dumps.formats.json_arrays import Unusable, flags, floats, integers
from servanda.rl.dumps.formats.jsonl import head, lines, plain, refuse_line
from servanda.traces.rollouts import Array

_FILE = re.compile(r"rank_(\d+)\.jsonl(?:\.gz)?")
_STEP = re.compile(r"step_(\d+)")
_NEEDED = ("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")
_KNOWN = (1, 2)
_DERIVED = {  # of what is read, or of no use here
    "micro_step", "micro_sequence_idx", "export_sequence_idx", "step", "sample_id",
    "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta",
    "is_masked", "is_masked_high", "is_masked_low", "ce_weights",
}  # fmt: skip


class _Line(msgspec.Struct):
    """The columns of a line that are read."""

    token_ids: list[int]
    loss_mask: list[bool]
    inference_logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    advantages: list[float | None] | None = None
    entropy: list[float | None] | None = None
    temperatures: list[float | None] | float | None = None
    position_ids: list[int] | None = None
    rl_weights: list[float | None] | None = None
    ref_kl_weights: list[float | None] | None = None
    env_name: str | None = None
    rank: int | None = None
    schema_version: int | None = None


_READ = frozenset(field.name for field in msgspec.structs.fields(_Line))
_decoder = msgspec.json.Decoder(_Line)


@importer("prime-rl")
class PrimeImporter:
    framework = "prime-rl"
    looks_for = "token_exports/step_<N>/rank_<R>.jsonl"
    pickled = False

    def sniff(self, folder: Path) -> Found | None:
        found = []
        for path in folder.rglob("rank_*.jsonl*"):
            rank, step = _FILE.fullmatch(path.name), _STEP.fullmatch(path.parent.name)
            if rank and step and path.is_file():
                name = path.relative_to(folder).as_posix()
                found.append((int(step[1]), int(rank[1]), File(path, int(step[1]), name)))
        if not found:
            return None
        found.sort(key=lambda entry: (*entry[:2], entry[2].name))
        stable = tuple(f for *_, f in found if (f.path.parent / "STABLE").exists())
        left = sorted({f.step for *_, f in found} - {f.step for f in stable})
        notes = [f"steps without STABLE, left out: {', '.join(map(str, left))}"] if left else []
        if not stable:
            return Found("prime-rl", folder, (), False, "no step has its STABLE marker")
        first = head(stable, _NEEDED)
        missing = [name for name in _NEEDED if name not in first]
        version = first.get("schema_version")
        if version not in _KNOWN and not missing:
            notes.append(f"schema_version {version!r} is not known; read as {_KNOWN[-1]}")
        if unread := sorted(set(first) - _READ - _DERIVED):
            notes.append(f"columns that are not read: {', '.join(unread)}")
        return Found(
            format="prime-rl",
            folder=folder,
            files=stable,
            sure=not missing,
            why=f"{stable[0].name} has no {', '.join(missing)}" if missing else "names and columns",
            notes=tuple(notes),
            version=str(version),
        )

    def rows(self, files: Sequence[File], refused: Refused) -> Iterator[tuple[str, Row]]:
        for file in files:
            rank = _FILE.fullmatch(file.path.name)
            replica = rank[1] if rank else ""
            for place, line in lines(file, refused):
                try:
                    yield from _rows(_line(line), place, replica)
                except Unusable as unusable:
                    refused.add(str(unusable), place)
                except _NotJson:
                    refuse_line(line, place, refused)


class _NotJson(Exception):  # noqa: N818 - a line, not a failure of the program
    pass


def _line(line: bytes) -> dict[str, Any]:
    try:
        read = _decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        values = plain(line)
        if values is None:
            raise _NotJson from None
        return values
    return {name: getattr(read, name) for name in _READ}


def _rows(values: dict[str, Any], place: str, replica: str) -> Iterator[tuple[str, Row]]:
    for name in _NEEDED:
        if values.get(name) is None:
            raise Unusable(f"{name} is missing")
    token = integers(values["token_ids"], "token_ids")
    loss = flags(values["loss_mask"], "loss_mask")
    train = floats(values["trainer_logprobs"], "trainer_logprobs")
    infer = floats(values["inference_logprobs"], "inference_logprobs")
    per_token = {
        name: column
        for name, key in (
            ("advantage", "advantages"),
            ("entropy_nats", "entropy"),
            ("temperature", "temperatures"),
        )
        if (column := _optional(values, key)) is not None
    }
    drawn = _drawn(values, loss)
    position = values.get("position_ids")
    columns = (loss, train, infer, drawn, *per_token.values())
    if any(len(column) != len(token) for column in columns):
        raise Unusable("token_ids, loss_mask and the logprobs are not equally long")
    starts = np.array([0])
    if position is not None:  # a packed line begins to count again
        place_N = integers(position, "position_ids")
        if len(place_N) != len(token):
            raise Unusable("position_ids and token_ids are not equally long")
        starts = np.unique(np.append(np.flatnonzero(place_N == 0), 0))
    env = values.get("env_name")
    if env is not None and not isinstance(env, str):
        raise Unusable("env_name is no text")
    labels = {"replica": replica, **({"env": env} if env else {})}
    for at, (start, end) in enumerate(zip(starts, [*starts[1:], len(token)], strict=True)):
        part = slice(int(start), int(end))
        mine = drawn[part]
        scored = train[part].copy()
        if len(mine) and not mine[0]:  # nothing of the sequence comes before its first token
            scored[0] = np.nan
        yield (
            f"{place}.{at + 1}" if len(starts) > 1 else place,
            Row(
                token=token[part],
                mask=mine,
                logp_train=scored,
                logp_infer=drawn_only(infer[part], mine),
                prompt=int(np.argmax(mine)) if mine.any() else len(mine),
                labels=labels,
                per_token={name: column[part] for name, column in per_token.items()},
            ),
        )


def _optional(values: dict[str, Any], key: str) -> Array | None:
    """A column that a line may lack; one that is null everywhere is not there."""
    if not isinstance(values.get(key), list):
        return None
    column = floats(values[key], key)
    return None if np.isnan(column).all() else column


def _drawn(values: dict[str, Any], loss: Array) -> Array:
    """Trained tokens that a policy drew: those of the reinforcement or reference-KL part."""
    weights = {name: _optional(values, name) for name in ("rl_weights", "ref_kl_weights")}
    for name, weight in weights.items():
        if weight is not None and len(weight) != len(loss):
            raise Unusable(f"{name} and loss_mask are not equally long")
    rl, ref_kl = weights["rl_weights"], weights["ref_kl_weights"]
    drawn = np.ones_like(loss) if rl is None else np.nan_to_num(rl) != 0
    if ref_kl is not None:
        drawn = drawn | (np.nan_to_num(ref_kl) != 0)
    return loss & drawn
