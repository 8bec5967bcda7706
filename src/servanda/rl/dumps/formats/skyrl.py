# SkyRL: dumped_data/global_step_<N>_training_input.pkl, a pickled batch of padded tensors.
#
# A pickle is a program, so it is never read in this process: `unpickle.py` reads it in a child
# process with limits, accepts only the batch class and plain data, and returns bytes of numbers.
# Sequences are padded on the left.  Columns of the response are as wide as the longest response and
# concern the last tokens.
#
# Routed experts, [S, T, layers, experts], are padded as the tokens are; row t is of the token that
# is fed.  router_padding_mask is 1 where a row was not recorded: in the padding, and from the last
# token that the server was fed on.

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import base
from servanda.rl.dumps.formats.json_arrays import Unusable
from servanda.rl.dumps.formats.padding import plain
from servanda.rl.dumps.formats.route_rows import routes_of
from servanda.rl.dumps.storage import Place, local
from servanda.traces.rollouts import ROUTE, ROUTES_UNREAD, UNROUTED, Array

_FILE = re.compile(r"[^/]*/global_step_(?P<step>\d+)_training_input\.pkl")
_NEEDED = (
    "sequences",
    "attention_mask",
    "loss_mask",
    "response_mask",
    "action_log_probs",
    "rollout_logprobs",
)
_ROUTES, _UNRECORDED = "rollout_expert_indices", "router_padding_mask"
_OPTIONAL = ("advantages", "rewards", _ROUTES, _UNRECORDED)
_WHOLE = ("sequences", "attention_mask", _ROUTES, _UNRECORDED)  # as wide as prompt and response
_HINTS = {
    "rollout_logprobs": "the trainer must keep the sampler's logprobs: off_policy_correction",
    "action_log_probs": "the trainer skipped its own pass over the batch: let it compute the "
    "policy's logprobs before the update",
}
_KINDS = {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"}
_TIMEOUT_S = 900


@base.importer("skyrl")
class SkyImporter:
    framework = "SkyRL"
    looks_for = "dumped_data/global_step_<N>_training_input.pkl"
    pickled = True

    def sniff(self, folder: Place) -> base.Detection | None:
        files = base.files_in(folder, "global_step_*.pkl", _FILE)
        why = "names; a pickle is not opened to look"
        return base.Detection("skyrl", folder, files, True, why) if files else None

    def rows(self, files: Sequence[base.File], refused: base.Refused) -> Iterator[base.Placed]:
        for file in files:
            columns, padding, unread = _unpickled(file)
            sequences = len(columns["sequences"])
            for at in range(sequences - padding):  # the last rows are copies that fill a batch
                place = f"{file.name}:{at + 1}"
                try:
                    row = _row({name: column[at] for name, column in columns.items()})
                    if _ROUTES in unread:
                        row = replace(row, per_sequence={**row.per_sequence, ROUTES_UNREAD: 1.0})
                    yield place, row
                except Unusable as unusable:
                    refused.add(str(unusable), place)


def _unpickled(file: base.File) -> tuple[dict[str, Array], int, list[str]]:
    """The columns of a batch, [S, ...], the number of padding rows, and columns of other forms."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = [sys.executable, "-I", "-S", str(Path(__file__).with_name("unpickle.py"))]
        wanted = ",".join((*_NEEDED, *_OPTIONAL))
        try:
            with local(file.path) as path, open(path, "rb") as pickle:
                ended = subprocess.run(
                    [*child, wanted, str(file.bytes)],
                    stdin=pickle,
                    stdout=out,
                    stderr=errors,
                    env={"PATH": os.defpath},
                    cwd="/",
                    timeout=_TIMEOUT_S,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"{file.name} was not read within {_TIMEOUT_S} s", hint="leave the file out"
            ) from None
        except OSError as error:
            raise MeasurementError(f"{file.name} cannot be read: {error}") from None
        if ended.returncode:
            errors.seek(0)
            last = errors.read(1 << 16).decode(errors="replace").strip().splitlines()[-1:]
            why = last[0] if ended.returncode == 3 and last else f"exit {ended.returncode}"
            raise MeasurementError(
                f"{file.name} was refused while it was unpickled: {why}",
                hint="nothing of it was run; export the step in another format",
            )
        out.seek(0)
        return _received(out, file)


def _received(stream: BinaryIO, file: base.File) -> tuple[dict[str, Array], int, list[str]]:
    """Parse the child's output, of which nothing is trusted."""
    try:
        head = json.loads(stream.readline(1 << 20))
        columns = {c["name"]: _array(c, stream) for c in head["columns"]}
        padding, unread = int(head["padding"]), [str(name) for name in head["unread"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MeasurementError(f"{file.name} does not hold a batch of tensors: {error}") from None
    for name in _NEEDED:
        if name not in columns:
            raise MeasurementError(
                f"{file.name} has no {name}",
                hint=_HINTS.get(name, "the writer of the batch left it out"),
            )
    width, response = columns["sequences"].shape[-1], columns["loss_mask"].shape[-1]
    for name, column in columns.items():
        over = width if name in _WHOLE else response
        more = column.shape[2:]  # of routes, the layers and the experts of each
        fits = column.shape[:2] == (len(columns["sequences"]), over) and over <= width
        if not fits or len(more) != (2 if name == _ROUTES else 0):
            raise MeasurementError(f"{file.name} has {name} of shape {list(column.shape)}")
    if not 0 <= padding <= len(columns["sequences"]):
        raise MeasurementError(f"{file.name} has pad_size {padding}")
    return columns, padding, unread


def _array(column: dict[str, Any], stream: BinaryIO) -> Array:
    data = stream.read(int(column["bytes"]))
    if column["format"] == "torch":
        return _tensor(data)
    if column["dtype"] not in _KINDS:
        raise ValueError(f"{column['name']} of {column['dtype']}")
    dtype, shape = np.dtype(column["dtype"]), tuple(int(size) for size in column["shape"])
    if math.prod(shape) * dtype.itemsize != len(data) or min(shape, default=0) < 0:
        raise ValueError(f"{column['name']} is not as long as its shape says")
    return np.frombuffer(data, dtype).reshape(shape)


def _tensor(data: bytes) -> Array:
    """A tensor of a type that NumPy lacks, in torch's format."""
    try:
        import torch
    except ImportError:
        raise ValueError("a tensor needs torch: pip install torch") from None
    try:
        return plain(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as error:  # a broken or hostile file raises many types of errors
        raise ValueError(f"no tensor ({type(error).__name__})") from None


def _row(values: dict[str, Array]) -> base.RolloutRow:
    for name in ("attention_mask", "loss_mask", "response_mask"):
        if not np.isin(values[name], (0, 1)).all():
            raise Unusable(f"{name} is neither 0 nor 1 everywhere")
    if values["sequences"].dtype.kind not in "iu":
        raise Unusable("sequences are not integers")
    cells = values["attention_mask"] == 1
    width, response = len(cells), len(values["loss_mask"])

    def whole(name: str, where: Array) -> Array:
        column = np.full(width, np.nan)
        column[width - response :] = np.where(where, values[name], np.nan)
        return column[cells]

    loss = values["loss_mask"] == 1
    scored = values["response_mask"] == 1
    mask = np.zeros(width, dtype=bool)
    mask[width - response :] = loss
    token = values["sequences"][cells].astype(np.int64)
    rewards = values.get("rewards")
    reward = None if rewards is None else float(np.where(scored, rewards, 0.0).sum())
    per_token = {"advantage": whole("advantages", scored)} if "advantages" in values else {}
    if _ROUTES in values and cells.any():
        per_token[ROUTE] = _routes(values, cells)
    return base.RolloutRow(
        token=token,
        mask=mask[cells],
        logp_train=whole("action_log_probs", scored),
        # a sequence that the loss excludes as a whole was sampled all the same
        logp_infer=whole("rollout_logprobs", loss if loss.any() else scored),
        prompt=max(len(token) - int(scored.sum()), 0),
        per_sequence={} if reward is None else {"reward": reward},
        per_token=per_token,
    )


def _routes(values: dict[str, Array], cells: Array) -> Array:
    """The experts of the pass that predicted each token of a sequence, [T, layers, experts]."""
    unrecorded = values.get(_UNRECORDED, np.zeros(len(cells)))
    if not np.isin(unrecorded, (0, 1)).all():
        raise Unusable(f"{_UNRECORDED} is neither 0 nor 1 everywhere")
    # the last token is fed to nothing
    route_TLK = routes_of(values[_ROUTES][cells][:-1], int(cells.sum()), _ROUTES)
    route_TLK[1:][unrecorded[cells][:-1] == 1] = UNROUTED
    return route_TLK
