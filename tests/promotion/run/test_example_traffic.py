# The driver of examples/promotion: how it splits, what it logs, and when it takes a route.
#
# Its log is read as `servanda promote` reads one, and its servers are real ones, of a table.

import asyncio
import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from servanda.judgement.traffic import traffic_of
from servanda.promotion.notify.sinks import sinks_of
from servanda.runner.run import load
from servanda.traces.request_log import first_of_each_user, read_assignments, read_served
from tests import kit
from tests.engines.serving import WAIT_S, live, table_engine
from tests.promotion.notify.made import effect

FOLDER = Path(__file__).parents[3] / "examples" / "promotion"
IDS = [f"request {i}" for i in range(4000)]


def script(name):
    spec = importlib.util.spec_from_file_location(f"promotion_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


traffic, set_route = script("traffic"), script("set_route")


def route(**changes):
    return traffic.Route(**{"run": "toy-1", "leg": "shadow", **changes})


def choices(ids=IDS, key="k", **changes):
    return [traffic.choose(key, one, route(**changes)) for one in ids]


def near(found, n, share):
    """Within five standard deviations of a binomial."""
    return abs(found - n * share) <= 5 * math.sqrt(n * share * (1 - share)) + 1e-9


# the split


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_infer_serves_the_share_of_the_requests_that_the_route_says(share):
    served = sum(choice.by_infer for choice in choices(share=share))
    assert near(served, len(IDS), share)


def test_who_is_served_by_infer_at_a_share_is_so_at_every_larger_one():
    before = set()
    for share in (0.0, 0.01, 0.1, 0.25, 0.5, 0.99, 1.0):
        now = {i for i, choice in enumerate(choices(share=share)) if choice.by_infer}
        assert before <= now
        before = now
    assert len(before) == len(IDS)


def test_a_request_goes_the_same_way_every_time_and_another_under_another_key():
    split = {"share": 0.5, "mirror": 0.5, "sample": 0.5}
    assert choices(**split) == choices(**split)
    assert choices(**split) != choices(key="another", **split)


def test_what_is_mirrored_is_answered_by_stable_and_what_is_sampled_was_sent_to_infer():
    found = choices(share=0.3, mirror=0.5, sample=0.4)
    assert not any(c.by_infer and c.mirrored for c in found)
    assert all(c.by_infer or c.mirrored for c in found if c.sampled)
    sent = [c for c in found if c.by_infer or c.mirrored]
    assert near(sum(c.mirrored for c in found), len(found), 0.7 * 0.5)
    # what is sampled is drawn apart from who is served
    assert near(sum(c.sampled for c in sent), len(sent), 0.4)


def test_before_there_is_a_route_stable_serves_everybody(tmp_path):
    nobody = traffic.Route.read(tmp_path / "route.json")
    found = [traffic.choose("k", one, nobody) for one in IDS[:100]]
    assert Counter(found) == {traffic.Choice(False, False, False): 100}


# the log


ASKED = {"prompt_token_ids": [0, 1], "labels": {}, "sampling": {"max_new_tokens": 4}}
ANSWER = {"token_ids": [2], "logprobs": [-1.0], "finish": "length"}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "served.jsonl"


@contextmanager
def closing_log(file):
    """A log that is ended, as the proxy ends it."""
    log = traffic.Log(file)
    yield log
    log.end()


def logged(file):
    return read_served(file.read_text(), str(file))


def test_lines_are_in_launch_order_however_the_answers_come(file):
    with closing_log(file) as log:
        rows = [log.launch(route(), True, **ASKED) for _ in range(5)]
        for i in (3, 1, 4):
            log.close(rows[i], ANSWER)
            assert file.read_text() == ""  # the first has none yet
        log.close(rows[0], {"lost": "timeout"})
        assert [row.index for row in logged(file)] == [0, 1]
        log.close(rows[2], ANSWER)

    found = logged(file)
    assert [row.index for row in found] == [0, 1, 2, 3, 4]
    assert [row.lost for row in found] == ["timeout", "", "", "", ""]


def test_what_is_not_sampled_has_no_line_and_is_counted(file):
    with closing_log(file) as log:
        for sampled in (False, True, False, False, True):
            row = log.launch(route(), sampled, **ASKED)
            if row is not None:
                log.close(row, ANSWER)

    assert [(row.index, row.served) for row in logged(file)] == [(0, 2), (1, 5)]


def test_every_leg_is_counted_by_itself(file):
    with closing_log(file) as log:
        for leg in ("shadow", "shadow", "canary-1", "shadow", "canary-1"):
            log.close(log.launch(route(leg=leg), True, **ASKED), ANSWER)

    assert [(row.leg, row.index) for row in logged(file)] == [
        *(("shadow", 0), ("shadow", 1), ("canary-1", 0), ("shadow", 2), ("canary-1", 1)),
    ]


def test_a_proxy_that_ends_logs_what_it_launched_and_one_that_begins_goes_on_counting(file):
    with closing_log(file) as log:
        rows = [log.launch(route(), True, **ASKED) for _ in range(3)]
        log.close(rows[1], ANSWER)
    with closing_log(file) as log:
        log.close(log.launch(route(), True, **ASKED), ANSWER)

    found = logged(file)
    assert [(row.index, row.served) for row in found] == [(i, i + 1) for i in range(4)]
    assert [row.lost for row in found] == ["the proxy ended", "", "the proxy ended", ""]


def test_the_likeliest_are_those_and_not_the_drawn_one():
    step = {"token_id:9": -7.0, **{f"token_id:{i}": -1.0 - i for i in range(5)}}
    assert traffic.likeliest(step) == [[i, -1.0 - i] for i in range(5)]


def test_users_ask_in_a_seeded_order_without_an_end(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in "abc"))

    def first(seed, n=40):
        return [one for one, _ in zip(traffic.asked(prompts, seed), range(n), strict=False)]

    assert first("1") == first("1") != first("2")
    ids, asked, _ = zip(*first("1"), strict=True)
    assert len({*ids}) == 40 and {*asked} == {*"abc"}


