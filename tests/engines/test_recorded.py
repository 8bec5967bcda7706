# Recordings: what an engine answered comes back bit for bit, and anything else is refused by name.

import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines import recorded as module
from servanda.engines.conformance import LAWS, examine_engine
from servanda.engines.recorded import HEAD, Recorded, record
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.runner import run
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests import kit

PLAIN = Sampling()
BATCH = Batch((3, 5, 8), ((0,), (1, 2), (2,)), 4)
HINT = "`servanda check CONTRACT --record FILE`"


def table(folder):
    kit.table(folder, "p.json", {"": kit.BASE, "a": [0.1, 0.3, 0.3, 0.2, 0.1]})
    return open_engine(Kernel(engine="table", model=str(folder / "p.json")))


def replay(path):
    return open_engine(Kernel(engine="recorded", model=str(path)))


def given(trace):
    return replace(BATCH, continuations=trace.continuations)


@pytest.fixture
def made(tmp_path):
    """A recording of one batch: drawn, scored, with logits; and what was answered."""
    path = tmp_path / "x.recorded"
    with record(table(tmp_path), path) as engine:
        engine.encode(["a b", "c"])
        engine.decode([[0, 1]])
        drawn = engine.generate(BATCH, PLAIN, 7)
        scored = engine.score(given(drawn), PLAIN, "prefill")
        logits = list(engine.logits(given(drawn), "decode"))
    return path, drawn, scored, logits


def same(one, other):
    fields = ("sequence_S", "length_S", "lost_S", "prompt_tokens_S", "token_N")
    return (
        all(np.array_equal(getattr(one, f), getattr(other, f)) for f in fields)
        and one.columns.keys() == other.columns.keys()
        and all(one.columns[c].tobytes() == other.columns[c].tobytes() for c in one.columns)
        and one.about == other.about
    )


# what comes back


def in_a_worker(path):
    return spawn(Kernel(engine="recorded", model=str(path)), "infer")


@pytest.mark.parametrize("opened", [replay, in_a_worker])
def test_what_was_answered_comes_back_bit_for_bit(made, opened):
    path, drawn, scored, logits = made
    engine = opened(path)

    assert same(engine.generate(BATCH, PLAIN, 7), drawn)
    assert same(engine.score(given(drawn), PLAIN, "prefill"), scored)
    for one, other in zip(engine.logits(given(drawn), "decode"), logits, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    assert engine.encode(["c", "a b"]) == [[2], [0, 1]]
    assert engine.decode([[0, 1]]) == ["a b"]
    assert engine.vocabulary() == kit.TOKENS
    engine.close()


def test_it_describes_the_kernel_that_answered_and_the_file(made, tmp_path):
    path, *_ = made
    own, found = table(tmp_path).describe(), replay(path).describe()

    digest = Recorded.read(str(path)).digest
    assert found.fingerprint == {**own.fingerprint, "recorded": digest}
    assert (found.tensors, found.tokens, found.eos) == (own.tensors, own.tokens, own.eos)
    assert found.full_logits and not found.timed


def test_logits_that_nobody_asked_for_are_not_promised(tmp_path):
    with record(table(tmp_path), tmp_path / "x.recorded") as engine:
        engine.generate(BATCH, PLAIN, 7)
    assert not replay(tmp_path / "x.recorded").describe().full_logits


def test_the_same_answers_are_the_same_file(tmp_path):
    for name in "xy":
        with record(table(tmp_path), tmp_path / name) as engine:
            engine.generate(BATCH, PLAIN, 7)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_kernel_that_answers_otherwise_each_time_is_replayed_in_its_order(tmp_path):
    engine = table(tmp_path)
    honest, seeds = engine.generate, iter([1, 1, 2])
    engine.generate = lambda batch, sampling, _: honest(batch, sampling, next(seeds))
    with record(engine, tmp_path / "x.recorded") as recorder:
        answers = [recorder.generate(BATCH, PLAIN, 7) for _ in range(3)]

    engine = replay(tmp_path / "x.recorded")
    assert all(same(engine.generate(BATCH, PLAIN, 7), answer) for answer in answers)
    assert not same(answers[1], answers[2])
    with zipfile.ZipFile(tmp_path / "x.recorded") as file:
        assert len(file.namelist()) == 3  # two answers and the head


# what is refused


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda e: e.generate(BATCH, PLAIN, 8), "no draw of sequence 3 with seed 8: it has seed 7"),
        (
            lambda e: e.generate(BATCH, Sampling(top_k=2), 7),
            "no draw of sequence 3 with sampling temperature 1.0, top_k 2, top_p 1.0, min_p 0.0: "
            "it has sampling temperature 1.0, top_p 1.0",
        ),
        (
            lambda e: e.generate(replace(BATCH, width=6), PLAIN, 7),
            "no draw of sequence 3 with width 6: it has width 4",
        ),
        (
            lambda e: e.generate(replace(BATCH, sequence_S=(3, 5, 12)), PLAIN, 7),
            "no draw of sequence 12 with seed 7: it ends at sequence 8",
        ),
        (
            lambda e: e.generate(replace(BATCH, prompts=((0,), (1, 1), (2,))), PLAIN, 7),
            "has sequence 5 with another prompt or continuation",
        ),
        (
            lambda e: e.generate(BATCH.take([0, 1]), PLAIN, 7),
            "has sequence 3 in another batch than the 2 sequences that are asked for",
        ),
        (
            lambda e: e.score(replace(BATCH, continuations=((0,),) * 3), PLAIN, "decode"),
            "no score of sequence 3 with path decode: it has path prefill",
        ),
        (lambda e: e.top(BATCH, "decode"), "no best tokens of any sequence"),
        (lambda e: list(e.logits(BATCH, "prefill")), "no logits of sequence 3 with path prefill"),
        (lambda e: e.encode(["a a"]), "no token ids of 'a a'"),
        (lambda e: e.decode([[4, 4]]), "no text of the ids [4, 4]"),
        (lambda e: e.time(BATCH, PLAIN, 7, True), "cannot be timed"),
    ],
)
def test_what_is_not_in_the_file_is_refused_by_name(made, ask, message):
    with pytest.raises(MeasurementError) as raised:
        ask(replay(made[0]))
    assert message in str(raised.value)
    assert str(made[0]) in str(raised.value)
    assert "hint: " in str(raised.value)


