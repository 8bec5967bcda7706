# Servanda's own dump format, written by a hook if the framework writes no logprobs.
#
# One Parquet file per step and rank, one sequence per row.  Columns: token_ids, mask, logp_train,
# logp_infer (lists), group, and "label.<name>", "sequence.<name>", "token.<name>".  A missing value
# is null.  Routes are lists of lists of lists: of tokens, of layers, of experts.

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from servanda.errors import EvidenceError, MeasurementError
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
from servanda.rl.dumps.formats.rows import BATCH_TOKENS, Rows
from servanda.rl.dumps.storage import Place, seekable
from servanda.traces.rollouts import REPLAYS, ROUTE, ROUTE_TRAIN, Array

# Writes Servanda's own dump format: a hook of a trainer calls it.


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
        generation: int = 0,
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
            generation: its number in the step, if that has several; each has its own file.

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
        name = (
            f"step_{at:06}.rank{self.rank}{f'.generation{generation}' * bool(generation)}.parquet"
        )
        return self._write(at, name, columns)

    def _write(self, step: int, name: str, columns: Mapping[str, Any]) -> Path:
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
        path = self.folder / name
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


__all__ = ["Writer"]

_FILE = re.compile(r"[^/]*/step_(?P<step>\d+)\.rank(?P<rank>\d+)(\.generation\d+)?\.parquet")
_NEEDED = ("token_ids", "mask", "logp_train", "logp_infer", "group")
_AGAIN = "write the step again, or remove the file"
_RANK = "trainer_rank"  # label of the rank in a file's name, where there are several
_HOLED = np.array([None])  # placeholder for ids or flags that contain a null


@base.importer("own")
class OwnImporter:
    framework = "Servanda"
    looks_for = "step_<N>.rank<R>.parquet"
    pickled = False

    def sniff(self, folder: Place) -> base.Detection | None:
        files = base.files_in(folder, "step_*.parquet", _FILE)
        if not files:
            return None
        version, names, why = _head(files[0])
        unread = [n for n in names if not _is_read(n)]
        return base.Detection(
            format="own",
            folder=folder,
            files=files,
            sure=not why,
            why=why or "names, columns and the version of the schema",
            notes=base.of_unread(unread),
            version=version,
        )

    def rows(
        self, files: Sequence[base.File], refused: base.Refused
    ) -> Iterator[base.Placed | Rows]:
        ranks = {file.rank for file in files}
        for file in files:
            yield from _read(file, refused, {_RANK: str(file.rank)} if len(ranks) > 1 else {})


def _read(
    file: base.File, refused: base.Refused, labels: Mapping[str, str]
) -> Iterator[base.Placed | Rows]:
    number = 0
    with _opened(file) as parquet:
        _, why = _version(parquet.schema_arrow, file)
        if why:
            raise MeasurementError(why, hint=_AGAIN)
        wanted = [name for name in parquet.schema_arrow.names if _is_read(name)]
        try:
            size = _batch_size(parquet.metadata)
            for batch in parquet.iter_batches(size, columns=wanted, use_threads=False):
                places = [f"{file.name}:{number + at + 1}" for at in range(batch.num_rows)]
                number += batch.num_rows
                rows = _rows(batch, places)
                if rows is None:
                    for place, row in _one_by_one(batch, places, refused):
                        yield place, replace(row, labels={**labels, **row.labels})
                else:
                    of_S = {name: [value] * len(places) for name, value in labels.items()}
                    yield replace(rows, labels={**of_S, **rows.labels})
        except Exception as error:  # pyarrow raises many types of errors for invalid bytes
            raise MeasurementError(f"{file.name} cannot be read: {error}", hint=_AGAIN) from None


@contextmanager
def _opened(file: base.File) -> Iterator[Any]:
    """A file of Parquet.

    Raises:
        MeasurementError: it is none.
    """
    import pyarrow.parquet as pq

    with ExitStack() as stack:
        try:
            source = stack.enter_context(seekable(file.path))
            parquet = stack.enter_context(pq.ParquetFile(source))
        except Exception as error:  # pyarrow raises many types of errors for invalid bytes
            why = f"{file.name} is no Parquet file ({error})"
            raise MeasurementError(why, hint=_AGAIN) from None
        yield parquet


