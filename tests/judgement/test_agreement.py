# Columns that are equal in every bit: what is counted, what is refused, and what is only said.

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from servanda import pair
from servanda.cli import main
from servanda.contract.identity import EvidenceKey
from servanda.engines.base import ENGINES
from servanda.engines.table import TableEngine
from servanda.judgement.evidence import Round, weigh
from servanda.judgement.verdict import Verdict, judge, objection, remarks
from servanda.rl.dumps.formats.parquet import Writer
from servanda.runner import load, run
from servanda.runner.compare.contract import Options, compare, prepare
from servanda.runner.probe import Engines
from servanda.theory.divergence.precision import rounded
from servanda.theory.stats.agreement import ENOUGH, INFORMATIVE, Agreement
from tests import kit
from tests.kit import parse

ROOT = Path(__file__).parents[2]
LEVELS = st.sampled_from([-3.0, -1.0, -0.04, -1e-9, 0.0, -np.inf, np.nan])


@given(st.lists(st.lists(st.tuples(LEVELS, LEVELS), max_size=6), min_size=1, max_size=8))
def test_the_counts_are_those_of_one_token_after_another(sequences):
    """The oracle walks the tokens; parts of a dump add up to the whole of it."""
    informative, equal, told, same = 0, 0, 0, 0
    for tokens in sequences:
        marks = []
        for train, infer in tokens:
            known = np.isfinite(infer) and not np.isnan(train)
            if known and min(train, infer) < np.log(INFORMATIVE):
                marks.append(train == infer)
        informative, equal = informative + len(marks), equal + sum(marks)
        told, same = told + bool(marks), same + (bool(marks) and all(marks))

    def of(some):
        train, infer = (np.array([pair[i] for tokens in some for pair in tokens]) for i in (0, 1))
        return Agreement.of(train.astype(float), infer.astype(float), np.array([*map(len, some)]))

    whole = of(sequences)
    assert (whole.tokens, whole.equal, whole.sequences) == (informative, equal, told)
    assert sum(whole.identical) == same
    parts = of(sequences[:1]) + of(sequences[1:])
    assert parts.distance == pytest.approx(whole.distance)
    assert replace(parts, distance=whole.distance) == whole


@pytest.mark.parametrize("copied", [0, 3, 40])
@pytest.mark.parametrize("noise", [1e-7, 1e-2])
def test_padded_rows_are_counted_as_flat_ones(copied, noise):
    """All counts are the same; what tokens differ by is, within the spread of its mean."""
    rng = np.random.default_rng(copied)
    infer = np.where(rng.random((40, 300)) < 0.6, -1e-4, -rng.exponential(1.0, (40, 300)) - 0.06)
    train = infer + rng.normal(0, noise, infer.shape) * (infer < -0.06)
    train[:copied] = infer[:copied]
    infer[5, 7], train[6, 8], mask = np.nan, np.nan, rng.random(infer.shape) < 0.8
    flat = Agreement.of(train[mask], infer[mask], mask.sum(axis=1))
    rows = Agreement.of_rows(train, infer, mask)
    assert replace(rows, tokens=0, distance=0.0) == replace(flat, tokens=0, distance=0.0)
    assert abs(rows.tokens - flat.tokens) <= 1  # a token without train's logprob
    assert rows.distance == pytest.approx(flat.distance, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_chance_alone_makes_no_copies(share):
    """Sequences whose tokens coincide with any one probability, by chance, are never copies."""
    rng = np.random.default_rng(int(10 * share))
    for _ in range(50):
        length_S = rng.integers(1, 200, 60)
        infer = -rng.exponential(1.0, length_S.sum()) - 0.06
        train = infer + np.where(rng.random(len(infer)) < share, 0.0, 0.01)
        assert not Agreement.of(train, infer, length_S).mixed


def toy(tmp_path, bitwise=False):
    """A contract whose two sides are one table under two names."""
    return kit.write(tmp_path, q={"": kit.BASE}, stable=None, bitwise=bitwise)[0]


def test_one_program_on_both_sides_is_not_sound_unless_it_is_declared(tmp_path):
    """Measured kernels, golden texts alone included; the text says both readings."""
    verdict = run.check(toy(tmp_path / "a"), run_dir=tmp_path / "run", open=run.in_process)
    (spot,) = (s.text for s in verdict.blind_spots if "every bit" in s.text)
    assert (verdict.outcome, verdict.exit_code) == ("error", 4)
    assert "one column was copied" in spot and "`bitwise: true`" in spot

    path = toy(tmp_path / "b", bitwise=True)
    declared = run.check(path, run_dir=tmp_path / "run2", open=run.in_process)
    (spot,) = (s.text for s in declared.blind_spots if "every bit" in s.text)
    assert declared.outcome == "holds"
    assert spot.endswith("this run could not have shown a disagreement")
    assert Verdict.from_dict(json.loads(json.dumps(declared.to_dict()))) == declared


def test_a_declared_bitwise_pair_that_differs_is_said(tmp_path):
    path, _ = kit.write(tmp_path, stable=None, bitwise=True)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)

    assert verdict.outcome == "holds"
    assert any("`bitwise: true` is declared, and" in s.text for s in verdict.blind_spots)


