# `servanda relations` on real servers: what is broken is found, and made small; what is not, holds.

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
from hypothesis import given
from hypothesis import strategies as st

from servanda.cli.main import main
from servanda.contract.model import Kernel
from servanda.engines.http import HTTPEngine
from servanda.engines.http.dialects.base import NEUTRAL, SequenceRequest, Server
from servanda.engines.http.dialects.llamacpp import LlamaCpp
from servanda.engines.http.dialects.vllm import VLLM
from servanda.engines.table import TableEngine
from servanda.errors import ContractError
from servanda.runner.relations.client import ClientRequest
from servanda.runner.relations.judge import (
    LEAST,
    MOST,
    TIMES,
    Judge,
    Limit,
    Measured,
    _too_many,
    limit_of,
    shrink,
)
from servanda.runner.relations.observation import Observation, difference
from servanda.runner.relations.relation import RELATIONS, Cases, Pair
from servanda.runner.relations.run import Options, rounding_of
from servanda.runner.relations.run import relations as all_relations
from servanda.runner.relations.subject import Request

pytest.importorskip("uvicorn")
from tests.engines.serving import live, table_engine

SMALL = ("--longest", "17", "--requests", "2", "--max-new-tokens", "3", "--quiet")
BITS = ("--equal-bits", "--only", "replay", "--only", "batching", "--only", "prefix-cache")


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


# fault -> the relation that finds it, and tokens of the smallest request
FAULTS = {
    ",prefix_cache=8,fault=prefix_hit:offset": ("prefix-cache", 9),
    ",prefix_cache=8,fault=prefix_hit:context": ("prefix-cache", 25),
    ",fault=batch_dependent:0.01": ("batching", 1),
    ",fault=lost_block:8": ("prompt-length", 8),
    ",fault=kv_cache_int8:token": ("prefill-decode", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_relation_and_made_as_small_as_it_gets(fault):
    name, tokens = FAULTS[fault]
    with model(fault, wait_s=0.3 if name == "batching" else 0.0) as url:
        code, seen = found(f"{url},batch_size=4", *texts(), "--only", name)
        one = seen[name]
        example = one["example"]

        assert (code, one["outcome"]) == (1, "violated")
        assert one["largest_nats"] > 1e-3 and one["noise_nats"] > one["limit_nats"]
        assert len(example["prompt_ids"]) <= tokens
        assert len(example["others"]) == (name == "batching") or name == "prefix-cache"
        assert example["max_new_tokens"] == 1 or name == "prompt-length"
        again = relations(*shlex.split(example["command"])[2:], "--quiet")
        assert again.exit_code == 1 and f"✗ {name}" in again.stdout
        assert again.stdout.splitlines()[-1].startswith("VIOLATED: ")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ",prefix_cache=8"])
def test_a_healthy_server_holds(options):
    with model(options) as url:
        code, seen = found(f"{url},batch_size=4", *texts())

    cache = seen["prefix-cache"]
    assert code == 0, seen
    assert {r["outcome"] for r in seen.values()} == {"holds", "untestable"}
    assert cache["outcome"] == ("holds" if options else "untestable")


def test_a_server_that_runs_each_request_by_itself_is_equal_bit_for_bit():
    with model(",prefix_cache=8") as url:
        code, seen = found(f"{url},batch_size=2", *BITS, *texts())

    assert code == 0, seen
    assert {(r["outcome"], r["largest_nats"]) for r in seen.values()} == {("holds", 0.0)}


@pytest.mark.slow
def test_draws_against_other_probabilities_than_are_reported_are_rejected(
    tmp_path, prompts, monkeypatch
):
    from servanda.engines.faults import FAULTS as CATALOGUE

    cold = CATALOGUE["undisclosed_temperature"].inject(TableEngine, 0.8)
    words = ("--only", "sampling", "--prompts", prompts, "--max-new-tokens", "8")
    with live(table_engine(tmp_path, cls=cold)) as (client, _):
        bad, broken = found(str(client.base_url), *words)
    with live(table_engine(tmp_path)) as (client, _):
        good, healthy = found(str(client.base_url), *words)

        monkeypatch.setattr("servanda.runner.relations.run._MOST", 64)
        open_, short = found(str(client.base_url), *words)

    assert (bad, broken["sampling"]["outcome"]) == (1, "violated")
    assert (good, healthy["sampling"]["outcome"]) == (0, "holds")
    assert "with a temperature within" in healthy["sampling"]["answer"]
    # a sampler that could not have been rejected does not hold
    assert (open_, short["sampling"]["outcome"]) == (3, "inconclusive")
    assert "and so few tokens show no temperature" in short["sampling"]["answer"]


