# Hostile pickles never run: the file that they would write does not appear.

import collections
import io
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl.dumps.checks import Soundness
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.formats.base import File
from servanda.rl.dumps.formats.skyrl import _received
from tests.rl.dumps.formats.made import DATA, read, sky_bytes


def sky(folder, data):
    inside = folder / "dumped_data"
    inside.mkdir(exist_ok=True)
    path = inside / "global_step_3_training_input.pkl"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return path


class Calls:
    """Pickled, a call of that function with those arguments."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_pickle_is_not_read_unless_asked_for(tmp_path):
    sky(tmp_path, b"")
    with pytest.raises(ContractError) as error:
        open_dump(tmp_path)
    assert str(error.value) == (
        "dumped_data/global_step_3_training_input.pkl is a Python pickle (SkyRL), which can hold "
        f"a program\n  hint: if you trust who wrote it: servanda check {tmp_path} "
        "--unsafe-pickles (it is read in a process of its own, and anything but tensors and "
        "plain data is refused)"
    )


def memo_bomb():
    """One opcode that asks for a memo of 2^31 entries."""
    return b"\x80\x04K\x01" + b"r" + struct.pack("<I", (1 << 31) - 1) + b"."


def tuples(depth):
    """A tuple of a tuple of a tuple."""
    return b"\x80\x04)" + b"\x85" * depth + b"."


def hostile(mark):
    shell = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": (Calls(os.system, shell), "it asks for posix.system"),
        "eval": (Calls(eval, code), "it asks for builtins.eval"),
        "exec": (Calls(exec, code), "it asks for builtins.exec"),
        "getattr": (Calls(getattr, "os", "upper"), "it asks for builtins.getattr"),
        "nested": ({"batch_dict": {"sequences": [Calls(os.system, shell)]}}, "posix.system"),
        "metadata": ({"batch_dict": {}, "metadata": Calls(os.system, shell)}, "posix.system"),
        "local module": (b"c" + b"evil\nrun\n)R.", "it asks for evil.run"),
        "old opcode": (b"(S'" + shell.encode() + b"'\nios\nsystem\n.", "it asks for os.system"),
        "dotted": (b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.", "torch.serialization.os"),
        "torch storage": (
            b"ctorch.storage\n_load_from_bytes\n(C\x01atR.",
            "it asks for torch.storage._load_from_bytes",
        ),
        "build on a stub": (
            b"\x80\x04cnumpy\ndtype\n}\x8c\x09__class__cposix\nsystem\nsb.",
            "it asks for posix.system",
        ),
        "persistent id": (b"Pos.system\n.", "it asks for objects from outside"),
        "extension": (b"\x82\x01.", "unregistered extension code"),
        "memo bomb": (memo_bomb(), "more memory than its size allows"),
        "bytes bomb": (b"\x80\x05\x8e" + struct.pack("<Q", 1 << 40) + b".", None),
        "deep": (tuples(2_000_000), None),
        "no batch": (collections.OrderedDict(), "it asks for collections.OrderedDict"),
        "empty": (b"", "EOFError"),
        "text": (b"hello", None),
    }


@pytest.mark.parametrize("name", [*hostile("x")])
def test_a_hostile_pickle_is_refused_and_never_runs(tmp_path, name, monkeypatch):
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef run(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data, reason = hostile(mark)[name]
    sky(tmp_path, data)
    with pytest.raises(MeasurementError) as error:
        read(open_dump(tmp_path, unsafe_pickles=True))
    assert str(error.value).startswith(
        "dumped_data/global_step_3_training_input.pkl was refused while it was unpickled: "
    )
    assert reason is None or reason in str(error.value)
    assert error.value.exit_code == 4
    assert not mark.exists()


def test_what_the_hostile_pickles_hold_does_run_where_it_is_let(tmp_path):
    """The oracle: the same bytes, read as pickles usually are, write the file."""
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(hostile(mark)["os.system"][0]))
    assert mark.exists()


def batch(**changes):
    """A batch of two sequences, one left-padded; pickled under the name of its class."""
    columns = {
        "sequences": np.array([[0, 5, 6, 7], [1, 2, 3, 4]]),
        "attention_mask": np.array([[0, 1, 1, 1], [1, 1, 1, 1]]),
        "loss_mask": np.array([[1.0, 1.0], [0.0, 1.0]], dtype=np.float32),
        "response_mask": np.array([[1, 1], [1, 1]]),
        "action_log_probs": np.array([[-1.0, -2.0], [-3.0, -4.0]], dtype=np.float32),
        "rollout_logprobs": np.array([[-1.5, -2.5], [0.0, -4.5]], dtype=np.float32),
        **changes,
    }
    return sky_bytes(columns)


def test_a_padded_batch_is_read_by_its_masks_and_rows_that_only_fill_it_are_not(tmp_path):
    sky(tmp_path, batch())
    first, second = read(open_dump(tmp_path, unsafe_pickles=True)).rows
    assert (first["tokens"], first["mask"]) == ([5, 6, 7], [False, True, True])
    assert first["train"][1:].tolist() == [-1.0, -2.0]
    assert second["train"][2:].tolist() == [-3.0, -4.0]
    assert np.isnan(second["infer"][:3]).all()  # a token that no policy drew
    out = read(open_dump(DATA / "skyrl", unsafe_pickles=True))
    assert len(out.rows) == 4  # of five


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout_logprobs": None}, "has no rollout_logprobs"),
        ({"loss_mask": np.zeros((2, 9))}, "has loss_mask of shape [2, 9]"),
        ({"action_log_probs": np.zeros((3, 2))}, "has action_log_probs of shape [3, 2]"),
        ({"action_log_probs": np.array([["a", "b"], ["c", "d"]])}, "action_log_probs of <U1"),
    ],
)
def test_a_batch_of_other_shapes_is_refused(tmp_path, changes, text):
    sky(tmp_path, batch(**changes))
    with pytest.raises(MeasurementError) as error:
        read(open_dump(tmp_path, unsafe_pickles=True))
    assert text in str(error.value)


def test_a_column_of_torch_is_read_as_it_was_written_unless_it_holds_a_call(tmp_path):
    torch = pytest.importorskip("torch")
    mark = tmp_path / "ran"

    def rows(value):
        stream = io.BytesIO()
        torch.save(value, stream)
        sky(tmp_path, batch(action_log_probs={"format": "torch", "data": stream.getvalue()}))
        return read(open_dump(tmp_path, unsafe_pickles=True)).rows

    first, _ = rows(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.bfloat16))
    assert first["train"][1:].tolist() == [-1.0, -2.0]
    with pytest.raises(MeasurementError, match="does not hold a batch of tensors: no tensor"):
        rows({"t": Calls(os.system, f"touch {mark}")})
    assert not mark.exists()


# ---- slime and miles: torch's own restricted reader


def pt(folder, payload, name="3.pt"):
    torch = pytest.importorskip("torch")
    inside = folder / "train_data"
    inside.mkdir(exist_ok=True)
    torch.save(payload, inside / name)
    return inside / name


def sample(**changes):
    made = {
        "tokens": [1, 2, 3, 4],
        "response_lengths": 2,
        "loss_masks": [1, 1],
        "log_probs": [-1.0, -2.0],
        "rollout_log_probs": [-1.5, -2.5],
        **changes,
    }
    return {name: value for name, value in made.items() if value is not ...}


def slime(folder, *samples, **more):
    return pt(folder, {"format_version": 2, "rollout_id": 3, "samples": [*samples], **more})


def test_a_call_in_a_file_of_torch_never_runs(tmp_path):
    mark = tmp_path / "ran"
    slime(tmp_path, sample(evil=Calls(os.system, f"touch {mark}")))
    with pytest.raises(MeasurementError, match="cannot be read as tensors and plain data"):
        read(open_dump(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout_log_probs": ...}, "rollout_log_probs is missing"),
        ({"log_probs": [-1.0]}, "log_probs and loss_masks are not equally long"),
        ({"loss_masks": [1, 1, 1], "response_lengths": 2}, "loss_masks and the response"),
        ({"loss_masks": [1] * 9, "response_lengths": 9}, "loss_masks and the response"),
        ({"loss_masks": [0.5, 1.0]}, "loss_masks is neither 0 nor 1 everywhere"),
        ({"tokens": [1.5, 2.0, 3.0, 4.0]}, "tokens are not a list of numbers"),
        ({"tokens": ["a"] * 4}, "tokens are not a list of numbers"),
        ({"tokens": [-1, 2, 3, 4]}, "a token id is negative"),
        ({"tokens": [1 << 80] * 4}, "tokens are not a list of numbers"),
        ({"log_probs": [0.0, 0.0]}, "the trainer's logprobs are all zero"),
        ({"log_probs": [[1.0], [2.0]]}, "log_probs are not a list of numbers"),
        ({"rollout_routed_experts": [[[0, 1]]] * 4}, "have not one row for each token but the"),
        ({"rollout_routed_experts": [[[0.5, 1]]] * 3}, "are not whole numbers, [tokens, layers"),
        ({"rollout_routed_experts": [[0, 1]] * 3}, "are not whole numbers, [tokens, layers"),
        ({"rollout_routed_experts": "none"}, "are not whole numbers, [tokens, layers"),
        ({"rollout_routed_experts": [[[0, 1 << 20]]] * 3}, "name expert 1048576, which is no"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_samples_that_cannot_be_trusted_are_refused(tmp_path, changes, reason):
    slime(tmp_path, sample(), sample(**changes))
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 1
    (refusal,) = dump.refused.values()
    assert reason in refusal.reason
    assert refusal.first == "train_data/3.pt:2"


def test_routed_experts_are_of_the_forward_that_predicted_the_token(tmp_path):
    torch = pytest.importorskip("torch")
    route_TLK = torch.arange(12).reshape(3, 2, 2).to(torch.uint8)
    slime(tmp_path, sample(rollout_routed_experts=route_TLK), sample())
    (step,) = open_dump(tmp_path).read()
    route_NLK = step.per_token["route"]
    assert (route_NLK[0] == -1).all() and (route_NLK[4:] == -1).all()
    assert (route_NLK[1:4] == route_TLK.numpy()).all()


def test_routed_experts_of_miles_are_read_from_its_columns(tmp_path):
    torch = pytest.importorskip("torch")
    columns = {name: [value] for name, value in sample().items()}
    columns["rollout_routed_experts"] = [torch.arange(6).reshape(3, 1, 2)]
    pt(tmp_path, {"rollout_id": 3, "rank": 0, "rollout_data": columns}, "3_0.pt")
    (step,) = open_dump(tmp_path).read()
    assert step.per_token["route"][1:].ravel().tolist() == [*range(6)]


def test_routed_experts_of_another_model_are_refused(tmp_path):
    routes = [[[[0, 1]]] * 3, [[[0, 1], [2, 3]]] * 3]
    slime(tmp_path, *(sample(rollout_routed_experts=route) for route in routes))
    dump = open_dump(tmp_path)
    assert len(read(dump).rows) == 1
    (refusal,) = dump.refused.values()
    assert refusal.reason == "rollout_routed_experts are of another model than those before"


def test_rewards_are_those_before_the_group_was_normalised(tmp_path):
    slime(tmp_path, sample(rewards=0.1), sample(rewards=-0.1), raw_reward=[1.0, 0.0])
    assert [row["reward"] for row in read(open_dump(tmp_path)).rows] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("left_out", "changes", "reason"),
    [
        ("3_1.pt", {}, "log_probs are held in parts, and that of context-parallel rank 1 of 2 is"),
        ("", {"sample_indices": ...}, "held in parts, and that of context-parallel rank 1 of 2"),
        (
            "",
            {"log_probs": [[-1.0]]},
            "log_probs of context-parallel rank 1 are 1 numbers, and its",
        ),
        ("", {"qkv_format": "bshd"}, "max_seq_lens is None, which no sequence of 4 tokens has"),
        ("", {"tokens": [[1, 2, 3, 5]]}, "that of context-parallel rank 1 of 2 is missing"),
        ("", {"cp_rank": 0}, "log_probs of one sample differ between ranks that hold copies of it"),
    ],
    ids=["missing", "unnumbered", "length", "padded", "tokens", "rank"],
)
def test_parts_that_cannot_be_joined_are_refused(tmp_path, left_out, changes, reason):
    """Of the three tokens of a response, rank 0 scored the first and rank 1 the others."""
    for rank, (train, infer) in enumerate((([-1.0], [-1.5]), ([-2.0, -3.0], [-2.5, -3.5]))):
        own = changes if rank or "sample_indices" in changes else {}
        columns = {
            "tokens": [[1, 2, 3, 4]],
            "response_lengths": [3],
            "loss_masks": [[1, 1, 1]],
            "sample_indices": [7],
            "log_probs": [train],
            "rollout_log_probs": [infer],
        }
        columns |= {name: value for name, value in own.items() if name in columns}
        columns = {name: value for name, value in columns.items() if value is not ...}
        payload = {"rollout_id": 3, "rollout_data": columns, "cp_size": 2}
        payload["cp_rank"] = own.get("cp_rank", rank)
        payload["qkv_format"] = changes.get("qkv_format", "thd")
        if f"3_{rank}.pt" != left_out:
            pt(tmp_path, payload, f"3_{rank}.pt")
    with pytest.raises(EvidenceError) as error:
        read(open_dump(tmp_path))
    assert reason in str(error.value)


@pytest.mark.parametrize("shard", [{"cp_size": "2"}, {"cp_rank": 2, "cp_size": 2}, {"cp_rank": -1}])
def test_a_rank_that_cannot_be_is_said(tmp_path, shard):
    columns = {name: [value] for name, value in sample().items()}
    pt(tmp_path, {"rollout_id": 3, "rollout_data": columns, **shard}, "3_0.pt")
    with pytest.raises(MeasurementError, match=r"3_0\.pt is of context-parallel rank"):
        read(open_dump(tmp_path))


@pytest.mark.parametrize("changes", [{"loss_masks": ...}, {"tokens": [7]}, {"partition": ["a"]}])
def test_parts_of_a_file_that_was_changed_are_refused(tmp_path, changes):
    columns = {name: [value] for name, value in sample().items()} | changes
    columns = {name: value for name, value in columns.items() if value is not ...}
    payload = {"rollout_id": 3, "rollout_data": columns, "cp_rank": 0, "cp_size": 2}
    pt(tmp_path, payload, "3_0.pt")
    with pytest.raises(EvidenceError):
        read(open_dump(tmp_path))


def test_rewards_of_miles_are_those_of_the_samples_of_a_rank(tmp_path):
    """Every rank has those of the whole rollout, in its order."""
    columns = {name: [value] * 2 for name, value in sample().items()}
    columns |= {"tokens": [[1, 2, 3, 4], [5, 2, 3, 4]], "partition": [1, 0]}
    columns["raw_reward"] = [0.25, 0.75]
    pt(tmp_path, {"rollout_id": 3, "rank": 0, "rollout_data": columns}, "3_0.pt")
    assert [row["reward"] for row in read(open_dump(tmp_path)).rows] == [0.75, 0.25]


def updated(folder, moved, updates=4, each=120, seed=0):
    """slime's file of a rollout in several updates, whose trainer's logprobs moved before each."""
    rng = np.random.default_rng(seed)
    samples, place = [], rng.permutation(updates * each)  # the order in which they are trained
    for at in range(updates * each):
        earlier = int(np.flatnonzero(place == at)[0]) // each
        infer = -rng.exponential(1.0, 2) - 0.1
        train = infer + rng.normal(0, 0.02 + moved * earlier, 2)
        made = sample(
            tokens=[at + 1, 2, 3, 4], log_probs=train.tolist(), rollout_log_probs=infer.tolist()
        )
        samples.append(made | {"rollout_position": at})
    shards = [
        {
            "partition": place[half::2].tolist(),
            "num_microbatches": [each // 4] * updates,
            "micro_batch_indices": [[2 * i, 2 * i + 1] for i in range(updates * each // 4)],
        }
        for half in range(2)
    ]
    return slime(folder, *samples, dp_shards=shards)


@pytest.mark.parametrize(("moved", "warned"), [(0.01, True), (0.0, False)])
def test_logprobs_that_slime_took_during_its_updates_are_said(tmp_path, moved, warned):
    updated(tmp_path, moved)
    (part,) = open_dump(tmp_path).read()
    update_S = part.per_sequence["update"]
    assert np.unique(update_S, return_counts=True)[1].tolist() == [120] * 4
    gap = [np.abs(part.ratio_K.reshape(-1, 2)[update_S == n]).mean() for n in (1, 4)]
    assert (gap[1] > 2 * gap[0]) is np.bool_(warned)
    sound = Soundness()
    sound.add(part)
    found = [finding for finding in sound.findings() if finding.check == "updates"]
    assert [finding.state for finding in found] == ["warning"] * warned
    if warned:
        assert "those of update 4: the trainer's logprobs are those of its" in found[0].text
        assert found[0].numbers["first"] == pytest.approx(gap[0])
        assert found[0].numbers["last"] == pytest.approx(gap[1])


@pytest.mark.parametrize(
    "shards",
    [None, 3, [3], [{"partition": [0]}], [{"num_microbatches": [1], "partition": [0]}]],
    ids=str,
)
def test_a_layout_that_is_not_known_gives_no_updates(tmp_path, shards):
    slime(tmp_path, sample(), dp_shards=shards)
    (part,) = open_dump(tmp_path).read()
    assert "update" not in part.per_sequence


@pytest.mark.parametrize("resumed", [0, 200])
def test_staleness_does_not_depend_on_the_rollout_that_a_process_began_with(tmp_path, resumed):
    """miles counts updates of its process, and numbers the rollouts of a run."""
    pytest.importorskip("torch")
    many = [sample(weight_versions=[str(v)]) for v in (4, 5, 5)]
    for at, one in enumerate(many):
        one["tokens"] = [at + 1, *one["tokens"][1:]]
    payload = {"format_version": 2, "rollout_id": resumed + 4, "samples": many}
    pt(tmp_path, payload, name=f"{resumed + 4}.pt")
    rows = read(open_dump(tmp_path)).rows
    assert [row["staleness"][0] for row in rows] == [1.0, 0.0, 0.0]
    rows = read(open_dump(DATA / "miles")).rows
    assert [row["staleness"][0] for row in rows] == [0.0, 1.0, 0.0, 2.0]  # of the oldest weights


def test_the_weights_that_sampled_a_response_are_its_label(tmp_path):
    pytest.importorskip("torch")
    many = [sample(weight_versions=versions) for versions in (["4"], ["4", "5", "5"], None)]
    for at, one in enumerate(many):
        one["tokens"] = [at + 1, *one["tokens"][1:]]
    pt(tmp_path, {"format_version": 2, "rollout_id": 3, "samples": many})
    (part,) = open_dump(tmp_path).read()
    assert part.labels["weight_version"] == ("4", "4-5", "")


@pytest.mark.parametrize("payload", [[1], {"rollout_id": 1}, {"rollout_id": 1, "samples": [3]}])
def test_a_file_of_torch_with_something_else_is_said(tmp_path, payload):
    pt(tmp_path, payload)
    with pytest.raises((ContractError, MeasurementError)) as error:
        read(open_dump(tmp_path))
    assert "3.pt" in str(error.value)


def test_a_file_of_torch_that_is_cut_off_is_said(tmp_path):
    slime(tmp_path, sample())
    path = slime(tmp_path, sample()).rename(tmp_path / "train_data" / "4.pt")
    slime(tmp_path, sample())
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(MeasurementError, match=r"train_data/4.pt cannot be read as tensors"):
        read(open_dump(tmp_path))


def test_without_torch_its_files_say_what_to_install(tmp_path, monkeypatch):
    slime(tmp_path, sample())
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MeasurementError) as error:
        read(open_dump(tmp_path))
    assert "pip install torch" in str(error.value)


def test_what_a_child_hands_back_is_held_against_its_shape():
    stream = io.BytesIO(
        b'{"padding": 0, "columns": [{"name": "sequences", "format": "numpy", "dtype": "int64", '
        b'"shape": [2, 2], "bytes": 8}]}\n12345678'
    )
    with pytest.raises(MeasurementError, match="sequences is not as long as its shape says"):
        _received(stream, File(Path("x.pkl"), 1, "x.pkl"))
