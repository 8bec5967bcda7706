# Routed experts where trainers record them: SkyRL's batch, slime's and miles's rollout_data.
#
# The files are made as the frameworks write them; expected rows are moved by hand.

import numpy as np
import pytest
import torch

from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.dumps.checks.routes import RoutesCheck
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.traces.rollouts import ROUTE, UNROUTED
from tests.rl.dumps.formats.made import sky_bytes

LAYERS, PICKED = 3, 2
LENGTHS, ANSWERS = (5, 7), (3, 4)
WIDE, ANSWER = max(LENGTHS), max(ANSWERS)


def fed_rows(length, high=200, seed=0):
    rng = np.random.default_rng(seed + length)
    return rng.integers(0, high, (length - 1, LAYERS, PICKED))


def expected(rows=None):
    """Row t is that of token t - 1; none for the first token."""
    none = np.full((1, LAYERS, PICKED), UNROUTED)
    return np.concatenate(
        [a for n in LENGTHS for a in (none, fed_rows(n) if rows is None else rows)]
    )


def sky(folder, dtype="uint8", masked=True, missing=0, **changes):
    """Two sequences, padded on the left; the last `missing` rows of each were not recorded."""

    def left(values, width, fill=0):
        value = np.full((width, *np.shape(values)[1:]), fill, np.asarray(values).dtype)
        value[width - len(values) :] = values
        return value

    dummy = np.arange(PICKED)
    routes = np.empty((2, WIDE, LAYERS, PICKED), dtype)
    routes[:] = dummy
    unrecorded = np.ones((2, WIDE), dtype=bool)
    for at, n in enumerate(LENGTHS):
        rows = fed_rows(n)[: n - 1 - missing]
        span = slice(WIDE - n, WIDE - n + len(rows))
        routes[at, span], unrecorded[at, span] = rows, False
    scored = np.stack([left(np.ones(n), ANSWER) for n in ANSWERS])
    logp = (-scored * np.arange(1, ANSWER + 1)).astype(np.float32)
    columns = {
        "sequences": np.stack([left(np.arange(1, n + 1), WIDE) for n in LENGTHS]),
        "attention_mask": np.stack([left(np.ones(n, int), WIDE) for n in LENGTHS]),
        "loss_mask": scored.astype(np.float32),
        "response_mask": scored.astype(np.int64),
        "action_log_probs": logp,
        "rollout_logprobs": logp - 0.1,
        "rollout_expert_indices": routes,
        "router_padding_mask": unrecorded if masked else None,
        **changes,
    }
    inside = folder / "dumped_data"
    inside.mkdir()
    (inside / "global_step_3_training_input.pkl").write_bytes(sky_bytes(columns, pad_size=0))
    return open_dump(folder, unsafe_pickles=True)


def chunk_of(dump):
    (chunk,) = dump.read()
    return chunk


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("masked", [True, False])  # older versions have no mask
def test_experts_of_a_padded_batch_are_read_by_its_masks(tmp_path, dtype, masked):
    route_NLK = chunk_of(sky(tmp_path, dtype, masked)).per_token[ROUTE]
    np.testing.assert_array_equal(route_NLK, expected())