def test_the_cache_is_not_said_to_hold_where_no_one_saw_a_hit():
    cache = RELATIONS["prefix-cache"]
    silent, cold, hit = (
        Pair(None, None, Observation((1,), ({1: -1.0},), cached), "") for cached in (None, 0, 16)
    )

    states = [cache.unseen([one])[0] for one in (silent, cold, hit)]
    assert states == ["inconclusive", "untestable", ""]


@pytest.mark.slow
def test_a_command_that_updates_a_server_is_run_between_before_and_after():
    """One that changes nothing, one that fails, and one after which other weights answer."""
    body = json.dumps({"kind": "kernel", "fault": {"wrong_rope_base": 2.0}})
    with model(",prefix_cache=8", test_mode=True) as url:
        words = (f"{url},batch_size=2", *SMALL, *texts(), "--only", "update")
        post = f"import httpx2; httpx2.post('{url}/servanda/misbehave', content='{body}')"
        post += ".raise_for_status()"
        commands = ("true", "exit 3", shlex.join([sys.executable, "-c", post]))
        held, failed, changed = (relations(*words, "--update", one) for one in commands)
        absent = relations(*words)

    assert held.exit_code == 0 and "✓ update" in held.stdout
    assert failed.exit_code == 4 and "--update ended with 3" in failed.stderr
    assert changed.exit_code == 1 and "✗ update         violated" in changed.stdout
    assert (
        absent.exit_code == 3 and "– update         not testable: name the command" in absent.stdout
    )


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
    assert (d.positions, d.of, d.largest, d.at, d.other_token) == (2, 3, 0.5, 1, None)
    draw = difference(a, same)
    assert (draw.at, draw.other_token, draw.moved) == (None, 1, 0.0)


def law(seed, spread, size=50):
    logits = np.random.default_rng(seed).normal(0, spread, size)
    return logits - np.logaddexp.reduce(logits)


def listed(logp, k, drawn):
    """An answer of one token, with the k likeliest beside the one that was drawn."""
    ids = {int(i) for i in np.argsort(-logp)[:k]} | {drawn}
    return Observation((drawn,), ({i: float(logp[i]) for i in ids},))


@given(
    st.integers(0, 10**6),
    st.floats(0, 6),
    st.integers(1, 12),
    st.integers(0, 49),
    st.integers(0, 49),
)
def test_lists_of_one_law_around_different_draws_do_not_differ(seed, spread, k, one, other):
    logp = law(seed, spread)
    d = difference(listed(logp, k, one), listed(logp, k, other))

    assert (d.moved, d.largest, d.unequal) == (0.0, 0.0, 0)


@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.01, 3))
def test_the_distance_is_a_lower_bound_and_grows_to_the_whole_one(seed, k, size):
    p, q = law(seed, 2), law(seed, 2) + size * law(seed + 1, 1)
    q -= np.logaddexp.reduce(q)
    whole = np.abs(np.exp(p) - np.exp(q)).sum() / 2
    part, full = (difference(listed(p, n, 0), listed(q, n, 1)).moved for n in (k, 50))

    assert part <= whole + 1e-12 and full == pytest.approx(whole)


@pytest.mark.parametrize("k", [1, 8, 50])
@pytest.mark.parametrize("spread", [0.5, 2, 4])
def test_logit_noise_of_a_size_is_measured_as_that_size(k, spread):
    """Over many laws: as large as the noise that was added to every logit."""
    rng, size, pairs = np.random.default_rng(1), 0.01, []
    for seed in range(400):
        p = law(seed, spread)
        q = p + rng.normal(0, size, 50)
        a, b = (listed(x - np.logaddexp.reduce(x), k, int(p.argmax())) for x in (p, q))
        pairs.append(Pair(Request((1,), 1), a, b, ""))

    # of one listed token, all others together are not much less noisy than one
    assert Measured.of(pairs).noise == pytest.approx(size, rel=0.3 if k == 1 else 0.1)


