# The Writer: what a hook in a trainer hands over comes back as it was, whatever its padding.

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.formats.parquet import Writer
from tests.rl.dumps.formats.made import EXPECTED, read


def ragged():
    """Arguments of Writer.step, as lists of one list a sequence."""
    nan = float("nan")
    return {
        "token_ids": [s.tokens for s in EXPECTED],
        "mask": [s.whole(s.loss, 0) for s in EXPECTED],
        "logp_train": [s.whole(s.train, nan) for s in EXPECTED],
        "logp_infer": [s.whole(s.infer, nan) for s in EXPECTED],
    }


def told(folder):
    return read(open_dump(folder)).rows


def holds(rows):
    for row, expected in zip(rows, EXPECTED, strict=True):
        at = len(expected.prompt)
        assert row["tokens"] == expected.tokens
        assert row["mask"] == [m == 1 for m in expected.whole(expected.loss)]
        assert row["train"][at:].tolist() == expected.train
        assert row["infer"][at:].tolist() == expected.infer
        assert np.isnan(row["train"][:at]).all()


def test_lists_come_back_as_they_were(tmp_path):
    path = Writer(tmp_path).step(14, **ragged())
    assert path.name == "step_000014.rank0.parquet"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    holds(told(tmp_path))
    dump = open_dump(tmp_path)
    assert (dump.format, dump.steps, dump.about["version"]) == ("own", (14,), "1")


def padded(columns, width, left=False):
    """[S, T] of lists; cells without a token are zero, as trainers have them."""
    rows = []
    for values in columns:
        fill = [0] * (width - len(values))
        rows.append([*fill, *values] if left else [*values, *fill])
    return np.array(rows)


def test_arrays_padded_on_the_right_have_lengths(tmp_path):
    arrays = {name: padded(column, 10) for name, column in ragged().items()}
    Writer(tmp_path).step(1, **arrays, lengths=np.array([len(s.tokens) for s in EXPECTED]))
    holds(told(tmp_path))


def verl(xp):
    """Prompts padded on the left, responses on the right, columns over the responses alone."""
    prompts = padded([s.prompt for s in EXPECTED], 4, left=True)
    responses = padded([s.response for s in EXPECTED], 7)
    real = np.concatenate(
        [
            padded([[1] * len(s.prompt) for s in EXPECTED], 4, left=True),
            padded([[1] * len(s.response) for s in EXPECTED], 7),
        ],
        axis=1,
    )
    return {
        "token_ids": xp(np.concatenate([prompts, responses], axis=1)),
        "mask": xp(padded([s.loss for s in EXPECTED], 7)),
        "logp_train": xp(padded([s.train for s in EXPECTED], 7).astype(np.float32)),
        "logp_infer": xp(padded([s.infer for s in EXPECTED], 7).astype(np.float32)),
        "present": xp(real),
    }


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_columns_of_the_response_speak_of_the_last_tokens(tmp_path, kind):
    xp = np.array if kind == "array" else pytest.importorskip("torch").tensor
    Writer(tmp_path).step(1, **verl(xp))
    holds(told(tmp_path))


def test_bfloat16_of_torch_is_taken_as_it_is(tmp_path):
    torch = pytest.importorskip("torch")
    coarse = torch.tensor([[-0.3, -1.7]], dtype=torch.bfloat16, requires_grad=True)
    Writer(tmp_path).step(1, [[1, 2]], [[1, 1]], coarse, [[-0.3, -1.7]])
    assert told(tmp_path)[0]["train"].tolist() == coarse[0].tolist()


