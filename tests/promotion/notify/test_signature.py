# What a signed webhook holds, against the library that its receivers use.

import base64
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from standardwebhooks import Webhook as Receiving
from standardwebhooks import WebhookVerificationError

from servanda.cli import main
from servanda.errors import ContractError
from servanda.promotion.notify.http_post import insist
from servanda.promotion.notify.sinks import VARIABLE, Webhook, secrets_of, sinks_of
from tests.promotion.notify.made import BODY, effect
from tests.promotion.notify.receiving import Receiver
from tests.transcripts import blocks

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "effects.md"
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OTHER = "whsec_" + base64.b64encode(bytes(range(40, 72))).decode()
KEY = "toy.v2-3f9a11c2:4:notify"
NOW = 1_800_000_000


def sent(secret=SECRET, *, key=KEY, clock=lambda: NOW + 0.7, **changes):
    """The body and the headers of a signed webhook, as they arrive."""
    with Receiver() as receiver:
        hook = Webhook(receiver.url, secrets_of({VARIABLE: secret}), clock)
        hook.deliver(effect(key=key, **changes))
    return receiver.raw[0], dict(receiver.headers[0][1].items())


@pytest.fixture
def its_time(monkeypatch):
    """Sets the clock of the receiver's library."""

    def at(seconds):
        class Clock(datetime):
            @classmethod
            def now(cls, tz):
                return datetime.fromtimestamp(seconds, tz)

        monkeypatch.setattr("standardwebhooks.webhooks.datetime", Clock)
        monkeypatch.setattr("time.time", lambda: seconds)

    at(NOW)
    return at


def of_the_page():
    """The verification that the page shows."""
    (code,) = [text for text in blocks(PAGE, "python") if "def verified" in text]
    found = {}
    exec(code, found)
    return found["verified"]


