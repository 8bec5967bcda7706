# `servanda relations` on real servers: what is broken is found, and made small; what is not, holds.

import collections
import itertools
import json
import math
import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.contract.model import Kernel
from servanda.engines.http.dialects.base import NEUTRAL, SequenceRequest, Server
from servanda.engines.http.dialects.llamacpp import LlamaCpp
from servanda.engines.http.dialects.vllm import VLLM
from servanda.engines.table import TableEngine
from servanda.runner.relations.judge import Judge, Pair, exchangeability, shrink
from servanda.runner.relations.observation import Observation, difference, features
from servanda.runner.relations.relation import RELATIONS
from servanda.runner.relations.run import NAMES, Options, draws
from servanda.runner.relations.run import relations as run_relations
from servanda.runner.relations.subject import Request

pytest.importorskip("uvicorn")
from tests.engines.serving import live, table_engine

SMALL = ("--longest", "17", "--requests", "2", "--max-new-tokens", "3", "--quiet")
BITS = ("--only", "replay", "--only", "company", "--only", "cache", "--only", "order")
ROUNDING = ("--limit", "1e-4")


def relations(*words):
    return CliRunner().invoke(main, ["relations", *map(str, words)])


def found(url, *words):
    """Exit code, and each relation of the JSON by its name."""
    done = relations(url, *SMALL, "--format", "json", *words)
    assert done.stdout.startswith("{"), done.output
    return done.exit_code, {r["relation"]: r for r in json.loads(done.stdout)["relations"]}


def model(options="", **how):
    pytest.importorskip("torch")
    from tests.runner.relation_servers import served

    return served(options, **how)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"token_ids": [0, 1]}\n')
    return path


def texts():
    from tests.runner.relation_servers import checkpoint

    return "--prompts", checkpoint() / "prompts.jsonl"


# fault -> the relation that finds it, tokens of the smallest request, and of those beside it
FAULTS = {
    ",prefix_cache=8,fault=prefix_hit:offset": ("cache", 9, [8]),
    ",prefix_cache=8,fault=prefix_hit:context": ("cache", 17, [8, 16]),
    ",fault=batch_dependent:0.01": ("company", 1, [1]),
    ",fault=lost_block:8": ("length", 8, []),
    ",fault=kv_cache_int8:token": ("prefill", 1, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_relation_and_made_as_small_as_it_gets(fault):
    name, tokens, beside = FAULTS[fault]
    with model(fault, wait_s=0.3 if name == "company" else 0.0) as url:
        code, seen = found(f"{url},batch_size=2", *ROUNDING, *texts(), "--only", name)
        one = seen[name]
        example = one["example"]

        assert (code, one["outcome"]) == (1, "violated")
        assert one["largest_nats"] > 1e-3
        assert len(example["prompt_ids"]) == tokens
        assert len(example["others"]) == len(beside)
        if name != "company":  # which requests a server runs together is a race
            assert sorted(map(len, example["others"])) == beside
        assert example["max_new_tokens"] == 1 and one["position"] == (name == "length")
        again = relations(*shlex.split(example["command"])[2:], "--quiet")
        assert again.exit_code == 1 and f"✗ {name}" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ",prefix_cache=8"])
def test_a_healthy_server_holds_beyond_rounding(options):
    with model(options) as url:
        code, seen = found(f"{url},batch_size=2", *ROUNDING, *texts())

    cache = seen["cache"]
    assert code == 0, seen
    assert {r["outcome"] for r in seen.values()} == {"holds", "untestable"}
    assert cache["outcome"] == ("holds" if options else "untestable")


def test_a_server_that_runs_each_request_by_itself_is_equal_bit_for_bit():
    with model(",prefix_cache=8") as url:
        code, seen = found(f"{url},batch_size=2", *BITS, *texts())

    assert code == 0, seen
    assert {(r["outcome"], r["largest_nats"]) for r in seen.values()} == {("holds", 0.0)}


