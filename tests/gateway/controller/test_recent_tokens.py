# The cause of a diversion, from the tokens that were scored last.

from servanda.gateway.controller.rescoring import _TOKENS, RecentTokens
from servanda.gateway.controller.web.summary import text
from servanda.traces.serialization import from_plain, to_plain
from tests.gateway.controller import controllers
from tests.judgement.causes.gaps import pairs


class _Asked:
    def __init__(self, key):
        self.labels, self.key = {"first": "a"}, key


def test_a_diverted_slice_has_a_cause_a_slice_and_a_next_command(tmp_path):
    clock = controllers.Clock()
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 240))

    status = leader.status()
    away, other = (controllers.status(leader, f"first={name}") for name in "ab")
    leader.close()

    assert away.advice.cause and other.advice is None
    assert away.advice.command.startswith("servanda ") and not away.advice.corrections
    shown = text(status, "http://gateway").split("\n")
    after = shown.index(next(one for one in shown if "first=a" in one and "quarantined" in one))
    assert shown[after + 1].strip().startswith("Likely cause")
    assert any(one.strip().startswith("Next command") for one in shown[after : after + 6])
    assert from_plain(type(away), to_plain(away)).advice == away.advice


def test_sound_traffic_has_no_advice(tmp_path):
    clock = controllers.Clock()
    path = controllers.contract(tmp_path, routing=controllers.ACTING)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 240))
    assert all(slice_.advice is None for slice_ in leader.status().slices)
    leader.close()


def test_the_oldest_tokens_are_dropped():
    recent = RecentTokens()
    for _, pair, sources in pairs(0, steps=100, size=24):
        recent.add([_Asked(f"user-{i}") for i, _ in enumerate(sources)], pair)
    kept = sum(len(pair.infer.token_N) for pair in recent._pairs)
    assert kept == recent._tokens <= _TOKENS
    assert len(recent._pairs) < 100
