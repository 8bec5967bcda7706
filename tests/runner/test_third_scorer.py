# A comparison with a referee says which of A and B is further from it.

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.engines.table import TableEngine
from servanda.runner import run
from servanda.runner.compare.side_distance import side_distances
from tests import kit, oracles


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """p.json, and q.json at TV 0.2 from it."""
    monkeypatch.chdir(tmp_path)
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    kit.table(tmp_path, "q.json", {"": kit.moved(kit.BASE, 0.2)})
    lines = [json.dumps({"prompt": "a b" if i % 2 else "c"}) for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")


PATHS = ("prefill", "decode")


def servanda(*words):
    call = ["compare", *words, "--prompts", "prompts.jsonl", "--quiet"]
    call += ["--preset", "nvfp4", "--sequences", "300", "--max-new-tokens", "6"]
    return CliRunner().invoke(main, call, catch_exceptions=False)


def test_a_verdict_stands_though_a_cannot_score(tables, monkeypatch):
    describe = TableEngine.describe
    monkeypatch.setattr(
        TableEngine,
        "describe",
        lambda engine: replace(
            describe(engine), scores=() if engine.kernel.batch_size == 7 else PATHS
        ),
    )
    monkeypatch.setattr("servanda.cli.compare.engines_on", lambda *_: nullcontext(run.in_process))
    done = servanda("table:q.json,batch_size=7", "table:p.json", "--referee", "table:p.json")
    assert "exit" in done.stdout and "it is not known which side is further" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "side"),
    [("q.json", "p.json", "A"), ("p.json", "q.json", "B"), ("q.json", "q.json", "")],
)
def test_the_side_that_differs_is_further(tables, a, b, side):
    done = servanda(f"table:{a}", f"table:{b}", "--referee", "table:p.json")
    says = f"{side} is further: " if side else "cannot tell which side is further"
    assert f"          {says}" in done.stdout, done.output
    assert "A − B: " in done.stdout and "confidence 95.0 %" in done.stdout
    again = servanda(f"table:{a}", f"table:{b}", "--referee", "table:p.json", "--format", "json")
    whole = json.loads(again.stdout)["referee"]["slices"][0]
    assert (whole["low"] > 0, whole["high"] < 0) == (side == "A", side == "B")


@pytest.mark.parametrize("names", [("all",), ("all", "few", "none")])
def test_two_ends_on_every_slice_share_alpha(names):
    """Each token is as far from the referee as it may be, on one side alone: a coin toss."""
    train_N, infer_N = (np.arange(300) % 4 == 0) * -2.0, (np.arange(300) % 4 > 0) * -2.0
    masks = {"all": np.ones(300, bool), "few": np.arange(300) < 80, "none": np.zeros(300, bool)}
    found = side_distances(train_N, infer_N, np.zeros(300), {n: masks[n] for n in names}, 0.06)
    price = math.log(2 * len(names) / 0.06)
    for one in (one for one in found if one.tokens):
        xs = [1.0] * (one.tokens // 4) + [0.0] * (one.tokens - one.tokens // 4)
        low, high = ((end + 1) / 2 for end in (one.low, one.high))
        for bets, end in ((oracles.POS, low), (oracles.NEG, high)):
            weights = oracles.weights(bets, 0.5)
            assert oracles.most([xs], bets, end, weights) == pytest.approx(price, abs=0.01)
