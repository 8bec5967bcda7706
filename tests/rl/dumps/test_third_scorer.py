# Which side of a dump is wrong, by a third scorer: faults of the trainer and of the server.

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from servanda.contract.model import Kernel
from servanda.engines.faults import FAULTS
from servanda.engines.transformers import TransformersEngine
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.third_scorer import chosen
from servanda.runner.batch_invariance import PLAIN
from servanda.runner.compare.side_distance import CAP, side_distances
from servanda.traces.trace import Batch
from tests.kit import servanda
from tests.rl.dumps import made
from tests.trainers import MODELS

REFEREE = f"transformers:{MODELS / 'tiny-lm'}@float32"
FAULT = {"corrupted_vocabulary": 0.5}
ROWS, WIDTH = 24, 24


def engine(**fields):
    kernel = Kernel(engine="transformers", model=str(MODELS / "tiny-lm"), **fields)
    make = TransformersEngine
    for name, value in (kernel.fault or {}).items():
        make = FAULTS[name].inject(make, value)
    return make(kernel)


def dump(folder, train, infer, steps=(3,)):
    """Rollouts that `infer` draws and `train` scores again."""
    rng, writer = np.random.default_rng(5), Writer(folder)
    prompts = tuple(tuple(rng.integers(1, 1000, 6).tolist()) for _ in range(ROWS))
    batch = Batch(tuple(range(ROWS)), prompts, WIDTH)
    drawn = infer.generate(batch, PLAIN, 1)
    ends = drawn.length_S.cumsum()[:-1]
    given = tuple(tuple(part.tolist()) for part in np.split(drawn.token_N, ends))
    scored = train.score(Batch(batch.sequence_S, prompts, WIDTH, given), PLAIN, "prefill")

    def column(values, none):
        parts = np.split(values, ends)
        return [np.r_[np.full(6, none), part] for part in parts]

    tokens = [np.r_[prompt, part] for prompt, part in zip(prompts, given, strict=True)]
    for step in steps:
        writer.step(
            step,
            tokens,
            column(np.ones(len(drawn.token_N), dtype=bool), False),
            column(scored.columns["logp"], np.nan),
            column(drawn.columns["logp"], np.nan),
            groups=[str(i) for i in range(ROWS)],
        )
    return folder


@pytest.fixture(scope="module")
def healthy():
    return engine(dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("side", ["train", "infer"])
def test_the_side_with_the_fault_is_further_from_the_referee(tmp_path, healthy, side):
    sides = {"train": healthy, "infer": healthy} | {side: engine(dtype="bfloat16", fault=FAULT)}
    path = dump(tmp_path, **sides)
    done = servanda("check", path, "--referee", REFEREE, "--quiet")
    name = {"train": "the trainer", "infer": "the server"}[side]
    assert f"          {name} is further: " in done.stdout, done.output
    assert f"of {ROWS} of {ROWS} rows" in done.stdout
    data = json.loads(servanda("check", path, "--referee", REFEREE, "--format", "json").stdout)
    whole = data["referee"]["slices"][0]
    assert whole["slice"] == "all" and (whole["low"] > 0) == (side == "train")
    assert whole["low"] <= whole["train"] - whole["infer"] <= whole["high"]


@pytest.mark.slow
def test_two_sides_that_differ_alike_are_not_told_apart(tmp_path):
    path = dump(tmp_path, engine(fault=FAULT), engine(fault=FAULT, attention="sdpa"))
    done = servanda("check", path, "--referee", REFEREE, "--quiet")
    assert "cannot tell which side is further: the trainer 0." in done.stdout


@pytest.mark.slow
def test_a_referee_has_the_weights_of_one_step(tmp_path, healthy):
    path = dump(tmp_path, healthy, healthy, steps=(3, 4))
    done = servanda("check", path, "--referee", REFEREE)
    assert done.exit_code == 2
    assert "the dump has 2 steps, and a reference scorer has the weights of one" in done.stderr
    words = ("check", path, "--steps", 4, "--referee", REFEREE, "--referee-rows", 5)
    assert f"of 5 of {ROWS} rows" in servanda(*words, "--quiet").stdout


def test_a_contract_has_no_referee(tmp_path):
    done = servanda("check", tmp_path / "x.kernelcontract.yaml", "--referee", REFEREE)
    assert done.exit_code == 2 and "is for a dump: leave out --referee" in done.stderr


def test_every_row_is_as_likely_to_be_chosen():
    block = made.rollouts(np.random.default_rng(0), 1, 40, turn_tokens=4)
    block = replace(block, token_N=np.arange(len(block.token_N)))
    counted = np.zeros(40)
    for seed in range(400):
        rows, total = chosen([block], (), 10, seed)
        assert total == 40 and len(rows) == 10
        counted[[row.token_T[0] // 12 for row in rows]] += 1
    assert counted.sum() == 4000 and (abs(counted - 100) < 5 * 8.7).all()


# the statistic


def test_an_interval_covers_the_difference_of_two_equal_sides():
    """Both sides have the same law, so their difference is 0: false answers are within alpha."""
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(200):
        referee = rng.normal(-2, 1, 400)
        train, infer = referee + rng.normal(0, 0.3, (2, 400))
        (whole,) = side_distances(train, infer, referee, {"all": np.ones(400, bool)}, 0.05)
        wrong += whole.further != "cannot tell"
    assert wrong <= 0.05 * 200


def test_a_worse_side_is_found_in_its_slice_alone():
    rng = np.random.default_rng(4)
    referee = rng.normal(-2, 1, 2000)
    train, infer = referee + rng.normal(0, 0.05, (2, 2000))
    late = np.arange(2000) % 4 == 0
    infer = infer - 0.8 * late
    slices = {"all": np.ones(2000, bool), "late": late, "early": ~late}
    whole, inside, outside = side_distances(train, infer, referee, slices, 0.05)
    assert (whole.further, inside.further, outside.further) == ("infer", "infer", "cannot tell")
    assert -0.9 < inside.low <= inside.train - inside.infer <= inside.high < -0.6


def test_a_token_counts_at_most_the_cap_and_one_without_a_score_for_either_answer():
    train = np.array([-1.0, -np.inf, -1.0])
    referee, infer = np.array([-1.0, -1.0, np.nan]), np.full(3, -1.0)
    (whole,) = side_distances(train, infer, referee, {"all": np.ones(3, bool)}, 0.05)
    assert (whole.tokens, whole.missing) == (2, 1) and whole.train == CAP / 2
    assert whole.further == "cannot tell"


def test_a_dump_with_images_is_judged_and_has_no_referee(tmp_path, healthy):
    """A reference scorer reads tokens alone, and would score a placeholder for each image."""
    import pyarrow as pa
    from pyarrow import parquet

    path = dump(tmp_path, engine(), healthy)
    for file in path.glob("*.parquet"):
        table = parquet.read_table(file)
        images = pa.array(["a.png"] * len(table))
        parquet.write_table(table.append_column("multi_modal_inputs", images), file)

    judged = servanda("check", path, "--quiet")
    refused = servanda("check", path, "--referee", REFEREE)

    assert judged.exit_code != 4, judged.output
    assert "multi_modal_inputs: logprobs are judged as both sides recorded them" in " ".join(
        judged.stdout.split()
    )
    assert refused.exit_code == 2
    assert "the rows of the dump have more than tokens (multi_modal_inputs)" in refused.stderr
    assert "images, video and sound are not read" in " ".join(refused.stderr.split())