def test_rows_that_a_sampler_did_not_record_are_none(tmp_path):
    """The batch has filler there, which routes each token to the first experts."""
    route_NLK = chunk_of(sky(tmp_path, missing=2)).per_token[ROUTE]
    wanted = expected()
    for end in np.cumsum(LENGTHS):
        wanted[end - 2 : end] = UNROUTED
    np.testing.assert_array_equal(route_NLK, wanted)


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (np.zeros((2, WIDE, LAYERS)), r"has rollout_expert_indices of shape \[2, 7, 3\]"),
        (np.zeros((2, 4, LAYERS, 2)), r"has rollout_expert_indices of shape \[2, 4, 3, 2\]"),
        (np.zeros((1, WIDE, LAYERS, 2)), r"has rollout_expert_indices of shape \[1, 7, 3, 2\]"),
    ],
)
def test_a_batch_with_experts_of_another_shape_is_refused(tmp_path, routes, says):
    with pytest.raises(MeasurementError, match=says):
        chunk_of(sky(tmp_path, rollout_expert_indices=routes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (np.float32, "are not whole numbers, [tokens, layers, experts]"),
        (lambda r: r.astype(np.int32) + 40_000, "name expert 40"),
        (lambda r: r.astype(np.int32) - 250, "name expert -"),
    ],
)
def test_what_is_no_expert_is_refused_with_its_sequence(tmp_path, change, says):
    made = fed_rows(WIDE)
    routes = np.broadcast_to(made[:1], (2, WIDE, LAYERS, PICKED))
    dump = sky(tmp_path, rollout_expert_indices=change(np.ascontiguousarray(routes)))
    with pytest.raises(Exception, match="no sequence"):
        [*dump.read()]
    (refusal,) = dump.refused.values()
    assert says in refusal.reason and refusal.count == 2
    assert refusal.first == "dumped_data/global_step_3_training_input.pkl:1"


def test_experts_in_a_form_that_is_not_read_are_a_warning_and_not_silence(tmp_path):
    """Newer versions pack them: values of all sequences, and offsets."""
    packed = {"format": "packed", "values": b"", "offsets": b""}
    chunk = chunk_of(sky(tmp_path, rollout_expert_indices=packed))
    assert ROUTE not in chunk.per_token
    check = RoutesCheck()
    check.add(chunk)
    found = check.finding()
    assert found.state == "warning"
    assert found.text.startswith("the experts of 2 of 2 sequences are recorded in a form that is")


def train_samples(routes=False, **changes):
    return [
        {
            "tokens": torch.arange(1, n + 1),
            "response_lengths": a,
            "loss_masks": torch.ones(a, dtype=torch.int),
            "log_probs": -torch.arange(1.0, a + 1),
            "rollout_log_probs": -torch.arange(1.0, a + 1) - 0.1,
            "rollout_position": at,
            "sample_index": 40 + at,
            **({"rollout_routed_experts": torch.from_numpy(fed_rows(n))} if routes else {}),
            **changes,
        }
        for at, (n, a) in enumerate(zip(LENGTHS, ANSWERS, strict=True))
    ]


def rollout_samples(kind=torch.tensor, dtype=np.int32):
    """As `Sample.to_dict` of slime (tensors) or of miles (NumPy's arrays)."""
    return [
        {
            "group_index": 0,
            "index": 40 + at,
            "prompt": "text",
            "tokens": list(range(1, n + 1)),
            "response_length": a,
            "status": "completed",
            "metadata": {},
            "rollout_log_probs": [-1.0] * a,
            "rollout_routed_experts": kind(fed_rows(n).astype(dtype)),
        }
        for at, (n, a) in enumerate(zip(LENGTHS, ANSWERS, strict=True))
    ]


def dumped(folder, train, rollout, name="3"):
    for kind, samples in (("train_data", train), ("rollout_data", rollout)):
        if samples is not None:
            (folder / kind).mkdir(exist_ok=True)
            file = folder / kind / f"{name if kind == 'train_data' else 3}.pt"
            torch.save({"rollout_id": 3, "samples": samples}, file)
    return open_dump(folder)


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["slime", "miles"])
def test_a_record_that_the_trainer_deleted_is_read_from_what_the_sampler_wrote(tmp_path, kind):
    dump = dumped(tmp_path, train_samples(), rollout_samples(kind))
    np.testing.assert_array_equal(chunk_of(dump).per_token[ROUTE], expected())


