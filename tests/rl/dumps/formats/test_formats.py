# Every format tells the same of the same sequences, by any writer.

import gzip
import json

import numpy as np
import pytest

from servanda.errors import ContractError, EvidenceError
from servanda.rl.dumps.formats import FORMATS, base, open_dump
from servanda.rl.dumps.formats.parquet import Writer
from tests.rl.dumps.formats.made import (
    DATA,
    EXPECTED,
    Sequence,
    nemo,
    nemo_row,
    nemo_text,
    prime,
    prime_row,
    read,
    sequences,
)

WRITTEN = ["miles", "miles_cp2", "miles_cp4", "nemo", "prime_rl", "skyrl", "slime"]


@pytest.mark.parametrize("folder", WRITTEN)
def test_a_dump_of_the_frameworks_own_writer_is_read_to_the_last_bit(folder):
    if folder.startswith(("miles", "slime")):
        pytest.importorskip("torch")
    dump = open_dump(DATA / folder, unsafe_pickles=True)
    out = read(dump)
    assert out.steps == [3]
    assert not dump.refused
    assert len(out.rows) == len(EXPECTED)
    for row, expected in zip(out.rows, EXPECTED, strict=True):
        mask = np.array(expected.whole(expected.loss)) == 1
        assert row["tokens"] == expected.tokens
        assert row["mask"] == mask.tolist()
        assert (
            row["train"][mask].tolist() == np.array(expected.whole(expected.train))[mask].tolist()
        )
        assert (
            row["infer"][mask].tolist() == np.array(expected.whole(expected.infer))[mask].tolist()
        )
        assert np.isnan(row["infer"][~mask]).all()
        assert (row["advantage"][mask] == expected.advantage).all()
        if folder != "prime_rl":  # which has no rewards
            assert row["reward"] == expected.reward
        if folder in ("nemo", "prime_rl", "slime"):
            assert row["env"] == expected.env
    groups = [row["group"] for row in out.rows]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_every_format_has_a_name_and_says_what_it_looks_for():
    assert sorted(FORMATS) == ["nemo", "own", "prime-rl", "skyrl", "slime"]
    assert all(f.framework and f.looks_for for f in FORMATS.values())


def test_steps_come_in_their_order_and_not_in_that_of_their_names(tmp_path):
    for step in (10, 9, 100):
        nemo(tmp_path / "logs", step=step)
    dump = open_dump(tmp_path)
    assert dump.steps == (9, 10, 100)
    assert read(dump).steps == [9, 10, 100]
    assert dump.files[0].name == "train_data_step9.jsonl"