def test_a_block_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(KeyError), record(table(tmp_path), tmp_path / "x.recorded") as engine:
        engine.generate(BATCH, PLAIN, 7)
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_logits_that_are_too_large_are_refused_while_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOGITS_BYTES", 1 << 20)
    texts = replace(BATCH, continuations=((0,) * 9000,) * 3, width=9000)
    with (
        pytest.raises(MeasurementError, match="exceed 1 MiB") as raised,
        record(table(tmp_path), tmp_path / "x.recorded") as engine,
    ):
        list(engine.logits(texts, "prefill"))
    assert "servanda tools measure CONTRACT --side infer -o x.pack" in str(raised.value)


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(MeasurementError, match="cannot be written"),
        record(table(tmp_path), tmp_path / "file" / "x.recorded"),
    ):
        pass


def changed(path, change):
    """The same recording with another head, or other members."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)


def head(**values):
    def change(members):
        members[HEAD] = json.dumps({**json.loads(members[HEAD]), **values}).encode()

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.unlink(), "there is no recording"),
        (lambda p: p.write_bytes(p.read_bytes()[:-40]), "is no recording, or only a part of one"),
        (lambda p: p.write_text("not a zip"), "is no recording, or only a part of one"),
        (lambda p: changed(p, lambda m: m.pop(HEAD)), "is a zip file, but no recording"),
        (lambda p: changed(p, lambda m: m.pop("000000.parquet")), "cannot be read"),
        (
            lambda p: changed(p, lambda m: m.update({"000000.parquet": b"x"})),
            "is damaged: 000000.parquet is not what its digest says",
        ),
        (lambda p: changed(p, head(decoded={"x": "y"})), "is damaged: head.json is not what"),
        (
            lambda p: changed(p, head(format=99)),
            "has format 99, and this version of",
        ),
        (lambda p: changed(p, lambda m: m.update({HEAD: b"[]"})), "states neither format nor"),
        (lambda p: changed(p, lambda m: m.update({HEAD: b"{"})), "cannot be read"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_the_next_move(made, spoil, message):
    path = made[0]
    spoil(path)
    with pytest.raises(MeasurementError) as raised:
        replay(path)
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert "hint: " in str(raised.value)


def test_a_recording_without_a_file_is_refused():
    with pytest.raises(MeasurementError, match="engine 'recorded' needs a model"):
        open_engine(Kernel(engine="recorded"))


# the laws of engines


def test_a_recording_keeps_the_laws_that_its_engine_kept(tmp_path):
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    kernel = Kernel(engine="table", model=str(tmp_path / "p.json"))
    asked = {"reopen": False, "sequences": 32}
    with record(open_engine(kernel), tmp_path / "x.recorded") as engine:
        before = examine_engine(lambda: engine, ["a b", "c", "b a"], **asked)

    def opened():
        return replay(tmp_path / "x.recorded")

    after = examine_engine(opened, ["a b", "c", "b a"], **asked)
    assert before.broken == after.broken == ()
    skipped = {f.law for f in after.those("skipped")} - {f.law for f in before.those("skipped")}
    assert skipped == {"seconds_are_of_every_token"}
    assert len(after.findings) == len(LAWS)


# a contract, measured once and checked elsewhere


def numbers(verdict):
    """What a verdict says of its clauses; not what its kernels are called."""
    data = verdict.to_dict()
    for cell in data["cells"]:
        cell.pop("where", None)
    return data["outcome"], data["cells"]


def contract(folder, **options):
    more = "numerical:\n  - {id: fact, metric: tv, aggregate: max, at_most: 0.5}\n"
    golden = kit.golden(folder)
    path, _ = kit.write(folder, golden=golden, last=96, limit=0.2, more=more, **options)
    return path


def elsewhere(path, side="infer", model="q"):
    """The same contract, with the recording for one kernel."""
    text = path.read_text()
    text = text.replace(f"table, model: {model}.json", "recorded, model: x.recorded")
    other = path.with_name("elsewhere.kernelcontract.yaml")
    other.write_text(text)
    return other


@pytest.mark.parametrize(("side", "model"), [("infer", "q"), ("train", "p")])
def test_a_recorded_kernel_is_checked_again_to_the_same_verdict(tmp_path, side, model):
    path = contract(tmp_path)
    file = tmp_path / "x.recorded"
    first = run.check(
        path, run_dir=tmp_path / "a", open=run.in_process, record=file, record_side=side
    )
    (tmp_path / f"{model}.json").unlink()

    again = run.check(elsewhere(path, side, model), run_dir=tmp_path / "b", open=run.in_process)

    assert {cell["section"] for cell in first.to_dict()["cells"]} >= {"numerical", "statistical"}
    assert numbers(again) == numbers(first)


@pytest.mark.parametrize(
    ("own", "old", "new", "message"),
    [
        ({}, "seed: 1", "seed: 2", r"no draw of sequence \d+ with seed"),
        ({"seed": 1}, "[32, 96]", "[960, 9600]", "it ends at sequence"),
    ],
)
def test_another_seed_and_more_rounds_are_refused(tmp_path, own, old, new, message):
    path = contract(tmp_path, **own)
    run.check(path, run_dir=tmp_path / "a", open=run.in_process, record=tmp_path / "x.recorded")
    other = elsewhere(path)
    other.write_text(other.read_text().replace(old, new))
    with pytest.raises(MeasurementError, match=message):
        run.check(other, run_dir=tmp_path / "b", open=run.in_process)


def test_a_run_that_was_begun_is_not_recorded_from_its_middle(tmp_path):
    path = contract(tmp_path)
    run.check(path, run_dir=tmp_path / "a", open=run.in_process)
    with pytest.raises(MeasurementError, match="was begun before") as raised:
        run.check(path, run_dir=tmp_path / "a", record=tmp_path / "x.recorded")
    assert "--fresh" in str(raised.value)
    assert not list(tmp_path.glob("x.recorded*"))


def test_a_stable_kernel_that_is_not_there_is_not_recorded(tmp_path):
    path = contract(tmp_path)
    with pytest.raises(MeasurementError, match="measures no stable kernel"):
        run.check(path, run_dir=tmp_path / "a", record=tmp_path / "x", record_side="stable")


def test_a_run_that_fails_leaves_no_recording(tmp_path):
    path = contract(tmp_path)

    def opened(kernel, side):
        engine = run.in_process(kernel, side)
        if side == "train":
            engine.score = lambda *_: (_ for _ in ()).throw(MeasurementError("out of memory"))
        return engine

    with pytest.raises(MeasurementError, match="out of memory"):
        run.check(path, run_dir=tmp_path / "a", open=opened, record=tmp_path / "x.recorded")
    assert not list(tmp_path.glob("x.recorded*"))


def test_the_command_line_records_a_kernel_and_checks_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = contract(tmp_path)
    call = CliRunner().invoke

    first = call(main, ["check", str(path), "--run-dir", "a", "--record", "x.recorded"])
    assert "recorded the infer kernel in x.recorded" in first.stderr
    assert first.exit_code == 0, first.output

    (tmp_path / "q.json").unlink()
    again = call(main, ["check", str(elsewhere(path)), "--run-dir", "b"])
    assert again.exit_code == 0, again.output
