# Traces over Arrow and Parquet: the same bits come back.

import io

import numpy as np
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from servanda.engines.arrow import from_bytes, from_table, to_bytes, to_table
from servanda.traces.trace import Trace

values = st.floats(allow_nan=True, allow_infinity=True)
sequences = st.lists(st.lists(st.tuples(st.integers(0, 1 << 40), values), max_size=4), max_size=5)


def trace(rows):
    length_S = np.array([len(r) for r in rows], dtype=np.int64)
    return Trace(
        sequence_S=np.arange(len(rows), dtype=np.int64) * 3,
        length_S=length_S,
        lost_S=length_S == 0,
        prompt_tokens_S=np.arange(len(rows), dtype=np.int64) + 1,
        token_N=np.array([t for r in rows for t, _ in r], dtype=np.int64),
        columns={"logp": np.array([v for r in rows for _, v in r], dtype=np.float64)},
        about={"path": "decode"},
    )


def bits(trace):
    fields = ("sequence_S", "length_S", "lost_S", "prompt_tokens_S", "token_N")
    arrays = [getattr(trace, name) for name in fields]
    arrays += [trace.columns[name] for name in sorted(trace.columns)]
    return [(a.dtype.str, a.tobytes()) for a in arrays], dict(trace.about)


@given(sequences)
def test_a_trace_survives_the_pipe_and_the_disk_bit_for_bit(rows):
    sent = trace(rows)
    assert bits(from_table(from_bytes(to_bytes(to_table(sent))))) == bits(sent)
    file = io.BytesIO()
    pq.write_table(to_table(sent), file)
    with pq.ParquetFile(file) as parquet:
        assert bits(from_table(parquet.read(use_threads=False))) == bits(sent)
