# The laws of engines: honest engines keep them, and each defect breaks the law that names it.

import threading
from dataclasses import replace

import numpy as np
import pytest

from servanda.contract.model import Kernel
from servanda.engines.conformance import LAWS, base, check_engine, examine_engine
from servanda.engines.table import TableEngine
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling, log_softmax
from servanda.traces.trace import Trace
from tests import kit

ROWS = {
    "": kit.BASE,
    "a": [0.1, 0.3, 0.3, 0.2, 0.1],
    "b": [0.5, 0.1, 0.1, 0.1, 0.2],
    "c": [0.2, 0.2, 0.2, 0.3, 0.1],
}
PLAIN = Sampling()


@pytest.fixture
def kernel(tmp_path):
    kit.table(tmp_path, "p.json", ROWS)
    return Kernel(engine="table", model=str(tmp_path / "p.json"), batch_size=8)


def with_columns(trace, **columns):
    return replace(trace, columns={**trace.columns, **columns})


class Best(TableEngine):
    """A server: it reports the two likeliest tokens, and not where the drawn one stands."""

    K = 2

    def describe(self):
        return replace(super().describe(), top=self.K)

    def generate(self, batch, sampling, seed):
        trace = super().generate(batch, sampling, seed)
        given = replace(batch, continuations=trace.continuations)
        logits_NV = np.concatenate([*self.logits(given, "decode")]) / sampling.temperature
        return replace(trace, columns=self.best(trace, log_softmax(logits_NV)))

    def top(self, batch, path):
        trace = self.score(batch, PLAIN, path)
        logp_NV = log_softmax(np.concatenate([*self.logits(batch, path)]))
        return replace(trace, columns=self.best(trace, logp_NV))

    def best(self, trace, logp_NV):
        order_NK = np.argsort(-logp_NV, axis=1, kind="stable")[:, : self.K]
        columns = {"logp": trace.columns["logp"]}
        for k, at_N in enumerate(order_NK.T):
            columns[f"id.{k}"] = at_N.astype(float)
            columns[f"logp.{k}"] = logp_NV[np.arange(len(at_N)), at_N]
        return columns


class Drawer(TableEngine):
    """A server that draws and knows next to nothing."""

    def describe(self):
        known = super().describe()
        return replace(
            known, vocab_size=0, eos=(), tokens="", tensors={}, scores=(), encodes=False,
            decodes=False, full_logits=False, timed=False,
        )  # fmt: skip

    def vocabulary(self):
        return []


class Scorer:
    """A trainer: it scores, and never draws."""

    def __init__(self, kernel):
        self._engine = TableEngine(kernel)
        for verb in ("describe", "encode", "decode", "vocabulary", "score", "logits", "close"):
            setattr(self, verb, getattr(self._engine, verb))

    def describe(self):
        return replace(self._engine.describe(), timed=False)


# honest engines


def test_a_table_keeps_every_law_that_speaks_of_it(kernel):
    report = check_engine(lambda: TableEngine(kernel))

    assert {f.law for f in report.findings} == set(LAWS)
    assert [f.law for f in report.those("skipped")] == ["top_is_the_head"]
    assert "0 of 33 laws of engines are broken" in str(report)


@pytest.mark.slow
def test_a_worker_keeps_the_laws_of_its_engine(kernel):
    report = check_engine(lambda: spawn(kernel, "infer"))
    assert len(report.those("skipped")) == 1


def test_prompts_may_be_texts_or_token_ids(kernel, monkeypatch):
    drawn, generate = set(), TableEngine.generate

    def spied(engine, batch, *how):
        drawn.update(map(tuple, batch.prompts))
        return generate(engine, batch, *how)

    monkeypatch.setattr(TableEngine, "generate", spied)
    check_engine(lambda: TableEngine(kernel), ["a b", [2], "c"])
    a, b, c = (TableEngine(kernel).encode([name])[0] for name in "abc")
    assert {(*a, *b), (2,), (*c,)} <= drawn


def test_an_engine_of_best_tokens_keeps_the_laws_of_best_tokens(kernel):
    report = check_engine(lambda: Best(kernel))
    kept = {f.law: f.message for f in report.those("kept")}
    assert "top_is_the_head" in kept
    assert "by the best 2" in kept["draws_follow_the_record"]
    assert "drawn tokens were not among the best 2" in kept["best_were_fixed_before_the_draw"]


def test_an_engine_that_only_draws_is_told_what_was_skipped_and_why(kernel):
    report = check_engine(lambda: Drawer(kernel), [[0], [1, 2]])

    skipped = {f.law: f.message for f in report.those("skipped")}
    assert skipped["scores_repeat_the_record"] == "it does not score by decode"
    assert skipped["nothing_follows_the_end"] == "it does not know which tokens end a sequence"
    assert skipped["seconds_are_of_every_token"] == "it is not timed"
    assert "draws_follow_the_record" not in skipped