class Noisy(TableEngine):
    """Logprobs move by another amount in each run of a request, and in company by more.

    The amounts follow from the prompt and the number of its run, whatever a server runs together.
    """

    company, noise = 0.0, 1e-3

    def __init__(self, kernel):
        super().__init__(kernel)
        self.runs = collections.Counter()

    def steps(self, batch, sampling, seed, best=0):
        self.runs.update(batch.prompts)
        draws_S = [np.random.default_rng([self.runs[p], *p]) for p in batch.prompts]
        company = self.company * (len(batch) > 1)
        for step in super().steps(batch, sampling, seed, best):
            noise_S = np.array([rng.normal(company, self.noise) for rng in draws_S])
            logp_N = step.columns["logp"] + noise_S[step.length_S > 0]
            yield replace(step, columns={**step.columns, "logp": logp_N})


class Crowded(Noisy):
    company = 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "outcome"), [(Noisy, "inconclusive"), (Crowded, "violated")])
def test_a_kernel_whose_replays_differ_is_tested_and_not_compared_with_a_threshold(
    tmp_path, prompts, kind, outcome
):
    with live(table_engine(tmp_path, cls=kind), wait_s=0.1, max_batch=2) as (client, _):
        url = f"{client.base_url},batch_size=2"
        names = ("--only", "replay", "--only", "company", "--prompts", prompts)
        code, seen = found(url, *names)
        loose, wide = found(url, *names, "--limit", "0.05")

    assert code == 1 and seen["replay"]["outcome"] == "violated"
    assert seen["company"]["outcome"] == outcome
    assert (seen["company"]["p_value"] <= seen["company"]["alpha"]) == (outcome == "violated")
    assert loose == 0 and wide["company"]["outcome"] == "holds"


@pytest.mark.slow
def test_draws_against_other_probabilities_than_are_reported_are_rejected(
    tmp_path, prompts, monkeypatch
):
    from servanda.engines.faults import FAULTS as CATALOGUE

    cold = CATALOGUE["undisclosed_temperature"].inject(TableEngine, 0.8)
    words = ("--only", "draws", "--prompts", prompts, "--max-new-tokens", "8")
    with live(table_engine(tmp_path, cls=cold)) as (client, _):
        bad, broken = found(str(client.base_url), *words)
    with live(table_engine(tmp_path)) as (client, _):
        good, healthy = found(str(client.base_url), *words)

        monkeypatch.setattr("servanda.runner.relations.run._MOST", 64)
        open_, short = found(str(client.base_url), *words)

    assert (bad, broken["draws"]["outcome"]) == (1, "violated")
    assert (good, healthy["draws"]["outcome"]) == (0, "holds")
    assert "with a temperature within" in healthy["draws"]["answer"]
    # a sampler that could not have been rejected does not hold
    assert (open_, short["draws"]["outcome"]) == (3, "inconclusive")
    assert "and so few tokens show no temperature" in short["draws"]["answer"]


def test_the_cache_is_not_said_to_hold_where_no_one_saw_a_hit():
    cache = RELATIONS["cache"]
    silent, cold, hit = (Observation((1,), ({1: -1.0},), cached) for cached in (None, 0, 16))

    assert [cache.unseen([one])[0] for one in (silent, cold, hit)] == [
        "inconclusive",
        "untestable",
        "",
    ]


@pytest.mark.slow
def test_a_command_that_updates_a_server_is_run_between_before_and_after():
    """One that changes nothing, one that fails, and one after which other weights answer."""
    body = json.dumps({"kind": "kernel", "fault": {"wrong_rope_base": 2.0}})
    with model(",prefix_cache=8", test_mode=True) as url:
        words = (f"{url},batch_size=2", *SMALL, *texts(), *ROUNDING, "--only", "update")
        post = f"import httpx2; httpx2.post('{url}/servanda/misbehave', content='{body}')"
        post += ".raise_for_status()"
        commands = ("true", "exit 3", shlex.join([sys.executable, "-c", post]))
        held, failed, changed = (relations(*words, "--update", one) for one in commands)
        absent = relations(*words)

    assert held.exit_code == 0 and "✓ update" in held.stdout
    assert failed.exit_code == 4 and "--update ended with 3" in failed.stderr
    assert changed.exit_code == 1 and "✗ update   violated" in changed.stdout
    assert absent.exit_code == 3 and "– update   not testable: name the command" in absent.stdout


