# An observer never costs a user an answer: whatever a reply holds, and whatever fails in what only
# observes requests, the client gets the bytes of a client that is not observed.

import json
import re
from random import Random

import pytest

from servanda.gateway.proxy import completion, gateway
from servanda.gateway.proxy.config import LogFiles
from servanda.gateway.proxy.counters import Counts, Guard, Histogram, InFlightMeans
from servanda.gateway.proxy.gateway import AssignmentLog, Gateway
from servanda.gateway.proxy.logprob_capture import LogprobCapture
from servanda.gateway.proxy.logprob_request import LogprobRequest
from servanda.gateway.proxy.request_log import LaunchLog, RequestLog
from servanda.gateway.proxy.server_kinds import KINDS
from tests.gateway.serving import (
    NOBODY,
    Fake,
    Running,
    config,
    eventually,
    everything,
    reply,
    snapshot,
    stream,
)
from tests.gateway.test_follow import ASK, PATH, Leader, following

ODD = [
    None,
    True,
    0,
    -1,
    1e308,
    10**30,
    -9999.0,
    "",
    "x",
    "\ud800",
    [],
    {},
    [None],
    [[]],
    [1],
    [{}],
]
ADDED = {"token_ids": [5], "prompt_token_ids": [1, 2]}
DONE, ENDS = b"data: [DONE]", (b"\n", b"\r\n", b"\r")
CUT = b'data: {"error":{"message":"infer broke its reply off; try again"'


def reply_of(rng, *, added):
    """A reply, or an event of a stream, with one or two values that are of another type.

    Args:
        added: whether it has the fields that a sampled request asks for beside.
    """
    choice = {"index": 0, "text": "a", "finish_reason": None, "delta": {"content": "a"}}
    choice |= {"message": {"role": "assistant", "content": "b"}, "stop_reason": None}
    whole = {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    if added:
        step = {"token": "token_id:5", "id": 5, "logprob": -1.5}
        logprobs = {"token_logprobs": [-1.5], "top_logprobs": [{"token_id:5": -1.5}]}
        choice |= {**ADDED, "logprobs": {**logprobs, "content": [{**step, "top_logprobs": [step]}]}}
        whole |= {**ADDED, "sglext": {"input_ids": [1], "output_ids": [[5]]}}
    for _ in range(rng.choice((1, 1, 2))):
        places = [*places_of(whole)]
        if not places:
            break
        part, key = rng.choice(places)
        if rng.random() < 0.1:
            del part[key]
        else:
            part[key] = json.loads(json.dumps(rng.choice(ODD)))
    return rng.choice(ODD) if rng.random() < 0.02 else whole


def places_of(value):
    """Each value inside, as the part that has it and its key."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places_of(value[key])


def bytes_of(rng):
    """A reply without added fields, of which some bytes may be others."""
    data = bytearray(
        json.dumps(reply_of(rng, added=False), ensure_ascii=rng.random() < 0.9).encode(
            errors="surrogatepass"
        )
    )
    for _ in range(rng.choice((0, 0, 1, 3))):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.choice((0, 1, 1))] = rng.choice((b"", b"\xff", b"{", b"]", b"\0", b"9"))
    return bytes(data).replace(b"\n", b" ").replace(b"\r", b" ")


def stream_of(rng):
    """Events without added fields, with whatever else a stream may hold; it may be cut."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        end = rng.choice(ENDS)
        lines = [rng.choice((b"data: ", b"data:")) + bytes_of(rng)]
        lines = rng.choice(([], [b": alive"], [b"event: e", b"id: 7"], [b"data"], [b""])) + lines
        parts += [*(line + end for line in lines), end * rng.choice((1, 1, 1, 0, 2))]
    parts.append(DONE + 2 * end if rng.random() < 0.7 else b"")
    whole = rng.choice((b"", b"", b"", b"\xef\xbb\xbf")) + b"".join(parts)
    return whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.2 else whole


def cut(rng, data):
    at = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 3, 30))))
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def unasked(reply, wish):
    """The reply to a client that asked for nothing beside; None if it stays as it is."""
    if not isinstance(reply, dict):
        return None
    choices = reply.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        return None
    told = json.loads(json.dumps(reply))
    for part in (told, *told.get("choices", [])):
        if isinstance(part.get("sglext"), dict):
            del part["sglext"]
        for name in () if wish.ids else ADDED:
            if name in part:
                part[name] = None
    for choice in () if wish.logprobs else told.get("choices", []):
        if choice.get("logprobs") is not None:
            choice["logprobs"] = None
    return told


def without_nulls(reply):
    """Without those fields where they are null: kinds of servers differ in them."""
    for part in (reply, *reply.get("choices", [])):
        for name in (*ADDED, "logprobs"):
            if name in part and part[name] is None:
                del part[name]
    return json.dumps(reply)


def captured(rng, kind):
    wish = LogprobRequest(
        b"",
        {"max_new_tokens": 4},
        best=rng.choice((0, 1, 8)),
        chat=rng.random() < 0.5,
        kind=KINDS[kind],
        ids=rng.random() < 0.2,
        logprobs=rng.random() < 0.2,
    )
    return wish, LogprobCapture(wish, 10_000)


