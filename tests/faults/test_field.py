# What the field's thresholds say, against averages taken one token at a time.

import math

import numpy as np
import pytest

from servanda.errors import EvidenceError
from servanda.faults.field import THRESHOLDS, readings

TRAIN = np.log([0.5, 0.25, 0.125, 1.0])
INFER = np.log([0.5, 0.5, 0.1, 0.9])


def by_hand(train, infer):
    d = [p - q for p, q in zip(train.tolist(), infer.tolist(), strict=True)]
    n = len(d)
    return {
        "mean |log ratio|": sum(map(abs, d)) / n,
        "token_mult_prob_error": sum(math.exp(abs(x)) for x in d) / n,
        "k3": sum(math.exp(x) - x - 1 for x in d) / n,
        "probability difference": sum(
            abs(math.exp(p) - math.exp(q)) for p, q in zip(train, infer, strict=True)
        )
        / n,
    }


def test_every_threshold_is_the_average_its_project_takes():
    for reading in readings(TRAIN, INFER):
        expected = by_hand(TRAIN, INFER)[reading.threshold.name]
        assert reading.value == pytest.approx(expected, rel=1e-12)
        assert reading.rings == (expected > reading.threshold.limit)


def test_two_equal_kernels_ring_nowhere():
    assert not any(r.rings for r in readings(TRAIN, TRAIN))
    assert len({(t.name, t.source) for t in THRESHOLDS}) == len(THRESHOLDS)


def test_a_token_that_train_gives_no_mass_rings_everywhere():
    found = readings(np.array([-np.inf, -1.0]), np.array([-1.0, -1.0]))
    rings = {r.threshold.name: r.rings for r in found}
    assert all(rings[name] for name in ("mean |log ratio|", "token_mult_prob_error", "k3"))


def test_a_token_without_a_logprob_is_refused_and_not_read_as_agreement():
    with pytest.raises(EvidenceError, match="no usable logprob"):
        readings(np.array([math.nan]), np.array([-1.0]))


def test_a_reading_names_value_limit_and_project():
    reading = next(r for r in readings(TRAIN, INFER) if r.threshold.source == "slime")
    assert str(reading) == "mean |log ratio| 0.255 (limit 0.1, slime)"
