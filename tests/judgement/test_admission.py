# What is refused: limits no record can resolve, prompts outside, records made otherwise.

import json
from dataclasses import replace
from typing import ClassVar

import pytest

from servanda.engines import open_engine
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, MeasurementError
from servanda.runner import run
from servanda.runner.run_directory import RunDirectory
from tests import kit

RECORD = "observability:\n  record: [{}]"
EVERYTHING = "fingerprint, token_ids, processed_logprobs, sampling, path, batch_size"


def check(path, folder, open_=run.in_process, **options):
    return run.check(path, run_dir=folder / "run", open=open_, **options)


def captured(folder, capture, **options):
    path, pair = kit.write(folder, **options)
    data = json.loads((folder / "q.json").read_text())
    (folder / "q.json").write_text(json.dumps(data | {"capture": capture}))
    return path, pair


# law 9: the precision of the record


@pytest.mark.parametrize(
    ("capture", "clause", "told"),
    [
        (
            "float16",
            "{id: kl, metric: k3_nats, aggregate: mean, clip: 1.0, mode: monitor, at_most: 1e-7}",
            "clause 'kl' wants mean k3_nats at most 1e-07, and infer records its logprobs as "
            "float16: rounding alone reads as 1.6e-07 on tokens of about 3 nats",
        ),
        (
            "bfloat16",
            "{id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.005}",
            "clause 'tail' wants p99 abs_log_ratio_nats at most 0.005, and infer records its "
            "logprobs as bfloat16: rounding alone reads as 7.8e-03 on tokens of about 3 nats",
        ),
    ],
)
def test_a_limit_below_the_floor_of_its_capture_is_refused_at_its_place(
    tmp_path, capture, clause, told
):
    path, _ = captured(tmp_path, capture, more=f"  - {clause}")
    with pytest.raises(ContractError) as caught:
        check(path, tmp_path)
    (problem,) = caught.value.problems
    assert problem.message == told
    limit = clause.partition("at_most: ")[2]
    assert problem.where.text[problem.where.column - 1 :] == limit
    assert problem.where.line == path.read_text().splitlines().index(f"  - {clause}") + 1
    assert problem.hint.endswith("or let the engine record float32 or float64")
    assert not list((tmp_path / "run").rglob("*.parquet"))


@pytest.mark.parametrize("capture", ["float64", "float32"])
def test_the_same_limit_is_fine_where_the_record_resolves_it(tmp_path, capture):
    more = "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.005}"
    path, _ = captured(tmp_path, capture, more=more, q={"": kit.BASE}, limit=0.1)
    assert check(path, tmp_path).outcome == "holds"


def test_a_coarse_record_is_really_rounded_and_reads_as_a_divergence(tmp_path):
    found = {}
    for capture in ("float64", "bfloat16"):
        folder = tmp_path / capture
        path, _ = captured(folder, capture, q={"": kit.BASE}, limit=0.05)
        verdict = check(path, folder)
        found[capture] = next(c.value for c in verdict.cells if c.clause == "tv")
    assert found["float64"] == 0.0
    assert 1e-4 < found["bfloat16"] < 2**-8  # tokens of 1 to 2.3 nats: eta is at most 2^-7


def test_bits_have_no_floor_but_a_limit_between_them_does(tmp_path):
    runtime = "runtime:\n  clauses:\n    - {{id: b, metric: batch_invariance_nats, at_most: {}}}"
    path, _ = captured(tmp_path / "a", "float16", more=runtime.format(0), limit=0.1)
    assert check(path, tmp_path / "a").outcome == "holds"
    path, _ = captured(tmp_path / "b", "float16", more=runtime.format("1e-6"), limit=0.1)
    with pytest.raises(ContractError, match="records its logprobs as float16"):
        check(path, tmp_path / "b")


def described(**changes):
    """Engines that say something else of themselves."""

    def open_(kernel, side):
        engine = open_engine(kernel)
        description = replace(engine.describe(), **changes)
        engine.describe = lambda: description
        return engine

    return open_


@pytest.mark.parametrize(
    ("scores", "declared", "wanted", "hint"),
    [
        (("prefill",), ", path: decode", "decode", "declare kernels.train.path: prefill"),
        (("decode",), "", "prefill", "declare kernels.train.path: decode"),
        ((), "", "prefill", "let it be infer, the side that draws"),
    ],
)
def test_a_train_engine_that_cannot_score_by_its_path_is_refused_before_measuring(
    tmp_path, scores, declared, wanted, hint
):
    path, _ = kit.write(tmp_path, train=declared)
    with pytest.raises(MeasurementError) as caught:
        check(path, tmp_path, described(scores=scores))
    (problem,) = caught.value.problems
    assert problem.message == f"the train engine 'table' cannot score given tokens by {wanted}"
    assert problem.hint.startswith(hint)
    assert not list((tmp_path / "run").rglob("*.parquet"))
    if scores:
        path, _ = kit.write(tmp_path, train=f", path: {scores[0]}")
        assert check(path, tmp_path, described(scores=scores)).outcome == "holds"


