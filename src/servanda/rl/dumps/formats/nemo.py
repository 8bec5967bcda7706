# NeMo-RL: train_data_step<N>.jsonl, one sequence per line, every value a batch of one.
#
# Sequences are padded on the right to the longest of the batch; input_lengths has their lengths.
# Index i concerns token i.  generation_logprobs (the sampler's) are 0.0 outside the loss mask;
# prev_logprobs (the trainer's) score the prompt as well.  A writer that skipped the trainer's pass
# fills prev_logprobs with zeros.  sample_loss_mask is 0 where a filter of the trainer removed the
# sequence, for example by the mismatch of its logprobs.

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from servanda.rl.dumps.formats import base, jsonl
from servanda.rl.dumps.formats.json_arrays import (
    NULL,
    Floats,
    Line,
    Unusable,
    flags,
    flags_of,
    floats,
    floats_of,
    integers,
    number,
    packed_floats,
    packed_integers,
    require,
    scalar,
    unnested,
)
from servanda.rl.dumps.formats.rows import Rows
from servanda.rl.dumps.storage import Place
from servanda.traces.rollouts import REMOVED

_FILE = re.compile(r"[^/]*/train_data_step(?P<step>\d+)\.jsonl(?:\.gz)?")
_NEEDED = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
_READ = (
    *(*_NEEDED, "input_lengths", "sample_loss_mask"),
    *("advantages", "rewards", "filtered_rewards", "agent_ref"),
)
_line = msgspec.defstruct("_line", [(name, Any, None) for name in _READ])
_any_line = msgspec.json.Decoder(_line)


class _Plain(msgspec.Struct):
    """A line of one sequence, with every value that a row needs."""

    token_ids: list[list[int]]
    token_loss_mask: msgspec.Raw
    generation_logprobs: list[Floats]
    prev_logprobs: list[Floats]
    input_lengths: list[int]
    advantages: msgspec.Raw = NULL
    sample_loss_mask: Any = None
    rewards: Any = None
    filtered_rewards: Any = None
    agent_ref: Any = None


_plain_line = msgspec.json.Decoder(_Plain)


@base.importer("nemo")
class NemoImporter:
    framework = "NeMo-RL"
    looks_for = "train_data_step<N>.jsonl"
    pickled = False

    def sniff(self, folder: Place) -> base.Detection | None:
        files = base.files_in(folder, "train_data_step*", _FILE)
        if not files:
            return None
        columns = jsonl.head(files, _NEEDED)
        return base.detection("nemo", folder, files, columns, _NEEDED, (*_READ, "idx", "content"))

    def rows(
        self, files: Sequence[base.File], refused: base.Refused
    ) -> Iterator[base.Placed | Rows]:
        for file in files:
            yield from jsonl.read(file, refused, _plain_line, _packed, _any_line, _rows)


def _packed(line: _Plain, place: str) -> Line:
    """The sequence of a plain line.

    Raises:
        ValueError: more than one value, a column that is not as long as the ids, or a sequence that
            the loss excludes.
    """
    (token,), (length,) = line.token_ids, line.input_lengths
    (infer,), (train,) = line.generation_logprobs, line.prev_logprobs
    loss = flags_of(_only(line.token_loss_mask))
    known = bytes(line.advantages) not in (b"null", b"[]")
    advantage = floats_of(_only(line.advantages)) if known else b""
    if not len(loss) == len(train) == len(infer) == len(token) or not 0 < length <= len(token):
        raise ValueError
    if known and len(advantage) != 8 * len(token):
        raise ValueError
    if _flag(line.sample_loss_mask) != 1:
        raise ValueError
    if train[0] == 0:  # the first token has no context, so it has no score
        train[0] = math.nan
    return Line(
        [place],
        [length],
        packed_integers(token)[: 8 * length],
        loss[:length],
        packed_floats(train[:length]),
        packed_floats(infer[:length]),
        _labels(line.agent_ref),
        _reward(line.filtered_rewards, line.rewards),
        {"advantage": advantage[: 8 * length]} if known else {},
    )


def _only(text: msgspec.Raw) -> bytes:
    """The text of the single list of a list; no JSON if it is another."""
    return bytes(text)[1:-1]


def _rows(values: dict[str, Any], place: str) -> Iterator[base.Placed]:
    yield place, _row(values)


def _row(values: dict[str, Any]) -> base.RolloutRow:
    require(values, (*_NEEDED, "input_lengths"))
    length = scalar(values["input_lengths"])
    if isinstance(length, bool) or not isinstance(length, int):
        raise Unusable("input_lengths is not an integer")
    token = integers(unnested(values["token_ids"]), "token_ids")
    loss = flags(unnested(values["token_loss_mask"]), "token_loss_mask")
    train = floats(unnested(values["prev_logprobs"]), "prev_logprobs")
    infer = floats(unnested(values["generation_logprobs"]), "generation_logprobs")
    if not len(loss) == len(train) == len(infer) == len(token):
        raise Unusable("token_ids, token_loss_mask and the logprobs are not equally long")
    if not 0 < length <= len(token):
        raise Unusable("input_lengths is not between 1 and the number of token ids")
    trained = _flag(values.get("sample_loss_mask"))
    if trained not in (0.0, 1.0):
        raise Unusable("a loss mask is neither 0 nor 1")
    drawn, per_token = loss[:length], {}
    if (advantages := values.get("advantages")) not in (None, []):
        advantage = floats(unnested(advantages), "advantages")
        if len(advantage) not in (1, len(token)):
            raise Unusable("advantages and token_ids are not equally long")
        per_token["advantage"] = np.broadcast_to(advantage, token.shape)[:length]
    if not trained:
        per_token[REMOVED] = drawn.astype(np.float64)
    train = train[:length].copy()
    if train[0] == 0:  # the first token has no context, so it has no score
        train[0] = np.nan
    return base.RolloutRow(
        token=token[:length],
        mask=drawn & bool(trained),
        logp_train=train,
        logp_infer=base.drawn_only(infer[:length], drawn),
        prompt=int(np.argmax(drawn)) if drawn.any() else length,
        labels=_labels(values.get("agent_ref")),
        per_sequence=_reward(values.get("filtered_rewards"), values.get("rewards")),
        per_token=per_token,
    )


def _flag(value: Any) -> float:
    """A flag of 0 and 1, or of true and false; 1 if missing."""
    if value is None:
        return 1.0
    value = scalar(value)
    return float(value) if isinstance(value, bool) else number(value, "sample_loss_mask")


def _reward(filtered: Any, given: Any) -> dict[str, float]:
    """The reward that was trained on, if there is one."""
    reward = given if filtered is None else filtered
    return {} if reward is None else {"reward": number(reward, "rewards")}


def _labels(agent: Any) -> dict[str, str]:
    """The environment of a sequence, if NeMo-Gym named its agent."""
    agent = scalar(agent)
    name = agent.get("name") if isinstance(agent, dict) else agent
    return {"env": name} if isinstance(name, str) and name else {}
