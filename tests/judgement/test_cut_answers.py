# Answers that stop where nothing ended them: an aborted rollout that is kept as an answer.

import dataclasses

import numpy as np
import pytest

from servanda.engines.base import ENGINES
from servanda.engines.table import TableEngine
from servanda.runner import load, run
from servanda.traces.trace import Trace, unended, with_ends
from tests import kit
from tests.kit import parse

D = kit.TOKENS.index("d")
END = kit.TOKENS.index("<eos>")
# after "d" the sides are far apart: .30 there, .01 elsewhere
FAR = {"": kit.moved(kit.BASE, 0.01), "d": kit.moved(kit.BASE, 0.3)}


def trace(*answers, **columns):
    token_N = np.array([t for answer in answers for t in answer], dtype=np.int64)
    return Trace(
        sequence_S=np.arange(len(answers)),
        length_S=np.array([*map(len, answers)], dtype=np.int64),
        lost_S=np.array([not answer for answer in answers]),
        prompt_tokens_S=np.ones(len(answers), dtype=np.int64),
        token_N=token_N,
        columns={"logp": -1.0 - np.arange(len(token_N)), **columns},
    )


@ENGINES.register("aborting_table")
class Aborting(TableEngine):
    """Ends each answer after its first "d", before the sides come to differ."""

    def generate(self, batch, sampling, seed):
        drawn = super().generate(batch, sampling, seed)
        parts = [
            answer[: answer.index(D) + 1] if D in answer else answer
            for answer in drawn.continuations
        ]
        kept_N = np.concatenate(
            [np.arange(n) < len(p) for n, p in zip(drawn.length_S, parts, strict=True)]
        )
        return dataclasses.replace(
            drawn,
            length_S=np.array([*map(len, parts)]),
            token_N=drawn.token_N[kept_N],
            columns={name: values[kept_N] for name, values in drawn.columns.items()},
        )


@pytest.mark.parametrize("width", [6, 20])
def test_answers_that_are_cut_where_the_sides_would_differ_do_not_hold(tmp_path, width):
    path, _ = kit.write(tmp_path, q=FAR, limit=0.025, width=width, stable=None, last=4000)
    text = path.read_text().replace("infer: {engine: table", "infer: {engine: aborting_table")
    contract, _ = parse(text, str(path), engines=["table", "aborting_table"])
    verdict = run.check(
        load.beside(contract, tmp_path), run_dir=tmp_path / "run", open=run.in_process
    )

    assert verdict.outcome != "holds"
    (spot,) = (s.text for s in verdict.blind_spots if "stop early" in s.text)
    assert "counted as missing" in spot
    (cell,) = (c for c in verdict.cells if c.clause == "tv" and c.slice == "all")
    assert cell.missing > 0


def test_answers_that_end_as_they_should_are_not_spoken_of(tmp_path):
    path, _ = kit.write(tmp_path, stable=None)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)

    assert verdict.outcome == "holds"
    assert not any("stop early" in s.text for s in verdict.blind_spots)


def test_a_missing_end_is_added_to_answers_that_stop_early_and_to_no_others():
    answers = (0, 1), (0, END), (), (2, 2, 2), (1,)
    drawn = trace(*answers, **{"id.0": np.arange(8.0)})
    found = with_ends(drawn, 3, (END,))

    assert found.continuations == ((0, 1, END), (0, END), (), (2, 2, 2), (1, END))
    assert np.isnan(found.columns["logp"]).tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    kept_N = ~np.isnan(found.columns["logp"])
    for name, values in drawn.columns.items():
        assert np.array_equal(found.columns[name][kept_N], values)
    assert (unended(drawn), unended(found)) == (0, 2)


def test_of_an_engine_that_does_not_say_what_ends_an_answer_nothing_is_told():
    drawn = trace((0, 1), (2,))
    assert with_ends(drawn, 3, ()) is drawn


def test_a_trace_of_lost_answers_alone_stays_as_it_is():
    drawn = trace((), ())
    assert with_ends(drawn, 3, (END,)) is drawn
    assert unended(drawn) == 0


@ENGINES.register("table_of_two_ends")
class TwoEnds(TableEngine):
    """Says that "d" ends an answer as well, as a generation config with two end tokens does."""

    def describe(self):
        own = super().describe()
        return dataclasses.replace(own, eos=(*own.eos, D))


def test_an_end_token_that_one_side_alone_names_is_an_end(tmp_path):
    path, _ = kit.write(tmp_path, stable=None)
    text = path.read_text()
    text = text.replace("infer: {engine: table", "infer: {engine: aborting_table")
    text = text.replace("train: {engine: table", "train: {engine: table_of_two_ends")
    known = ["table", "aborting_table", "table_of_two_ends"]
    contract, _ = parse(text, str(path), engines=known)
    verdict = run.check(
        load.beside(contract, tmp_path), run_dir=tmp_path / "run", open=run.in_process
    )

    assert verdict.outcome == "holds"
    assert not any("stop early" in s.text for s in verdict.blind_spots)