def test_an_unknown_capture_is_refused(tmp_path):
    path, _ = captured(tmp_path, "float8")
    with pytest.raises(MeasurementError, match="cannot be recorded as 'float8'"):
        check(path, tmp_path)
    path, _ = kit.write(tmp_path / "b")
    with pytest.raises(MeasurementError, match="engine records its logprobs as 'half'"):
        check(path, tmp_path / "b", described(capture="half"))


# law 7: as declared


class Otherwise(TableEngine):
    """Says something else of its records, or nothing."""

    changes: ClassVar = {}
    without: ClassVar = ()

    def _trace(self, *args):
        trace = super()._trace(*args)
        about = {**trace.about, **self.changes}
        about = {k: v for k, v in about.items() if k not in self.without}
        columns = {k: v for k, v in trace.columns.items() if k not in self.without}
        return replace(trace, about=about, columns=columns)


def otherwise(side_, changes=(), without=()):
    made = type("Made", (Otherwise,), {"changes": dict(changes), "without": tuple(without)})
    return lambda kernel, side: made(kernel) if side == side_ else open_engine(kernel)


@pytest.mark.parametrize(
    ("side", "item", "said", "declared"),
    [
        ("infer", "path", "prefill", "decode"),
        ("infer", "batch_size", "1", "32"),
        ("train", "path", "decode", "prefill"),
        ("train", "batch_size", "64", "32"),
    ],
)
def test_a_record_that_was_made_otherwise_is_refused(tmp_path, side, item, said, declared):
    path, _ = kit.write(tmp_path)
    with pytest.raises(MeasurementError) as caught:
        check(path, tmp_path, otherwise(side, {item: said}))
    assert str(caught.value).splitlines() == [
        f"the {side} engine 'table' recorded {item} {said}, and the contract declares {declared}",
        "  hint: numbers made otherwise do not concern this contract: scoring a prompt does not "
        "certify decoding, nor one sampling another",
    ]


def test_another_sampling_is_refused_and_another_spelling_is_not(tmp_path):
    spelled = '{"top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "top_k": null}'
    path, _ = kit.write(tmp_path / "a")
    assert check(path, tmp_path / "a", otherwise("infer", {"sampling": spelled})).exit_code == 0
    path, _ = kit.write(tmp_path / "b")
    other = otherwise("infer", {"sampling": spelled.replace('ature": 1.0', 'ature": 0.7')})
    with pytest.raises(MeasurementError, match=r"recorded sampling .*0\.7.*contract declares"):
        check(path, tmp_path / "b", other)


def test_a_record_on_disk_is_held_to_the_contract_as_well(tmp_path):
    path, _ = kit.write(tmp_path, more=RECORD.format(EVERYTHING))
    assert check(path, tmp_path).outcome == "holds"  # what is asked for is in the record
    kept = RunDirectory(tmp_path / "run", 1)
    trace = kept.read("rounds/000000.train")
    kept.write("rounds/000000.train", replace(trace, about={**trace.about, "path": "decode"}))
    with pytest.raises(MeasurementError, match="the train engine 'table' recorded path decode"):
        check(path, tmp_path)


@pytest.mark.parametrize(
    ("item", "without"),
    [
        ("path", ["path"]),
        ("batch_size", ["batch_size"]),
        ("sampling", ["sampling"]),
        ("processed_logprobs", ["logp"]),
    ],
)
def test_what_is_asked_for_and_not_recorded_is_named_with_its_engine(tmp_path, item, without):
    path, _ = kit.write(tmp_path, more=RECORD.format(EVERYTHING))
    with pytest.raises(MeasurementError) as caught:
        check(path, tmp_path, otherwise("infer", without=without))
    assert str(caught.value).splitlines() == [
        f"the infer engine 'table' does not record {item}, which observability.record asks for",
        f"  hint: take {item} out of observability.record, or let the engine record it",
    ]


def test_an_engine_that_says_nothing_of_itself_has_no_fingerprint(tmp_path):
    path, _ = kit.write(tmp_path, more=RECORD.format("fingerprint"))
    with pytest.raises(MeasurementError, match="'table' does not record fingerprint"):
        check(path, tmp_path, described(fingerprint={}))


# the envelope


def test_prompts_outside_the_envelope_are_named_by_their_lines(tmp_path):
    more = "runtime: {envelope: {prompt_tokens: [1, 2]}}"
    path, _ = kit.write(tmp_path, more=more, prompts=("a", "a b c", "b", "a b c d"))
    with pytest.raises(ContractError) as caught:
        check(path, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"{tmp_path / 'prompts.jsonl'}:2:1: a prompt of 3 tokens lies outside the envelope the "
        "contract concerns (1 to 2)"
    )
    assert lines[1] == (
        "  hint: drop the line, or widen runtime.envelope.prompt_tokens; runtime.envelope.outside "
        "routes such requests to stable"
    )
    assert ":4:1: a prompt of 4 tokens" in lines[2]


def test_many_prompts_outside_are_counted(tmp_path):
    more = "runtime: {envelope: {prompt_tokens: [2, 4]}}"
    path, _ = kit.write(tmp_path, more=more, prompts=("a b", *["a"] * 9))
    with pytest.raises(ContractError) as caught:
        check(path, tmp_path)
    assert len(caught.value.problems) == 6
    assert "4 more lines like these" in str(caught.value)
