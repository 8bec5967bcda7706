# `servanda serve` as a person starts it: the processes, what they say, and how they end.

import contextlib
import os
import signal
import stat

import httpx2
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.gateway.http.listener import bind
from servanda.promotion.ledger.ledger import verify_at
from tests.gateway.running import ADA, WAIT_S, Program, Serving, Users, ask, kernels, until


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with kernels(tmp_path_factory.mktemp("kernels")) as found:
        yield found


def total(serving):
    return sum(one["scored"] for one in serving.status()["slices"])


def ask_once(serving):
    with httpx2.Client(base_url=serving.url, timeout=WAIT_S) as client:
        return ask(client, "a")[1]


@contextlib.contextmanager
def misbehaving(url, fault):
    """A server with a fault, and how often it struck."""
    at = f"{url}/servanda/misbehave"
    httpx2.post(at, json=fault).raise_for_status()
    try:
        yield lambda: httpx2.get(at).json()["struck"]
    finally:
        httpx2.delete(at).raise_for_status()


def all_taken(gateway):
    counts = gateway["counts"]
    assert counts["dropped"] == 0
    return gateway["taken"] == counts["sampled"] == counts["statuses"]["infer\t2xx"]


def test_a_slice_that_breaks_leaves_infer_and_the_others_stay(urls, tmp_path):
    with Serving(tmp_path, urls, "--log", "served") as serving, Users(serving.begun()) as users:
        serving.line(r"team=d: .* -> quarantined: tv on team=d exceeds its limit.*pages oncall")
        until(lambda: users.pools("d", -12) == {"stable"}, "stable serves the slice")
        assert users.pools("a") == users.pools("b") == {"infer"}
        found = serving.slice("d")
        assert found["status"] == "quarantined" and found["acts"]
        assert {serving.slice(t)["status"] for t in "ab"} == {"active"}
        assert {status for _, status, _ in users.probe} == {200}
        assert serving.end() == 0
    assert verify_at(str(tmp_path / "ledger.db")).sound
    assert (tmp_path / "served" / "served-0001.jsonl").stat().st_size > 0


def test_observe_moves_nothing_and_says_what_it_would(urls, tmp_path):
    with Serving(tmp_path, urls, mode="observe") as serving, Users(serving.begun()) as users:
        serving.line("mode observe: all traffic is served by infer; decisions are only logged")
        serving.line(r"team=d: .* -> quarantined \(recorded only, route unchanged\)")
        before = len(users.probe)
        until(lambda: len(users.probe) > before + 24, "users go on")
        assert users.pools("d", before) == {"infer"}
        assert serving.end() == 0


def test_a_url_may_end_as_clients_are_given_it(urls, tmp_path):
    """With the /v1, that is; the server is met all the same, and its model's name is known."""
    with Serving(tmp_path, [f"{url}/v1" for url in urls]) as serving:
        serving.begun()
        assert ask_once(serving) == 200
        assert "does not respond yet" not in serving.text
        assert serving.end() == 0


def test_it_says_at_the_start_what_it_watches_and_where(urls, tmp_path):
    with Serving(tmp_path, urls) as serving:
        assert serving.url.startswith("http://127.0.0.1:")
        serving.line(
            r"tv on team=a: a mean of at most 0\.1; alarm threshold 6,000, return "
            r"threshold 20; diverts the slice"
        )
        serving.line(rf"infer at {urls[0]} and stable at {urls[1]}")
        serving.line(r"page http://127\.0\.0\.1:\d+/  \(keys: keys\.yaml\)")
        assert serving.end(signal.SIGINT) == 0


def test_a_leader_that_is_killed_under_traffic_costs_no_request_and_no_evidence(urls, tmp_path):
    # few enough to wait with the gateway until a leader is there again
    given = {"teams": "ab", "pause_s": 0.05}
    with Serving(tmp_path, urls) as serving, Users(serving.begun(), **given) as users:
        until(lambda: total(serving) > 40, "evidence comes")
        os.kill(serving.leader(), signal.SIGKILL)
        serving.line("the leader ended with signal 9; it is started again")
        serving.line("the leader is running again")
        before = total(serving)
        until(lambda: total(serving) > before + 40, "evidence goes on")
        users.__exit__()
        assert {(status, pool) for _, status, pool in users.probe} == {(200, "infer")}
        # every answer was sampled, and none was lost with the leader
        until(lambda: all_taken(serving.status()["gateways"][0]), "all are taken")
        assert serving.end() == 0


