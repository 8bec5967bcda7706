# Batch invariance and the corners of the envelope, on kernels whose truth is known.

import json

import numpy as np
import pytest

import servanda as sv
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.table import TableEngine
from servanda.engines.worker import spawn
from servanda.errors import ContractError
from servanda.judgement.clauses.batch_invariance import Company, Difference
from servanda.runner import run
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests import kit

BITWISE = "    - {id: bits, metric: batch_invariance_nats, at_most: 0}"
LOOSE = "    - {id: near, metric: batch_invariance_nats, at_most: 0.01}"


def write(folder, clauses=(), envelope="", golden=True, numerical="", **options):
    runtime = "runtime:\n" + (f"  envelope: {envelope}\n" if envelope else "")
    runtime += "  clauses:\n" + "\n".join(clauses) + "\n" if clauses else ""
    folder.mkdir(parents=True, exist_ok=True)
    return kit.write(
        folder,
        more=(numerical + runtime) if clauses or envelope else numerical,
        golden=kit.golden(folder) if golden else "",
        limit=0.3,
        **options,
    )[0]


def check(path, folder, open_=run.in_process, **options):
    return run.check(path, run_dir=folder / "run", open=open_, **options)


def cell(verdict, clause, slice_="all"):
    return next(c for c in verdict.cells if (c.clause, c.slice) == (clause, slice_))


class InCompany(TableEngine):
    """Adds `shift` nats to every logprob of a batch in which more than one runs at once."""

    shift = 1e-3

    def score(self, batch, sampling, path):
        trace = super().score(batch, sampling, path)
        if path == "decode" and (batch.together or self.kernel.batch_size) > 1:
            trace.columns["logp"][:] += self.shift
        return trace


def in_company(kernel, side):
    return InCompany(kernel) if side == "infer" else open_engine(kernel)


@pytest.mark.parametrize("golden", [True, False])
def test_a_kernel_of_look_ups_is_bitwise_the_same_in_any_company(tmp_path, golden):
    verdict = check(write(tmp_path, [BITWISE], golden=golden), tmp_path)
    bits = cell(verdict, "bits")
    assert (bits.outcome, bits.value, bits.kind) == ("holds", 0.0, "fact")
    assert bits.n and bits.floor is None
    assert "0 of" in bits.note and "batches of 32" in bits.note


def test_company_that_changes_a_bit_is_violated_and_the_path_is_named(tmp_path):
    verdict = check(write(tmp_path, [BITWISE, LOOSE]), tmp_path, in_company)
    bits, near = cell(verdict, "bits"), cell(verdict, "near")
    assert (bits.outcome, near.outcome, verdict.exit_code) == ("violated", "holds", 1)
    assert bits.value == near.value == pytest.approx(1e-3)
    decode, prefill = bits.note.split("; ")
    assert decode == "decode: 10 of 10 logprobs change in batches of 32, by at most 0.001 nats"
    assert prefill == "prefill: 0 of 10 logprobs change in batches of 32, by at most 0 nats"


def test_bits_are_compared_and_what_has_no_value_is_missing():
    def difference(alone, together):
        return Difference.of(Company(np.array(alone), np.array(together), 4))

    assert difference([0.0, -np.inf], [0.0, -np.inf]) == Difference(0.0, 2, 0, 0, 4)
    assert difference([0.0], [-0.0]) == Difference(0.0, 1, 1, 0, 4)
    assert difference([-1.0, np.nan], [-1.5, -1.0]) == Difference(0.5, 1, 1, 1, 4)
    assert difference([-1.0], [-np.inf]).largest == np.inf


def test_batches_and_corners_replay_and_resume(tmp_path):
    numerical = "numerical:\n  - {id: n, metric: tv, at_most: 0.2}\n"
    envelope = "{batch_size: [1, 40], prompt_tokens: [1, 5]}"
    path = write(tmp_path, [BITWISE], envelope, numerical=numerical)
    plan = sv.compile(sv.load(path))
    pairs = sv.measure(plan, tmp_path / "run", open=run.in_process)
    verdict = check(path, tmp_path)
    assert sv.judge(plan, sv.weigh(plan, pairs)) == verdict
    for file in (tmp_path / "run").rglob("corners/*"):
        file.unlink()
    assert check(path, tmp_path) == verdict


def corners(verdict, clause="n"):
    return {c.slice: c for c in verdict.cells if c.clause == clause and c.slice != "all"}


