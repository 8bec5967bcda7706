# NeMo-RL: train_data_step<N>.jsonl, one sequence a line, every value a batch of one.
#
# Sequences are padded on the right to the longest of the batch: input_lengths says where they
# end.  Index i speaks of token i.  generation_logprobs (the sampler's) are 0.0 outside the loss
# mask; prev_logprobs (the trainer's) score the prompt as well.  A writer that skipped the
# trainer's pass fills prev_logprobs with zeros.  sample_loss_mask is 0 where a filter of the
# trainer removed the sequence, by the mismatch of its logprobs for one.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from servanda.rl.dumps.formats.base import File, Found, Refused, Row, drawn_only, importer
from servanda.rl.dumps.formats.json_arrays import (
    Unusable,
    flags,
    floats,
    integers,
    number,
    scalar,
    unnested,
)
from servanda.rl.dumps.formats.jsonl import head, lines, plain, refuse_line
from servanda.traces.rollouts import REMOVED, Array

_NAME = re.compile(r"train_data_step(\d+)\.jsonl(?:\.gz)?")
_NEEDED = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


class _Line(msgspec.Struct):
    """A line as the writer of NeMo-RL has it; other nestings are read as plain data."""

    token_ids: list[list[int]]
    token_loss_mask: list[list[float]]
    generation_logprobs: list[list[float]]
    prev_logprobs: list[list[float]]
    input_lengths: list[int]
    sample_loss_mask: list[float] | None = None
    advantages: list[list[float]] | None = None
    rewards: Any = None
    filtered_rewards: Any = None
    agent_ref: Any = None


_READ = frozenset(field.name for field in msgspec.structs.fields(_Line))
_decoder = msgspec.json.Decoder(_Line)


@importer("nemo")
class NemoImporter:
    framework = "NeMo-RL"
    looks_for = "train_data_step<N>.jsonl"
    pickled = False

    def sniff(self, folder: Path) -> Found | None:
        found = [
            File(path, int(match[1]), path.relative_to(folder).as_posix())
            for path in folder.rglob("train_data_step*")
            if (match := _NAME.fullmatch(path.name)) and path.is_file()
        ]
        if not found:
            return None
        files = tuple(sorted(found, key=lambda file: (file.step, file.name)))
        first = head(files, _NEEDED)
        missing = [name for name in _NEEDED if name not in first]
        unread = sorted(set(first) - _READ - {"idx", "content"})
        return Found(
            format="nemo",
            folder=folder,
            files=files,
            sure=not missing,
            why=f"{files[0].name} has no {', '.join(missing)}" if missing else "names and columns",
            notes=(f"columns that are not read: {', '.join(unread)}",) if unread else (),
        )

    def rows(self, files: Sequence[File], refused: Refused) -> Iterator[tuple[str, Row]]:
        for place, line in (pair for file in files for pair in lines(file, refused)):
            try:
                yield place, _typed(_decoder.decode(line))
                continue
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
                pass  # another nesting, NaN, or no JSON at all
            values = plain(line)
            if values is None:
                refuse_line(line, place, refused)
                continue
            try:
                yield place, _plain(values)
            except Unusable as unusable:
                refused.add(str(unusable), place)


def _typed(line: _Line) -> Row:
    single = (line.token_ids, line.token_loss_mask, line.generation_logprobs, line.prev_logprobs)
    kept = [1.0] if line.sample_loss_mask is None else line.sample_loss_mask
    if any(len(column) != 1 for column in (*single, line.input_lengths, kept)):
        raise ValueError("no batch of one")
    advantages = np.array(line.advantages[0]) if line.advantages else None
    return _row(
        np.array(line.token_ids[0], dtype=np.int64),
        np.array(line.token_loss_mask[0]),
        np.array(line.prev_logprobs[0]),
        np.array(line.generation_logprobs[0]),
        line.input_lengths[0],
        kept[0],
        advantages,
        line.rewards if line.filtered_rewards is None else line.filtered_rewards,
        line.agent_ref,
    )


def _plain(values: dict[str, Any]) -> Row:
    for name in (*_NEEDED, "input_lengths"):
        if values.get(name) is None:
            raise Unusable(f"{name} is missing")
    advantages = values.get("advantages")
    rewards = values.get("filtered_rewards")
    length = scalar(values["input_lengths"])
    if isinstance(length, bool) or not isinstance(length, int):
        raise Unusable("input_lengths is not an integer")
    return _row(
        integers(unnested(values["token_ids"]), "token_ids"),
        flags(unnested(values["token_loss_mask"]), "token_loss_mask").astype(np.float64),
        floats(unnested(values["prev_logprobs"]), "prev_logprobs"),
        floats(unnested(values["generation_logprobs"]), "generation_logprobs"),
        length,
        1.0 if (kept := values.get("sample_loss_mask")) is None else _kept(kept),
        None if advantages is None else floats(unnested(advantages), "advantages"),
        values.get("rewards") if rewards is None else rewards,
        values.get("agent_ref"),
    )


def _kept(value: Any) -> float:
    """A flag of 0 and 1, or of true and false."""
    value = scalar(value)
    return float(value) if isinstance(value, bool) else number(value, "sample_loss_mask")


def _row(
    token: Array,
    loss: Array,
    train: Array,
    infer: Array,
    length: int,
    kept: float,
    advantage: Array | None,
    reward: Any,
    agent: Any,
) -> Row:
    padded = len(token)
    if not len(loss) == len(train) == len(infer) == padded:
        raise Unusable("token_ids, token_loss_mask and the logprobs are not equally long")
    if not 0 < length <= padded:
        raise Unusable("input_lengths is not between 1 and the number of token ids")
    if not np.isin(loss, (0.0, 1.0)).all() or kept not in (0.0, 1.0):
        raise Unusable("a loss mask is neither 0 nor 1")
    drawn = loss[:length] == 1.0
    if advantage is not None and len(advantage) == 1:
        advantage = np.full(padded, advantage[0])
    if advantage is not None and len(advantage) != padded:
        raise Unusable("advantages and token_ids are not equally long")
    train = train[:length].copy()
    if train[0] == 0:  # nothing comes before the first token, so nothing scored it
        train[0] = np.nan
    return Row(
        token=token[:length],
        mask=drawn & (kept == 1.0),
        logp_train=train,
        logp_infer=drawn_only(infer[:length], drawn),
        prompt=int(np.argmax(drawn)) if drawn.any() else length,
        labels=_labels(agent),
        per_sequence={} if reward is None else {"reward": number(reward, "rewards")},
        per_token={
            **({} if advantage is None else {"advantage": advantage[:length]}),
            **({} if kept == 1.0 else {REMOVED: drawn.astype(np.float64)}),
        },
    )


def _labels(agent: Any) -> dict[str, str]:
    """The environment of a sequence, where NeMo-Gym named its agent."""
    agent = scalar(agent)
    name = agent.get("name") if isinstance(agent, dict) else agent
    return {"env": name} if isinstance(name, str) and name else {}
