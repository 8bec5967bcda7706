# Faults of a replay: the check of a dump names each, as its trainer would have written it.

import numpy as np
import pytest
from examples.moe import run as demo

from servanda.contract.model import Kernel
from servanda.engines.faults.replay import REPLAY_FAULTS
from servanda.engines.transformers import TransformersEngine
from servanda.errors import MeasurementError
from servanda.rl.dumps.checks import Soundness
from servanda.rl.dumps.formats import open_dump

MODEL = str(demo.ROOT / "models" / "tiny-moe")


@pytest.fixture(scope="module")
def rollout():
    return demo.sampled(demo.opened("bfloat16"))


def found(folder, rollout, engine):
    train = demo.scored(engine, rollout, rollout.routes)
    demo.written(folder, rollout, train, replays=True)
    sound = Soundness()
    for chunk in open_dump(folder).read():
        sound.add(chunk)
    return next(f for f in sound.findings() if f.check == "replay")


def engine(fault=None, value=None):
    made = TransformersEngine
    if fault is not None:
        entry = REPLAY_FAULTS[fault]
        made = entry.inject(made, entry.default if value is None else value)
    return made(Kernel(engine="transformers", model=MODEL, dtype="float32"))


def test_a_replay_without_a_fault_is_sound(tmp_path, rollout):
    assert found(tmp_path, rollout, engine()).state == "ok"


@pytest.mark.parametrize(
    ("fault", "value", "says"),
    [
        (
            "shifted_replay",
            1,
            "are misaligned: row t is the sampler's row t-1 (100 % of the layers",
        ),
        (
            "shifted_replay",
            2,
            "are misaligned: row t is the sampler's row t-2 (100 % of the layers",
        ),
        ("layer_not_replayed", 1, "tokens have others (layer 1; in "),
        ("layer_not_replayed", 2, "tokens have others (layer 2; in "),
        ("dropped_replay", True, "tokens have others (layers 0, 1, 2; in "),
    ],
)
def test_each_fault_is_named_with_its_place(tmp_path, rollout, fault, value, says):
    finding = found(tmp_path, rollout, engine(fault, value))
    assert finding.state == "unsound"
    assert says in finding.text
    assert finding.first.startswith("step_000001.rank0.parquet:")


@pytest.mark.parametrize("name", [*REPLAY_FAULTS])
def test_a_fault_says_what_it_is_and_where_it_was_met(name):
    entry = REPLAY_FAULTS[name]
    assert entry.summary.endswith(".") and entry.seen and entry.side == "train"
    assert entry.problem(entry.default) is None
    with pytest.raises(MeasurementError, match="takes"):
        entry.inject(TransformersEngine, np.nan)
