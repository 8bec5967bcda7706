# Posting to real servers on this machine that fail, drop, trickle and redirect.

import re

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.http_post import Busy, Hook, insist
from tests.promotion.notify.receiving import SECRET, Receiver


def posted(receiver, **options):
    Hook(receiver.url, "--webhook", **options).post({"a": 1})


def refused(receiver, **options):
    """The error, whose text holds no secret."""
    with receiver, pytest.raises(MeasurementError) as error:
        posted(receiver, **options)
    assert "s3cr3t" not in str(error.value)
    return error.value


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_a_status_of_success_says_that_it_was_taken(status):
    with Receiver(status) as receiver:
        posted(receiver)
    assert receiver.got == [{"a": 1}]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_receiver_that_is_busy_may_be_asked_again(status):
    error = refused(Receiver(status))
    assert isinstance(error, Busy)
    assert (str(error), error.after_s) == (f"127.0.0.1: status {status}", 0.0)


@pytest.mark.parametrize("status", [400, 401, 404, 410, 501])
def test_a_receiver_that_refuses_is_not_asked_again(status):
    error = refused(Receiver(status))
    assert not isinstance(error, Busy)
    assert str(error) == f"127.0.0.1: status {status}"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    with Receiver() as elsewhere:
        error = refused(Receiver((status, {"location": elsewhere.url})))
    assert elsewhere.got == []
    assert str(error) == f"127.0.0.1: status {status}, a redirect: it is not followed"
    assert not isinstance(error, Busy)


def test_a_connection_that_is_dropped_may_be_tried_again():
    error = refused(Receiver("drop"))
    assert isinstance(error, Busy)
    assert str(error) in ("127.0.0.1: RemoteProtocolError", "127.0.0.1: ReadError")


def test_a_host_that_is_not_there_may_be_tried_again():
    with Receiver() as receiver:
        pass
    with pytest.raises(Busy) as error:
        posted(receiver)
    assert str(error.value) == "127.0.0.1: ConnectError"


def test_an_answer_whose_body_never_ends_is_taken_by_its_status():
    with Receiver("body") as receiver:
        posted(receiver)
    assert receiver.got == [{"a": 1}]


def test_an_answer_that_trickles_is_left_alone_when_its_time_is_over():
    error = refused(Receiver("trickle"), all_s=0.2)
    assert isinstance(error, Busy)
    assert str(error) == "127.0.0.1: no answer within 0.2 s"


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 0.0),
        (
            {
                "retry-after": "Wed, 21 Oct 2026 07:28:09 GMT",
                "date": "Wed, 21 Oct 2026 07:28:00 GMT",
            },
            9.0,
        ),
        (
            {
                "retry-after": "Wed, 21 Oct 2026 07:28:00 GMT",
                "date": "Wed, 21 Oct 2026 07:28:09 GMT",
            },
            0.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "-3"}, 0.0),
    ],
)
def test_the_pause_that_is_asked_for_is_known_without_a_clock(headers, asked):
    assert refused(Receiver((429, headers))).after_s == asked


@pytest.mark.parametrize(
    "url", [SECRET, f"ftp://host/{SECRET}", f"http:///{SECRET}", f"https://h:port/{SECRET}", ""]
)
def test_a_url_that_is_none_is_refused_unseen(url):
    with pytest.raises(ContractError) as error:
        Hook(url, "--slack")
    assert str(error.value) == (
        "--slack takes a URL that begins with http:// or https://\n"
        "  hint: the value is not shown, because it may be a secret"
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h.example/\x01s3cr3t", r"h\.example: InvalidURL"),
        # from Python 3.13 on of the finer kind
        (f"http://{'a' * 64}/s3cr3t", f"{'a' * 64}: Unicode(Encode)?Error"),
    ],
)
def test_a_url_that_cannot_be_asked_is_not_asked_again(url, said):
    with pytest.raises(MeasurementError) as error:
        Hook(url, "--slack").post({})
    assert not isinstance(error.value, Busy)
    assert re.fullmatch(said, str(error.value))


def attempts(*outcomes):
    """A call that meets each outcome in turn, errors by raising them."""
    left = [*outcomes]

    def attempt():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return attempt, left


@pytest.mark.parametrize(
    ("outcomes", "paused"),
    [
        (["done"], []),
        ([Busy("x"), "done"], [0.5]),
        ([Busy("x"), Busy("x"), "done"], [0.5, 1.0]),
        ([Busy("x", 3.0), Busy("x", 0.1), "done"], [3.0, 1.0]),
        ([Busy("x", 86400.0), Busy("x", float("inf")), "done"], [10.0, 10.0]),
    ],
)
def test_who_is_busy_is_asked_again_after_growing_pauses(outcomes, paused):
    """Those that are asked for are granted, but not for ever."""
    pauses = []
    attempt, left = attempts(*outcomes)
    assert insist(attempt, pauses.append) == "done"
    assert (pauses, left) == (paused, [])


def test_the_third_try_is_the_last():
    pauses = []
    attempt, left = attempts(Busy("one"), Busy("two"), Busy("three"), "never")
    with pytest.raises(Busy, match="three"):
        insist(attempt, pauses.append)
    assert (pauses, left) == ([0.5, 1.0], ["never"])


def test_a_refusal_is_the_last_word():
    attempt, left = attempts(Busy("one"), MeasurementError("no"), "never")
    with pytest.raises(MeasurementError, match="no"):
        insist(attempt, [].append)
    assert left == ["never"]