# requests


def test_a_request_says_to_servers_what_may_be_read_from_a_cache():
    """Each in its own words, and an ordinary request as before."""
    plain = SequenceRequest((1, 2), 1, NEUTRAL, 0)
    salted = replace(plain, salt="s", warm=True)
    vllm, llama = (
        [kind().draw(one, Server("m"), "raw")[1] for one in (plain, salted)]
        for kind in (VLLM, LlamaCpp)
    )

    assert "cache_salt" not in vllm[0] and vllm[1]["cache_salt"] == "s"
    assert [body["cache_prompt"] for body in llama] == [False, True]


# comparison


def seen(*tokens_and_logps):
    return Observation(
        tuple(token for token, _ in tokens_and_logps), tuple(logp for _, logp in tokens_and_logps)
    )


def test_two_answers_are_compared_up_to_the_first_token_that_differs():
    a = seen((1, {1: -1.0}), (2, {2: -2.0, 3: -0.5}), (4, {4: -9.0}))
    b = seen((1, {1: -1.0}), (3, {2: -2.5, 3: -0.75}), (4, {4: -1.0}))
    same = seen((1, {1: -1.0}), (3, {2: -2.0, 3: -0.5}), (4, {4: -1.0}))

    d = difference(a, b)
    assert (d.positions, d.largest, d.at, d.other_token) == (2, 0.5, 1, None)
    draw = difference(a, same)
    assert (draw.at, draw.other_token) == (None, 1)
    assert draw.exceeds(0, draws=True) and not draw.exceeds(0, draws=False)
    assert d.exceeds(0.4, draws=True) and not d.exceeds(0.5, draws=True)


def test_lists_of_unlike_tokens_differ_by_what_they_leave_out():
    """Token 1 has -0.1 in one list; in the other it has at most the least of the list, -1.5."""
    a = seen((1, {1: -0.1, 2: -0.9}))
    b = seen((9, {7: -0.5, 8: -1.5, 9: -6.0}))  # 9 was drawn, and may stand beside the list

    assert difference(a, b).largest == pytest.approx(1.4)
    assert difference(b, a).largest == pytest.approx(1.4)


def test_answers_that_cannot_be_compared_and_logprobs_that_are_no_number_are_no_agreement():
    pair = Pair(
        Request((1,), 2), seen((1, {1: -1.0}), (2, {2: -1.0})), seen((1, {1: -1.0}), (3, {3: -1.0}))
    )
    loose = Judge(None, 0.1, 0.05).compared(RELATIONS["replay"], [pair])
    strict = Judge(None, 0.0, 0.05).compared(RELATIONS["replay"], [pair], small=False)

    assert (loose.outcome, strict.outcome) == ("inconclusive", "violated")
    nan = seen((1, {1: float("nan")}), (2, {2: -1.0}))
    pair = Pair(Request((1,), 2), nan, nan)
    answer = Judge(None, 0.0, 0.05).compared(RELATIONS["replay"], [pair])

    assert answer.outcome == "inconclusive" and "1 tokens have no usable logprob" in answer.answer


def test_features_do_not_depend_on_which_run_is_first():
    runs = [
        seen((1, {1: -1.0, 5: -3.0}), (2, {2: -2.0})),
        seen((1, {1: -1.5}), (3, {2: -2.5, 3: -1.0})),
        seen((1, {1: -1.2}), (2, {2: -2.2})),
    ]
    whole = features(runs)

    assert whole.tolist() == [[-1.0, -2.0], [-1.5, -2.5], [-1.2, -2.2]]
    for order in itertools.permutations(range(3)):
        assert features([runs[i] for i in order]).tolist() == whole[list(order)].tolist()


