"""`servanda gateway pin` and `servanda gateway status --gateway`, against a leader's listener."""

import json

import httpx2
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.errors import ContractError, MeasurementError
from servanda.gateway.controller.status import ControllerStatus, ScoringStatus
from servanda.gateway.controller.web import summary
from servanda.gateway.controller.web.client import ControllerClient
from servanda.gateway.routing.model import Pin
from servanda.traces.serialization import from_plain
from tests.gateway.controller.web import fake
from tests.gateway.controller.web.serving import KEY, live


@pytest.fixture
def server():
    leader = fake.Controller()
    with live(leader) as client:
        yield str(client.base_url).rstrip("/"), leader


def servanda(*arguments, key=KEY["operator"]):
    env = {"SERVANDA_ADMIN_KEY": key}
    return CliRunner().invoke(main, [*map(str, arguments)], env=env, catch_exceptions=False)


def pin(url, *arguments, **how):
    return servanda("gateway", "pin", *arguments, "--reason", "why not", "--gateway", url, **how)


def test_a_slice_is_pinned_and_released(server):
    url, leader = server

    done = pin(url, "long", "--to", "stable", "--ttl", "24h")
    assert done.output == "long: active → active, pinned to stable (a-operator: why not)\n"
    assert done.exit_code == 0

    done = pin(url, "long", "--release")
    assert done.output == "long: active, pinned to stable → active (a-operator: why not)\n"
    assert leader.asked == [
        ("pin", "long", "stable", 86_400.0, "a-operator", "why not"),
        ("unpin", "long", "a-operator", "why not"),
    ]


def test_the_key_may_lie_in_a_file(server, tmp_path):
    url, leader = server
    (tmp_path / "key").write_text(KEY["admin"] + "\n")
    done = pin(url, "all", "--to", "observe", "--ttl", "1h", "--key-file", tmp_path / "key", key="")
    assert done.exit_code == 0
    assert leader.asked[0][4] == "a-admin"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("lnog", "--to", "infer", "--ttl", "1h"),
            2,
            "URL: no slice is named 'lnog'\n  hint: did you mean 'long'?",
        ),
        (
            ("long", "--to", "infer", "--ttl", "31d"),
            2,
            "--ttl: a pin lasts longer than 0 s and 30 days at most\n"
            "  hint: pin again when it expires, or change the contract",
        ),
        (
            ("long", "--release"),
            4,
            "URL: long has no pin\n  hint: `servanda gateway status` shows the pins",
        ),
        (("long", "--to", "infer"), 2, "give --to with --ttl, or --release"),
        (("long", "--ttl", "1h"), 2, "give --to with --ttl, or --release"),
        (("long", "--to", "infer", "--ttl", "1h", "--release"), 2, "give --to with --ttl, or"),
        (("long",), 2, "give --to with --ttl, or --release\n  hint: --to stable --ttl 24h"),
        (("long", "--to", "infer", "--ttl", "soon"), 2, "a duration is a number and ms, s, m,"),
    ],
)
def test_what_cannot_be_is_told_with_the_next_move(server, arguments, code, says):
    url, leader = server
    done = pin(url, *arguments)
    assert done.exit_code == code
    assert says in done.output.replace(url, "URL")
    assert not [one for one in leader.asked if one[0] == "pin"]


def test_a_wrong_key_is_told_and_not_repeated(server):
    url, _ = server
    done = pin(url, "long", "--to", "infer", "--ttl", "1h", key="wrong-key-0123456789")
    assert done.exit_code == 4
    assert done.output.replace(url, "URL") == (
        "URL: unknown key\n"
        "  hint: SERVANDA_ADMIN_KEY or --key-file holds a key of the leader's file of keys\n"
    )


def test_a_key_without_the_role_is_told_which_it_needs(server):
    url, _ = server
    done = pin(url, "long", "--to", "infer", "--ttl", "1h", key=KEY["viewer"])
    assert done.exit_code == 4
    assert "a-viewer is a viewer, and this needs the role operator" in done.output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "holds no key"),
        (b"two words", "holds no key"),
        (b"\xff\xfe", "cannot be read: it is not UTF-8"),
        ("schlüssel-0123456789".encode(), "holds no key"),
    ],
)
def test_a_file_without_a_key_is_told(server, tmp_path, content, says):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    done = pin(server[0], "long", "--release", "--key-file", path)
    assert done.exit_code == 2
    assert f"{path} {says}" in done.output and "hint: " in done.output


def test_no_key_at_all_is_told(server):
    done = pin(server[0], "long", "--release", key="")
    assert done.exit_code == 2
    assert done.output == (
        "no key: SERVANDA_ADMIN_KEY is not set\n"
        "  hint: set SERVANDA_ADMIN_KEY, or give --key-file with the key alone\n"
    )


def test_whoever_is_not_there_is_told():
    done = servanda("gateway", "status", "--gateway", "http://127.0.0.1:1")
    assert done.exit_code == 4
    assert done.output == (
        "http://127.0.0.1:1 cannot be reached: Connection refused\n"
        "  hint: give the URL of the admin listener; the default of `servanda serve` is "
        "http://127.0.0.1:8081\n"
    )


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8081", "ftp://x", "http://", "http://me:secret@x", "http://x:y", "http://["]
)
def test_what_is_no_url_is_told_and_not_repeated(url):
    done = servanda("gateway", "status", "--gateway", url)
    assert done.exit_code == 2
    assert "--gateway takes a URL of http or https, without a key" in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_a_url_may_end_as_those_of_the_api_do(server, end):
    url, _ = server
    assert servanda("gateway", "status", "--gateway", f"{url}{end}").exit_code == 0


