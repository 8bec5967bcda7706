# A promotion over a gateway: it mirrors, splits and logs as the promotion says, and gives back.

import json
import re
from collections import defaultdict

import httpx2
import pytest

from servanda.traces.request_log import is_assignment, read_served
from tests.gateway.running import ADA, SERVED, WAIT_S, Program, Serving, Users, kernels, until

STAGES = """\
observability:
  clauses:
    - {id: coverage, metric: scoring_rate, over: 1h, at_least: 0.9, stages: [shadow, canary]}
promotion:
  offline: {prompt_groups: [32, 640]}
  shadow: {share: 0.5, prompt_groups: [32, 640]}
  canary: {steps: [0.25], sample: 1.0, prompt_groups: [32, 640]}
  full: {sample: 0.5, prompt_groups: [32, 640]}
"""
SOUND = {**SERVED, "d": SERVED["a"]}


@pytest.fixture(scope="module")
def promoted(tmp_path_factory):
    """A build that went from offline to full, and was taken back by a person."""
    folder = tmp_path_factory.mktemp("promoted")
    # routing's own sample is none to speak of: what is logged is what the promotion asks for
    with (
        kernels(folder / "kernels", SOUND) as urls,
        Serving(folder, urls, "--log", "served", more=STAGES, limit=0.3, sample=0.001) as serving,
        Users(serving.begun()) as users,
    ):
        yield Promoted(folder, serving, users)


class Promoted:
    def __init__(self, folder, serving, users):
        self.folder, self.serving, self.users = folder, serving, users
        at = serving.page.removeprefix("http://")
        self.router = ("--webhook", f"http://promoter:{ADA}@{at}/v1/admin/route")
        self.effects = f"http://{at}/v1/admin/route"
        words = ("--log", "served", "--until", "completed", "--every", "1s", "--quiet")
        self.code, self.said = self.call("promote", serving.contract.name, *words)
        self.full = serving.status()
        self.probe = len(users.probe)
        self.back = self.call("promotion", "rollback", "toy", "--reason", "a drill")
        until(lambda: users.pools("a", -12) == {"stable"}, "stable serves")
        self.taken_back = serving.status()

    def call(self, *words):
        given = (*words, "--ledger", "ledger.db", *self.router)
        with Program(*given, cwd=self.folder) as program:
            code = program.process.wait(WAIT_S)
            program._thread.join(WAIT_S)
            return code, program.text

    def legs(self):
        """Leg -> its rows in the log, as a promotion reads them."""
        found = defaultdict(list)
        for file in sorted((self.folder / "served").glob("*.jsonl")):
            text = file.read_text()
            text = text[: text.rindex("\n") + 1]
            lines = [json.loads(line) for line in text.splitlines()]
            plain = [line for line in lines if not is_assignment(line)]
            for row, data in zip(read_served(text, str(file)), plain, strict=True):
                found[row.leg].append((row, data))
        return found


def test_a_build_goes_from_offline_to_full_over_a_gateway(promoted):
    assert promoted.code == 0, promoted.said
    # of users who do not rest, a span may be over in one look, and the next one begun
    told = re.search(r"^COMPLETED: everything (holds on full-\d+|held before)", promoted.said, re.M)
    assert told, promoted.said
    assert promoted.full["base"] == 1.0 and promoted.full["leg"].startswith("full-")


def test_each_leg_is_logged_as_a_promotion_reads_it(promoted):
    legs = promoted.legs()
    assert {"shadow", "canary-1", "full-1"} <= {*legs}  # few others were sampled, or none
    for leg in ("shadow", "canary-1", "full-1"):
        rows = [row for row, _ in legs[leg]]
        assert [row.index for row in rows] == [*range(len(rows))]
        served = [row.served for row in rows]
        assert served == sorted({*served}) and served[0] >= 1
        assert not [row.lost for row in rows if row.lost]


def test_a_shadow_is_mirrored_and_a_canary_is_served(promoted):
    legs = promoted.legs()
    mirrored = {leg: {data["x-mirrored"] for _, data in rows} for leg, rows in legs.items()}
    assert mirrored["shadow"] == {True}
    assert mirrored["canary-1"] == {False}


def test_what_a_promotion_samples_is_logged_and_no_work_of_the_referee(promoted):
    shares = {leg: {d["x-chance"] for _, d in rows} for leg, rows in promoted.legs().items()}
    assert shares["shadow"] == shares["canary-1"] == {1.0}
    assert 0.5 in shares["full-1"]  # and 1 once it is taken back
    apart = promoted.full["scoring"]["outside"]["rows sampled only for a promotion"]
    assert apart > 100


def test_a_run_that_is_taken_back_is_served_by_stable_at_once(promoted):
    code, said = promoted.back
    assert code == 0, said
    assert promoted.taken_back["base"] == 0.0


def test_a_route_that_comes_late_brings_nothing_back(promoted):
    run, leg = (promoted.full[name] for name in ("run", "leg"))
    late = {"kind": "route", "run": run, "leg": leg, "share": 1.0, "mirror": 0.0, "sample": 0.5}
    headers = {"authorization": f"Bearer {ADA}"}
    reply = httpx2.post(promoted.effects, json={**late, "turn": 1}, headers=headers, timeout=WAIT_S)
    assert reply.status_code == 200  # a refusal would be sent again
    assert promoted.serving.status()["base"] == 0.0
    until(lambda: promoted.users.pools("b", -12) == {"stable"}, "stable serves")
