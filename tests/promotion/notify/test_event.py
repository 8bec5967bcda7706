# What each effect is called as an event, as the SDK of CloudEvents reads it.

from datetime import datetime, timezone

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from servanda.promotion.notify.sinks import Webhook
from servanda.promotion.state import Effect
from tests.promotion.notify.made import BODY, effect
from tests.promotion.notify.receiving import Receiver


def event_of(one):
    """What a receiver's SDK makes of an effect."""
    with Receiver() as receiver:
        Webhook(receiver.url).deliver(one)
    headers = dict(receiver.headers[0][1].items())
    return from_http_event(HTTPMessage(headers=headers, body=receiver.raw[0]))


@pytest.mark.parametrize(
    ("kind", "type_"),
    [
        ("route", "dev.servanda.promotion.routed"),
        ("notify", "dev.servanda.promotion.changed"),
        ("page", "dev.servanda.promotion.paged"),
    ],
)
def test_what_a_promotion_tells_is_an_event(kind, type_):
    event = event_of(effect(kind, key="llama.int8/4/modèle 1"))
    assert event.get_specversion() == "1.0" and event.get_type() == type_
    assert event.get_id() == "llama.int8/4/modèle 1"
    assert event.get_source() == "/servanda/llama-int8-3f9a"
    assert event.get_subject() == "canary-2"
    assert event.get_time() == datetime.fromtimestamp(BODY["at"], timezone.utc)
    assert event.get_datacontenttype() == "application/json"
    assert event.get_data() == {"kind": kind, "key": "llama.int8/4/modèle 1", **BODY}


def test_what_a_gateway_tells_of_a_slice_is_another():
    body = {"run": "chat int8", "slice": "team=größe", "at": 5.0, "leg": "gateway"}
    for kind, type_ in (
        ("notify", "dev.servanda.slice.moved"),
        ("page", "dev.servanda.slice.paged"),
    ):
        event = event_of(Effect(kind, "k", body))
        assert event.get_type() == type_ and event.get_subject() == "team=größe"
        assert event.get_source() == "/servanda/chat%20int8"


def test_an_empty_effect_is_an_event_too():
    event = event_of(Effect("notify", "some-key"))
    assert (event.get_id(), event.get_source()) == ("some-key", "/servanda")
    assert event.get_subject() is None