def test_a_contract_with_a_mistake_is_refused_with_its_place_and_the_old_one_stays(urls, tmp_path):
    with Serving(tmp_path, urls) as serving:
        before = serving.status()["contract"]
        serving.write(limit="lots")
        serving.line("the contract is not taken over, and the one before stays")
        serving.line(r"toy\.kernelcontract\.yaml:16:\d+: ")
        assert serving.status()["contract"] == before
        assert ask_once(serving) == 200

        serving.write(limit=0.2)
        serving.line(r"toy 0\.0\.0 is followed from .*\), mode enforce; evidence begins anew$")
        assert serving.status()["contract"] != before
        serving.write(limit=0.2, mode="observe")
        serving.line(r"toy 0\.0\.0 is followed from .*\), mode observe; its evidence stays$")
        serving.write(limit=0.2)
        serving.line(r"toy 0\.0\.0 is followed from .*\), mode enforce; its evidence stays$")
        serving.process.send_signal(signal.SIGHUP)
        said = len(serving.lines)
        serving.line("toy 0.0.0 is followed from now on", after=said)
        assert serving.end() == 0


def test_a_contract_whose_pools_moved_says_that_gateways_keep_the_old_ones(urls, tmp_path):
    with Serving(tmp_path, urls) as serving:
        assert serving.page
        serving.infer = urls[0].replace("127.0.0.1", "localhost")
        serving.write()
        serving.line("infer has another URL there: restart the gateways to use it")
        assert serving.end() == 0


def test_a_pool_has_the_time_that_the_call_gives_it(urls, tmp_path):
    """Stable answers what infer is too slow for; without another pool the client is told."""
    slow = {"kind": "slow", "seconds": 5.0}
    waits = ("--first-byte", "200ms")
    with Serving(tmp_path, urls, *waits) as serving, misbehaving(urls[0], slow) as infer:
        url = serving.url
        with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
            until(lambda: ask(client, "a") == ("a", 200, "stable") and infer(), "stable answers")
            with misbehaving(urls[1], slow):
                assert ask(client, "a")[1] == 504
        assert serving.end() == 0


def test_told_to_end_it_answers_who_is_under_way(urls, tmp_path):
    slow = {"kind": "slow", "seconds": 1.0}
    with Serving(tmp_path, urls) as serving:
        url = serving.begun()
        with misbehaving(urls[0], slow) as infer, Users(url, teams="a", at_a_time=1) as users:
            until(infer, "infer is asked")
            serving.process.send_signal(signal.SIGTERM)
            until(lambda: users.probe, "the answer comes")
        assert users.probe[0][1:] == (200, "infer")
        assert serving.process.wait(WAIT_S) == 0
        assert "no new requests are accepted" in serving.text


def test_a_gateway_that_is_killed_takes_its_leader_with_it(urls, tmp_path):
    with Serving(tmp_path, urls) as serving:
        assert serving.page
        leader = serving.leader()
        serving.process.kill()
        until(lambda: not alive(leader), "the leader has ended")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_keys_they_are_made_for_the_owner_alone(urls, tmp_path):
    with Serving(tmp_path, urls, keys=False) as serving:
        serving.line(r"keys: state/keys\.yaml, made for this start")
        assert ask_once(serving) == 200
        file = tmp_path / "state" / "keys.yaml"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().split('"')[1]
        assert serving.status(key)["mode"] == "enforce"
        assert key not in serving.text
        with pytest.raises(httpx2.HTTPStatusError, match="401"):
            serving.status("a key that is none of ours")
        assert serving.end() == 0


def test_two_gateways_follow_one_leader(urls, tmp_path):
    shared = "a-key-that-gateways-share"
    rows = f"- {{name: ada, role: admin, key: {ADA}}}\n- {{name: g, role: gateway, key: {shared}}}"
    keys = tmp_path / "leader.yaml"
    keys.touch(0o600)
    keys.write_text(rows)
    with Serving(tmp_path, urls, "--leader-only", "--keys", keys, keys=False) as leader:
        page = leader.page
        leader.line("the leader is running")
        follow = ("--leader", page, "--name")
        more = {"SERVANDA_GATEWAY_KEY": shared}
        with (
            Serving(tmp_path / "1", urls, *follow, "one", **more) as one,
            Serving(tmp_path / "2", urls, *follow, "two", **more) as two,
            Users(one.begun()) as first,
            Users(two.begun()) as second,
        ):
            leader.line(r"team=d: .* -> quarantined")
            until(lambda: first.pools("d", -12) == {"stable"}, "the first follows")
            until(lambda: second.pools("d", -12) == {"stable"}, "and the second")
            assert {g["name"] for g in leader.status()["gateways"]} == {"one", "two"}
            assert one.end() == two.end() == 0
        assert leader.end() == 0