def test_lists_of_unlike_tokens_differ_by_what_they_leave_out():
    """Token 1 has .6 in one list; in the other it has at most the least of the list, .25."""
    a = seen((1, {1: math.log(0.6), 2: math.log(0.2)}))
    # 9 was drawn, and may stand beside the list
    b = seen((9, {7: math.log(0.3), 8: math.log(0.25), 9: math.log(0.01)}))

    assert difference(a, b).moved == pytest.approx(0.35) == difference(b, a).moved


# limits


def moved(noise, unequal=1.0, positions=100):
    return Measured(noise, unequal, positions)


@pytest.mark.parametrize(
    ("others", "rounding", "nats", "red", "why"),
    [
        ({}, "16-bit", MOST["16-bit"], MOST["16-bit"], "no other relation does"),
        ({}, None, TIMES * LEAST["float32"], TIMES * LEAST["16-bit"], "no other relation shows"),
        ({"b": moved(1e-6)}, None, TIMES * LEAST["float32"], None, "the least of float32"),
        # few logprobs differ: a model in 16 bits, which rounds alike most of the time
        ({"b": moved(1e-6, 0.01)}, None, TIMES * LEAST["16-bit"], None, "the least of 16-bit"),
        ({"b": moved(0.05)}, None, 0.1, None, "twice what the other relations show"),
        ({"b": moved(0.05)}, "float32", MOST["float32"], None, "the most of float32"),
        # a fault in two relations does not excuse itself
        ({"b": moved(0.02), "c": moved(3.0), "d": moved(0.03)}, "16-bit", 0.06, None, "twice what"),
        ({"b": moved(0.02), "replay": moved(0.04)}, "16-bit", 0.08, None, "twice what"),
        # few tokens show a noise that is little known; nothing else does
        ({"b": moved(0.02, positions=12), "c": moved(0.03)}, "16-bit", 0.06, None, "twice what"),
        ({"b": moved(0.02, positions=12)}, "16-bit", 0.04, None, "twice what"),
    ],
)
def test_a_limit_is_twice_the_rounding_that_other_relations_show(others, rounding, nats, red, why):
    limit = limit_of("a", {**others, "a": moved(9.0)}, rounding)

    assert (limit.nats, limit.red_nats) == pytest.approx((nats, red or nats))
    assert why in limit.why
    assert limit_of("a", others, rounding, stated=0.5) == Limit(0.5, 0.5, "as stated")


@pytest.mark.parametrize("name", ["batching", "prefill-decode"])
def test_the_two_relations_of_one_row_and_several_show_each_others_rounding(name):
    """A kernel that rounds otherwise for one row shows so in these two, and nowhere else."""
    (other,) = {"batching", "prefill-decode"} - {name}
    quiet = {"order": moved(0.001), "client": moved(0.005), "prefix-cache": moved(0.001)}

    alike = limit_of(name, {**quiet, other: moved(0.04), name: moved(9.0)}, "16-bit")
    alone = limit_of(name, {**quiet, other: moved(0.001), name: moved(9.0)}, "16-bit")
    elsewhere = limit_of("order", {**quiet, other: moved(0.04), name: moved(0.04)}, "16-bit")

    assert (alike.nats, alone.nats) == pytest.approx((0.08, TIMES * LEAST["16-bit"]))
    assert elsewhere.nats == pytest.approx(TIMES * LEAST["16-bit"])


@pytest.mark.parametrize(
    ("kernel", "rounding"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "16-bit"),
        ({"dtype": "bfloat16", "quantization": "fp8_tensor"}, "8-bit"),
        ({"dtype": "bfloat16", "quantization": "w8a8"}, "8-bit"),
        ({"dtype": "bfloat16", "quantization": "nvfp4"}, "4-bit"),
        ({"dtype": "bfloat16", "kv_cache": "fp8_e4m3"}, "8-bit"),
        ({"dtype": "bfloat16", "quantization": "int8_weight_only"}, "16-bit"),
        ({"quantization": "w4a16_g128"}, "float32"),
    ],
)
def test_the_rounding_of_a_kernel_is_that_of_its_format(kernel, rounding):
    engine = SimpleNamespace(describe=lambda: SimpleNamespace(fingerprint={}))
    subject = SimpleNamespace(
        kernel=Kernel(engine="table", model="none.json", **kernel), engine=engine, remote=False
    )

    assert rounding_of(subject) == rounding


