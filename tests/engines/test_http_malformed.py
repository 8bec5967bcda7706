# A reply that is not as it should be is refused, or what is read of it is what it says.

import pytest
from hypothesis import given, settings

from tests.drawn import examples
from tests.engines.malformed import cases, malformed, refused_or_true


def test_what_was_recorded_is_read():
    assert {(case.dialect, case.verb) for case in cases()} == {
        ("vllm", "draw"),
        ("vllm", "score"),
        ("llamacpp", "draw"),
    }
    assert not any(refused_or_true(case, case.text) for case in cases())


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(malformed())
def test_a_malformed_reply_is_refused_or_read_as_it_is(tampered):
    refused_or_true(*tampered)
