# Traces as Arrow: the same columns travel over a worker's pipe and rest in Parquet.

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from servanda.traces.trace import Trace

_SEQUENCE = {
    "sequence": "sequence_S",
    "prompt_tokens": "prompt_tokens_S",
    "lost": "lost_S",
}
_ABOUT = b"servanda"


def to_table(trace: Trace) -> pa.Table:
    """One row a sequence; its tokens and their columns are lists."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(trace.length_S)]).astype(np.int32))
    columns = {name: pa.array(getattr(trace, field)) for name, field in _SEQUENCE.items()}
    columns["token_ids"] = pa.ListArray.from_arrays(offsets, pa.array(trace.token_N))
    for name, values in trace.columns.items():
        # from_pandas=False keeps a NaN a NaN: absent is not null, and neither is zero
        array = pa.array(np.asarray(values, dtype=np.float64), from_pandas=False)
        columns[name] = pa.ListArray.from_arrays(offsets, array)
    about = {_ABOUT: json.dumps(dict(trace.about), sort_keys=True).encode()}
    return pa.table(columns).replace_schema_metadata(about)


def from_table(table: pa.Table) -> Trace:
    """The inverse of to_table, bit for bit."""
    table = table.combine_chunks()
    lists = {
        name: _flat(table[name])
        for name in table.column_names
        if pa.types.is_list(table.schema.field(name).type)
    }
    lengths = table["token_ids"].chunk(0).value_lengths() if table.num_rows else pa.array([])
    return Trace(
        sequence_S=table["sequence"].to_numpy(),
        length_S=np.asarray(lengths, dtype=np.int64),
        lost_S=table["lost"].to_numpy().astype(bool),
        prompt_tokens_S=table["prompt_tokens"].to_numpy(),
        token_N=lists.pop("token_ids"),
        columns=lists,
        about=json.loads((table.schema.metadata or {}).get(_ABOUT, b"{}")),
    )


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    if not column.num_chunks:
        return np.zeros(0, np.int64 if pa.types.is_integer(column.type.value_type) else np.float64)
    return column.chunk(0).flatten().to_numpy(zero_copy_only=False)


def to_parquet(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue().to_pybytes()


def from_parquet(data: bytes) -> pa.Table:
    return pq.read_table(pa.BufferReader(data), use_threads=False)


def to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
