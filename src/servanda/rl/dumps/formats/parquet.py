# Servanda's own dump format, written by a hook if the framework writes no logprobs.
#
# One Parquet file per step and rank, one sequence per row.  Columns: token_ids, mask, logp_train,
# logp_infer (lists), group, and "label.<name>", "sequence.<name>", "token.<name>".  A missing value
# is null.  Routes are lists of lists of lists: of tokens, of layers, of experts.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import base
from servanda.rl.dumps.formats.rows import BATCH_TOKENS, Rows
from servanda.rl.dumps.formats.writer import KEY, SCHEMA, Writer, is_route, is_text
from servanda.rl.dumps.storage import Place, seekable
from servanda.traces.rollouts import Array

__all__ = ["Writer"]

_FILE = re.compile(r"[^/]*/step_(?P<step>\d+)\.rank(?P<rank>\d+)\.parquet")
_NEEDED = ("token_ids", "mask", "logp_train", "logp_infer", "group")
_AGAIN = "write the step again, or remove the file"
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
        for file in files:
            yield from _read(file, refused)


def _read(file: base.File, refused: base.Refused) -> Iterator[base.Placed | Rows]:
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
                    yield from _one_by_one(batch, places, refused)
                else:
                    yield rows
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