def test_the_smallest_counterexample_is_the_smallest():
    """What fails: both 7 and 9 in the prompt in this order, and a 3 in some other request."""

    def fails(request):
        prompt = [t for t in request.prompt if t in (7, 9)]
        return prompt == [7, 9] and any(3 in other for other in request.others)

    others = ((1, 2), (1, 1, 3, 1, 1, 1), (5,) * 9)
    large = Request((0, 0, 7, 1, 9, 4, 4, 4, 4, 4, 4), 6, others)

    small = shrink(RELATIONS["company"], large, fails)

    assert small == Request((7, 1, 9), 1, ((1, 1, 3),))


# the test


def exact(runs_K):
    """The p-value over every labelling of every request."""

    def statistic(chosen_K):
        total = 0.0
        for runs_RF, chosen in zip(runs_K, chosen_K, strict=True):
            rest = [r for r in range(len(runs_RF)) if r not in chosen]
            center = runs_RF - np.median(runs_RF, axis=0)
            spread = np.abs(center).mean(axis=0)
            gap = np.abs(runs_RF[list(chosen)].mean(axis=0) - runs_RF[rest].mean(axis=0))
            total += sum(g / s for g, s in zip(gap, spread, strict=True) if s)
        return total

    labels = [[*itertools.combinations(range(len(r)), len(r) // 2)] for r in runs_K]
    true = statistic([tuple(range(len(r) // 2)) for r in runs_K])
    values = [statistic(chosen) for chosen in itertools.product(*labels)]
    return np.mean([value >= true - 1e-9 for value in values])


@pytest.mark.parametrize("moved", [0.0, 1.0, 3.0])
def test_the_p_value_is_that_of_all_labellings(moved):
    rng = np.random.default_rng(3)
    runs_K = [rng.normal(size=(4, 2)) + moved * (np.arange(4) < 2)[:, None] for _ in range(3)]

    assert exchangeability(runs_K, rounds=19_999) == pytest.approx(exact(runs_K), abs=0.015)


# the command line


def test_what_cannot_be_read_is_refused_with_its_place(tmp_path):
    bad = relations("table:none.json", "--prompt-ids", "1,x")
    side = relations("table:none.json", "--side", "infer")

    assert bad.exit_code == 2 and "'1,x' is no list of token ids: write 5,17,8" in bad.stderr
    assert side.exit_code == 2 and "--side names a side of a contract" in side.stderr


def test_an_engine_without_a_prefix_cache_refuses_the_key(tmp_path):
    from servanda.engines import open_engine
    from servanda.errors import MeasurementError

    with pytest.raises(MeasurementError, match="has no prefix cache of its own here") as error:
        open_engine(Kernel(engine="table", model="none.json", prefix_cache=16))
    assert "remove the key prefix_cache" in str(error.value)


class Full(TableEngine):
    """It fails on prompts of more than six tokens."""

    def generate(self, batch, sampling, seed):
        if max(map(len, batch.prompts)) > 6:
            raise RuntimeError("no room")
        return super().generate(batch, sampling, seed)


def test_an_error_of_the_server_is_a_violation_but_at_the_first_request_no_answer(
    tmp_path, prompts
):
    with live(table_engine(tmp_path, cls=Full)) as (client, _):
        words = ("--prompts", prompts, "--only", "replay", "--only", "length")
        code, seen = found(str(client.base_url), *words, "--longest", "12", "--requests", "2")
    assert code == 1 and seen["replay"]["outcome"] == "violated"
    assert "with status 500" in seen["replay"]["answer"]
    assert "prompts of up to 6 tokens were answered before" in seen["replay"]["answer"]
    assert len(seen["replay"]["example"]["prompt_ids"]) == 12
    with live(table_engine(tmp_path, cls=Full)) as (client, _):
        words = ("--prompts", prompts, "--longest", "24", "--requests", "2", "--quiet")
        done = relations(str(client.base_url), *words)
    assert done.exit_code == 4 and "with status 500" in done.output


@pytest.mark.slow
@pytest.mark.parametrize(("size", "outcome"), [(1e-5, "inconclusive"), (0.5, "violated")])
def test_a_difference_that_rounding_can_make_is_undecided_without_a_limit(
    tmp_path, prompts, size, outcome
):
    class Crowd(Noisy):
        company, noise = size, 0.0

    with live(table_engine(tmp_path, cls=Crowd), wait_s=0.1, max_batch=2) as (client, _):
        url = f"{client.base_url},batch_size=2"
        names = ("--only", "replay", "--only", "company", "--prompts", prompts)
        code, seen = found(url, *names)
        bits, strict = found(url, *names, "--limit", "0")
        words = relations(url, *names, *SMALL).stdout
    assert (code, seen["company"]["outcome"]) == (3 if size < 0.1 else 1, outcome)
    assert (bits, strict["company"]["outcome"]) == (1, "violated")
    assert ("--limit 3e-05 accepts them and decides" in words) == (outcome == "inconclusive")


@pytest.mark.slow
def test_a_second_tier_of_the_cache_is_read_only_after_other_requests():
    with model(",prefix_cache=8,fault=prefix_hit:demoted") as url:
        words = (f"{url},batch_size=2", "--only", "cache", "--limit", "0", *texts())
        near, first = found(*words)
        far, second = found(*words, "--between", "1024")
    assert (near, first["cache"]["outcome"]) == (0, "holds")
    assert (far, second["cache"]["outcome"]) == (1, "violated")
    assert "--between 1024" in second["cache"]["example"]["command"]


# the price of a rejection


TOLD = SimpleNamespace(  # the answers differ by a nat in every run
    name="told",
    refusal=lambda _: "",
    plain=lambda *_: Observation((1,), ({1: -1.0},)),
    other=lambda *_: Observation((1,), ({1: -2.0},)),
    unseen=lambda _: ("", ""),
)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_a_relation_is_rejected_at_its_alpha_and_not_below(monkeypatch, limit):
    judge = Judge(None, limit, 0.0125, noisy=True)
    for p, outcome in ((0.0125, True), (np.nextafter(0.0125, 1), False)):
        monkeypatch.setattr("servanda.runner.relations.judge.exchangeability", lambda _, p=p: p)
        found = judge.judge(TOLD, [Request((1,), 1)])
        assert (found.outcome == "violated") == outcome and found.p_value == p


def test_the_smallest_p_value_is_one_labelling_of_all():
    apart = [np.repeat([[0.0], [1.0]], 20, axis=0) + np.arange(40)[:, None] / 1e3]

    assert exchangeability(apart * 3) == 1 / 2000


@pytest.mark.parametrize(("near", "outcome"), [(1e-9, True), (-1e-9, False)])
def test_draws_are_rejected_at_an_e_value_of_one_over_alpha(monkeypatch, near, outcome):
    seen = Observation((1,) * 9000, ({1: -0.1},) * 9000)
    subject = SimpleNamespace(each=lambda *_: [seen])
    evidence = SimpleNamespace(n=9000, log_e=-math.log(0.0125) + near)
    monkeypatch.setattr("servanda.runner.relations.run._evidence", lambda *_: evidence)
    cases = SimpleNamespace(given=Request((1,), 1), seed=0, width=3)

    found = draws(Judge(subject, 0.0, 0.0125), cases)

    assert (found.outcome == "violated") == outcome and found.alpha == 0.0125


def test_the_relations_that_are_asked_for_share_alpha(monkeypatch):
    each = []

    def found(name, now, judge, cases, options):
        each.append(now.alpha)
        return draws, judge

    monkeypatch.setattr("servanda.runner.relations.run._found", found)
    monkeypatch.setattr("servanda.runner.relations.run._replays", lambda now, _: (None, now))
    for only in ((), ("company", "cache", "draws"), ("draws",)):
        each.clear()
        [*run_relations(None, None, Options(only, alpha=0.06))]
        assert each == [pytest.approx(0.06 / (len(only) or len(NAMES)))] * len(each) and each
