# Reference packs: what was drawn comes back bit for bit, and anything else is refused.

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from servanda.contract.identity import digest_of
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.recorded import HEAD, Pack
from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.judgement.verdict import Verdict
from servanda.runner import run
from servanda.runner.compare import reference
from servanda.runner.compare.reference import PackOptions, measure_pack, pack_contract
from servanda.runner.golden import bounded_names
from servanda.theory.divergence.base import LogitRows, exact
from servanda.theory.sampling import Sampling, log_softmax
from servanda.traces.trace import Batch
from tests import kit


@pytest.fixture
def made(tmp_path):
    """A contract of two tables and a pack of its train side: (path, pack, tables)."""
    path, pair = kit.write(tmp_path, golden=kit.golden(tmp_path), last=96, limit=0.2)
    pack = measure_pack(run.load(path), "train", tmp_path / "p.pack", open=run.in_process)
    return path, pack, pair


def swap(path, folder, pack="p.pack", golden=""):
    """The contract with the pack as the side that draws and the other kernel re-scoring."""
    text = path.read_text()
    text = text.replace(
        "train: {engine: table, model: p.json}", "train: {engine: table, model: q.json}"
    )
    text = text.replace(
        "infer: {engine: table, model: q.json}", f"infer: {{engine: pack, model: {pack}}}"
    )
    lines = [line for line in text.splitlines() if not line.startswith("golden:")]
    swapped = folder / "swapped.kernelcontract.yaml"
    swapped.write_text("\n".join([*lines, golden]))
    return swapped


def test_a_pack_and_a_candidate_give_the_verdict_of_both_kernels(tmp_path, made):
    """The pack is the side that draws, so the roles are swapped: q re-scores what p drew."""
    path, _, _ = made
    with_pack = run.check(swap(path, tmp_path), run_dir=tmp_path / "a", open=run.in_process)
    both = tmp_path / "both.kernelcontract.yaml"
    text = swap(path, tmp_path).read_text()
    both.write_text(text.replace("engine: pack, model: p.pack", "engine: table, model: p.json"))
    live = run.check(both, run_dir=tmp_path / "b", open=run.in_process)
    assert [(c.value, c.e_holds, c.e_violated, c.floor) for c in with_pack.cells] == [
        (c.value, c.e_holds, c.e_violated, c.floor) for c in live.cells
    ]
    assert with_pack.key.grade == "verified" and with_pack.key.weights == live.key.weights
    assert with_pack.key.infer != live.key.infer  # a pack is no engine, and says so


def test_the_mean_over_reference_tokens_is_the_total_variation(tmp_path, made):
    path, _, pair = made
    verdict = run.check(swap(path, tmp_path), run_dir=tmp_path / "a", open=run.in_process)
    tv = next(c for c in verdict.cells if c.clause == "tv")
    low, high = tv.interval
    assert low <= pair.mean_tv([(0,), (1,), (2,)], 6) <= high


def test_a_pack_states_what_it_holds(made):
    _, pack, _ = made
    again = Pack.read(pack.file)
    assert again.head == pack.head and again.schedule.groups == 96
    assert again.schedule.kernel.engine == "table" and again.description.tensors
    assert again.head["vocabulary"] == kit.TOKENS
    assert len(again.answers["score"].sequence_S) == 3 * 4  # every tenth of 32, in each round
    drawn = again.answers["generate"]
    assert {"logp", "rank", "entropy_nats", "p_max", "mass_before"} <= set(drawn.columns)


def test_golden_positions_are_kept_with_what_bounds_a_candidate(made):
    _, pack, pair = made
    best = pack.answers["top"]
    assert len(best.token_N) == 2 * 5
    text = pack.head["encoded"][json.loads(pack.schedule.golden.splitlines()[0])["prompt"]]
    logits_V = pair.train.logits_CV[pair.train.row_of(text[:1])]
    logp_V = log_softmax(logits_V[None])[0]
    assert best.columns["logp"][0] == logp_V[text[1]] and best.token_N[0] == text[1]
    order = np.argsort(-logp_V, kind="stable")
    ids_NK, logp_NK = best.best
    assert ids_NK[0].tolist() == order.tolist()
    assert logp_NK[0].tolist() == logp_V[order].astype(np.float32).tolist()