def test_groups_labels_and_numbers_come_with_their_sequences(tmp_path):
    Writer(tmp_path, rank=1).step(
        2,
        **ragged(),
        groups=[7, 7, "b", "b"],
        labels={"env": ["math", "math", "tools", ""]},
        staleness=[0, 1, 2, 3],
        advantages=[[s.advantage] * len(s.response) for s in EXPECTED],
        rewards=np.array([1.0, 0.0, 1.0, float("nan")]),
    )
    rows = told(tmp_path)
    assert [row["group"] for row in rows] == ["7", "7", "b", "b"]
    assert [row["env"] for row in rows] == ["math", "math", "tools", ""]
    assert [set(row["staleness"].tolist()) for row in rows] == [{0.0}, {1.0}, {2.0}, {3.0}]
    assert rows[2]["advantage"][2:].tolist() == [0.25] * 6
    assert np.isnan(rows[2]["advantage"][:2]).all()
    assert [row["reward"] for row in rows[:3]] == [1.0, 0.0, 1.0]
    assert np.isnan(rows[3]["reward"])
    assert rows[0]["source"] == "step_000002.rank1.parquet:1"


def test_ranks_write_their_own_files_and_a_step_is_read_once(tmp_path):
    for rank in (0, 1):
        Writer(tmp_path, rank=rank).step(1, **ragged())
    Writer(tmp_path, rank=1).step(1, **ragged())
    dump = open_dump(tmp_path)
    assert [p.name for p in dump.files] == [f"step_000001.rank{r}.parquet" for r in (0, 1)]
    labels = [row["trainer_rank"] for row in read(dump).rows]
    assert labels == ["0"] * 4 + ["1"] * 4


def test_a_file_that_is_being_written_is_not_seen(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    seen = []

    def stopped(table, path, **kwargs):
        path.write_bytes(b"PAR1")
        seen.append(path.name)
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", stopped)
    with pytest.raises(OSError, match="disk full"):
        writer.step(1, **ragged())
    assert seen
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask": [[1]]}, "4 sequences, and 1 of mask"),
        ({"token_ids": [[1.5]] * 4}, "token_ids are not integers"),
        ({"token_ids": [[-1] * 8, [1] * 6, [1] * 8, [1] * 4]}, "a token id is negative"),
        ({"logp_train": [[0.0] * 9] * 4}, "logp_train of sequence 0 has shape [9]"),
        ({"logp_train": [-1.0] * 4}, "logp_train of sequence 0 has shape []"),
        ({"mask": [[2] * 4] * 4}, "a mask is neither 0 nor 1 everywhere"),
        ({"groups": ["a"]}, "4 sequences, and 1 of groups"),
        ({"labels": {"env": ["a"]}}, "4 sequences, and 1 of labels['env']"),
        ({"labels": {"My env": ["a"] * 4}}, "a label is named 'My env'"),
        ({"rewards": [1.0]}, "4 sequences, and 1 rewards"),
        ({"lengths": [1]}, "4 sequences, and 1 of lengths"),
        ({"lengths": [1] * 4, "present": [[1]] * 4}, "lengths and present say the same"),
        ({"present": [[1]] * 4}, "present has 1 cells of 8 tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_shapes_that_do_not_fit_are_said(tmp_path, changes, text):
    with pytest.raises(EvidenceError) as error:
        Writer(tmp_path).step(1, **{**ragged(), **changes})
    assert text in str(error.value)
    assert not list(tmp_path.iterdir())


def rewritten(path, change):
    table = pq.read_table(path)
    about = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(about), path)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("token_ids", None, "token_ids is missing"),
        ("logp_train", [-1.0], "the trainer's logprobs and the token ids are not equally long"),
        ("token_ids", [1, None] * 4, "a token id or a flag of the mask is null"),
        ("mask", [True, None] * 4, "a token id or a flag of the mask is null"),
        ("token_ids", [-5] * 8, "a token id is negative"),
        ("logp_infer", [None] * 8, "none of its trained tokens has both logprobs"),
        ("token_ids", [], "are not equally long"),
    ],
)
def test_a_row_that_another_writer_got_wrong_is_refused(tmp_path, column, value, reason):
    path = Writer(tmp_path).step(1, **ragged())

    def change(table):
        at = table.schema.get_field_index(column)
        values = table.column(column).to_pylist()
        values[0] = value
        kind = pa.list_(table.schema.field(column).type.value_type)  # another writer's has nulls
        return table.set_column(at, column, pa.array(values, kind))

    rewritten(path, change)
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 3
    (refusal,) = dump.refused.values()
    assert reason in refusal.reason
    assert refusal.first == "step_000001.rank0.parquet:1"


