# Notifications by Apprise, to real servers on this machine: JSON, PagerDuty's API, and mail.

import email
import email.policy
import importlib
import json
import socket

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.http_post import Busy
from servanda.promotion.notify.sinks import sinks_of
from tests.promotion.notify.made import effect
from tests.promotion.notify.receiving import SECRET, Receiver

# of the libraries' own imports and servers
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
PAGE = effect("page", to="oncall", status="rolled_back", why="gradient is violated")


def sink(url):
    [made] = sinks_of(notify=[f"apprise={url}"])
    return made


@pytest.fixture
def apprise():
    return pytest.importorskip("apprise", reason="pip install 'servanda[apprise]'")


@pytest.mark.usefixtures("apprise")
def test_a_service_gets_the_change_as_people_read_it():
    with Receiver() as receiver:
        made = sink(receiver.url.replace("http://", "json://"))
        made.deliver(effect())
        made.deliver(PAGE)

    change, page = receiver.got
    assert (change["title"], change["type"]) == (
        "servanda: llama-int8: canary-1 → canary-2",
        "info",
    )
    assert "decided by gradient on all 0.0214 [0.018, 0.0251], limit 0.05" in change["message"]
    assert "the infer kernel serves 25 %" in change["message"]
    assert page["title"].startswith("servanda: oncall is needed: llama-int8: canary-1 → canary-2")
    assert page["type"] == "failure"
    assert made.kinds == ("notify", "page")


def test_pagerduty_gets_an_event_of_its_api(apprise, monkeypatch):
    plugin = importlib.import_module("apprise.plugins.pagerduty")
    with Receiver((202, {})) as receiver:
        regions = dict.fromkeys(plugin.PAGERDUTY_API_LOOKUP, receiver.url)
        monkeypatch.setattr(plugin, "PAGERDUTY_API_LOOKUP", regions)
        sink("pagerduty://integrationkey@apikey").deliver(PAGE)

    [event] = receiver.got
    assert event["event_action"] == "trigger"
    assert event["routing_key"] == "integrationkey"
    assert event["payload"]["severity"] == "critical"
    assert "oncall is needed" in json.dumps(event["payload"])


@pytest.mark.usefixtures("apprise")
def test_a_mail_arrives_at_a_real_server():
    controller = pytest.importorskip("aiosmtpd.controller", reason="pip install aiosmtpd")
    mails = []

    class Handler:
        async def handle_DATA(self, server, session, envelope):
            mails.append((envelope.mail_from, envelope.rcpt_tos, envelope.content))
            return "250 taken"

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server = controller.Controller(Handler(), hostname="127.0.0.1", port=port)
    server.start()
    try:
        to = f"mailto://127.0.0.1:{port}?from=a@example.com&to=b@example.com&mode=insecure"
        sink(to).deliver(PAGE)
    finally:
        server.stop()

    [(sender, receivers, content)] = mails
    assert (sender, receivers) == ("a@example.com", ["b@example.com"])
    mail = email.message_from_bytes(content, policy=email.policy.default)
    assert mail["subject"].startswith("servanda: oncall is needed: llama-int8")
    text = mail.get_body(("plain", "html")).get_content()
    assert "gradient is violated" in text


@pytest.mark.usefixtures("apprise")
def test_what_is_refused_is_named_without_its_secret(capfd):
    with Receiver(500) as receiver:
        made = sink(receiver.url.replace("http://", "json://"))
        with pytest.raises(Busy) as busy:
            made.deliver(PAGE)
    with pytest.raises(ContractError) as wrong:
        sink(f"nonsense://{SECRET}")

    assert str(busy.value) == "JSON: Apprise could not deliver it"
    assert "no service of Apprise takes this URL" in str(wrong.value)
    assert made.name.startswith("apprise:JSON:")
    shown = "".join([made.name, str(busy.value), str(wrong.value), *capfd.readouterr()])
    assert SECRET not in shown and "s3cr3t" not in shown


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    with pytest.raises(MeasurementError) as error:
        sink("json://host")
    assert "needs apprise" in str(error.value)
    assert error.value.problems[0].hint == "pip install 'servanda[apprise]'"