def test_a_pool_that_is_not_there_yet_is_said_and_keeps_nobody_waiting(urls, tmp_path):
    with bind("127.0.0.1", 0, "") as taken:
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with Serving(tmp_path, (nowhere, urls[1])) as serving:
        serving.line(rf"! infer does not respond yet.*{nowhere}")
        with httpx2.Client(base_url=serving.url, timeout=WAIT_S) as client:
            assert ask(client, "a")[1:] == (200, "stable")
        assert serving.end() == 0


def test_a_second_one_on_the_same_state_is_refused_and_the_first_keeps_its_keys(urls, tmp_path):
    with Serving(tmp_path, urls, keys=False) as serving:
        assert serving.page
        file = tmp_path / "state" / "keys.yaml"
        before = file.read_text()
        with Serving(tmp_path, urls, keys=False) as second:
            second.line("state is in use by another leader")
            assert second.process.wait(WAIT_S) == 4
        assert file.read_text() == before
        assert serving.end() == 0


def test_labels_that_no_request_has_are_said(urls, tmp_path):
    with Serving(tmp_path, urls) as serving:
        assert serving.url
        text = serving.contract.read_text().replace(
            "labels:\n  team: {from: request.metadata.team}\n", ""
        )
        assert serving.end() == 0
    serving.contract.write_text(text)
    words = ("serve", serving.contract.name, "--port", 0, "--admin", "127.0.0.1:0")
    with Program(*words, "--state", "other", cwd=tmp_path) as program:
        program.line("! no request has the label team: labels: does not declare where to find it")
        program.line("serving users at")
        assert program.end() == 0


def test_a_leader_is_met_before_it_is_followed(urls, tmp_path, monkeypatch):
    shared = "a-key-that-gateways-share"
    keys = tmp_path / "leader.yaml"
    keys.touch(0o600)
    keys.write_text(f"- {{name: g, role: gateway, key: {shared}}}\n")
    with Serving(tmp_path, urls, "--leader-only", "--keys", keys, keys=False) as leader:
        page = leader.page
        leader.line("the leader is running")
        monkeypatch.setenv("SERVANDA_GATEWAY_KEY", "none-of-the-leaders-keys")
        at = (leader.contract, "--port", 0, "--leader")
        code, said = refused(tmp_path, *at, page)
        assert code == 2 and f"the leader at {page} refuses the key of SERVANDA_GATEWAY_KEY" in said
        code, said = refused(tmp_path, *at, urls[0])
        assert code == 4 and f"{urls[0]} is no leader: status 404" in said
        code, said = refused(tmp_path, *at, page.removeprefix("http://"))
        assert code == 2 and "--leader is '127.0.0.1:" in said
        monkeypatch.setenv("SERVANDA_GATEWAY_KEY", shared)
        other = leader.contract.with_name("other.kernelcontract.yaml")
        other.write_text(leader.contract.read_text().replace("name: toy", "name: other"))
        code, said = refused(tmp_path, other, *at[1:], page)
        assert code == 2 and f"the leader at {page} leads toy, and this is other" in said
        assert leader.end() == 0


# what is refused


def refused(tmp_path, *words):
    own = [] if "--leader" in words else ["--state", tmp_path / "s"]
    done = CliRunner().invoke(main, ["serve", *map(str, [*words, *own])])
    return done.exit_code, done.output


@pytest.fixture
def contract(tmp_path):
    """A contract whose servers are none."""
    urls = ("http://127.0.0.1:9", "http://127.0.0.1:10")
    with Serving(tmp_path, urls, "--admin", "nonsense") as serving:
        serving.process.wait(WAIT_S)
        assert "--admin is HOST:PORT, not 'nonsense'" in serving.text
        return serving


def test_a_kernel_without_a_server_is_refused_with_its_place(contract, tmp_path):
    text = contract.contract.read_text()
    contract.contract.write_text(
        text.replace(
            '{engine: openai_http, url: "http://127.0.0.1:9"}', "{engine: table, model: p.json}"
        )
    )
    code, said = refused(tmp_path, contract.contract)
    assert code == 2 and "toy.kernelcontract.yaml:6:" in said
    assert "infer is table p.json" in said and "or give --infer-url URL" in said