def test_a_numerical_clause_is_a_cell_at_every_corner_of_the_envelope(tmp_path):
    numerical = "numerical:\n  - {id: n, metric: tv, at_most: 0.05, slices: all}\n"
    envelope = "{batch_size: [2, 40], prompt_tokens: [1, 5]}"
    verdict = check(write(tmp_path, (), envelope, numerical=numerical), tmp_path)
    found = corners(verdict)
    assert list(found) == [
        "corner batch=2 prompt=1",
        "corner batch=2 prompt=5",
        "corner batch=40 prompt=1",
        "corner batch=40 prompt=5",
    ]
    # the tables differ by 0.01 everywhere; 8 texts at least, and one full batch
    assert [c.n for c in found.values()] == [48, 48, 240, 240]
    for corner in found.values():
        assert (corner.outcome, corner.kind, corner.limit) == ("holds", "fact", 0.05)
        assert corner.value == pytest.approx(0.01)
        assert corner.floor == pytest.approx(0.0, abs=1e-12)


class LongIsWrong(TableEngine):
    """Moves TV 0.2 where more than three tokens came before."""

    def logits(self, batch, path):
        moved = np.log(kit.moved(kit.BASE, 0.2))
        for prompt, given in zip(batch.prompts, batch.continuations, strict=True):
            before = len(prompt) + np.arange(len(given))
            yield np.where(before[:, None] > 3, moved, np.log(kit.BASE))


def test_a_drift_that_depends_on_the_length_shows_at_its_corner_exactly(tmp_path):
    numerical = "numerical:\n  - {id: n, metric: tv, at_most: 0.05, slices: all}\n"
    path = write(tmp_path, (), "{prompt_tokens: [1, 9]}", numerical=numerical, width=3)
    (tmp_path / "golden.jsonl").write_text('{"prompt": "a b c"}\n{"prompt": "b a"}\n')

    def open_(kernel, side):
        return LongIsWrong(kernel) if side == "infer" else open_engine(kernel)

    verdict = check(path, tmp_path, open_)
    found = corners(verdict)
    assert cell(verdict, "n").outcome == "holds"  # golden texts are too short to see it
    assert [(c.slice, c.outcome) for c in found.values()] == [
        ("corner batch=32 prompt=1", "holds"),
        ("corner batch=32 prompt=9", "violated"),
    ]
    assert found["corner batch=32 prompt=9"].value == pytest.approx(0.2)
    assert verdict.exit_code == 1


def test_a_side_that_disagrees_with_itself_raises_the_floor_of_its_corner(tmp_path):
    class Restless(TableEngine):
        """In another batch it is off by TV 0.1."""

        def logits(self, batch, path):
            moved = kit.BASE if len(batch) == 32 else kit.moved(kit.BASE, 0.1)
            yield np.tile(np.log(moved), (sum(map(len, batch.continuations)), 1))

    def open_(kernel, side):
        return Restless(kernel) if side == "infer" else open_engine(kernel)

    numerical = "numerical:\n  - {id: n, metric: tv, at_most: {times: 2.5, of: self_noise}}\n"
    path = write(tmp_path, (), "{prompt_tokens: [1, 1]}", numerical=numerical)
    (corner,) = corners(check(path, tmp_path, open_)).values()
    assert corner.floor == pytest.approx(0.1) and corner.limit == pytest.approx(0.25)


def test_a_corner_beyond_the_context_is_refused_before_measuring(tmp_path, monkeypatch):
    from dataclasses import replace

    describe = TableEngine.describe
    monkeypatch.setattr(TableEngine, "describe", lambda self: replace(describe(self), context=40))
    numerical = "numerical:\n  - {id: n, metric: tv, at_most: 0.05}\n"
    path = write(tmp_path, (), "{prompt_tokens: [1, 64]}", numerical=numerical)
    with pytest.raises(ContractError) as caught:
        check(path, tmp_path)
    message, line, _, hint = str(caught.value).splitlines()
    assert message.endswith(
        "the envelope promises prompts of 64 tokens; with 6 new ones they exceed the model's "
        "context of 40"
    )
    assert "envelope: {prompt_tokens: [1, 64]}" in line
    assert hint == "  hint: promise at most 34 prompt tokens"
    assert not list((tmp_path / "run").rglob("*.parquet"))


def test_how_many_run_at_once_crosses_the_pipe(tmp_path):
    kit.table(tmp_path, "q.json", {"": kit.BASE})
    kernel = Kernel(engine="table", model=str(tmp_path / "q.json"))
    batch = Batch((0, 1, 2), ((0,),) * 3, 2, ((1, 1),) * 3, together=2)
    assert [len(chunk) for chunk in batch.chunks(32)] == [2, 1]
    assert batch.take([0]).together == 2
    engine = spawn(kernel, "infer")
    try:
        about = engine.score(batch, Sampling(), "decode").about
    finally:
        engine.close()
    assert json.loads(about["batch_size"]) == 2
