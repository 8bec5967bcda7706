# Routes of both sides in Servanda's own dumps: what is written is read, and the rest is refused.

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.rl.dumps.formats import open_dump, parquet
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.steps.blocks import blocks
from servanda.traces.rollouts import REPLAYS, ROUTE, ROUTE_TRAIN, UNROUTED

LAYERS, PICKED = 3, 2
LENGTHS = (5, 1, 9)


def rows(rng, length):
    return rng.integers(0, 300, (length, LAYERS, PICKED)).astype(np.int64)


def written(folder, lengths=LENGTHS, missing=0, **more):
    """A step with routes of all tokens but the first `missing` of each sequence."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 99, n).tolist() for n in lengths]
    logp = [(-rng.random(n)).tolist() for n in lengths]
    routes = [rows(rng, max(n - missing, 0)) for n in lengths]
    given = {"routes": routes, "routes_train": routes[::-1][::-1]} | more
    path = Writer(folder).step(1, ids, [[1] * n for n in lengths], logp, logp, **given)
    return path, routes


def chunk_of(folder):
    (chunk,) = open_dump(folder).read()
    return chunk


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 3), st.booleans())
def test_routes_are_read_as_they_were_written(tmp_path_factory, lengths, missing, one_by_one):
    folder = tmp_path_factory.mktemp("dump")
    _, routes = written(folder, lengths, missing)
    way = {"side_effect": lambda *_: None} if one_by_one else {"wraps": parquet._rows}
    with patch.object(parquet, "_rows", **way):
        chunk = chunk_of(folder)
    for name in (ROUTE, ROUTE_TRAIN):
        found = np.split(chunk.per_token[name], np.cumsum(lengths)[:-1])
        for part, wanted in zip(found, routes, strict=True):
            none = len(part) - len(wanted)
            assert part.dtype == np.int16
            assert (part[:none] == UNROUTED).all()
            np.testing.assert_array_equal(part[none:], wanted)
    assert REPLAYS not in chunk.per_sequence


def test_padded_tensors_and_a_trainer_that_replays(tmp_path):
    rng = np.random.default_rng(2)
    routes = torch.from_numpy(rng.integers(0, 8, (2, 6, LAYERS, PICKED)))
    logp = -torch.rand(2, 6)
    Writer(tmp_path).step(
        1, torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6), logp, logp,
        lengths=[6, 4], routes=routes[:, :-1], routes_train=routes[:, :-1], replays=True,
    )  # fmt: skip
    chunk = chunk_of(tmp_path)
    assert chunk.per_sequence[REPLAYS].tolist() == [1, 1]
    expected = np.concatenate([routes[0, :5].numpy(), routes[1, :3].numpy()])
    np.testing.assert_array_equal(np.delete(chunk.per_token[ROUTE], [0, 6], axis=0), expected)
    assert (chunk.per_token[ROUTE][[0, 6]] == UNROUTED).all()


def test_a_batch_of_verl_is_written_by_the_line_of_the_how_to(tmp_path):
    """Prompts padded on the left, answers on the right; zeros in the padding and the last row."""
    prompts, answers, width = (3, 2), (4, 2), (3, 4)
    total = sum(width)
    ids, present = np.zeros((2, total), int), np.zeros((2, total), int)
    experts = np.zeros((2, total, LAYERS, PICKED), np.int16)
    fed = []
    for at, (p, n) in enumerate(zip(prompts, answers, strict=True)):
        span = slice(width[0] - p, width[0] + n)
        ids[at, span], present[at, span] = np.arange(1, p + n + 1), 1
        fed.append(rows(np.random.default_rng(at), p + n - 1))
        experts[at, span.start : span.stop - 1] = fed[-1]
    mask = present[:, width[0] :]
    Writer(tmp_path).step(
        1, torch.from_numpy(ids), torch.from_numpy(mask), -0.5 * mask, -0.6 * mask,
        present=torch.from_numpy(present), routes=torch.from_numpy(experts)[:, :-1],
    )  # fmt: skip
    found = np.split(chunk_of(tmp_path).per_token[ROUTE], [prompts[0] + answers[0]])
    for part, wanted in zip(found, fed, strict=True):
        assert (part[0] == UNROUTED).all()
        np.testing.assert_array_equal(part[1:], wanted)


WRONG = np.zeros((5, LAYERS, PICKED), dtype=np.int64)


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        ([WRONG[:, 0]], r"routes of sequence 0 has shape \[5, 2\] and type int64"),
        ([WRONG + 0.5], "type float64"),
        ([np.concatenate([WRONG, WRONG])], "has 10 rows, and the sequence 5 tokens"),
        ([WRONG - 2], "names expert -2"),
        ([WRONG + 40_000], "names expert 40000"),
        ([WRONG, WRONG], "1 sequences, and 2 of routes"),
    ],
)
def test_what_is_no_route_is_refused_with_its_place(tmp_path, routes, says):
    with pytest.raises(EvidenceError, match=says):
        written(tmp_path, [5], routes=routes)


def test_sequences_of_two_models_and_a_replay_of_nothing_are_refused(tmp_path):
    with pytest.raises(EvidenceError, match="has sequences of 2 shapes"):
        written(tmp_path, [5, 5], routes=[WRONG, WRONG[:, :2]])
    with pytest.raises(EvidenceError, match="the trainer replays routes, and there are none"):
        written(tmp_path, [5], routes=None, replays=True)


def test_a_file_with_routes_of_another_type_says_so(tmp_path):
    path, _ = written(tmp_path)
    table = pq.read_table(path)
    at = table.schema.get_field_index(f"token.{ROUTE}")
    flat = pa.array([[1.0] * n for n in LENGTHS])
    pq.write_table(table.set_column(at, f"token.{ROUTE}", flat), path)
    with pytest.raises(Exception, match=r"has token\.route as list<"):
        [*open_dump(tmp_path).read()]


def test_a_sequence_whose_route_is_null_has_none(tmp_path):
    path, routes = written(tmp_path)
    table = pq.read_table(path)
    at = table.schema.get_field_index(f"token.{ROUTE}")
    column = table.column(at).combine_chunks()
    holed = pa.array([None, *column.to_pylist()[1:]], column.type)
    field = pa.field(f"token.{ROUTE}", column.type)
    pq.write_table(table.set_column(at, field, holed), path)
    chunk = chunk_of(tmp_path)
    assert (chunk.per_token[ROUTE][: LENGTHS[0]] == UNROUTED).all()
    np.testing.assert_array_equal(chunk.per_token[ROUTE][-LENGTHS[-1] :], routes[-1])


def test_ranks_that_wrote_the_experts_of_two_models_are_refused(tmp_path):
    written(tmp_path, [5])
    ids, logp = [[1, 2, 3]], [[-0.1, -0.2, -0.3]]
    fewer = [np.zeros((3, LAYERS - 1, PICKED), dtype=np.int64)]
    Writer(tmp_path, rank=1).step(1, ids, [[1, 1, 1]], logp, logp, routes=fewer)
    with pytest.raises(EvidenceError, match="has 3 layers of 2 experts a token in one part of a"):
        [*blocks(open_dump(tmp_path).read())]
