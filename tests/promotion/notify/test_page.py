# What the page on effects shows is what is sent.

import json
import os
import sys
from pathlib import Path

import pytest

from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import Leg
from servanda.promotion.advance import effects_of
from servanda.promotion.notify.base import message
from servanda.promotion.notify.sinks import Command
from servanda.promotion.notify.slack import lines
from servanda.promotion.state import CellResult, Effect, RuleAction, State
from servanda.traces.serialization import to_plain
from tests.transcripts import blocks

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "effects.md"
SHOWN = [json.loads(text) for text in blocks(PAGE, "json")]


def effect_of(shown):
    body = {name: value for name, value in shown.items() if name not in ("kind", "key")}
    return Effect(shown["kind"], shown["key"], body)


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown["kind"])
def test_the_json_of_the_page_has_the_keys_of_an_effect(shown):
    """And its own key is made as theirs are."""
    course = (Leg("offline"), Leg("canary", share=0.25))
    run, turn = shown["run"], shown["turn"]
    state = State(run, EvidenceKey("c", "p", "t", "i", "w"), leg=1, turn=turn)
    cell = CellResult("gradient", "all", "violated")
    asked = (RuleAction("page", "oncall", (cell,), "gradient is violated"),)
    made = effects_of(course, None, state, cell, asked)
    (effect,) = [effect for effect in made if effect.kind == shown["kind"]]
    sent = message(effect)
    assert {*sent} == {*shown} and {*to_plain(sent["decided"])} == {*shown["decided"]}
    assert shown["key"] == effect.key


def test_the_message_of_the_page_is_that_of_its_page():
    (text,) = blocks(PAGE, "text")
    (page,) = [effect_of(shown) for shown in SHOWN if shown["kind"] == "page"]
    head, *rest = text.strip().split("\n")
    assert [head.removeprefix("🔴 "), *rest] == [*lines(page), page.body["run"]]


def test_the_receiver_of_the_page_takes_each_route_once(tmp_path, monkeypatch):
    (script,) = [text for text in blocks(PAGE, "sh") if "route.sh, for" in text]
    split = 'import json, sys; print(json.load(sys.stdin)["share"])'
    programs = {
        "route.sh": script,
        "jq": f"#!/bin/sh\n[ \"$1\" = .share ] && exec {sys.executable} -c '{split}'\n",
        "split-traffic": f'#!/bin/sh\necho "$@" >> {tmp_path}/splits\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command = Command(f"{tmp_path}/route.sh {tmp_path}/taken")
    for shown in [*SHOWN, *SHOWN]:
        command.deliver(effect_of(shown))
    assert (tmp_path / "splits").read_text() == "--infer 0.25\n"
