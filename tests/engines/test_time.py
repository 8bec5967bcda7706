# Engine `transformers` serves by a clock: every reading has its place.

import itertools
from pathlib import Path

import numpy as np
import pytest

from servanda.contract.model import Kernel
from servanda.engines.transformers import TransformersEngine
from servanda.judgement.clauses.batch_invariance import Company, Difference
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace

MODEL = Path(__file__).parents[2] / "models" / "tiny-lm"


@pytest.fixture(scope="module")
def engine():
    kernel = Kernel(engine="transformers", model=str(MODEL), dtype="float32", batch_size=4)
    return TransformersEngine(kernel)


def launched(n, width=6):
    rng = np.random.default_rng(1)
    prompts = tuple(tuple(rng.integers(5, 900, 2 + 3 * i).tolist()) for i in range(n))
    return Batch(tuple(range(n)), prompts, width)


@pytest.mark.parametrize("record", [True, False])
def test_each_step_is_read_off_the_clock_once(engine, record):
    engine.clock = itertools.count().__next__  # one second between two readings
    batch = launched(4)
    length_S = engine.generate(batch, Sampling(), 3).length_S
    timing = engine.time(batch, Sampling(), 3, record)
    assert timing.first_S == (1.0,) * 4
    assert timing.gap_N == (1.0,) * int((length_S - 1).sum())
    assert timing.wall == length_S.max() and timing.tokens == length_S.sum()


def test_requests_beyond_the_batch_size_wait(engine):
    engine.clock = itertools.count().__next__
    batch = launched(6)
    length_S = engine.generate(batch, Sampling(), 3).length_S
    timing = engine.time(batch, Sampling(), 3, False)
    before = int(length_S[:4].max())
    assert timing.first_S == (1.0,) * 4 + (before + 1.0,) * 2
    assert timing.wall == before + length_S[4:].max()


def test_a_real_clock_moves_forward(engine):
    import time

    engine.clock = time.perf_counter
    timing = engine.time(launched(3), Sampling(), 3, False)
    assert all(s > 0 for s in (*timing.first_S, *timing.gap_N))
    assert timing.wall >= max(timing.first_S)
    assert engine.describe().timed and engine.describe().capture == "float64"


def test_company_changes_bits_in_float32_and_how_many_run_at_once_is_said(engine):
    drawn = engine.generate(launched(6), Sampling(), 3)
    given = Batch(drawn.sequence_S, launched(6).prompts, 6, drawn.continuations)
    together = engine.score(given, Sampling(), "decode")
    ones = [given.take([row]) for row in range(6)]
    alone = Trace.join([engine.score(one, Sampling(), "decode") for one in ones])
    difference = Difference.of(Company(alone.columns["logp"], together.columns["logp"], 4))
    assert 0 < difference.largest < 1e-3 and difference.differing
    same = Batch(given.sequence_S, given.prompts, 6, given.continuations, together=1)
    one_by_one = engine.score(same, Sampling(), "decode")
    assert one_by_one.about["batch_size"] == "1" and together.about["batch_size"] == "4"
    assert (one_by_one.columns["logp"] == alone.columns["logp"]).all()