# answers


def rounded(sizes, seed=3):
    """Pairs of one token each, whose logits moved by noise of these sizes, nats."""
    rng = np.random.default_rng(seed)
    for n, size in enumerate(sizes):
        p = law(n, 2)
        q = p + rng.normal(0, size, 50)
        q = q - np.logaddexp.reduce(q) if size else p
        yield Pair(Request((n,), 1), listed(p, 8, 0), listed(q, 8, 0), "here")


SO = Limit(0.02, 0.02, "so")


def judged(pairs, limit=SO, **how):
    relation = RELATIONS[how.pop("relation", "replay")]
    judge = Judge(SimpleNamespace(remote=False), 0.05, **how)
    return judge.judged(relation, [*pairs], limit, small=False)


def test_a_fault_of_twice_the_rounding_is_red_and_rounding_is_not():
    """Of 20 kernels: one that rounds by 0.02 nats holds, and one with a fault of 0.04 does not."""
    floor, answers = 0.02, []
    for seed in range(0, 60, 3):
        plain, other, fault = (
            [*rounded([size] * 48, seed=seed + n)]
            for n, size in enumerate((floor, floor, math.hypot(floor, 2 * floor)))
        )
        shown = {"b": Measured.of(other)}
        limit = limit_of("a", shown, "16-bit")
        answers.append((judged(plain, limit).outcome, judged(fault, limit).outcome))

    assert sum(plain == "holds" for plain, _ in answers) == 20
    assert sum(fault == "violated" for _, fault in answers) >= 18


def test_one_wrong_answer_of_many_is_found():
    assert judged(rounded([0.005] * 396)).outcome == "holds"
    found = judged(rounded([0.005] * 200 + [3.0] + [0.005] * 195))

    assert found.outcome == "violated" and "in 1 of 396 requests" in found.answer
    assert found.example.prompt == (200,)


def test_a_mean_beyond_the_limit_has_to_be_beyond_it_again():
    relation, judge = RELATIONS["batching"], Judge(SimpleNamespace(remote=False), 0.05)
    far, near = [*rounded([0.03] * 40)], [*rounded([0.002] * 400)]
    limit = Limit(0.02, 0.02, "so")

    once = judge.judged(relation, far, limit, lambda: far, small=False)
    chance = judge.judged(relation, far, limit, lambda: near, small=False)

    assert (once.outcome, chance.outcome) == ("violated", "holds")


def test_between_two_limits_a_relation_is_undecided_and_names_the_option():
    answer = judged(rounded([0.01] * 40), Limit(4e-5, 0.02, "no other shows it"))

    assert answer.outcome == "inconclusive" and answer.answer.endswith("by --rounding")


def drawn_otherwise(limit_breaks):
    a, b = listed(law(1, 2), 8, 0), listed(law(1, 2), 8, 1)
    moved_b = Observation(b.tokens, ({i: v + limit_breaks for i, v in b.logp[0].items()},))
    return Pair(Request((1,), 1), a, moved_b, "")


def test_other_draws_at_equal_logprobs_are_a_violation_at_any_limit():
    loose = Limit(10.0, 10.0, "as stated")
    pairs = [drawn_otherwise(0.0), *rounded([0.0] * 20)]

    seeds = judged(pairs, loose)
    assert (
        seeds.outcome == "violated" and "other tokens are drawn from equal logprobs" in seeds.answer
    )
    assert "bit for bit" not in seeds.answer
    # where replays draw otherwise that is said once, and where both ways draw anew it is no fault
    assert judged(pairs, loose, draws=False, relation="batching").outcome == "holds"
    anew = [replace(pair, seeded=False) for pair in pairs]
    assert judged(anew, loose, relation="prompt-length").outcome == "holds"


def test_more_other_draws_than_the_differences_explain_are_a_violation():
    pairs = [drawn_otherwise(1e-9)] * 10 + [*rounded([1e-9] * 40)]
    few = [*rounded([1e-9] * 40)]

    assert "other tokens are drawn in 10 of 50 answers" in judged(pairs).answer
    assert judged(pairs).outcome == "violated" and judged(few).outcome == "holds"