def _head(file: base.File) -> tuple[str, list[str], str]:
    """Schema version, columns, and their problem."""
    try:
        with _opened(file) as parquet:
            schema = parquet.schema_arrow
    except MeasurementError as error:
        return "", [], error.problems[0].message
    version, why = _version(schema, file)
    return version, schema.names, why


def _version(schema: Any, file: base.File) -> tuple[str, str]:
    """The version of a schema, and the problem with it or with its columns."""
    version = (schema.metadata or {}).get(KEY, b"").decode(errors="replace")
    if version != SCHEMA:
        found = f"has schema {version!r}, and not {SCHEMA!r}"
        found = found if version else "has no schema version: Servanda's writer did not write it"
        return version, f"{file.name} {found}"
    missing = [name for name in _NEEDED if name not in schema.names]
    for name in (n for n in schema.names if _is_read(n)):
        if not _fits(name, schema.field(name).type):
            return version, f"{file.name} has {name} as {schema.field(name).type}"
    return version, f"{file.name} has no {', '.join(missing)}" if missing else ""


def _is_read(name: str) -> bool:
    return _is_list(name) or is_text(name) or name.startswith("sequence.")


def _is_list(name: str) -> bool:
    return name in _NEEDED[:4] or name.startswith("token.")


def _fits(name: str, kind: Any) -> bool:
    import pyarrow.types as pt

    if is_text(name):
        return pt.is_string(kind) or pt.is_large_string(kind)
    if name.startswith("sequence."):
        return pt.is_floating(kind) or pt.is_integer(kind)
    if not (pt.is_list(kind) or pt.is_large_list(kind)):
        return False
    inner = {"token_ids": pt.is_integer, "mask": pt.is_boolean}.get(name, pt.is_floating)
    kind = kind.value_type
    if is_route(name):
        for _ in range(2):
            if not (pt.is_fixed_size_list(kind) and kind.list_size):
                return False
            kind = kind.value_type
        inner = pt.is_integer
    return bool(inner(kind))