def test_a_record_of_the_trainer_itself_comes_first(tmp_path):
    others = [{**one, "rollout_routed_experts": 0 * one["rollout_routed_experts"]}
              for one in rollout_samples()]  # fmt: skip
    dump = dumped(tmp_path, train_samples(routes=True), others)
    np.testing.assert_array_equal(chunk_of(dump).per_token[ROUTE], expected())


def test_samples_are_found_by_their_numbers_in_another_order(tmp_path):
    train = [{k: v for k, v in one.items() if k != "rollout_position"} for one in train_samples()]
    dump = dumped(tmp_path, train, rollout_samples()[::-1])
    np.testing.assert_array_equal(chunk_of(dump).per_token[ROUTE], expected())


def test_a_sample_with_other_tokens_has_no_record(tmp_path):
    """A place or a number alone may be of another sample: the tokens decide."""
    rollout = rollout_samples()
    rollout[1]["tokens"][2] = 99
    chunk = chunk_of(dumped(tmp_path, train_samples(), rollout))
    assert (chunk.per_token[ROUTE][LENGTHS[0] :] == UNROUTED).all()
    np.testing.assert_array_equal(chunk.per_token[ROUTE][: LENGTHS[0]], expected()[: LENGTHS[0]])


@pytest.mark.parametrize("rows", ["answer", "all", "layers"])
def test_records_of_another_size_are_refused_with_their_place(tmp_path, rows):
    rollout = rollout_samples()
    route = rollout[1]["rollout_routed_experts"]
    rollout[1]["rollout_routed_experts"] = {
        "answer": route[-ANSWERS[1] :],  # without the prompt
        "all": torch.cat([route, route[-1:]]),
        "layers": route[:, :2],
    }[rows]
    dump = dumped(tmp_path, train_samples(), rollout)
    assert len(chunk_of(dump)) == 1
    (refusal,) = dump.refused.values()
    assert refusal.first == "train_data/3.pt:2"
    assert refusal.reason == (
        "rollout_routed_experts are of another model than those before"
        if rows == "layers"
        else "rollout_routed_experts have not one row for each token but the last"
    )


def test_a_dense_model_is_read_without_loading_what_the_sampler_wrote(tmp_path, monkeypatch):
    """Its samples have the field, and None in it."""
    bare = [{**one, "rollout_routed_experts": None} for one in rollout_samples()]
    dump = dumped(tmp_path, train_samples(), bare)
    monkeypatch.setattr("servanda.rl.dumps.formats.slime.samples_of", None)
    assert ROUTE not in chunk_of(dump).per_token


def test_a_record_that_cannot_be_read_is_a_warning(tmp_path):
    """Samples may hold objects of the trainer's own."""
    rollout = rollout_samples()
    rollout[0]["metadata"] = {"answer": Own()}
    check = RoutesCheck()
    check.add(chunk_of(dumped(tmp_path, train_samples(), rollout)))
    assert "recorded in a form that is not read" in check.finding().text


class Own:
    pass


def test_a_record_of_the_sampler_alone_is_tested_and_nothing_is_compared(tmp_path):
    """Its experts follow the fed tokens, or those before them: both end, and say which it is."""
    rng = np.random.default_rng(0)
    favourite = np.stack([rng.permutation(16)[:PICKED] for _ in range(6)])
    for name, shift in (("right", 0), ("wrong", 1)):
        samples = []
        for at in range(60):
            token = rng.integers(0, 6, 50)
            rows = np.roll(favourite[token][:-1, None], shift, axis=0)
            samples.append({"index": at, "tokens": token.tolist(), "response_length": 40,
                            "rollout_routed_experts": rows.astype(np.int32)})  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        dumped(folder, None, samples)
        with pytest.raises(EvidenceError) as error:
            judge_dump(DumpOptions(folder))
        text = str(error.value)
        assert (
            "rollout_data/ of" in text and "holds the sampler's side alone, so nothing is" in text
        )
        assert (
            "experts fit their tokens" if name == "right" else "row t is that of token t-1"
        ) in text