def test_columns_of_a_later_writer_are_left_and_another_schema_is_not_guessed_at(tmp_path):
    path = Writer(tmp_path).step(1, **ragged())
    rewritten(path, lambda table: table.append_column("extra", pa.array([1, 2, 3, 4])))
    dump = open_dump(tmp_path)
    assert dump.about["notes"] == "columns that are not read: extra"
    assert len(read(dump).rows) == 4
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"servanda.rollouts": b"9"}), path)
    with pytest.raises(ContractError, match="has schema '9', and not '1'"):
        open_dump(tmp_path)


def test_a_file_that_is_no_parquet_is_said(tmp_path):
    path = Writer(tmp_path).step(1, **ragged())
    Writer(tmp_path).step(2, **ragged())
    later = tmp_path / "step_000002.rank0.parquet"
    later.write_bytes(later.read_bytes()[:-40])
    with pytest.raises(MeasurementError, match=r"step_000002.rank0.parquet is no Parquet file"):
        read(open_dump(tmp_path))
    path.write_bytes(b"PAR1")
    with pytest.raises(ContractError, match=r"step_000001.rank0.parquet is no Parquet file"):
        open_dump(tmp_path)


ONE = ([[1, 2, 3]], [[1, 1, 1]], [[-1.0, -1.0, -1.0]], [[-1.0, -1.0, -1.0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "the step is -1"),
        ({"step": 1.5}, "the step is 1.5"),
        ({"logp_train": None}, "logp_train is neither [S, T] nor one list a sequence"),
        ({"logp_infer": -1.0}, "logp_infer is neither [S, T] nor one list a sequence"),
        ({"logp_train": [["a", "b", "c"]]}, "logp_train of sequence 0 holds what is no number"),
        ({"lengths": [3, 2]}, "1 sequences, and 2 of lengths"),
        ({"lengths": [4]}, "lengths[0] is 4, of 3 tokens"),
        ({"lengths": [-1]}, "lengths[0] is -1, of 3 tokens"),
    ],
)
def test_what_would_be_written_wrongly_is_refused(tmp_path, changes, message):
    names = ("token_ids", "mask", "logp_train", "logp_infer")
    given = {"step": 1, **dict(zip(names, ONE, strict=True)), **changes}
    with pytest.raises(EvidenceError) as error:
        Writer(tmp_path).step(**given)
    assert str(error.value).startswith(message)
    assert not [*tmp_path.iterdir()]


def test_groups_that_are_a_tensor_are_named_by_their_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    Writer(tmp_path).step(torch.tensor(3), *ONE, groups=torch.tensor([7]))
    Writer(tmp_path).step(4, *ONE, groups=[torch.tensor(8)])
    assert [chunk.group_S for chunk in open_dump(tmp_path).read()] == [("7",), ("8",)]


def test_what_the_loss_used_and_the_versions_come_back(tmp_path):
    given = {
        "token_ids": [[5, 6, 7], [5, 8]],
        "mask": [[1, 1], [1]],
        "logp_train": [[-1.0, -0.5], [-2.0]],
        "logp_infer": [[-1.1, -0.5], [-1.9]],
    }
    Writer(tmp_path).step(
        9,
        **given,
        loss_weights=[[1.0, 0.5], [0.0]],
        loss_mask=[[1, 0], [1]],
        versions=[[8, 9], [7]],
    )
    (rollouts,) = open_dump(tmp_path).read()

    columns = {
        name: column[rollouts.mask_N].tolist() for name, column in rollouts.per_token.items()
    }
    assert columns == {
        "loss_weight": [1.0, 0.5, 0.0],
        "loss_mask": [1.0, 0.0, 1.0],
        "weight_version": [8.0, 9.0, 7.0],
        "staleness": [1.0, 0.0, 2.0],
    }
    with pytest.raises(EvidenceError, match="a token of step 9 was sampled by version 12"):
        Writer(tmp_path).step(9, **given, versions=[[8, 12], [7]])