def test_the_key_is_part_of_the_digest_only_where_it_is_set(tmp_path):
    plain = load.load(toy(tmp_path / "a"))
    assert "bitwise" not in plain.meaning
    assert plain.digest != plain.model_copy(update={"bitwise": True}).digest


def test_arrays_that_are_one_another_are_not_sound(tmp_path):
    """`pair` in the chain of pure functions: no engine, no folder, the same answer."""
    plan = load.compile(load.load(toy(tmp_path)))
    schedule = plan.schedules[0]
    units = schedule.units(0)
    rng = np.random.default_rng(0)
    logp = -rng.exponential(1.0, (len(units), 6)) - 0.06
    key = EvidenceKey(plan.contract.digest, "", "t", "i", "w")
    same = weigh(plan, key, [Round(schedule.name, 0, units, pair(logp, logp.copy(), logp < 0))])
    other = weigh(plan, key, [Round(schedule.name, 0, units, pair(logp - 1e-3, logp, logp < 0))])
    assert judge(plan, same).outcome == "error"
    assert judge(plan, other).outcome != "error"


@ENGINES.register("echo_of_train")
class Echo(TableEngine):
    """Draws by its own table, and reports the logprobs of p.json beside it."""

    def generate(self, batch, sampling, seed):
        drawn = super().generate(batch, sampling, seed)
        p = self.kernel.model_copy(update={"model": str(Path(self.kernel.model).parent / "p.json")})
        given = copy.copy(batch)
        object.__setattr__(given, "continuations", drawn.continuations)
        said = TableEngine(p).score(given, sampling, "decode")
        object.__setattr__(drawn, "columns", {**drawn.columns, "logp": said.columns["logp"]})
        return drawn


def test_an_engine_that_reports_the_references_logprobs_is_not_sound(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.002)}, stable=None)
    text = path.read_text().replace("infer: {engine: table", "infer: {engine: echo_of_train")
    contract, _ = parse(text, str(path), engines=["table", "echo_of_train"])
    verdict = run.check(
        load.beside(contract, tmp_path), run_dir=tmp_path / "run", open=run.in_process
    )
    assert verdict.outcome == "error"
    assert any("every bit" in s.text for s in verdict.blind_spots)


@pytest.mark.slow
def test_comparing_a_kernel_with_itself_declares_it(tmp_path, monkeypatch):
    """A against A stays usable: the contract that compare writes has the key, and says why."""
    monkeypatch.chdir(tmp_path)
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    kit.table(tmp_path, "copy.json", {"": kit.BASE})
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def compared(b, **options):
        asked = Options(
            *("table:p.json", f"table:{b}"),
            prompts=Path("prompts.jsonl"),
            preset="nvfp4",
            max_new_tokens=6,
            run_dir=Path(f"run-{b}-{len(options)}"),
            **options,
        )
        with Engines(run.in_process) as engines:
            comparison = prepare(asked, engines)
            return comparison, compare(comparison, engines)

    itself, verdict = compared("p.json")
    assert verdict.outcome == "holds"
    assert "bitwise: true    # A and B are one kernel" in itself.text(Path())
    _, copied = compared("copy.json")
    assert copied.outcome == "error"
    assert compared("copy.json", bitwise=True)[1].outcome == "holds"


def dump(folder, copied, steps=6, n=20, width=200):
    """A dump in our own format in which some rows of the trainer's column are the sampler's."""
    writer = Writer(folder)
    for step in range(1, steps + 1):
        rng = np.random.default_rng(step)
        infer = -np.minimum(rng.exponential(0.8, (n, width)) + 1e-3, 12)
        train = np.minimum(infer + rng.normal(-5e-5, 0.01, infer.shape), -1e-6)
        train[: int(copied * n)] = infer[: int(copied * n)]
        ids = rng.integers(0, 9999, (n, width + 20))
        groups = [f"p{step}.{i // 5}" for i in range(n)]
        writer.step(step, ids, np.ones((n, width)), train, infer, groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [1.0, 0.5, 0.1])
def test_a_dump_with_copied_rows_is_not_sound(tmp_path, copied):
    dump(tmp_path / "dump", copied)
    done = CliRunner().invoke(main, ["check", str(tmp_path / "dump"), "--quiet"])

    assert done.exit_code == 4, done.output
    assert "UNSOUND: both sides' logprobs are equal in every bit" in done.output
    watched = CliRunner().invoke(main, ["watch", str(tmp_path / "dump"), "--once"])
    assert watched.exit_code == 4, watched.output


def test_a_dump_that_is_declared_bitwise_holds_and_says_that_it_shows_nothing(tmp_path):
    dump(tmp_path / "dump", 1.0)
    done = CliRunner().invoke(main, ["check", str(tmp_path / "dump"), "--quiet", "--bitwise"])

    assert done.exit_code == 0, done.output
    assert "this run could not have shown a disagreement" in done.output


