# Writes Servanda's own dump format: a hook of a trainer calls it.

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from servanda.errors import EvidenceError
from servanda.rl.dumps.formats import base
from servanda.rl.dumps.formats.padding import (
    aligned,
    aligned_routes,
    cells,
    flags,
    plain,
    split,
    texts,
)
from servanda.traces.rollouts import REPLAYS, ROUTE, ROUTE_TRAIN, Array

SCHEMA = "1"
KEY = b"servanda.rollouts"
_NAMED = re.compile(r"[a-z][a-z0-9_]*")


class Writer:
    """Writes the samples and logprobs of training steps, for `servanda check`.

    Args:
        folder: created if missing; one per run.
        rank: rank of the process; each rank writes its own files.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.rank = rank

    def step(
        self,
        step: int,
        token_ids: Any,
        mask: Any,
        logp_train: Any,
        logp_infer: Any,
        *,
        lengths: Any = None,
        present: Any = None,
        groups: Sequence[object] | None = None,
        labels: Mapping[str, Sequence[object]] | None = None,
        staleness: Any = None,
        advantages: Any = None,
        rewards: Any = None,
        loss_weights: Any = None,
        loss_mask: Any = None,
        versions: Any = None,
        routes: Any = None,
        routes_train: Any = None,
        replays: bool = False,
    ) -> Path:
        """Write the sequences of a step; writing a step again replaces it.

        Arrays are NumPy's or torch's, [S, T], or lists of one list per sequence.  A column that is
        shorter than the tokens concerns the last ones, such as the response after a prompt.

        Args:
            step: step number of the trainer.
            token_ids: prompt and response, [S, T].
            mask: 1 if the trainer learns from the token, [S, T] or [S, R].
            logp_train: the trainer's, before its update, nats; NaN if missing.
            logp_infer: the sampler's, nats; NaN if missing.
            lengths: tokens of each sequence, [S], for arrays padded on the right.
            present: 1 if a cell contains a token, [S, T], for any padding.
            groups: the prompt of each sequence, [S]; without it, equal prompts are one group.
            labels: name -> value of each sequence, [S]: "env", "replica".
            staleness: age of the sampling weights in updates, [S] or the shape of the mask.
            advantages: [S] or the shape of the mask.
            rewards: [S].
            loss_weights: the weight that the loss gave to each token, [S] or the shape of the mask.
            loss_mask: 1 if the loss used the token, after every filter, the shape of the mask.
            versions: number of updates of the sampling weights, [S] or the shape of the mask; the
                staleness is then the step less the version.
            routes: the experts of a mixture that the sampler recorded, whole numbers, [S, T, L, K]
                for L layers and K experts a token: row t is of the forward that predicted token t.
                Rows of the token that is fed are passed as routes[:, :-1].  -1 where unknown.
            routes_train: those of the trainer's forward pass, as routes.
            replays: whether the trainer replays the sampler's experts, so that both are equal.

        Returns:
            The file.

        Raises:
            EvidenceError: inconsistent shapes, or an invalid step.
        """
        try:
            at = index(step)
        except TypeError:
            at = -1
        if at < 0:
            raise EvidenceError(f"the step is {step!r}", hint="an integer from 0 on")
        token_S = split(token_ids, "token_ids")
        cells_S = cells(token_S, lengths, present)
        lists = {"mask": mask, "logp_train": logp_train, "logp_infer": logp_infer}
        per_token = {
            "staleness": _staleness(at, staleness, versions),
            "advantage": advantages,
            "loss_weight": loss_weights,
            "loss_mask": loss_mask,
            "weight_version": versions,
        }
        lists |= {f"token.{name}": v for name, v in per_token.items() if v is not None}
        lists = {"token_ids": token_S} | {n: aligned(n, v, token_S) for n, v in lists.items()}
        columns: dict[str, Any] = {
            name: [part[cells_T] for part, cells_T in zip(parts, cells_S, strict=True)]
            for name, parts in lists.items()
        }
        if replays and routes is None:
            raise EvidenceError("the trainer replays routes, and there are none: routes is None")
        given = ("routes", ROUTE, routes), ("routes_train", ROUTE_TRAIN, routes_train)
        for argument, name, values in given:
            if values is not None:
                columns[f"token.{name}"] = aligned_routes(argument, values, token_S, cells_S)
        if replays:
            columns[f"sequence.{REPLAYS}"] = np.ones(len(token_S))
        columns["mask"] = [flags(values) for values in columns["mask"]]
        columns["group"] = texts("groups", groups, len(token_S))
        for name, values in (labels or {}).items():
            if not _NAMED.fullmatch(name):
                raise EvidenceError(
                    f"a label is named {name!r}", hint="small letters, digits and _: env"
                )
            columns[f"label.{name}"] = texts(f"labels[{name!r}]", values, len(token_S))
        if rewards is not None:
            columns["sequence.reward"] = plain(rewards).astype(np.float64).reshape(-1)
            if len(columns["sequence.reward"]) != len(token_S):
                raise EvidenceError(
                    f"{len(token_S)} sequences, and {len(columns['sequence.reward'])} rewards"
                )
        return self._write(at, columns)

    def _write(self, step: int, columns: Mapping[str, Any]) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def column(name: str, values: Any) -> pa.Array:
            if is_text(name):
                return pa.array(values, pa.string())
            if name.startswith("sequence."):
                return pa.array(values, pa.float64())
            # without nulls it is decoded in two thirds of the time
            end_S = np.cumsum([0, *map(len, values)], dtype=np.int32)
            flat_N = np.concatenate(values) if values else np.zeros(0)
            flat = pa.array(flat_N.reshape(-1), _stored(name, values))
            for size in reversed(flat_N.shape[1:]):  # the layers of a token, the experts of a layer
                flat = pa.FixedSizeListArray.from_arrays(flat, size)
            element = pa.field("element", flat.type, nullable=False)
            return pa.ListArray.from_arrays(end_S, flat, type=pa.list_(element))

        arrays = {name: column(name, values) for name, values in columns.items()}
        fields = [pa.field(name, a.type, is_text(name)) for name, a in arrays.items()]
        table = pa.table([*arrays.values()], pa.schema(fields))
        about = {KEY: SCHEMA.encode(), b"step": str(step).encode()}
        table = table.replace_schema_metadata(about)
        longest = max((len(tokens) for tokens in columns["token_ids"]), default=1)
        path = self.folder / f"step_{step:06}.rank{self.rank}.parquet"
        part = path.with_name(f".{path.name}.{os.getpid()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:  # a reader sees a complete file or none
            pq.write_table(
                table,
                part,
                row_group_size=max(1, base.CHUNK_TOKENS // max(longest, 1)),
                use_dictionary=[name for name in columns if is_text(name)],  # pyright: ignore
            )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path


def _staleness(step: int, staleness: Any, versions: Any) -> Any:
    """The given staleness, or that of the versions.

    Raises:
        EvidenceError: a version is newer than the step.
    """
    if staleness is not None or versions is None:
        return staleness
    ages = [step - plain(part).astype(np.float64) for part in versions]
    for age in ages:
        if (age < 0).any():
            raise EvidenceError(
                f"a token of step {step} was sampled by version {step - float(np.min(age)):g}",
                hint="versions are numbers of updates, as steps are",
            )
    return ages


def _stored(name: str, values: Sequence[Array]) -> Any:
    """The type of a column's elements: the smallest that keeps each value."""
    import pyarrow as pa

    if name == "mask":
        return pa.bool_()
    if is_route(name):
        return pa.int16()
    if name == "token_ids":
        largest = max((int(ids.max(initial=0)) for ids in values), default=0)
        return pa.int32() if largest < 1 << 31 else pa.int64()
    return pa.float32() if all(v.dtype == np.float32 for v in values) else pa.float64()


def is_route(name: str) -> bool:
    return name in (f"token.{ROUTE}", f"token.{ROUTE_TRAIN}")


def is_text(name: str) -> bool:
    return name == "group" or name.startswith("label.")