def test_prompts_that_cannot_be_made_up_are_asked_for(kernel):
    report = examine_engine(lambda: Drawer(kernel), laws=["lost_rows_are_empty"])
    assert "knows neither its vocabulary nor a tokenizer" in str(report)
    assert "check_engine(open_engine, prompts=[[1, 2], [3]])" in str(report)


def test_an_engine_that_only_scores_is_tried_on_tokens_that_are_made_up(kernel):
    report = check_engine(lambda: Scorer(kernel))
    kept = {f.law for f in report.those("kept")}
    assert {"scores_are_of_what_was_given", "logits_agree_with_scores"} <= kept
    reason = {f.law: f.message for f in report.those("skipped")}["a_seed_repeats"]
    assert reason == "the engine Scorer has no verb 'generate'"


def test_a_refused_sampling_is_skipped_with_its_reason(kernel):
    class Plain(TableEngine):
        def generate(self, batch, sampling, seed):
            if sampling.filters:
                raise MeasurementError("this server has no filters")
            return super().generate(batch, sampling, seed)

    report = check_engine(lambda: Plain(kernel))
    skipped = {f.law: f.message for f in report.those("skipped")}
    assert skipped["top_k_of_one_is_greedy"] == "it refuses top_k 1: this server has no filters"


def test_a_server_whose_draws_are_its_own_is_told_of_and_not_refused(kernel):
    class Own(TableEngine):
        calls = 0

        def generate(self, batch, sampling, seed):
            self.calls += 1
            return super().generate(batch, sampling, seed + 1000 * self.calls)

    assert "a_seed_repeats" in examine_engine(lambda: Own(kernel)).broken
    report = check_engine(lambda: Own(kernel), deterministic=False)
    said = {f.law: f.message for f in report.findings}
    assert "were others when a seed was given again" in said["a_seed_repeats"]


@pytest.mark.parametrize("law", LAWS)
def test_each_law_runs_by_its_name_and_says_what_it_is(law, kernel):
    report = check_engine(lambda: TableEngine(kernel), laws=[law])
    assert [f.law for f in report.findings] == [law]
    assert (LAWS[law].__doc__ or "").strip()


def test_a_law_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="no law 'a_seed_repeat'; did you mean 'a_seed_repeats'"):
        examine_engine(lambda: None, laws=["a_seed_repeat"])


# broken engines


def drawing(change):
    """An engine whose draws are changed: (trace, batch, sampling, seed, honest engine)."""

    class Broken(TableEngine):
        def generate(self, batch, sampling, seed):
            trace = super().generate(batch, sampling, seed)
            return change(trace, batch, sampling, seed, super())

    return Broken


def scoring(change):
    class Broken(TableEngine):
        def score(self, batch, sampling, path):
            return change(super().score(batch, sampling, path), batch, sampling, path, super())

    return Broken


def shifted(trace, batch, sampling, seed, honest):
    return with_columns(trace, logp=np.roll(trace.columns["logp"], 1))


def raw(trace, batch, sampling, seed, honest):
    given = replace(batch, continuations=trace.continuations)
    return replace(trace, columns=honest.score(given, PLAIN, "decode").columns)


def goes_on(trace, batch, sampling, seed, honest):
    """The end token is drawn, and then as many others as there is room for."""
    answers = [(tokens + (0,) * batch.width)[: batch.width] for tokens in trace.continuations]
    given = replace(batch, continuations=tuple(answers))
    return replace(honest.score(given, sampling, "decode"), about=trace.about)


def no_end(trace, batch, sampling, seed, honest):
    answers = [t[:-1] if t[-1] == 4 and len(t) > 1 else t for t in trace.continuations]
    given = replace(batch, continuations=tuple(answers))
    return replace(honest.score(given, sampling, "decode"), about=trace.about)


def one_noise(trace, batch, sampling, seed, honest):
    """The stream of the first sequence for all of them."""
    parts = []
    for row in range(len(batch)):
        one = replace(batch.take([row]), sequence_S=(11,))
        drawn = honest.generate(one, sampling, seed)
        parts.append(replace(drawn, sequence_S=np.array([batch.sequence_S[row]])))
    return Trace.join(parts)


def noise_of_the_row(trace, batch, sampling, seed, honest):
    drawn = honest.generate(replace(batch, sequence_S=tuple(range(len(batch)))), sampling, seed)
    return replace(drawn, sequence_S=np.array(batch.sequence_S))


def ignores_the_seed(trace, batch, sampling, seed, honest):
    return honest.generate(batch, sampling, 1)


