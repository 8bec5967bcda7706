# Faults of a replay: the check of a dump names each, as its trainer would have written it.

from dataclasses import replace

import numpy as np
import pytest
from examples.moe import run as demo

from servanda.contract.model import Kernel
from servanda.engines.transformers import TransformersEngine
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


def engine(change=None):
    """A trainer's engine; `change` is what it makes of the experts [T, L, K] that it is given."""

    class Replaying(TransformersEngine):
        def score(self, batch, *args, **kwargs):
            routes = batch.routes if change is None else tuple(map(change, batch.routes))
            return super().score(replace(batch, routes=routes), *args, **kwargs)

    return Replaying(Kernel(engine="transformers", model=MODEL, dtype="float32"))


def shifted(by):
    return lambda route_TLK: np.roll(route_TLK, by, axis=0)


def without(*layers):
    """The routers of these layers pick their experts themselves."""

    def change(route_TLK):
        own = route_TLK.copy()
        own[:, layers] = -1
        return own

    return change


@pytest.mark.slow
def test_a_replay_without_a_fault_is_sound(tmp_path, rollout):
    assert found(tmp_path, rollout, engine()).state == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (shifted(1), "are misaligned: row t is the sampler's row t-1 (100 % of the layers"),
        (shifted(2), "are misaligned: row t is the sampler's row t-2 (100 % of the layers"),
        (without(1), "tokens have others (layer 1; in "),
        (without(2), "tokens have others (layer 2; in "),
        (without(0, 1, 2), "tokens have others (layers 0, 1, 2; in "),
    ],
)
def test_each_fault_is_named_with_its_place(tmp_path, rollout, change, says):
    finding = found(tmp_path, rollout, engine(change))
    assert finding.state == "unsound"
    assert says in finding.text
    assert finding.first.startswith("step_000001.rank0.parquet:")
