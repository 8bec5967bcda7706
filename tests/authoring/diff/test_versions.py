# The order of versions, and what a version ought to have become.

from __future__ import annotations

import itertools

import pytest

from servanda.authoring.diff.difference import advice, order

# of item 11 of Semantic Versioning 2.0.0, and around it
IN_ORDER = [
    "0.9.9",
    "1.0.0-alpha",
    "1.0.0-alpha.1",
    "1.0.0-alpha.beta",
    "1.0.0-beta",
    "1.0.0-beta.2",
    "1.0.0-beta.11",
    "1.0.0-rc.1",
    "1.0.0",
    "1.0.1",
    "1.2",
    "1.10.0",
    "v2.0.0",
    "10.0.0",
    "",
    "draft",
    "latest",
]


def test_versions_are_put_in_order():
    by_letters = sorted(IN_ORDER)
    assert sorted(by_letters, key=order) == IN_ORDER != by_letters


def test_every_two_versions_can_be_compared():
    for one, other in itertools.permutations(IN_ORDER, 2):
        assert (order(one) < order(other)) == (IN_ORDER.index(one) < IN_ORDER.index(other))


@pytest.mark.parametrize(("one", "same"), [("1.2", "1.2.0"), ("1.0.0+a", "1.0.0+b"), ("0", "0.0")])
def test_versions_that_say_the_same(one, same):
    assert order(one) == order(same)


@pytest.mark.parametrize("text", ["", "draft", "1.", "1..2", "-1", "1.0.0-", "²", "9" * 10])
def test_what_is_no_version_comes_after_all_that_are(text):
    assert order(text) > order("999999999.0.0")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1.0.0", "2.0.0"),
        ("1.9.9", "2"),
        ("0.1.0", "0.2.0"),
        ("0.9.0", "1.0.0"),
        ("1.0.0-rc.1", "1.0.0-rc.2"),
    ],
)
def test_a_version_that_may_break_needs_no_advice(old, new):
    assert advice(old, new) == ""


@pytest.mark.parametrize(
    ("old", "new", "went", "wanted"),
    [
        ("1.0.0", "1.0.0", "stayed 1.0.0", "2.0.0"),
        ("0.1.0", "0.1.1", "went from 0.1.0 to 0.1.1", "0.2.0"),
        ("2.0.0", "1.0.0", "went from 2.0.0 to 1.0.0", "3.0.0"),
        ("1.0.0", "1.1.0-rc.1", "went from 1.0.0 to 1.1.0-rc.1", "2.0.0"),
    ],
)
def test_the_advice_names_the_next_version(old, new, went, wanted):
    assert advice(old, new) == f"metadata.version {went}; a change that breaks wants {wanted}"


@pytest.mark.parametrize(("old", "new"), [("1.0.0", "draft"), ("draft", "1.0.0")])
def test_what_is_no_version_cannot_say_that_it_breaks(old, new):
    said = "metadata.version 'draft' is no version such as 1.0.0, so it cannot say that"
    assert advice(old, new) == said