def test_the_same_draws_make_the_same_file(tmp_path, made):
    path, pack, _ = made
    again = measure_pack(run.load(path), "train", tmp_path / "again.pack", open=run.in_process)
    assert again.digest == pack.digest
    assert (tmp_path / "again.pack").read_bytes() == Path(pack.file).read_bytes()


def generate(pack, **changes):
    engine = open_engine(Kernel(engine="pack", model=pack.file))
    drawn = pack.answers["generate"]
    n = 4
    sequences = tuple(drawn.sequence_S[:n].tolist())
    batch = Batch(sequences, ((0,),) * n, changes.get("width", 6))
    batch = Batch(
        changes.get("sequences", sequences), changes.get("prompts", batch.prompts), batch.width
    )
    return engine.generate(
        batch,
        changes.get("sampling", Sampling()),
        changes.get("seed", int(pack.calls[0].question.seed)),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "no draw of sequence 0 with seed 1: it has seed"),
        ({"width": 5}, "no draw of sequence 0 with width 5: it has width 6"),
        (
            {"sampling": Sampling(temperature=0.5)},
            "draw of sequence 0 with sampling temperature",
        ),
        (
            {"sequences": (999, 1, 2, 3)},
            "of sequence 999 with seed .*: it ends at sequence 95",
        ),
        ({"prompts": ((0, 1),) * 4}, "has sequence 0 with another prompt or continuation"),
    ],
)
def test_what_was_not_drawn_is_refused(made, changes, message):
    with pytest.raises(MeasurementError, match=message) as caught:
        generate(made[1], **changes)
    assert caught.value.problems[0].hint


def test_other_prompts_are_refused_by_name(made):
    engine = open_engine(Kernel(engine="pack", model=made[1].file))
    assert engine.encode(["a", "c"]) == [[0], [2]]
    with pytest.raises(MeasurementError, match="has no token ids of 'a b'"):
        engine.encode(["a b"])
    with pytest.raises(MeasurementError, match="has no logits of any sequence"):
        next(iter(engine.logits(Batch((0,), ((0,),), 1, ((1,),)), "prefill")))


def test_a_pack_cannot_be_the_side_that_scores(tmp_path, made):
    path = tmp_path / "train.kernelcontract.yaml"
    lines = (
        made[0].read_text().replace("engine: table, model: p.json", "engine: pack, model: p.pack")
    )
    path.write_text("\n".join(x for x in lines.splitlines() if not x.startswith("golden:")))
    with pytest.raises(
        MeasurementError, match="cannot score tokens that it did not draw"
    ) as caught:
        run.check(path, run_dir=tmp_path / "r", open=run.in_process)
    assert "make it the infer kernel" in caught.value.problems[0].hint


def test_a_fresh_attempt_needs_a_fresh_pack(tmp_path, made):
    path = swap(made[0], tmp_path)
    run.check(path, run_dir=tmp_path / "r", open=run.in_process)
    with pytest.raises(MeasurementError, match="no draw of sequence 0 with seed") as caught:
        run.check(path, run_dir=tmp_path / "r", open=run.in_process, fresh=True)
    assert "without --fresh" in caught.value.problems[0].hint