def test_progress_counts_the_bytes_of_steps(tmp_path):
    for step in (1, 2):
        nemo(tmp_path, step=step)
    dump, seen = open_dump(tmp_path), []
    assert len(list(dump.read(lambda done, total: seen.append((done, total))))) == 2
    assert seen == [(dump.bytes // 2, dump.bytes), (dump.bytes, dump.bytes)]


def test_a_file_may_be_named_and_may_be_zipped(tmp_path):
    path = nemo(tmp_path)
    assert len(read(open_dump(path)).rows) == 4
    zipped = tmp_path / "z" / (path.name + ".gz")
    zipped.parent.mkdir()
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert read(open_dump(zipped)).rows[0]["tokens"] == EXPECTED[0].tokens


def test_chunks_are_bounded_and_in_the_order_of_the_file(tmp_path, monkeypatch):
    many = sequences(40)
    nemo(tmp_path, many)
    whole = read(open_dump(tmp_path))
    monkeypatch.setattr(base, "CHUNK_TOKENS", 30)
    chunks = list(open_dump(tmp_path).read())
    assert len(chunks) > 5
    assert all(len(chunk.token_N) <= 30 for chunk in chunks)
    assert [s for chunk in chunks for s in chunk.source_S] == [r["source"] for r in whole.rows]


@pytest.mark.slow
def test_a_large_file_is_never_held(tmp_path):
    """50 MB of lines; the largest chunk is what a chunk may hold."""
    sequence = sequences(1, longest=3)[0]
    long = Sequence(
        prompt=sequence.prompt, response=[7] * 4000, loss=[1] * 4000, infer=[-1.5] * 4000,
        train=[-1.25] * 4000,
    )  # fmt: skip
    line = nemo_text([long])
    path = tmp_path / "train_data_step1.jsonl"
    with open(path, "w") as stream:
        for _ in range(50_000_000 // len(line)):
            stream.write(line)
    sizes = [len(chunk.token_N) for chunk in open_dump(tmp_path).read()]
    assert sum(sizes) > 1.5 * base.CHUNK_TOKENS
    assert max(sizes) <= base.CHUNK_TOKENS


# ---- NeMo-RL


@pytest.mark.parametrize("levels", [1, 2])
def test_nemo_values_may_be_nested_deeper(tmp_path, levels):
    row = nemo_row(EXPECTED[0], 11)
    for _ in range(levels):
        row = {name: [value] for name, value in row.items()}
    (tmp_path / "train_data_step3.jsonl").write_text(json.dumps(row) + "\n")
    (out,) = read(open_dump(tmp_path)).rows
    assert out["tokens"] == EXPECTED[0].tokens
    assert out["infer"][3:].tolist() == EXPECTED[0].infer
    assert (out["reward"], out["env"]) == (1.0, "math")


def nemo_one(folder, **changes):
    """The first of EXPECTED, as a row of NeMo-RL with changes."""
    nemo(folder, EXPECTED[:1], **changes)
    (row,) = read(open_dump(folder)).rows
    return row


def test_nemo_leaves_absent_what_nothing_scored_and_nan(tmp_path):
    prev = nemo_row(EXPECTED[0], 11)["prev_logprobs"]
    prev[0][4] = float("nan")  # no broken line
    row = nemo_one(tmp_path, prev_logprobs=prev)
    assert np.isnan(row["train"][[0, 4]]).all()
    assert row["train"][1:3].tolist() == [-2.5, -2.5]
    assert row["train"][5] == EXPECTED[0].train[2]
    assert np.isnan(row["infer"][:3]).all()


@pytest.mark.parametrize(("flag", "trained"), [([0.0], False), (None, True)])
def test_nemo_sequences_that_the_loss_leaves_out_have_no_mask(tmp_path, flag, trained):
    row = nemo_one(tmp_path, sample_loss_mask=flag)
    assert any(row["mask"]) is trained
    assert row["infer"][3:].tolist() == EXPECTED[0].infer


def test_nemo_takes_the_reward_that_was_trained_on_and_one_advantage_for_every_token(tmp_path):
    row = nemo_one(tmp_path, rewards=[7.0], filtered_rewards=[0.25], advantages=[[0.75]])
    assert row["reward"] == 0.25
    assert row["advantage"].tolist() == [0.75] * len(EXPECTED[0].tokens)


def test_nemo_columns_that_nobody_reads_are_named_once(tmp_path):
    nemo(tmp_path, EXPECTED, teacher=[1], colour=["red"])
    dump = open_dump(tmp_path)
    assert dump.about["notes"] == "columns that are not read: colour, teacher"
    assert dump.about["framework"] == "NeMo-RL"
    assert len(read(dump).rows) == 4


WIDTH = 11
GOOD = nemo_row(EXPECTED[0], WIDTH)
REFUSED = [
    ({"prev_logprobs": [[0.0] * WIDTH]}, "the trainer's logprobs are all zero"),
    ({"prev_logprobs": [[-0.0] * WIDTH]}, "the trainer's logprobs are all zero"),
    ({"generation_logprobs": [[0.0] * WIDTH]}, "the sampler's logprobs are all zero"),
    ({"prev_logprobs": [[float("nan")] * WIDTH]}, "none of its trained tokens has both logprobs"),
    ({"prev_logprobs": [[-1.0] * (WIDTH - 1)]}, "are not equally long"),
    ({"token_loss_mask": [[1.0] * (WIDTH + 1)]}, "are not equally long"),
    ({"advantages": [[1.0] * 5]}, "advantages and token_ids are not equally long"),
    ({"token_ids": [[-1, *GOOD["token_ids"][0][1:]]]}, "a token id is negative"),
    ({"token_ids": [[1.5, *GOOD["token_ids"][0][1:]]]}, "token_ids are not integers"),
    ({"token_ids": [[1 << 70, *GOOD["token_ids"][0][1:]]]}, "token_ids are not integers"),
    ({"token_ids": [["1", *GOOD["token_ids"][0][1:]]]}, "token_ids are not integers"),
    ({"prev_logprobs": [["-1"] * WIDTH]}, "prev_logprobs are not numbers"),
    ({"prev_logprobs": ...}, "prev_logprobs is missing"),
    ({"generation_logprobs": None}, "generation_logprobs is missing"),
    ({"token_loss_mask": [[0.5] * WIDTH]}, "token_loss_mask is neither 0 nor 1"),
    ({"sample_loss_mask": [0.3]}, "a loss mask is neither 0 nor 1"),
    ({"input_lengths": [0]}, "input_lengths is not between 1 and the number of token ids"),
    ({"input_lengths": [WIDTH + 1]}, "input_lengths is not between 1 and the number"),
    ({"input_lengths": [8.0]}, "input_lengths is not an integer"),
    ({"input_lengths": ...}, "input_lengths is missing"),
    ({"rewards": ["high"]}, "rewards is not a number"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=lambda v: str(v)[:60])
def test_a_row_that_cannot_be_trusted_is_refused_alone_and_counted(tmp_path, changes, reason):
    bad = {k: v for k, v in {**GOOD, **changes}.items() if v is not ...}
    lines = [GOOD, bad, GOOD]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "train_data_step3.jsonl").write_text(text)
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 2
    (refusal,) = dump.refused.values()
    assert reason in refusal.reason
    assert (refusal.count, refusal.first) == (1, "train_data_step3.jsonl:2")
    assert dump.refused.rows == 1


def test_a_broken_line_is_counted_with_its_place(tmp_path):
    path = nemo(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1:1] = [b"{nope}\n", b"\xff\xfe\n", b"[1]\n", b"\n", b"[" * 100_000 + b"\n"]
    path.write_bytes(b"".join(lines))
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 4
    assert str(dump.refused) == "4 x the line is no JSON (first: train_data_step3.jsonl:2)"


def test_a_file_that_is_cut_off_is_said_when_all_was_read(tmp_path):
    path = nemo(tmp_path)
    path.write_bytes(path.read_bytes().rstrip())  # a last line without its end is whole
    assert len(read(open_dump(tmp_path)).rows) == 4
    path.write_bytes(path.read_bytes()[:-200])
    dump, got = open_dump(tmp_path), []
    with pytest.raises(EvidenceError) as error:
        got.extend(dump.read())
    assert len(got[0]) == 3
    assert error.value.exit_code == 4
    assert str(error.value) == (
        "train_data_step3.jsonl:4: the file ends in the middle of a row; 3 sequences of "
        f"{tmp_path} were read, refused: 1 x the file ends in the middle of a row "
        "(first: train_data_step3.jsonl:4)\n"
        "  hint: wait until it is written, copy it again, or leave the step out: --steps"
    )


def test_a_zipped_file_that_is_cut_off_is_said(tmp_path):
    data = gzip.compress(nemo_text(sequences(200)).encode())
    (tmp_path / "train_data_step3.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(EvidenceError, match="the file ends in the middle of a row"):
        read(open_dump(tmp_path))


def test_a_dump_of_which_nothing_can_be_used_is_no_evidence(tmp_path):
    sure, unsure = [[0.0] * WIDTH], [[-2.0] * WIDTH]
    nemo(tmp_path, prev_logprobs=sure, generation_logprobs=unsure, token_ids=[[1] * WIDTH])
    with pytest.raises(EvidenceError) as error:
        read(open_dump(tmp_path))
    assert str(error.value).startswith(f"no sequence of {tmp_path} can be used: 4 x ")
    assert "first: train_data_step3.jsonl:1" in str(error.value)


@pytest.mark.parametrize("bad", [b"[" * 100_000 + b"\n", b"\xff\xfe{\n", b"{}\n"])
def test_a_first_row_that_cannot_be_read_refuses_itself_alone(tmp_path, bad):
    path = nemo(tmp_path, sequences(5))
    path.write_bytes(bad + path.read_bytes())
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 5
    assert [r.first for r in dump.refused.values()] == ["train_data_step3.jsonl:1"]


def test_a_first_step_without_logprobs_refuses_itself_alone(tmp_path):
    """Distillation writes files of the same name, and no logprobs."""
    nemo(tmp_path, sequences(5), step=0, prev_logprobs=..., generation_logprobs=...)
    nemo(tmp_path, sequences(5), step=1)
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 5
    assert dump.empty == {0: "train_data_step0.jsonl"}


def test_an_empty_file_among_others_is_remembered(tmp_path):
    for step in (1, 3):
        nemo(tmp_path, step=step)
    (tmp_path / "train_data_step2.jsonl").write_text("")
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 8
    assert dump.empty == {2: "train_data_step2.jsonl"}


def test_a_mask_may_be_true_and_false(tmp_path):
    nemo(tmp_path / "a")
    rows = [json.loads(line) for line in nemo_text(EXPECTED).splitlines()]
    for row in rows:
        row["token_loss_mask"] = [[bool(v) for v in row["token_loss_mask"][0]]]
        row["sample_loss_mask"] = [True]
    (tmp_path / "b").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "b" / "train_data_step3.jsonl").write_text(text)
    numbers, flags = (read(open_dump(tmp_path / name)).rows for name in "ab")
    assert [row["mask"] for row in numbers] == [row["mask"] for row in flags]


@pytest.mark.parametrize("number", [-1e308, -3.4028235e38, -65504.0])
@pytest.mark.parametrize("column", ["generation_logprobs", "prev_logprobs"])
def test_the_smallest_number_of_a_float_type_is_no_logprob(tmp_path, column, number):
    """It stands for "no probability", and a sum over it would be of it alone."""
    row = nemo_row(EXPECTED[0], len(EXPECTED[0].tokens))
    at = row["token_loss_mask"][0].index(1.0)
    row[column][0][at] = number
    (tmp_path / "train_data_step3.jsonl").write_text(json.dumps(row) + "\n")
    side = {"generation_logprobs": "infer", "prev_logprobs": "train"}[column]
    (found,) = read(open_dump(tmp_path)).rows
    assert found[side][at] == -np.inf


# ---- prime-rl


def test_prime_steps_without_their_marker_are_left_out_and_said(tmp_path):
    prime(tmp_path, step=2, stable=False)
    with pytest.raises(ContractError, match="no step has its STABLE marker"):
        open_dump(tmp_path)
    prime(tmp_path, step=1)
    dump = open_dump(tmp_path)
    assert dump.steps == (1,)
    assert dump.about["notes"] == "steps without STABLE, left out: 2"


def test_prime_version_2_and_later_are_read_and_said(tmp_path):
    tokens = len(EXPECTED[0].tokens)
    prime(tmp_path, EXPECTED[:1], schema_version=2, sample_id="a", temperatures=[0.7] * tokens)
    dump = open_dump(tmp_path)
    assert dump.about["version"] == "2"
    assert "notes" not in dump.about
    assert read(dump).rows[0]["temperature"].tolist() == [0.7] * tokens
    prime(tmp_path, EXPECTED[:1], schema_version=9)
    assert open_dump(tmp_path).about["notes"] == "schema_version 9 is not known; read as 2"


def test_prime_null_is_absent(tmp_path):
    tokens = EXPECTED[0].whole(EXPECTED[0].infer)
    tokens[4] = None
    prime(tmp_path, EXPECTED[:1], inference_logprobs=tokens)
    (row,) = read(open_dump(tmp_path)).rows
    assert np.isnan(row["infer"][4])
    assert row["infer"][5] == EXPECTED[0].infer[2]
    assert np.isnan(row["train"][0])  # the first token of a packed line follows another sequence


def test_prime_ranks_are_those_of_the_trainer_in_their_order(tmp_path):
    for rank in (10, 2):
        prime(tmp_path, EXPECTED[:1], rank=rank)
    assert [row["rank"] for row in read(open_dump(tmp_path)).rows] == ["2", "10"]


def test_prime_tokens_that_no_policy_drew_have_no_mask(tmp_path):
    whole = EXPECTED[0].whole
    prime(tmp_path, EXPECTED[:1], rl_weights=whole([1.0, 1.0, 0.0, 0.0, 1.0]))
    (row,) = read(open_dump(tmp_path)).rows
    assert row["mask"] == whole([True, True, False, False, True], False)
    prime(tmp_path, EXPECTED[:1], rl_weights=whole([0.0] * 5), ref_kl_weights=whole([1.0] * 5))
    assert sum(read(open_dump(tmp_path)).rows[0]["mask"]) == 5


def test_prime_lines_that_are_packed_come_apart_where_positions_begin_again(tmp_path):
    one, other = prime_row(EXPECTED[0]), prime_row(EXPECTED[1])
    both = {
        name: value + other[name] if isinstance(value, list) else value
        for name, value in one.items()
    }
    path = prime(tmp_path)
    path.write_text(json.dumps(both) + "\n")
    rows = read(open_dump(tmp_path)).rows
    assert [row["tokens"] for row in rows] == [EXPECTED[0].tokens, EXPECTED[1].tokens]
    assert [row["source"].partition(":")[2] for row in rows] == ["1.1", "1.2"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_mask": [True]}, "are not equally long"),
        ({"token_ids": ["a"] * 8}, "token_ids are not integers"),
        ({"trainer_logprobs": ...}, "trainer_logprobs is missing"),
        ({"trainer_logprobs": [0.0] * 8}, "the trainer's logprobs are all zero"),
        ({"inference_logprobs": [None] * 8}, "none of its trained tokens has both logprobs"),
        ({"position_ids": [0]}, "position_ids and token_ids are not equally long"),
        ({"rl_weights": [1.0]}, "rl_weights and loss_mask are not equally long"),
        ({"ref_kl_weights": [1.0]}, "ref_kl_weights and loss_mask are not equally long"),
        ({"env_name": 7}, "env_name is no text"),
        ({"loss_mask": [2] * 8}, "loss_mask is neither 0 nor 1 everywhere"),
    ],
)
def test_prime_rows_that_cannot_be_trusted_are_refused(tmp_path, changes, reason):
    path = prime(tmp_path, EXPECTED[:1])
    good, bad = path.read_text(), {**prime_row(EXPECTED[0]), **changes}
    bad = {k: v for k, v in bad.items() if v is not ...}
    path.write_text(good + json.dumps(bad) + "\n")
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 1
    (refusal,) = dump.refused.values()
    assert reason in refusal.reason
    assert refusal.first == "token_exports/step_3/rank_0.jsonl:2"


# ---- which dump


def test_a_folder_without_a_dump_says_what_was_looked_for_and_seen(tmp_path):
    for name in ("metrics.jsonl", "log.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ContractError) as error:
        open_dump(tmp_path)
    assert str(error.value) == (
        f"'{tmp_path}' holds no dump; looked for train_data_step<N>.jsonl (NeMo-RL); "
        "step_<N>.rank<R>.parquet (Servanda); "
        "token_exports/step_<N>/rank_<R>.jsonl (prime-rl); "
        "dumped_data/global_step_<N>_training_input.pkl (SkyRL); "
        "train_data/<N>.pt (slime or miles); it holds log.txt, metrics.jsonl\n"
        "  hint: TRL and verl write no logprobs to disk by default: docs/how-to/dumps.md has the "
        "lines that do"
    )
    assert error.value.exit_code == 2


WRITTEN_BY = {  # a file, its first line, the framework, and a word of the next move
    "rollouts/12.jsonl": ("verl", {"input": "", "output": "", "score": 1, "step": 12}, "VERL"),
    "out/completions.jsonl": (
        "ms-swift",
        {"step": ["1"], "prompt": [""], "completion": [""], "advantages": [0.5]},
        "rollout_per_token_logps",
    ),
    "completions/completions_00003.parquet": ("TRL", None, "Dumping"),
    "rollout/7/a1.jsonl": (
        "AReaL",
        {"task_id": 1, "head_version": 6, "tail_version": 7, "completion": ""},
        "prox_logp",
    ),
    "dump/rollout_dump_data.step_3.jsonl": ("ROLL", {"scores": [1.0]}, "infer_logprobs"),
    "capture/sample.jsonl": ("tinker-cookbook", {"kind": "sample"}, "forward_backward"),
    "episodes/5.json": ("rLLM", None, "docs/how-to/verl.md"),
    "policy_loss_debug/rank_0_call_1.pt": ("miles", None, "--dump-details"),
}


@pytest.mark.parametrize("name", WRITTEN_BY)
def test_files_of_a_framework_without_both_logprobs_are_named(tmp_path, name):
    framework, line, move = WRITTEN_BY[name]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("" if line is None else json.dumps(line) + "\n")
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    for opened in (tmp_path, path):
        with pytest.raises(ContractError) as error:
            open_dump(opened)
        said, hint = str(error.value).split("\n  hint: ")
        assert (
            f"{name if opened is tmp_path else path.name} looks like a file of {framework}" in said
        )
        assert move in hint


def test_a_newest_step_that_is_being_written_is_left_out_and_said(tmp_path):
    for step in (1, 2, 3):
        path = nemo(tmp_path, step=step)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    dump = open_dump(tmp_path).finished()
    assert dump.steps == (1, 2)
    assert dump.about["notes"].endswith(
        "step 3 is left out: train_data_step3.jsonl ends in the middle of a row (being written?)"
    )
    read(dump)
    path.write_bytes(whole[:-1])  # whole, without the last end of a line
    assert open_dump(tmp_path).finished().steps == (1, 2, 3)
    path.write_bytes(whole[:-40])
    with pytest.raises(EvidenceError, match="ends in the middle of a row"):
        read(open_dump(path).finished())  # it was asked for


def test_an_earlier_step_that_is_cut_off_is_refused(tmp_path):
    for step in (1, 2):
        nemo(tmp_path, step=step)
    first = tmp_path / "train_data_step1.jsonl"
    first.write_bytes(first.read_bytes()[:-40])
    with pytest.raises(EvidenceError, match="ends in the middle of a row"):
        read(open_dump(tmp_path).finished())


def test_two_formats_in_a_folder_want_one_to_be_named(tmp_path):
    nemo(tmp_path)
    prime(tmp_path)
    with pytest.raises(ContractError) as error:
        open_dump(tmp_path)
    assert str(error.value) == (
        f"'{tmp_path}' holds dumps of more than one format: 1 of nemo, 1 of prime-rl\n"
        f"  hint: name one: servanda check {tmp_path} --as nemo"
    )
    assert open_dump(tmp_path, "prime-rl").format == "prime-rl"
    nemo(tmp_path / "other")
    Writer(tmp_path / "other").step(1, [[1, 2]], [[0, 1]], [[-1.0, -1.0]], [[-1.0, -1.0]])
    with pytest.raises(ContractError, match="1 of nemo, 1 of own"):
        open_dump(tmp_path / "other")


def test_two_runs_in_a_folder_want_one_to_be_named(tmp_path):
    nemo(tmp_path / "exp_1")
    nemo(tmp_path / "exp_2")
    with pytest.raises(ContractError) as error:
        open_dump(tmp_path)
    assert str(error.value) == (
        "step 3 is there twice: exp_1/train_data_step3.jsonl and exp_2/train_data_step3.jsonl\n"
        "  hint: name the folder of one run"
    )


def test_a_dump_without_logprobs_says_what_is_missing(tmp_path):
    nemo(tmp_path, prev_logprobs=..., token_ids=...)
    with pytest.raises(ContractError) as error:
        open_dump(tmp_path)
    assert "train_data_step3.jsonl has no token_ids, prev_logprobs" in str(error.value)


def test_a_format_and_a_folder_that_are_not_there_are_said(tmp_path):
    with pytest.raises(ContractError, match="there is no dump format 'nemp'") as error:
        open_dump(tmp_path, "nemp")
    assert "did you mean 'nemo'?" in str(error.value)
    with pytest.raises(ContractError, match=r"there is no '.*nowhere'"):
        open_dump(tmp_path / "nowhere")