# real servers


@pytest.fixture
def contract(tmp_path):
    path, _ = kit.write(tmp_path / "toy", width=16)
    return load(path)


def prompts(n):
    return [(one, "ab"[i % 2], {"first": "ab"[i % 2]}) for i, one in enumerate(IDS[:n])]


async def served(stable, infer, folder, n, silent=False):
    """The answers to n requests, eight at a time; infer may be silent, and is then given up."""
    with closing_log(folder / "served.jsonl") as log:
        waits = (httpx2.Timeout(WAIT_S), httpx2.Timeout(WAIT_S, read=0.1 if silent else WAIT_S))
        clients = [
            httpx2.AsyncClient(base_url=url, timeout=wait)
            for url, wait in zip((stable, infer), waits, strict=True)
        ]
        proxy = traffic.Proxy(*clients, folder / "route.json", log)
        waiting, answers = iter(prompts(n)), {}

        async def user():
            for request, prompt, labels in waiting:
                answers[request] = await proxy.serve(request, prompt, labels)

        await asyncio.gather(*(user() for _ in range(8)))
        for client in clients:
            await client.aclose()
        return [answers[one] for one in IDS[:n]]


@pytest.fixture
def servers(tmp_path):
    for name in "si":
        (tmp_path / name).mkdir()
    stable = table_engine(tmp_path / "s")
    infer = table_engine(tmp_path / "i", rows={"": kit.moved(kit.BASE, 0.3)})
    with live(stable) as (one, _), live(infer, test_mode=True) as (other, _):
        yield str(one.base_url), other


def written(tmp_path, **changes):
    found = {"run": "toy-1", "leg": "shadow", "share": 0.0, "mirror": 0.0, "sample": 1.0}
    (tmp_path / "route.json").write_text(json.dumps({**found, **changes}))


@pytest.mark.slow
def test_what_was_mirrored_is_evidence_and_is_not_shown(servers, tmp_path, contract):
    stable, infer = servers
    alone = asyncio.run(served(stable, str(infer.base_url), tmp_path, 60))
    assert not (tmp_path / "served.jsonl").read_text()  # no route: nobody asks infer
    written(tmp_path, mirror=0.5)

    shown = asyncio.run(served(stable, str(infer.base_url), tmp_path, 60))

    assert shown == alone
    found = traffic_of(logged(tmp_path / "served.jsonl"), contract, run="toy-1", leg="shadow")
    assert found.outside == {} and len(found.groups) == len(found.launched)
    assert 15 <= len(found.launched) <= 45
    assert {r.labels["first"] for r in found.launched} == {"a", "b"}
    assert all(len(r.best) == len(r.tokens) for r in found.launched)
    engine = table_engine(tmp_path / "i", rows={"": kit.moved(kit.BASE, 0.3)})
    for request in found.launched:  # and what infer really drew
        assert request.tokens[-1] in engine.describe().eos or len(request.tokens) == 16