def other_order(trace, batch, sampling, seed, honest):
    order = sorted(range(len(batch)), key=lambda row: len(batch.prompts[row]))
    return honest.generate(batch.take(order), sampling, seed)


def relabelled(trace, batch, sampling, seed, honest):
    """Sorted by length for speed, and handed back under the wrong indexes."""
    return replace(
        other_order(trace, batch, sampling, seed, honest),
        sequence_S=trace.sequence_S,
        prompt_tokens_S=trace.prompt_tokens_S,
    )


def zero_for_nan(trace, batch, sampling, seed, honest):
    logp_N = trace.columns["logp"].copy()
    logp_N[::7] = 0.0
    return with_columns(trace, logp=logp_N)


def positive(trace, batch, sampling, seed, honest):
    return with_columns(trace, logp=-trace.columns["logp"])


def overflow(trace, batch, sampling, seed, honest):
    token_N = trace.token_N.copy()
    token_N[3] = 5
    return replace(trace, token_N=token_N)


def lost_with_tokens(trace, batch, sampling, seed, honest):
    return replace(trace, lost_S=np.arange(len(batch)) == 1)


def unsaid(trace, batch, sampling, seed, honest):
    return replace(trace, about={})


def scored_the_prompt(trace, batch, sampling, seed, honest):
    return replace(trace, about={**trace.about, "path": "prefill"})


def colder(trace, batch, sampling, seed, honest):
    """Draws at another temperature than it records."""
    other = Sampling(temperature=sampling.temperature / 2)
    drawn = honest.generate(batch, other, seed)
    given = replace(batch, continuations=drawn.continuations)
    return replace(honest.score(given, sampling, "decode"), about=trace.about)


def too_long(trace, batch, sampling, seed, honest):
    return honest.generate(replace(batch, width=batch.width + 2), sampling, seed)


def no_filters(trace, batch, sampling, seed, honest):
    plain = Sampling(temperature=sampling.temperature)
    return replace(honest.generate(batch, plain, seed), about=trace.about)


def score_of_others(trace, batch, sampling, path, honest):
    other = replace(batch, continuations=tuple(c[::-1] for c in batch.continuations))
    return replace(honest.score(other, sampling, path), token_N=trace.token_N)


def score_reversed(trace, batch, sampling, path, honest):
    return honest.score(batch.take(range(len(batch))[::-1]), sampling, path)


def score_raw(trace, batch, sampling, path, honest):
    return honest.score(batch, PLAIN, path)


def off_by_one_prefill(trace, batch, sampling, path, honest):
    return (
        with_columns(trace, logp=np.roll(trace.columns["logp"], 1)) if path == "prefill" else trace
    )


def appended(ids_NK, logp_NK, token_N, own_N):
    """The drawn token in the last place, unless it is there already."""
    there_N = (ids_NK == token_N[:, None]).any(axis=1)
    ids_N = np.where(there_N, ids_NK[:, -1], token_N)
    return np.column_stack([ids_NK[:, :-1], ids_N]), np.column_stack(
        [logp_NK[:, :-1], np.where(there_N, logp_NK[:, -1], own_N)]
    )


class Appends(Best):
    def generate(self, batch, sampling, seed):
        trace = super().generate(batch, sampling, seed)
        ids_NK, logp_NK = appended(*trace.best, trace.token_N, trace.columns["logp"])
        names = {f"id.{k}": v.astype(float) for k, v in enumerate(ids_NK.T)}
        return with_columns(trace, **names, **{f"logp.{k}": v for k, v in enumerate(logp_NK.T)})


class Unsorted(Best):
    def best(self, trace, logp_NV):
        columns = super().best(trace, logp_NV)
        columns["id.0"], columns["id.1"] = columns["id.1"], columns["id.0"]
        columns["logp.0"], columns["logp.1"] = columns["logp.1"], columns["logp.0"]
        return columns


class Fingers(TableEngine):
    """What it says of itself counts its calls."""

    calls = 0

    def describe(self):
        self.calls += 1
        known = super().describe()
        return replace(known, fingerprint={**known.fingerprint, "calls": str(self.calls)})


class Numbers(TableEngine):
    def describe(self):
        return replace(super().describe(), fingerprint={"engine": "table", "threads": 1})


class Ends(TableEngine):
    def describe(self):
        return replace(super().describe(), eos=(9,))


class Trips(TableEngine):
    def _chunks(self, batch):
        return [batch]


class Once(TableEngine):
    """The second close fails."""

    closed = False

    def close(self):
        if self.closed:
            raise MeasurementError("closed already")
        self.closed = True


class Pieces(TableEngine):
    """Logits without the last row."""

    def logits(self, batch, path):
        for piece in super().logits(batch, path):
            yield piece[:-1]