def _batch_size(metadata: Any) -> int:
    """Sequences that have about BATCH_TOKENS tokens together."""
    tokens = sum(
        group.column(at).num_values
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for at in range(metadata.num_columns)
        if group.column(at).path_in_schema.startswith("token_ids.")
    )
    return max(1, BATCH_TOKENS * metadata.num_rows // max(tokens, 1))


def _rows(batch: Any, places: Sequence[str]) -> Rows | None:
    """The sequences of a batch; None if a value that a sequence needs is missing in it."""
    lists = {name: batch.column(name) for name in batch.schema.names if _is_list(name)}
    ends = [array.offsets.to_numpy() for array in lists.values()]
    if any(array.null_count for array in lists.values()):
        return None
    if not all(np.array_equal(end - end[0], ends[0] - ends[0][0]) for end in ends):
        return None
    whole = [array for name, array in lists.items() if is_route(name)]
    if any(_holed(array) for array in (lists["token_ids"], lists["mask"], *whole)):
        return None
    texts = {n: batch.column(n).to_pylist() for n in batch.schema.names if is_text(n)}
    numbers = {n: batch.column(n) for n in batch.schema.names if n.startswith("sequence.")}
    return Rows(
        places,
        np.diff(ends[0]).astype(np.int64),
        _flat(lists["token_ids"]).astype(np.int64, copy=False),
        _flat(lists["mask"]),
        _flat(lists["logp_train"]),
        _flat(lists["logp_infer"]),
        [group or "" for group in texts.pop("group")],
        {name[6:]: [text or "" for text in column] for name, column in texts.items()},
        {
            name[9:]: array.to_numpy(zero_copy_only=False).astype(np.float64)
            for name, array in numbers.items()
            if array.null_count < len(array)
        },
        {
            name[6:]: _flat(array).astype(_kept(name), copy=False)
            for name, array in lists.items()
            if name.startswith("token.")
        },
    )


def _kept(name: str) -> type[np.generic]:
    """The type of a token's number in memory."""
    return np.int16 if is_route(name) else np.float64


def _holed(array: Any) -> bool:
    """Whether a list of a column holds a null, at any depth."""
    import pyarrow.types as pt

    while not array.null_count and pt.is_nested(array.type):
        array = array.flatten()
    return bool(array.null_count)


def _flat(array: Any) -> Array:
    """All values of a column of lists, [N], or of routes, [N, L, K]; a null number is NaN."""
    import pyarrow as pa
    import pyarrow.types as pt

    flat, sizes = array.flatten(), []
    while pt.is_fixed_size_list(flat.type):
        sizes.append(flat.type.list_size)
        flat = flat.flatten()
    if sizes:
        return flat.to_numpy(zero_copy_only=False).reshape(-1, *sizes)
    if pt.is_boolean(flat.type):  # through bytes: far faster than from bits
        return flat.cast(pa.uint8()).to_numpy(zero_copy_only=False).view(bool)
    return flat.to_numpy(zero_copy_only=False)


def _one_by_one(batch: Any, places: Sequence[str], refused: base.Refused) -> Iterator[base.Placed]:
    columns = {name: _pieces(batch.column(name)) for name in batch.schema.names}
    for at, place in enumerate(places):
        row = _row({name: pieces[at] for name, pieces in columns.items()})
        if isinstance(row, str):
            refused.add(row, place)
        else:
            yield place, row


def _pieces(array: Any) -> list[Any]:
    """The values of a column, row by row; a null list is None, a null number NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if not (pt.is_list(array.type) or pt.is_large_list(array.type)):
        return array.to_pylist()
    lengths = pc.list_value_length(array)  # pyright: ignore[reportAttributeAccessIssue]
    ends = np.cumsum(lengths.fill_null(0).to_numpy(zero_copy_only=False))
    if not len(ends):
        return []
    valid = array.is_valid().to_pylist()
    if pt.is_fixed_size_list(array.type.value_type):  # routes
        if _holed(array.drop_null()):
            return [None] * len(ends)
        routes = np.split(_flat(array), ends[:-1])
        return [part if ok else None for part, ok in zip(routes, valid, strict=True)]
    flat = array.flatten()
    null = None
    if flat.null_count and not pt.is_floating(flat.type):  # a missing number is NaN
        null = flat.is_null().to_numpy(zero_copy_only=False)
        flat = flat.fill_null(pa.scalar(0).cast(flat.type))
    pieces: list[Any] = np.split(flat.to_numpy(zero_copy_only=False), ends[:-1])
    if null is not None:
        holes = np.split(null, ends[:-1])
        pieces = [_HOLED if h.any() else p for p, h in zip(pieces, holes, strict=True)]
    return [p if ok else None for p, ok in zip(pieces, valid, strict=True)]


def _row(values: Mapping[str, Any]) -> base.RolloutRow | str:
    """The row, or the reason why it is invalid."""
    missing = [name for name in _NEEDED[:4] if values[name] is None]
    if missing:
        return f"{missing[0]} is missing"
    token, mask = values["token_ids"], values["mask"]
    if token.dtype.kind not in "iu" or mask.dtype != bool:
        return "a token id or a flag of the mask is null"
    per_token = {n[6:]: v for n, v in values.items() if n.startswith("token.") and v is not None}
    numbers = {n[9:]: v for n, v in values.items() if n.startswith("sequence.") and v is not None}
    return base.RolloutRow(
        token=token.astype(np.int64),
        mask=mask,
        logp_train=values["logp_train"].astype(np.float64),
        logp_infer=values["logp_infer"].astype(np.float64),
        prompt=int(np.argmax(mask)) if mask.any() else len(token),
        group=values["group"] or "",
        labels={n[6:]: v for n, v in values.items() if n.startswith("label.") and v},
        per_sequence={name: float(value) for name, value in numbers.items()},
        per_token={n: value.astype(_kept(f"token.{n}")) for n, value in per_token.items()},
    )