def by_library(headers, body, secret):
    try:
        Receiving(secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


RECEIVERS = pytest.mark.parametrize("receives", [by_library, "page"], ids=["library", "page"])


def verified(receives, headers, body, secret=SECRET):
    headers = {name.lower(): value for name, value in headers.items()}
    return (of_the_page() if receives == "page" else receives)(headers, body, secret)


@RECEIVERS
@pytest.mark.parametrize("why", ["it holds", "größer als 0.05 ✗ \u2028"])
def test_a_receiver_knows_who_sent_it(receives, why, its_time):
    body, headers = sent(why=why)
    assert verified(receives, headers, body)
    assert headers["webhook-timestamp"] == str(NOW)
    assert not verified(receives, headers, body, OTHER)


@RECEIVERS
@pytest.mark.parametrize("changed", ["webhook-id", "webhook-timestamp", "body", "signature"])
def test_nothing_of_it_can_be_changed(receives, changed, its_time):
    body, headers = sent()
    if changed == "body":
        body = body.replace(b'"share":0.25', b'"share":0.99')
    elif changed == "signature":
        headers["webhook-signature"] = "v1," + base64.b64encode(bytes(32)).decode()
    else:
        headers[changed] = {"webhook-id": "another", "webhook-timestamp": str(NOW - 60)}[changed]
    assert not verified(receives, headers, body)


@RECEIVERS
@pytest.mark.parametrize(
    ("late_s", "taken"), [(299, True), (301, False), (-299, True), (-302, False)]
)
def test_an_old_one_that_is_sent_again_by_somebody_is_refused(receives, late_s, taken, its_time):
    body, headers = sent(clock=lambda: NOW)
    its_time(NOW + late_s)
    assert verified(receives, headers, body) is taken


def test_the_snippet_of_the_page_refuses_what_is_not_signed():
    body, headers = sent("")
    assert not any(name.startswith("webhook-") for name in headers)
    assert not verified("page", headers, body)
    odd = {"webhook-id": "a", "webhook-timestamp": "soon", "webhook-signature": "v1,é v2"}
    assert not verified("page", odd, body)


def test_a_retry_has_its_own_time_and_the_same_id(its_time):
    clock, waits = iter([NOW, NOW + 5]), []
    with Receiver(503) as receiver:
        hook = Webhook(receiver.url, secrets_of({VARIABLE: SECRET}), lambda: next(clock))
        insist(lambda: hook.deliver(effect(key=KEY)), waits.append)
    first, second = (headers for _, headers in receiver.headers)
    assert first["webhook-id"] == second["webhook-id"] == "toy%2Ev2-3f9a11c2:4:notify"
    assert first["ce-id"] == second["ce-id"] and receiver.raw[0] == receiver.raw[1]
    times = [int(headers["webhook-timestamp"]) for headers in (first, second)]
    assert times == [NOW, NOW + 5] and waits == [0.5]
    for body, headers in zip(receiver.raw, (first, second), strict=True):
        assert verified(by_library, dict(headers.items()), body)


def test_both_secrets_sign_while_one_takes_over_from_the_other(its_time):
    body, headers = sent(f"{SECRET} {OTHER}")
    assert headers["webhook-signature"].count("v1,") == 2
    for secret in (SECRET, OTHER):
        for receives in (by_library, "page"):
            assert verified(receives, headers, body, secret)


def test_an_id_has_no_full_stop_for_that_is_what_ends_it(its_time):
    body, headers = sent(key="a.1800000000.{}:modèle 1")
    assert headers["webhook-id"] == "a%2E1800000000%2E{}:mod%C3%A8le%201"
    assert verified(by_library, headers, body)


@pytest.mark.parametrize("bare", [SECRET.removeprefix("whsec_"), SECRET.rstrip("=")])
def test_a_secret_may_lack_its_prefix_or_its_padding(bare):
    assert secrets_of({VARIABLE: bare}) == secrets_of({VARIABLE: SECRET}) == (bytes(range(32)),)


MAKES = "hint: python -c \"import base64, secrets; print('whsec_'"


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("correct-horse-battery", f"the secret in {VARIABLE} is not base64"),
        ("whsec_" + "YQ==", f"the secret in {VARIABLE} has 1 bytes, and 24 are the least"),
        (f"{SECRET} " + base64.b64encode(bytes(23)).decode(), "has 23 bytes, and 24 are the least"),
        ("whsec_", "has 0 bytes, and 24 are the least"),
    ],
)
def test_a_weak_secret_is_refused_before_anything_and_not_shown(secret, said, tmp_path):
    with pytest.raises(ContractError) as caught:
        sinks_of(["http://h.example/x"], environ={VARIABLE: secret})
    assert said in str(caught.value) and MAKES in str(caught.value)
    assert all(len(one) < 7 or one not in str(caught.value) for one in secret.split())
    done = CliRunner().invoke(
        main,
        ["promotion", "status", "--help"],
        env={VARIABLE: secret},
    )
    assert done.exit_code == 0  # what tells nobody anything needs no secret
    done = CliRunner().invoke(
        main,
        [
            "promotion",
            "rollback",
            "r",
            "--reason",
            "x",
            "--ledger",
            str(tmp_path / "l"),
            "--webhook",
            "http://h",
        ],
        env={VARIABLE: secret},
    )
    assert done.exit_code == 2 and said in done.output


def test_nobody_else_is_signed_for():
    assert len(sinks_of((), ["http://h.example/x"], environ={VARIABLE: "weak"})) == 1


def test_the_way_that_a_weak_secret_hints_at_makes_one():
    with pytest.raises(ContractError) as caught:
        secrets_of({VARIABLE: "weak"})
    (problem,) = caught.value.problems
    code = problem.hint.split('"')[1].replace("print(", "made.append(")
    made = []
    exec(code, {"made": made})
    assert len(secrets_of({VARIABLE: made[0]})[0]) == 32


def test_what_is_signed_is_what_was_sent_before():
    """The body has not changed: receivers that check nothing go on."""
    body, headers = sent()
    with Receiver() as receiver:
        Webhook(receiver.url).deliver(effect(key=KEY))
    assert receiver.raw[0] == body
    assert receiver.got == [{"kind": "notify", "key": KEY, **BODY}]
    names = {name.lower(): value for name, value in headers.items()}
    assert names["content-type"] == "application/json" and names["idempotency-key"] == KEY
