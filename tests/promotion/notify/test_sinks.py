# What each sink sends, to real receivers, and what it is called in the ledger.

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.http_post import Busy
from servanda.promotion.notify.sinks import Webhook, sinks_of
from servanda.promotion.notify.slack import LONGEST, Slack, lines, section
from tests.promotion.notify.made import BODY, DECIDED, effect
from tests.promotion.notify.receiving import SECRET, Receiver
from tests.transcripts import parsed


@pytest.mark.parametrize("kind", ["route", "notify", "page"])
def test_a_webhook_gets_every_effect_whole_with_its_key_twice(kind):
    with Receiver() as receiver:
        Webhook(receiver.url).deliver(effect(kind))
    assert receiver.got == [{"kind": kind, "key": "llama-int8-3f9a/4/notify", **BODY}]
    ((path, headers),) = receiver.headers
    assert path == f"/{SECRET}"
    assert headers["idempotency-key"] == "llama-int8-3f9a/4/notify"
    assert headers["content-type"] == "application/json"


def test_a_body_cannot_take_the_place_of_kind_and_key():
    with Receiver() as receiver:
        Webhook(receiver.url).deliver(effect(kind="route", key="k", decided=None))
        Webhook(receiver.url).deliver(type(effect())("page", "mine", {"kind": "x", "key": "y"}))
    assert receiver.got[0]["decided"] is None
    assert receiver.got[1] == {"kind": "page", "key": "mine"}


def test_a_key_of_other_letters_fits_a_header():
    with Receiver() as receiver:
        Webhook(receiver.url).deliver(effect(key="modèle 1/3\n"))
    assert receiver.headers[0][1]["idempotency-key"] == "mod%C3%A8le 1/3%0A"
    assert receiver.got[0]["key"] == "modèle 1/3\n"


@pytest.mark.parametrize("sink", [Webhook, Slack])
def test_a_sink_tries_once_and_says_whether_to_try_again(sink):
    with Receiver(503, 404) as receiver:
        with pytest.raises(Busy, match=r"^127\.0\.0\.1: status 503$"):
            sink(receiver.url).deliver(effect())
        with pytest.raises(MeasurementError, match=r"^127\.0\.0\.1: status 404$"):
            sink(receiver.url).deliver(effect())
    assert len(receiver.got) == 2


def test_slack_gets_what_a_person_can_act_on():
    with Receiver() as receiver:
        Slack(receiver.url).deliver(effect(why="every <cell> holds"))
    assert receiver.got == [
        {
            "text": "servanda: llama-int8: canary-1 → canary-2",
            "blocks": [
                {
                    "type": "section",
                    "text": {
                        "type": "mrkdwn",
                        "text": ":large_green_circle: *llama-int8: canary-1 → canary-2*\n"
                        "every &lt;cell&gt; holds\n"
                        "decided by gradient on all 0.0214 [0.018, 0.0251], limit 0.05, "
                        "n 1,412 prompt groups\n"
                        "traffic: the infer kernel serves 25 %\n"
                        "next: servanda promotion status llama-int8-3f9a\n"
                        "`llama-int8-3f9a`",
                    },
                }
            ],
        }
    ]


def test_routes_are_not_for_people():
    assert Slack("https://hooks.example/x").kinds == ("notify", "page")
    assert Webhook("https://hooks.example/x").kinds == ("route", "notify", "page")


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({"from": None, "leg": "offline"}, "llama-int8: offline"),
        ({"from": "offline", "leg": "offline"}, "llama-int8: offline"),
        (
            {"from": "canary-2", "leg": "offline", "status": "rolled_back"},
            "llama-int8: canary-2 → offline, rolled back",
        ),
        (
            {"from": None, "status": "awaiting_approval"},
            "llama-int8: canary-2, awaiting approval",
        ),
        ({"contract": ..., "run": ..., "from": ..., "leg": ...}, "a promotion"),
        (
            {"contract": ..., "from": "offline", "leg": "shadow"},
            "llama-int8-3f9a: offline → shadow",
        ),
        ({"contract": ..., "run": ..., "from": ..., "status": ...}, "canary-2"),
    ],
)
def test_the_head_says_what_moved_from_where_to_where(changes, head):
    assert lines(effect(**changes))[0] == head


def test_a_page_says_who_is_needed():
    page = effect("page", to="oncall", status="halted", **{"from": None})
    assert lines(page)[0] == "oncall is needed: llama-int8: canary-2, halted"
    assert lines(effect("page"))[0] == "someone is needed: llama-int8: canary-1 → canary-2"


