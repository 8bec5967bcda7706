# Served requests as an engine: it hands out what was answered, and can be asked nothing.

import json
import math

import numpy as np
import pytest

from servanda.contract.identity import Description
from servanda.contract.model import Kernel
from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.request_log import read_served
from servanda.traces.trace import Batch

PLAIN = Sampling()
INFER = Description({"engine": "x", "logprobs": "raw"}, {"w": "d"}, "t", 8, (4,), capture="float32")


def requests(*rows):
    lines = [
        {
            "index": i,
            "run": "r",
            "leg": "shadow",
            "at": 1.0,
            "served": i + 1,
            "prompt_token_ids": [1, 2],
            "sampling": {"max_new_tokens": 3},
            **row,
        }
        for i, row in enumerate(rows)
    ]
    return read_served("".join(f"{json.dumps(line)}\n" for line in lines), "f")


def answer(tokens, logp, finish="stop", **more):
    return {"token_ids": tokens, "logprobs": logp, "finish": finish, **more}


def engine(*rows, kernel=None):
    return TrafficReplayEngine(kernel or Kernel(engine="x"), INFER, requests(*rows))


def drawn(engine, *sequences, sampling=PLAIN):
    return engine.generate(Batch(sequences, ((1, 2),) * len(sequences), 3), sampling, 0)


def test_rows_are_handed_out_by_their_index():
    found = drawn(
        engine(answer([3, 4], [-1.0, -2.0]), {"lost": "timeout"}, answer([4], [-0.5])), 2, 0, 1
    )

    assert found.sequence_S.tolist() == [2, 0, 1]
    assert found.length_S.tolist() == [1, 2, 0]
    assert found.lost_S.tolist() == [False, False, True]
    assert found.continuations == ((4,), (3, 4), ())
    assert found.columns["logp"].tolist() == [-0.5, -1.0, -2.0]
    assert found.best is None
    assert found.about["path"] == "decode"


def test_best_tokens_are_columns_and_absent_ones_are_no_number():
    best = [[[3, -0.25], [1, -2.0]]]
    found = drawn(engine(answer([4], [-3.0], best=best), answer([4], [-1.0])), 0, 1)

    ids_NK, logp_NK = found.best
    assert ids_NK.tolist() == [[3, 1], [-1, -1]]
    assert logp_NK[0].tolist() == [-0.25, -2.0] and np.isnan(logp_NK[1]).all()


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        (answer([3], [-1.0]), (3, 4)),
        (answer([3, 4], [-1.0, -1.0]), (3, 4)),
        (answer([3], [-1.0], "length"), (3,)),
        (answer([3, 3, 3], [-1.0] * 3), (3, 3, 3)),
        (answer([3], [-1.0], "stop_string"), (3,)),
    ],
)
def test_an_end_that_is_not_in_the_log_is_a_token_of_unknown_probability(row, tokens):
    found = drawn(engine(row), 0)

    assert found.continuations == (tokens,)
    assert np.isnan(found.columns["logp"]).sum() == (len(tokens) - len(row["token_ids"]))


def test_raw_logprobs_say_nothing_of_a_processed_draw():
    warm = Sampling(temperature=0.7)

    with pytest.raises(MeasurementError, match="raw logprobs"):
        drawn(engine(answer([4], [-1.0])), 0, sampling=warm)
    declared = Kernel(engine="x", logprobs="processed")
    assert len(drawn(engine(answer([4], [-1.0]), kernel=declared), 0, sampling=warm).token_N) == 1


def test_it_is_whom_infer_is_and_scores_nothing():
    own = engine().describe()

    assert (own.digest, own.weights) == (INFER.digest, INFER.weights)
    assert (own.scores, own.encodes, own.full_logits, own.timed) == ((), False, False, False)


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("encode", [["a"]]),
        ("decode", [[[1]]]),
        ("score", [None, PLAIN, "decode"]),
        ("logits", [None, "decode"]),
        ("top", [None, "decode"]),
        ("time", [None, PLAIN, 0, True]),
    ],
)
def test_nothing_can_be_asked_of_a_log(verb, options):
    with pytest.raises(MeasurementError, match="a log of served requests cannot"):
        getattr(engine(), verb)(*options)


def test_an_unknown_logprob_stays_unknown():
    found = drawn(engine(answer([4], [None])), 0)

    assert math.isnan(found.columns["logp"][0])