def test_pin_needs_to_know_where():
    done = servanda("gateway", "pin", "long", "--release", "--reason", "x")
    assert done.exit_code == 2
    assert "--gateway is missing\n  hint: --gateway http://127.0.0.1:8081" in done.output


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (200, b"<html>", "status 200, not a servanda leader"),
        (404, b"{}", "status 404, not a servanda leader"),
        (200, b"[" * 100_000, "status 200, not a servanda leader"),
        (302, b"", "status 302, not a servanda leader"),
        (200, b"{}", "name is missing"),
        (500, b'{"error": {"message": "the store is gone", "hint": ""}}', "the store is gone"),
        (404, b'{"error": {"message": "ask under /v1"}}', "status 404, not a servanda leader"),
        (500, b'{"error": 3}', "status 500, not a servanda leader"),
    ],
)
def test_an_answer_that_is_none_is_told(status, content, says):
    def answer(request):
        return httpx2.Response(status, content=content, headers={"location": "http://elsewhere"})

    asking = ControllerClient("http://leader/", "k", httpx2.MockTransport(answer))
    with pytest.raises(MeasurementError) as found:
        asking.status()
    assert says in str(found.value) and str(found.value).startswith("http://leader: ")


def test_a_refusal_of_the_body_is_a_wrong_call():
    def answer(request):
        return httpx2.Response(400, json={"error": {"message": "no", "hint": "yes"}})

    with pytest.raises(ContractError, match="http://leader: no\n  hint: yes"):
        ControllerClient("http://leader", "k", httpx2.MockTransport(answer)).unpin("a", "b")


def test_status_shows_a_row_a_slice(server):
    url, leader = server
    leader.now = fake.status(
        mode="observe",
        slices=(fake.broken("prompt > 32k", acts=False), fake.slice_("all", share=1.0)),
        diverted=0.0,
    )
    done = servanda("gateway", "status", "--gateway", url, key=KEY["viewer"])
    assert done.exit_code == 0
    assert done.output.replace(url, "URL").splitlines() == [
        "✗ 1 would be quarantined · 1 active, within limits",
        "gateway-demo · contract 3982d4a0 · route 17",
        "infer 12 in flight, room for 33 · stable 3 in flight, room for 7, 20 failed over from"
        " infer (5xx 20), 81 before the first route · 1 gateway",
        "scored 1,912 of 41,300 requests · 6.0 % would be diverted · ! observers failed, and no"
        " answer changed (capture 3) · 14 queued · 3 dropped · 41 users",
        "",
        "  slice          share  value  limit  served by                               state",
        "✗ prompt > 32k   6.0 %  0.173   0.05  infer (would be stable)                 "
        "would be quarantined  1.046 times the alarm threshold, 188 requests, 27 users",
        "✓ whole traffic  100 %  0.012   0.05  infer (would be infer, 6.0 % diverted)  "
        "active, within limits  9 % of alarm threshold, 412 requests, 41 users",
        "",
        "mode: observe: all traffic is served by infer; decisions are only logged. "
        "To act on decisions about 'prompt > 32k': "
        "servanda gateway pin 'prompt > 32k' --to enforce --ttl 24h "
        "--reason TEXT --gateway URL",
    ]


def test_a_pin_as_json_is_what_moved(server):
    done = pin(server[0], "long", "--to", "stable", "--ttl", "1h", "--format", "json")
    (move,) = json.loads(done.stdout)
    assert (move["slice"], move["actor"]) == ("long", "a-operator")


def test_status_as_json_is_the_standing(server):
    url, leader = server
    done = servanda("gateway", "status", "--gateway", url, "--format", "json")
    assert from_plain(ControllerStatus, json.loads(done.output)) == leader.now


def test_status_of_a_run_and_of_a_gateway_are_two_things(server):
    done = servanda("gateway", "status", "r-1", "--gateway", server[0])
    assert done.exit_code == 2
    assert "unexpected extra argument (r-1)" in done.output


def test_problems_pins_and_odd_names_are_told_on_lines_of_their_own():
    odd = "a\nb\x1b[31m'; rm -rf /"
    standing = fake.status(
        store="the store\nis locked",
        scoring=ScoringStatus(problem="the train kernel ended", dropped=2),
        slices=(
            fake.broken(odd, acts=False),
            fake.slice_("c", pin=Pin("stable", "anna", odd, fake.NOW + 90)),
            fake.slice_("d", cells=(), scored=0, keys=0),
        ),
    )
    told = summary.text(standing, "http://x")
    assert "\x1b" not in told
    lines = told.splitlines()
    assert lines[:2] == ["! the store is locked", "! the train kernel ended"]
    assert "    by anna, for 1 min 30 s more: a b [31m'; rm -rf /" in lines
    assert "servanda gateway pin 'a b [31m'\"'\"'; rm -rf /' --to enforce" in lines[-1]