def rewritten(pack, out, change):
    """The pack with its members changed by a function."""
    with zipfile.ZipFile(pack.file) as file:
        members = {name: file.read(name) for name in file.namelist()}
    change(members)
    with zipfile.ZipFile(out, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out


def head(**changes):
    def change(members):
        data = {**json.loads(members[HEAD]), **changes}
        data.pop("digest")
        members[HEAD] = json.dumps({**data, "digest": digest_of(data)}).encode()

    return change


def drop(name):
    return lambda members: members.pop(name)


def put(name, data):
    return lambda members: members.update({name: data})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("000000.parquet", b"PAR1"), "is damaged: 000000.parquet is not what its digest says"),
        (drop(HEAD), "is a zip file, but no reference pack"),
        (head(schedule=None), "is a recording, and no reference pack"),
        (head(schedule={"kernel": {"engine": 3}}), "cannot be read"),
    ],
)
def test_a_pack_that_is_not_sound_is_refused(tmp_path, made, change, message):
    bad = rewritten(made[1], tmp_path / "bad.pack", change)
    with pytest.raises(MeasurementError, match=message) as caught:
        Pack.read(str(bad))
    assert caught.value.problems[0].hint


def test_every_truncation_is_refused(tmp_path, made):
    data = Path(made[1].file).read_bytes()
    bad = tmp_path / "bad.pack"
    for size in range(0, len(data), max(1, len(data) // 40)):
        bad.write_bytes(data[:size])
        with pytest.raises(MeasurementError):
            Pack.read(str(bad))


def test_every_flipped_byte_is_refused_or_harmless(tmp_path, made):
    """A byte of zip's own bookkeeping may not matter; what is read is always what was written."""
    data = Path(made[1].file).read_bytes()
    bad = tmp_path / "bad.pack"
    for at in range(0, len(data), max(1, len(data) // 200)):
        bad.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            found = Pack.read(str(bad))
        except ServandaError:
            continue
        assert found.digest == made[1].digest
        assert [found.data(c) for c in found.calls] == [made[1].data(c) for c in found.calls]


def test_a_missing_pack_and_a_file_that_is_none(tmp_path):
    with pytest.raises(MeasurementError, match="there is no reference pack"):
        Pack.read(str(tmp_path / "x.pack"))
    (tmp_path / "x.pack").write_text("no zip")
    with pytest.raises(MeasurementError, match="is no reference pack, or only a part of one"):
        Pack.read(str(tmp_path / "x.pack"))


def test_a_kernel_string_is_measured_on_its_prompts(tmp_path):
    kit.write(tmp_path)
    asked = PackOptions(
        f"table:{tmp_path}/p.json",
        prompts=tmp_path / "prompts.jsonl",
        sequences=40,
        max_new_tokens=5,
        temperature=0.7,
    )
    contract, side = pack_contract(asked)
    pack = measure_pack(contract, side, tmp_path / "x.pack", open=run.in_process)
    assert pack.schedule.groups == 64  # rounds are whole
    assert pack.schedule.workload.sampling.max_new_tokens == 5
    assert pack.schedule.workload.sampling.temperature == 0.7


def test_options_of_a_kernel_do_not_go_with_a_contract(tmp_path):
    path, _ = kit.write(tmp_path)
    with pytest.raises(ContractError, match="--temperature is the contract's to say"):
        pack_contract(PackOptions(str(path), temperature=0.5))
    with pytest.raises(ContractError, match="--side names a side of a contract"):
        pack_contract(PackOptions(f"table:{tmp_path}/p.json", side="train"))


# golden texts: what the best tokens of a pack say of a candidate

GOLDEN = """\
golden: {{prompts: golden.jsonl}}
numerical:
  - {{id: near, metric: {metric}, aggregate: {aggregate}, at_most: {limit}{more}}}
"""


def near(made, folder, metric="tv", aggregate="mean", limit=0.2, more="", run_dir="g"):
    golden = GOLDEN.format(metric=metric, aggregate=aggregate, limit=limit, more=more)
    path = swap(made[0], folder, golden=golden)
    verdict = run.check(path, run_dir=folder / run_dir, open=run.in_process)
    return next(c for c in verdict.cells if c.clause == "near"), verdict


@pytest.fixture
def cut(monkeypatch, tmp_path):
    """A contract and a pack that kept only the three best of five tokens."""
    monkeypatch.setattr(reference, "TOP", 3)
    q = {"": kit.moved(kit.BASE, 0.1)}
    path, pair = kit.write(tmp_path, q=q, golden=kit.golden(tmp_path), last=96, limit=0.3)
    pack = measure_pack(run.load(path), "train", tmp_path / "p.pack", open=run.in_process)
    return path, pack, pair


@pytest.mark.sampled(11)
@pytest.mark.parametrize("metric", bounded_names())
@pytest.mark.parametrize("aggregate", ["mean", "max", "p50"])
def test_the_ends_hold_the_exact_value_and_are_one_where_nothing_is_left_out(
    tmp_path, made, metric, aggregate
):
    """The toy has five tokens, so the pack holds every one, in float32."""
    found, _ = near(made, tmp_path, metric, aggregate)

    _, _, pair = made
    infer, train = (np.array([t.logits_CV[t.row_of((0,))]]) for t in (pair.train, pair.infer))
    truth = exact(metric, LogitRows(train, infer))[0]
    low, high = found.interval
    assert (found.kind, found.outcome, found.value) == ("bound", "holds", None)
    assert low - 1e-6 <= truth <= high + 1e-6
    assert high - low < 1e-5
    assert found.n == 10 and found.units == "golden positions"


@pytest.mark.parametrize(
    ("limit", "outcome"), [(0.04, "violated"), (0.15, "inconclusive"), (0.6, "holds")]
)
def test_a_limit_between_the_ends_is_left_open(tmp_path, cut, limit, outcome):
    """p = (.35 .25 .2 | .1 .1), q has .1 moved: the TV is .1, and .2 of the mass is unknown."""
    found, _ = near(cut, tmp_path, limit=limit)

    low, high = found.interval
    assert low - 1e-6 <= 0.1 <= high
    assert low > 0.04 and 0.15 < high < 0.6
    assert found.outcome == outcome
    if outcome == "inconclusive":
        assert found.note == (
            "the pack's best tokens leave it open (they leave out 0.2 of the mass on average): "
            "the reference's full logits would decide"
        )


def test_a_divergence_without_an_upper_end_can_be_violated_and_never_holds(tmp_path, cut):
    found, verdict = near(cut, tmp_path, "kl_nats", limit=5.0)
    assert found.outcome == "inconclusive" and found.interval[1] == np.inf
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    found, _ = near(cut, tmp_path, "kl_nats", limit=1e-4, run_dir="h")
    assert found.outcome == "violated"


@pytest.mark.parametrize(
    ("more", "outcome"), [("", "not applicable"), (", required: true", "error")]
)
def test_a_metric_that_best_tokens_do_not_bound_is_named(tmp_path, made, more, outcome):
    found, _ = near(made, tmp_path, "logit_osc_nats", "max", more=more)
    assert found.outcome == outcome
    assert "infer tells the best tokens of golden texts" in found.note


def test_golden_texts_that_the_pack_lacks_are_refused(tmp_path, made):
    (tmp_path / "golden.jsonl").write_text('{"token_ids": [3, 3, 3]}\n')
    with pytest.raises(MeasurementError, match="has sequence 0 with another prompt") as caught:
        near(made, tmp_path)
    assert "give the golden texts of the recorded run" in caught.value.problems[0].hint


def test_golden_texts_scored_on_another_path_are_refused(tmp_path, made):
    golden = GOLDEN.format(metric="tv", aggregate="mean", limit=0.2, more="")
    golden = golden.replace("golden.jsonl}", "golden.jsonl, path: prefill}")
    with pytest.raises(MeasurementError, match="with path prefill: it has path decode"):
        path = swap(made[0], tmp_path, golden=golden)
        run.check(path, run_dir=tmp_path / "g", open=run.in_process)


def test_what_was_bounded_is_read_again_and_crosses_a_worker(tmp_path, made):
    before, _ = near(made, tmp_path)
    again, _ = near(made, tmp_path)
    golden = GOLDEN.format(metric="tv", aggregate="mean", limit=0.2, more="")
    verdict = run.check(swap(made[0], tmp_path, golden=golden), run_dir=tmp_path / "worker")

    assert before == again
    assert next(c for c in verdict.cells if c.clause == "near") == before