def check_one(rng):
    """One reply and one stream through a capture; an exception fails the test."""
    kind = rng.choice([*KINDS])
    found = reply_of(rng, added=True)
    data = json.dumps(found).encode()
    wish, capture = captured(rng, kind)
    meant = unasked(found, wish)
    told = [capture.reply(data), capture.feed(b"data: " + data + b"\n\n")[6:-2]]
    if meant is None or capture.broken == "malformed":  # it cannot be read
        assert told == [data] * 2 and (meant is None or b"\\ud800" in data)
    else:
        for text in told if told[1] else told[:1]:
            assert without_nulls(json.loads(text)) == without_nulls(meant)
        # an event is left out where there is nothing else in it
        choices = meant.get("choices", [])
        assert told[1] or all(one.get("delta") == {} for one in choices)
    json.dumps([capture.answer(), capture.prompt, capture.odd, capture.prompt_tokens])

    for data in (bytes_of(rng), stream_of(rng)):
        capture = captured(rng, kind)[1]
        parts = cut(rng, data)
        assert b"".join([*map(capture.feed, parts), capture.rest()]) == data
        json.dumps([capture.answer(), capture.prompt, capture.odd])
    data = bytes_of(rng)
    assert captured(rng, kind)[1].reply(data) == data


@pytest.mark.slow
def test_whatever_a_reply_holds_a_capture_changes_added_fields_alone():
    for seed in range(3000):
        check_one(Random(f"observed {seed}"))


@pytest.mark.slow
def test_sixty_thousand_replies_pass_their_captures():
    for seed in range(60_000):
        check_one(Random(f"long {seed}"))


def asked(running, sends):
    return running.client.post(PATH, json={**ASK, "stream": sends})


def test_a_gateway_gives_a_sampled_client_the_bytes_of_any_other():
    rng = Random(7)
    with Fake() as infer, Running(config(infer, controller=NOBODY)) as running:
        for version in range(1, 161):
            sends = rng.random() < 0.6
            data = stream_of(rng) if sends else bytes_of(rng)
            whole = not sends or rng.random() < 0.8
            infer.script = (
                stream(*filter(None, cut(rng, data)), end=whole) if sends else reply(data)
            )
            found = []
            for sample in (0.0, 1.0):
                running.gateway.answer_breaker = gateway.Breaker(running.gateway.clock)
                take = snapshot(whole=everything(sample=sample), version=2 * version + int(sample))
                running.gateway.take(take)
                found.append(asked(running, sends))

            assert found[0].content == found[1].content and found[0].content.startswith(data)
            assert [one.status_code for one in found] == [200, 200]
            assert whole or CUT in found[1].content
        assert running.idle().counts.sampled == 160 and not any(
            running.gateway.counts.observer_failed.values()
        )


SECRET = "the words of a user"
# what fails -> the observer that is to blame; calls that succeed before
FAILS = [
    *((LogprobCapture, "feed", "capture", calls) for calls in range(4)),
    *((LogprobCapture, name, "capture", 0) for name in ("reply", "rest", "answer", "_keep")),
    (gateway, "logprob_request_of", "capture", 0),
    *(
        (Counts, name, "counters", 0)
        for name in ("decided", "replied", "answered", "begun", "ended")
    ),
    *((Histogram, "add", "counters", 0), (InFlightMeans, "move", "counters", 0)),
    *((LaunchLog, name, "log", 0) for name in ("launch", "resolve")),
    *((RequestLog, name, "log", 0) for name in ("write", "assign")),
    *((AssignmentLog, "assign", "log", 0), (Gateway, "resolve", "log", 0)),
    *((completion.Mirror, name, "mirror", 0) for name in ("send", "_ask", "_room")),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("of", "name", "observer", "calls"), FAILS)
def test_an_observer_that_fails_costs_no_one_an_answer(
    of, name, observer, calls, monkeypatch, caplog, tmp_path
):
    whole = json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}).encode()
    parts = [b"data: " + whole[:9], whole[9:] + b"\n\ndata: ", whole + b"\n\n" + DONE + b"\n\n: x"]
    real, left = getattr(of, name), [calls]

    def fails(*given, **named):
        if left[0]:
            left[0] -= 1
            return real(*given, **named)
        raise RuntimeError(SECRET)

    away = {"share": 0.0, "acts": True, "mirror": 1.0} if observer == "mirror" else {}
    scripts = {True: stream(*parts), False: reply(whole)}
    pools = Fake(scripts[False]), Fake(scripts[False])
    monkeypatch.setattr(of, name, fails)
    with pools[0] as infer, pools[1] as stable:
        given = config(infer, stable, controller=NOBODY, log=LogFiles(tmp_path / "log"))
        with Running(given) as running:
            take = snapshot(whole=everything(sample=1.0, **away), run="r", leg="l")
            running.gateway.take(take)
            for sends in (True, False, True):
                infer.script = stable.script = scripts[sends]
                answer = asked(running, sends)
                assert answer.status_code == 200
                assert answer.content == (b"".join(parts) if sends else whole)
                left[0] = 0
            counts = running.idle().counts.report()

        assert {name for name, n in counts["observer_failed"].items() if n} == {observer}
    said = [record.getMessage() for record in caplog.records if "servanda" in record.name]
    assert len(said) == 1 and SECRET not in caplog.text
    assert re.match(rf"observer {observer} failed: RuntimeError at tests\S+:\d+; ", said[0])


@pytest.mark.parametrize(
    ("of", "name"), [(RequestLog, "flush"), (LaunchLog, "sweep"), (Gateway, "report")]
)
def test_routes_are_followed_whatever_fails_in_what_is_sent(of, name, monkeypatch, tmp_path):
    def fails(*_):
        raise KeyError(SECRET)

    with monkeypatch.context() as patched, Fake() as infer, Leader() as leader:
        leader.snapshot = snapshot()
        patched.setattr(of, name, fails)
        with following(infer, leader, log=LogFiles(tmp_path)) as running:
            eventually(lambda: running.gateway.snapshot is not None)
            leader.snapshot = snapshot(version=2)
            eventually(lambda: running.gateway.snapshot.version == 2)
            patched.undo()


def test_a_guard_lets_pass_what_ends_a_request():
    guard = Guard("log", Counts())
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