def test_a_request_that_infer_loses_is_logged_as_lost_and_answered_by_stable(servers, tmp_path):
    stable, infer = servers
    alone = asyncio.run(served(stable, str(infer.base_url), tmp_path, 40))
    written(tmp_path, leg="canary-1", share=1.0)
    fault = {"kind": "status", "status": 503, "share": 0.5, "seed": 3}
    assert infer.post("/servanda/misbehave", json=fault).status_code == 200

    shown = asyncio.run(served(stable, str(infer.base_url), tmp_path, 40))

    found = logged(tmp_path / "served.jsonl")
    assert [row.index for row in found] == [*range(40)]
    lost = [row for row in found if row.lost]
    assert 5 <= len(lost) <= 35 and all("503" in row.lost for row in lost)
    lines = read_assignments((tmp_path / "served.jsonl").read_text(), "served.jsonl")
    users = first_of_each_user(lines, "toy-1", "canary-1")
    assert len(users) == 40 and sum(u.because == "failover" for u in users) == len(lost)
    # the same request has the same seed at both
    answered = {row.sampling["seed"]: row for row in found}
    seeds = [int(traffic.place(traffic.Proxy.key, one, "seed") * 2**53) for one in IDS[:40]]
    for seed, answer, of_stable in zip(seeds, shown, alone, strict=True):
        row = answered[seed]
        assert answer == of_stable if row.lost else tuple(answer["token_ids"]) == row.tokens


@pytest.mark.parametrize(
    ("fault", "why"), [("hang", "ReadTimeout"), ("drop", "Error"), ("garble", "Error")]
)
def test_every_way_to_lose_an_answer_has_its_line(servers, tmp_path, fault, why):
    stable, infer = servers
    written(tmp_path, mirror=1.0)
    assert infer.post("/servanda/misbehave", json={"kind": fault}).status_code == 200

    shown = asyncio.run(served(stable, str(infer.base_url), tmp_path, 8, silent=fault == "hang"))

    assert all(answer["token_ids"] for answer in shown)
    found = logged(tmp_path / "served.jsonl")
    assert [row.index for row in found] == [*range(8)]
    assert all(why in row.lost for row in found), found


# the route


@pytest.fixture
def routes(tmp_path):
    return tmp_path / "route.json"


def decided(turn, run="toy-1", at=None, **changes):
    at = 1000.0 + turn if at is None else at
    body = {"kind": "route", "run": run, "turn": turn, "at": at, "leg": "canary-1"}
    return {**body, "key": f"{run}:{turn}:route", "share": 0.1 * turn, "mirror": 0.0} | {
        "sample": 1.0,
        **changes,
    }


def test_a_later_turn_is_taken_and_an_older_or_a_repeated_one_is_not(routes):
    assert set_route.set_route(routes, decided(2))
    assert set_route.set_route(routes, decided(4))
    for turn in (4, 3, 1):
        assert not set_route.set_route(routes, decided(turn, share=0.9))
    assert json.loads(routes.read_text())["share"] == pytest.approx(0.4)
    assert set_route.set_route(routes, decided(5))
    assert sorted(p.name for p in routes.parent.iterdir()) == ["route.json", "route.json.lock"]


def test_of_two_runs_the_one_that_was_decided_last_has_the_traffic(routes):
    assert set_route.set_route(routes, decided(9, run="monday", at=100.0))
    assert set_route.set_route(routes, decided(1, run="tuesday", at=200.0))
    assert not set_route.set_route(routes, decided(10, run="monday", at=150.0))
    assert json.loads(routes.read_text())["run"] == "tuesday"


@pytest.mark.parametrize("kind", ["notify", "page"])
def test_what_is_no_route_moves_no_traffic(routes, kind):
    assert not set_route.set_route(routes, decided(1, kind=kind))
    assert not routes.exists()


def test_the_command_sets_the_route_that_the_traffic_reads(routes):
    program = f"{sys.executable} {FOLDER / 'set_route.py'} {routes}"
    (sink,) = sinks_of((), (), (program,))

    sink.deliver(effect("route", "llama-int8-3f9a:4:route"))
    sink.deliver(effect("notify", "llama-int8-3f9a:5:notify", share=1.0))

    found = traffic.Route.read(routes)
    assert found == traffic.Route("llama-int8-3f9a", "canary-2", 0.25, 0.0, 0.01)


def test_the_command_without_a_file_says_how_it_is_called():
    done = subprocess.run(
        [sys.executable, FOLDER / "set_route.py"], capture_output=True, text=True, input="{}"
    )
    assert done.returncode == 1 and done.stderr == "usage: set_route.py ROUTE.json  < effect\n"