class Stops(TableEngine):
    """The first tokens are not timed."""

    def time(self, batch, sampling, seed, record):
        timing = super().time(batch, sampling, seed, record)
        return replace(timing, first_S=timing.first_S[1:])


class Begins(TableEngine):
    """encode begins every text with a special token, which decode leaves out."""

    def encode(self, texts):
        return [[4, *ids] for ids in super().encode(texts)]

    def decode(self, ids):
        return super().decode([tokens[1:] for tokens in ids])


class Special(TableEngine):
    """encode puts a token in front."""

    def encode(self, texts):
        return [[0, *ids] for ids in super().encode(texts)]


DEFECTS = {
    "logprobs shifted by one": (drawing(shifted), "scores_repeat_the_record"),
    "raw logprobs under a temperature": (drawing(raw), "the_record_is_processed"),
    "tokens after the end": (drawing(goes_on), "nothing_follows_the_end"),
    "the end token left out": (drawing(no_end), "nothing_follows_the_end"),
    "one noise for all sequences": (drawing(one_noise), "sequences_have_noise_of_their_own"),
    "noise of the row": (drawing(noise_of_the_row), "batch_mates_do_not_matter"),
    "the seed ignored": (drawing(ignores_the_seed), "another_seed_draws_anew"),
    "rows in another order": (drawing(other_order), "rows_are_those_of_the_batch"),
    "rows under wrong indexes": (drawing(relabelled), "scores_repeat_the_record"),
    "0.0 for what is missing": (drawing(zero_for_nan), "absent_is_not_zero"),
    "a positive logprob": (drawing(positive), "logprobs_are_logprobs"),
    "an id of no token": (drawing(overflow), "tokens_are_in_the_vocabulary"),
    "a lost row with tokens": (drawing(lost_with_tokens), "lost_rows_are_empty"),
    "draws that do not say how": (drawing(unsaid), "draws_say_how_they_were_made"),
    "draws that say prefill": (drawing(scored_the_prompt), "draws_say_how_they_were_made"),
    "another temperature": (drawing(colder), "draws_follow_the_record"),
    "more tokens than room": (drawing(too_long), "rows_are_those_of_the_batch"),
    "filters that are not applied": (drawing(no_filters), "top_k_of_one_is_greedy"),
    "scores of other tokens": (scoring(score_of_others), "scores_repeat_the_record"),
    "scores in reverse": (scoring(score_reversed), "scores_are_of_what_was_given"),
    "raw scores": (scoring(score_raw), "scores_know_the_filters"),
    "prefill shifted by one": (scoring(off_by_one_prefill), "prefill_is_near"),
    "logits without the last row": (Pieces, "logits_agree_with_scores"),
    "the drawn token appended": (Appends, "best_were_fixed_before_the_draw"),
    "best tokens unsorted": (Unsorted, "top_is_the_head"),
    "a description that counts": (Fingers, "describe_is_stable"),
    "a fingerprint of numbers": (Numbers, "describe_is_plain"),
    "an end outside the vocabulary": (Ends, "describe_is_consistent"),
    "misfits that trip it": (Trips, "misfits_are_refused_by_name"),
    "a second close that fails": (Once, "a_closed_engine_opens_again"),
    "requests that are not timed": (Stops, "seconds_are_of_every_token"),
    "a token in front": (Special, "texts_round_trip"),
    "a special token in front": (Begins, "nothing_encodes_as_nothing"),
}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_breaks_the_law_that_names_it(name, kernel):
    broken, law = DEFECTS[name]

    report = examine_engine(lambda: broken(kernel), ["a b", "b", "c a b", "a"])

    assert law in report.broken, report
    finding = next(f for f in report.findings if f.law == law)
    assert finding.message and finding.hint


def test_an_engine_that_hangs_once_it_is_closed_is_not_waited_for(kernel, monkeypatch):
    released = threading.Event()

    class Hangs(TableEngine):
        closed = False

        def close(self):
            self.closed = True

        def describe(self):
            if self.closed:
                released.wait()
            return super().describe()

    monkeypatch.setattr(base, "_PATIENCE_S", 0.05)
    report = examine_engine(lambda: Hangs(kernel), laws=["a_closed_engine_opens_again"])
    released.set()
    assert "after close, describe did not answer within 0.05 s" in str(report)


def test_a_broken_law_is_an_assertion_that_says_what_was_found_and_the_next_move(kernel):
    with pytest.raises(AssertionError) as raised:
        check_engine(lambda: DEFECTS["a lost row with tokens"][0](kernel))
    said = str(raised.value)
    assert "lost_rows_are_empty: sequence 14 is lost and has" in said
    assert "the law: A sequence that was lost has no tokens; all others have one at least." in said
    assert "hint: a lost sequence has length 0" in said