def test_more_other_draws_than_expected_are_those_of_a_poisson_tail():
    tail = pytest.importorskip("scipy.stats").poisson.sf
    for found, expected in itertools.product(range(120), (0.0, 0.01, 0.5, 3.0, 40.0)):
        assert _too_many(found, expected) == (found > 0 and tail(found - 1, expected) < 1e-4)


def test_little_that_could_be_compared_is_undecided():
    row = listed(law(1, 2), 8, 0).logp[0]
    long = Observation((0,) * 8, (row,) * 8)
    other = Observation((1,) * 8, (row,) * 8)
    pair = Pair(Request((1,), 8), long, other, "")

    found = judged([pair], draws=False, relation="batching")
    assert found.outcome == "inconclusive"
    assert found.answer == "only 1 of 8 tokens could be compared: other tokens are drawn"


def test_bits_are_compared_where_they_are_asked_for():
    pairs = [*rounded([1e-12] * 3)]

    assert judged(pairs).outcome == "holds"
    found = judged(pairs, bitwise=True)
    assert found.outcome == "violated" and found.answer.startswith("not equal bit for bit")
    assert judged(rounded([0.0] * 3), bitwise=True).answer.startswith("equal bit for bit")


def test_logprobs_that_are_no_number_are_no_agreement():
    nan = Pair(Request((1,), 1), *[seen((1, {1: float("nan")}), (2, {2: -2.0}))] * 2, "")
    alone = Pair(Request((1,), 1), *[seen((1, {1: float("nan")}))] * 2, "")

    one = Pair(Request((1,), 1), seen((1, {1: float("nan")})), seen((1, {1: -2.0})), "")
    many = [Pair(Request((1,), 1), *[seen((2, {2: -2.0}))] * 2, "")] * 100

    assert judged([nan]).answer == "1 of 2 tokens have no logprob"
    assert judged([alone]).outcome == "inconclusive"
    assert judged([*many, one]).answer == "1 tokens have a logprob in one answer alone"
    assert judged([*many, alone]).answer.startswith(
        "equal bit for bit: 101 answers, 100 of 101 tokens"
    )


def test_the_smallest_counterexample_is_the_smallest():
    """What fails: both 7 and 9 in the prompt in this order, and a 3 in some other request."""

    def fails(request):
        prompt = [t for t in request.prompt if t in (7, 9)]
        return prompt == [7, 9] and any(3 in other for other in request.others)

    others = ((1, 2), (1, 1, 3, 1, 1, 1), (5,) * 9)
    large = Request((0, 0, 7, 1, 9, 4, 4, 4, 4, 4, 4), 6, others)

    small = shrink(RELATIONS["batching"], large, fails)

    assert small == Request((7, 1, 9), 1, ((1, 1, 3),))


# the command line


def test_what_cannot_be_read_is_refused_with_its_place(tmp_path):
    bad = relations("table:none.json", "--prompt-ids", "1,x")
    side = relations("table:none.json", "--side", "infer")

    assert bad.exit_code == 2 and "'1,x' is no list of token ids: write 5,17,8" in bad.stderr
    assert side.exit_code == 2 and "--side names a side of a contract" in side.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1", "no JSON file of a request"),
        ('{"max_tokens": 4}', "neither 'prompt' nor 'messages'"),
        ('{"prompt": [[1, 2]]}', "neither a text nor a list of token ids"),
        ('{"prompt": [1, 2], "max_tokens": "many"}', "'many' new tokens are asked for"),
        ('{"prompt": [1, 2, 3, 4]}', "a prompt of 4 tokens, and the server has a context of 4"),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_with_its_file(tmp_path, text, said):
    path = tmp_path / "request.json"
    path.write_text(text)
    engine = SimpleNamespace(server=Server("m", context=4))

    with pytest.raises(ContractError, match=said) as error:
        ClientRequest.read(path, engine)
    assert str(path) in str(error.value) and error.value.problems[0].hint


def test_an_engine_without_a_prefix_cache_refuses_the_key(tmp_path):
    from servanda.engines import open_engine
    from servanda.errors import MeasurementError

    with pytest.raises(MeasurementError, match="has no prefix cache of its own here") as error:
        open_engine(Kernel(engine="table", model="none.json", prefix_cache=16))
    assert "remove the key prefix_cache" in str(error.value)


class Full(TableEngine):
    """It fails on prompts of more than some tokens."""

    most = 6

    def generate(self, batch, sampling, seed):
        if max(map(len, batch.prompts)) > self.most:
            raise RuntimeError("no room")
        return super().generate(batch, sampling, seed)