def test_a_contract_without_a_stable_kernel_takes_no_url_of_one(contract, tmp_path):
    contract.write(mode="observe")
    text = contract.contract.read_text()
    stable = 'stable: {engine: openai_http, url: "http://127.0.0.1:10"}'
    for part in (stable, "{divert: slice}, ", "  stable_in_flight: 64\n"):
        assert part in text
        text = text.replace(part, "")
    contract.contract.write_text(text)
    code, said = refused(tmp_path, contract.contract, "--stable-url", "http://127.0.0.1:10")
    assert code == 2 and "the contract has no stable kernel, but --stable-url gives its URL" in said


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://u:secret@127.0.0.1:9"])
def test_an_option_that_is_no_url_is_told_before_anything_is_asked(contract, tmp_path, url):
    code, said = refused(tmp_path, contract.contract, "--port", 0, "--infer-url", url)
    assert code == 2 and said == (
        "--infer-url takes a URL of http or https, without a key\n"
        "  hint: write http://HOST:PORT; SERVANDA_INFER_KEY is sent there as the key\n"
    )


def test_an_option_that_names_the_referee_is_refused(contract, tmp_path):
    train = 'train: {engine: openai_http, url: "http://127.0.0.1:11"}'
    text = contract.contract.read_text().replace("train: {engine: table, model: p.json}", train)
    contract.contract.write_text(text)
    code, said = refused(tmp_path, contract.contract, "--stable-url", "http://127.0.0.1:11/v1")
    assert (
        code == 2
        and "--stable-url is the server of kernels.train: the reference scorer must" in said
    )


def test_a_port_that_is_taken_is_said(contract, tmp_path):
    with bind("127.0.0.1", 0, "") as taken:
        port = taken.getsockname()[1]
        code, said = refused(tmp_path, contract.contract, "--port", port)
        assert code == 4 and f"nothing can be served at 127.0.0.1:{port}: " in said
        assert "--port takes another address" in said
        at = ("--port", 0, "--admin", f"127.0.0.1:{port}")
        code, said = refused(tmp_path, contract.contract, *at)
        assert code == 4 and "--admin takes another address" in said


def test_a_contract_that_is_wrong_is_refused_as_everywhere(contract, tmp_path):
    contract.write(mode="sometimes")
    code, said = refused(tmp_path, contract.contract)
    assert code == 2 and "toy.kernelcontract.yaml:20:9: " in said


def test_a_leader_is_followed_with_a_key_or_not_at_all(contract, tmp_path, monkeypatch):
    monkeypatch.delenv("SERVANDA_GATEWAY_KEY", raising=False)
    at = ("--port", 0, "--leader", "http://127.0.0.1:9")
    code, said = refused(tmp_path, contract.contract, *at)
    assert code == 2 and "SERVANDA_GATEWAY_KEY is empty" in said
    code, said = refused(tmp_path, contract.contract, *at, "--leader-only")
    assert code == 2 and "give either --leader or --leader-only" in said


def test_what_would_say_nothing_is_refused(contract, tmp_path):
    leader = ("--leader", "http://127.0.0.1:9")
    code, said = refused(tmp_path, contract.contract, *leader, "--admin", "h:1", "--slack", "x")
    assert code == 2 and "not with --leader: leave out --admin, --slack" in said
    idle = ("--leader-only", "--timeout", "1h", "--show-pool")
    code, said = refused(tmp_path, contract.contract, *idle)
    assert code == 2 and "--leader-only serves no users: leave out --show-pool, --timeout" in said
    for option in ("--first-byte", "--timeout"):
        code, said = refused(tmp_path, contract.contract, option, "0s")
        assert code == 2 and "--first-byte and --timeout must be longer than 0 s" in said
        code, said = refused(tmp_path, contract.contract, option, "soon")
        assert code == 2 and "a duration is a number and ms, s, m, h or d" in said


def test_what_is_not_installed_is_said_with_the_pip_line(contract, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "servanda.gateway.proxy.app", None)
    code, said = refused(tmp_path, contract.contract)
    assert code == 4 and "hint: pip install 'servanda[gateway]'" in said


def test_serve_says_how_to_call_it():
    with Program("serve", "--help", cwd=None) as program:
        assert program.process.wait(WAIT_S) == 0
        program.line("Exit codes: 0 it was stopped; 2 the call or a file is wrong; 4 it")
