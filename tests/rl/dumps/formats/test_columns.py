# Columns of many sequences give what their rows give one by one: numbers, places and refusals.

import json
import tempfile
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.errors import ServandaError
from servanda.rl.dumps.formats import (
    base,
    json_arrays,
    jsonl,
    nemo,
    open_dump,
    parquet,
    prime_rl,
    rows,
)
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.steps.blocks import joined
from tests.drawn import examples
from tests.rl.dumps.formats.made import read
from tests.rl.dumps.formats.test_fuzz import FEW, LAYOUTS, broken
from tests.rl.dumps.formats.test_own import ragged, rewritten

LOGP = [-1.5, -0.25, -0.1, 0.0, float("nan"), None, -3.4028235e38, -65504.0, float("-inf")]
KINDS = {
    "token_ids": pa.list_(pa.int64()),
    "mask": pa.list_(pa.bool_()),
    "group": pa.string(),
    "label.env": pa.string(),
    "sequence.reward": pa.float64(),
    "token.advantage": pa.list_(pa.float64()),
    "token.removed": pa.list_(pa.float64()),
}


@st.composite
def sequence(draw, odd):
    """The columns of one sequence; with faults, if `odd`."""
    size = draw(st.integers(0 if odd else 1, 5))

    def column(good, bad=()):
        values = draw(st.lists(st.sampled_from(good), min_size=size, max_size=size))
        if odd and bad and not draw(st.integers(0, 9)):
            return draw(st.sampled_from([None, [*values, bad[0]], [bad[0]] * size]))
        return values

    return {
        "token_ids": column([0, 1, 2, 150_000], [-1, None]),
        "mask": column([True, True, False] if odd or draw(st.booleans()) else [False], [None]),
        "logp_train": column(LOGP[: 9 if odd else 3], [0.0, None]),
        "logp_infer": column(LOGP[: 9 if odd else 4], [0.0, None]),
        "group": draw(st.sampled_from(["", "a", "b", None])),
        "label.env": draw(st.sampled_from(["", "math", None])),
        "sequence.reward": draw(st.sampled_from([1.0, 0.0, float("nan"), None])),
        "token.advantage": column([0.5, -1.0], [None]),
        "token.removed": column([0.0, 1.0], [None]),
    }


@st.composite
def steps(draw):
    """Sequences of one to two steps, mostly sound, and the columns that their files have."""
    made = [
        draw(st.lists(sequence(odd=draw(st.booleans())), min_size=1, max_size=12)) for _ in "12"
    ]
    left = draw(st.sets(st.sampled_from(["label.env", "sequence.reward", "token.removed"])))
    logp = draw(st.sampled_from([pa.float32(), pa.float64(), pa.float16()]))
    return made[: draw(st.integers(1, 2))], left, logp


def outcome(folder):
    """The sequences of each step, the refusals, and how reading ended."""
    dump, chunks, ended = open_dump(folder), [], ""
    try:
        chunks.extend(dump.read())
    except ServandaError as error:
        ended = str(error)
    refused = [(r.reason, r.first, r.count) for r in dump.refused.values()]
    assert all(len(c.token_N) <= base.CHUNK_TOKENS or len(c) == 1 for c in chunks)
    of_steps = [joined([*part]) for _, part in groupby(chunks, lambda c: c.step)]
    return [plain(r) for r in of_steps], refused, dump.refused.accepted, dump.empty, ended


def plain(r):
    """Rollouts that can be compared, NaN being equal to itself; absent is NaN everywhere."""
    numbers = {**r.per_sequence, **r.per_token}
    numbers = {n: repr(v.tolist()) for n, v in sorted(numbers.items()) if not np.isnan(v).all()}
    labels = {n: texts for n, texts in sorted(r.labels.items()) if any(texts)}
    columns = (r.length_S, r.token_N, r.mask_N, r.logp_train_N, r.logp_infer_N)
    kinds = [column.dtype.str for column in columns]
    texts = [repr(column.tolist()) for column in columns]
    return r.step, texts, kinds, r.group_S, r.source_S, labels, numbers


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(steps(), st.sampled_from([1, 4, 9, 1 << 20]), st.integers(1, 40))
def test_columns_of_a_parquet_file_give_what_its_rows_give(made, chunk, batch):
    of_steps, left, logp = made
    kinds = {**KINDS, "logp_train": pa.list_(logp), "logp_infer": pa.list_(logp)}
    with tempfile.TemporaryDirectory() as folder:
        for step, many in enumerate(of_steps):
            names = [name for name in many[0] if name not in left]
            table = pa.table({n: pa.array([s[n] for s in many], kinds[n]) for n in names})
            table = table.replace_schema_metadata({b"servanda.rollouts": b"1"})
            path = Path(folder) / f"step_{step}.rank0.parquet"
            pq.write_table(table, path, row_group_size=5)
        with patch.object(parquet, "_rows", lambda *_: None):
            expected = outcome(folder)
        with (
            patch.object(base, "CHUNK_TOKENS", chunk),
            patch.object(parquet, "BATCH_TOKENS", batch),
            patch.object(rows, "BATCH_TOKENS", batch),
        ):
            assert outcome(folder) == expected


def test_a_sound_parquet_file_is_read_by_its_columns(tmp_path):
    """Otherwise the property above would compare rows with rows."""
    Writer(tmp_path).step(1, **ragged())
    with patch.object(parquet, "_one_by_one", side_effect=AssertionError):
        assert len(read(open_dump(tmp_path)).rows) == 4