def test_an_error_of_the_server_is_a_violation_but_at_the_first_request_no_answer(
    tmp_path, prompts
):
    with live(table_engine(tmp_path, cls=Full)) as (client, _):
        words = ("--prompts", prompts, "--only", "replay", "--only", "prompt-length")
        code, seen = found(str(client.base_url), *words, "--longest", "12", "--requests", "2")
    assert code == 1 and seen["replay"]["outcome"] == "violated"
    assert "with status 500" in seen["replay"]["answer"]
    assert "prompts of up to 1 tokens were answered before" in seen["replay"]["answer"]
    assert len(seen["replay"]["example"]["prompt_ids"]) == 12
    with live(table_engine(tmp_path, cls=type("Empty", (Full,), {"most": 0}))) as (client, _):
        words = ("--prompts", prompts, "--longest", "24", "--requests", "2", "--quiet")
        done = relations(str(client.base_url), *words)
    assert done.exit_code == 4 and "with status 500" in done.output


@pytest.mark.slow
def test_a_second_tier_of_the_cache_is_read_only_after_other_requests():
    with model(",prefix_cache=8,fault=prefix_hit:demoted") as url:
        words = (f"{url},batch_size=2", "--only", "prefix-cache", *texts())
        near, first = found(*words)
        far, second = found(*words, "--between", "1024")
    assert (near, first["prefix-cache"]["outcome"]) == (0, "holds")
    assert (far, second["prefix-cache"]["outcome"]) == (1, "violated")
    assert "--between 1024" in second["prefix-cache"]["example"]["command"]


@pytest.mark.parametrize(("near", "outcome"), [(1e-9, "violated"), (-1e-9, "holds")])
@pytest.mark.parametrize("asks", [True, False])
def test_draws_with_named_sampling_and_without_are_each_tested_at_half_of_alpha(
    monkeypatch, asks, near, outcome
):
    def drawn(_, named):
        return [Observation((int(named),) * 9000, ({1: -0.1},) * 9000)]

    def evidence(seen, _):
        grown = seen[0].tokens[0] == asks
        return SimpleNamespace(n=9000, log_e=(math.log(2 / 0.025) + near) * grown)

    monkeypatch.setattr("servanda.runner.relations.run._evidence", evidence)
    monkeypatch.setattr("servanda.runner.relations.run._seen", lambda *_: 0.1)
    engine = HTTPEngine.__new__(HTTPEngine)
    engine.server = Server("m", defaults={})
    cases = Cases([(1,)], 1, 3, 1, 1, given=Request((1,), 1))
    options = Options(only=("sampling",), alpha=0.025)

    (found,) = all_relations(SimpleNamespace(drawn=drawn, engine=engine), cases, options)

    assert (found.outcome, found.alpha) == (outcome, 0.0125)


@pytest.mark.parametrize("between", [0.0, 0.01])
def test_a_length_modulo_a_block_is_told_though_one_such_case_moved_less_than_the_limit(between):
    """The last token of a block of 32 is lost; the 128th token matters little here."""
    moves = {32: 0.5, 64: 1.0, 128: between, 256: 0.7} if between else {32: 0.5, 64: 1.0, 256: 0.7}
    lengths = (7, 8, 9, 16, 17, 31, 33, 63, 65, 129, 257, *moves)
    pairs = []
    for n in lengths:
        (pair,) = rounded([moves.get(n, 0.0)], seed=n)
        pairs.append(replace(pair, request=Request((0,) * (n - 1), 2)))

    found = judged(pairs, relation="prompt-length")

    assert found.outcome == "violated" and len(pairs[-1].request.prompt) == 255
    assert "(those of 0 modulo 32 tokens, from 32 on)" in found.answer


def test_a_case_of_the_same_length_that_is_as_the_others_is_no_pattern():
    moves = {32: 0.5, 64: 1.0, 128: 0.0}
    pairs = []
    for n in (7, 8, 16, 31, 33, 63, 129, *moves):
        (pair,) = rounded([moves.get(n, 0.0)], seed=n)
        pairs.append(replace(pair, request=Request((0,) * (n - 1), 2)))

    found = judged(pairs, relation="prompt-length")

    assert found.outcome == "violated" and "modulo" not in found.answer