@pytest.mark.parametrize(
    ("status", "icon", "moves"),
    [
        ("running", ":large_green_circle:", ["servanda promotion status r"]),
        ("completed", ":large_green_circle:", ["servanda promotion status r"]),
        ("awaiting_approval", ":warning:", ["servanda promotion approve r --reason TEXT"]),
        ("awaiting_evidence", ":warning:", ["servanda promotion status r"]),
        ("superseded", ":warning:", ["servanda promotion status r"]),
        (
            "halted",
            ":red_circle:",
            [
                "servanda promotion override r --clause ID --slice NAME --ttl 24h --reason TEXT",
                "servanda promotion rollback r --reason TEXT",
            ],
        ),
        ("rolled_back", ":red_circle:", ["servanda promotion status r"]),
    ],
)
def test_how_it_stands_chooses_the_icon_and_the_next_commands(status, icon, moves):
    with Receiver() as receiver:
        Slack(receiver.url).deliver(effect(status=status, run="r"))
    icon_and_head, *rest = receiver.got[0]["blocks"][0]["text"]["text"].split("\n")
    assert icon_and_head.startswith(icon)
    assert [row for row in rest if row.startswith("next")] == [f"next: {move}" for move in moves]
    for move in moves:
        parsed(move.split())


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"value": None, "low": None, "high": None}, "gradient on all, limit 0.05, n 1,412"),
        ({"value": 0.0, "low": 0.0}, "gradient on all 0 [0, 0.0251], limit 0.05, n 1,412"),
        ({"high": None}, "gradient on all 0.0214, limit 0.05, n 1,412"),
        ({"value": "inf", "limit": 1e-6}, "gradient on all ∞ [0.018, 0.0251], limit 10⁻⁶, n 1"),
        ({"n": 0}, "limit 0.05, n 0 prompt groups"),
        ({"n": None, "limit": None, "note": "why"}, "gradient on all 0.0214 [0.018, 0.0251], why"),
        (dict.fromkeys(["value", "low", "high", "limit", "n"]), "decided by gradient on all"),
    ],
)
def test_what_is_absent_is_left_out_and_never_zero(changes, shown):
    decided = {**DECIDED, **changes}
    (line,) = [row for row in lines(effect(decided=decided)) if row.startswith("decided")]
    present = {name: value for name, value in decided.items() if value is not None}
    assert lines(effect(decided=present)) == lines(effect(decided=decided))
    assert shown in line
    if decided["n"] is None:
        assert line.endswith(shown)


def test_traffic_is_told_where_it_is_known():
    def traffic(**changes):
        return [row for row in lines(effect(**changes)) if row.startswith("traffic: ")]

    assert traffic(share=...) == traffic(share=None) == []
    assert traffic(share=0.0, mirror=0.05) == ["traffic: the infer kernel serves 0 %, 5 % mirrored"]
    assert traffic(share=1.0, mirror=...) == ["traffic: the infer kernel serves 100 %"]


def test_an_empty_effect_is_a_message_too():
    with Receiver() as receiver:
        Slack(receiver.url).deliver(type(effect())("notify", "some-key"))
    text = receiver.got[0]["blocks"][0]["text"]["text"]
    assert text == ":large_green_circle: *a promotion*\n`some-key`"


def test_a_message_is_never_longer_than_slack_takes():
    """A refused one would hold up those behind it."""
    message = section("error", ["head", "x" * 9000], "run")
    text = message["blocks"][0]["text"]["text"]
    assert len(text) == LONGEST and text.endswith("…")
    assert message["text"] == "servanda: head"


def test_names_are_the_same_at_every_call_and_hold_no_secret():
    url = f"https://u:pw@Hooks.example:8443/{SECRET}"
    first, again = (sinks_of([url], [url], ["cat --token s3cr3t"]) for _ in range(2))
    names = [sink.name for sink in first]
    assert names == [sink.name for sink in again]
    assert names == [
        "webhook:hooks.example:96b10cfd",
        "slack:hooks.example:96b10cfd",
        "command:cat:a53d59da",
    ]


def test_two_receivers_at_one_host_have_two_names():
    one, other = sinks_of(["https://h.example/a", "https://h.example/b"])
    assert one.name != other.name


def test_a_wrong_receiver_is_refused_by_the_name_of_its_option():
    with pytest.raises(ContractError, match="--slack takes a URL"):
        sinks_of(slack=["nonsense"])
    with pytest.raises(ContractError, match="--webhook takes a URL"):
        sinks_of(webhook=["nonsense"])