def test_a_first_token_that_is_certain_does_not_split_a_chunk(tmp_path):
    zero = [0.0, -1.0]
    Writer(tmp_path).step(1, [[1, 2]] * 6, [[1, 1]] * 6, [zero] * 6, [zero] * 6)
    with patch.object(rows.Collector, "_add_row", side_effect=AssertionError):
        (chunk,) = open_dump(tmp_path).read()
    assert len(chunk) == 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_writer_keeps_the_type_of_logprobs_and_small_ids_in_four_bytes(tmp_path, dtype):
    logp = np.array([[-0.1, -0.2, np.nan]], dtype=dtype)
    path = Writer(tmp_path).step(1, [[1, 2, 3]], [[0, 1, 1]], logp, logp, advantages=[0.5])
    schema = pq.read_schema(path)
    kinds = {name: str(schema.field(name).type.value_type) for name in schema.names[:4]}
    logp_kind = {np.float32: "float", np.float64: "double"}[dtype]
    assert kinds == {
        "token_ids": "int32", "mask": "bool", "logp_train": logp_kind, "logp_infer": logp_kind,
    }  # fmt: skip
    (row,) = read(open_dump(tmp_path)).rows
    assert row["train"].dtype == np.float64
    np.testing.assert_array_equal(row["train"], logp[0].astype(np.float64))
    assert row["tokens"] == [1, 2, 3]
    assert row["advantage"].tolist() == [0.5] * 3


def test_ids_beyond_four_bytes_are_kept(tmp_path):
    Writer(tmp_path).step(1, [[1, 1 << 40]], [[1, 1]], [[-1.0, -1.0]], [[-1.0, -1.0]])
    assert read(open_dump(tmp_path)).rows[0]["tokens"] == [1, 1 << 40]


def test_files_of_earlier_versions_are_read(tmp_path):
    """They have int64, float64 and columns that can hold nulls."""
    path = Writer(tmp_path).step(1, **ragged())
    now = read(open_dump(tmp_path)).rows
    before = {name: kind for name, kind in KINDS.items() if name in ("token_ids", "mask")}
    before |= {name: pa.list_(pa.float64()) for name in ("logp_train", "logp_infer")}

    def change(table):
        fields = [pa.field(n, before.get(n, pa.string())) for n in table.schema.names]
        return table.cast(pa.schema(fields)).replace_schema_metadata(table.schema.metadata)

    rewritten(path, change)
    assert str(read(open_dump(tmp_path)).rows) == str(now)


@settings(max_examples=examples(150))
@given(broken(), st.sampled_from([1, 4, 9, 1 << 20]), st.integers(1, 40))
def test_plain_lines_give_what_they_give_one_by_one(case, chunk, batch):
    name, data = case
    with tempfile.TemporaryDirectory() as folder:
        LAYOUTS[name](folder, FEW).write_bytes(data)
        try:
            open_dump(folder)
        except ServandaError:
            return
        with patch.object({"nemo": nemo, "prime-rl": prime_rl}[name], "_packed", not_plain):
            expected = outcome(folder)
        with patch.object(base, "CHUNK_TOKENS", chunk), patch.object(jsonl, "BATCH_TOKENS", batch):
            assert outcome(folder) == expected


def not_plain(*args, **kwargs):
    raise ValueError


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("compact", [False, True])
def test_lines_as_frameworks_write_them_are_plain(tmp_path, name, compact):
    """Otherwise the property above would compare rows with rows."""
    path = LAYOUTS[name](tmp_path, FEW)
    if compact:
        path.write_bytes(path.read_bytes().replace(b", ", b",").replace(b": ", b":"))
    with patch.object(jsonl, "_values", side_effect=AssertionError):
        assert len(read(open_dump(tmp_path)).rows) == 3


def test_a_column_that_some_lines_lack_is_nan_in_them(tmp_path):
    path = LAYOUTS["prime-rl"](tmp_path, FEW)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["advantages"], lines[0]["env_name"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chunk,) = open_dump(tmp_path).read()
    known = ~np.isnan(chunk.per_token["advantage"])
    assert [known[chunk.sequence_N == at].all() for at in range(3)] == [True, False, True]
    assert chunk.labels["env"] == ("", FEW[1].env, FEW[2].env)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "[1.5]", "[1.5, 1.5]", "[1.5,1.5,1.5]", "[1.5, 1.5, 2.5]", "[null, null]", "[1, 1.0]",
        '"1.5, 1.5"', "1.5", "[1.5 , 1.5]", '["a", "a"]', "[[1], [1]]", "[1e999, 1e999]", "null",
        "[1.5, 1.5,1.5]", "[0.0, 1.0, 0.1]", "[0, 1, 1]", "[true, false]", '"0, 1"', "[0, 0]",
        "[2, 0]", "[0.0, 0.0, 1.0]", "[1.0, 1.0, 10.0]", "[0, 01]", "[-0.0, 0.0]", "[1]", "[0,2]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("of", ["floats", "flags"])
def test_a_list_that_is_not_decoded_is_the_list_that_is(of, text):
    quick = {"floats": json_arrays.floats_of, "flags": json_arrays.flags_of}[of]
    kind = {"floats": json_arrays.Floats, "flags": json_arrays.Flags}[of]
    slow = {"floats": json_arrays.packed_floats, "flags": json_arrays.packed_flags}[of]

    def outcome(packed):
        try:
            return packed()
        except (ValueError, msgspec.MsgspecError):
            return "refused"

    decoded = outcome(lambda: slow(msgspec.json.decode(text, type=kind)))
    assert outcome(lambda: quick(text.encode())) == decoded
