# Ten thousand broken dumps; the default suite reads two hundred.

from hypothesis import given, settings

from tests.rl.dumps.formats.test_fuzz import broken, refused_or_to_the_letter


@settings(max_examples=10_000)
@given(broken())
def test_ten_thousand_broken_dumps_are_refused_or_read_to_the_letter(case):
    refused_or_to_the_letter(*case)