def test_a_healthy_dump_has_nothing_to_say_of_it(tmp_path):
    dump(tmp_path / "dump", 0.0)
    done = CliRunner().invoke(main, ["check", str(tmp_path / "dump"), "--quiet"])

    assert done.exit_code == 0, done.output
    assert "every bit" not in done.output


STORED = {
    "float64": lambda x: x,
    "float32": lambda x: x.astype(np.float32).astype(float),
    "bfloat16": lambda x: rounded(x, "bfloat16"),
    "float16": lambda x: rounded(x, "float16"),
    "3 decimals": lambda x: np.round(x, 3),
    "4 decimals": lambda x: np.round(x, 4),
    "3 decimals, held as float32": lambda x: np.round(x, 3).astype(np.float32).astype(float),
    "4 decimals, held as float32": lambda x: np.round(x, 4).astype(np.float32).astype(float),
}


def kernels(seed, noise_S, width=64):
    """Two kernels whose log ratios have a spread of each sequence's own, [S, width] each."""
    rng = np.random.default_rng(seed)
    infer = np.log(np.clip(rng.beta(2, 1, (len(noise_S), width)), 1e-4, 0.999))
    moved = rng.normal(0, 1, infer.shape) * np.array(noise_S)[:, None]
    return np.minimum(infer + moved * (1 - np.exp(infer)), -1e-6), infer


def agreement(train, infer):
    return Agreement.of(train.ravel(), infer.ravel(), np.full(len(train), train.shape[1]))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("noises", [(1e-4, 0.02), (3e-4, 0.02), (1e-5, 1e-3), (1e-3, 1e-3)])
def test_rounding_makes_no_copies_where_some_sequences_are_older_than_others(stored, noises):
    """Half of them were drawn by the newest weights, half by older ones."""
    for seed in range(4):
        pair = kernels(seed, [noises[s % 2] for s in range(300)])
        found = agreement(*map(STORED[stored], pair))
        assert not found.mixed and not found.mostly


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("own", [1, 2, 16])
def test_a_column_that_was_copied_but_for_a_few_tokens_is_seen(stored, own):
    train, infer = kernels(3, [0.02] * 100)
    train[:, own:] = infer[:, own:]

    found = agreement(*map(STORED[stored], (train, infer)))

    assert found.mostly
    mask = np.ones(train.shape, dtype=bool)
    assert Agreement.of_rows(*map(STORED[stored], (train, infer)), mask).mostly


def test_a_dump_whose_column_was_copied_but_for_each_first_token_is_not_sound(tmp_path):
    rng, writer = np.random.default_rng(0), Writer(tmp_path / "dump")
    for step in range(1, 5):
        train, infer = kernels(step, [0.02] * 24)
        train[:, 1:] = infer[:, 1:]
        ids = rng.integers(0, 9999, (24, 84))
        writer.step(step, ids, np.ones((24, 64)), train, infer)
    for verb, option in (("check", "--quiet"), ("watch", "--once")):
        done = CliRunner().invoke(main, [verb, str(tmp_path / "dump"), option])
        assert done.exit_code == 4, done.output
        assert "most of a column was copied" in done.output


def test_few_informative_tokens_are_said_and_refuse_nothing():
    infer = np.full(400, -1e-4)
    infer[: ENOUGH - 1] = -1.0
    found = Agreement.of(infer, infer, np.array([400]))
    contract = load.load(ROOT / "examples/tiny-bf16.kernelcontract.yaml")
    assert objection(contract, found) == ""
    (text,) = remarks(contract, found)
    assert "only 15 of the tokens" in text


@pytest.mark.parametrize("keys", [{}, {"kv_cache": "fp8_e4m3"}, {"head_dtype": "bfloat16"}])
def test_rounding_alone_beside_a_declared_low_precision_is_said(keys):
    rng = np.random.default_rng(1)
    infer = -rng.exponential(1.0, 5000)
    contract = load.load(ROOT / "examples/tiny-bf16.kernelcontract.yaml")
    coarse = contract.kernels.infer
    coarse = coarse.model_copy(update={"dtype": "float32", **keys}) if keys else coarse
    kernels = contract.kernels.model_copy(update={"infer": coarse})
    contract = contract.model_copy(update={"kernels": kernels})

    def said(noise):
        train = infer + rng.normal(0, noise, 5000)
        return remarks(contract, Agreement.of(train, infer, np.full(50, 100)))

    assert [text.endswith("both sides look like one program") for text in said(5e-7)] == [True]
    assert f"infer is declared {keys.get('kv_cache', 'bfloat16')}" in said(5e-7)[0]
    assert said(5e-3) == ()


@pytest.mark.parametrize(("octave", "copies"), [(5, 3), (4, 0)])
def test_a_copy_is_longer_than_chance_repeats_once_in_a_million(octave, copies):
    """Half of the tokens of other sequences are equal: 2^-20 < 1e-6 < 2^-19."""
    identical = [0] * len(Agreement().identical)
    identical[octave] = 3
    whole = 3 * 2**octave
    found = Agreement(whole + 100, whole + 50, 13, tuple(identical), whole, 10.0)
    assert found.copies == copies
