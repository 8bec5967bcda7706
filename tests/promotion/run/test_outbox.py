# The outbox: at least once, in order, never again; whatever fails, and whenever it is killed.

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.promotion.ledger.entry import LedgerError, Outrun, Record
from servanda.promotion.ledger.ledger import open_ledger, verify
from servanda.promotion.notify.base import message
from servanda.promotion.notify.sinks import Webhook
from servanda.promotion.run.outbox import Delivery, deliver, deliver_late
from servanda.promotion.state import Effect
from servanda.traces.serialization import to_plain
from tests.promotion.notify.receiving import Receiver
from tests.promotion.run.kept import RUN, Kept, Killed, Taker


def route(turn, **body):
    return Effect("route", f"{RUN}/{turn}/route", {"turn": turn, "share": turn / 100, **body})


def notify(turn):
    return Effect("notify", f"{RUN}/{turn}/notify", {"turn": turn})


def page(turn):
    return Effect("page", f"{RUN}/{turn}/page", {"turn": turn, "to": "oncall"})


def key(effect):
    return effect.key


def told(ledger, *sinks, pauses=None, run=RUN):
    pauses = [] if pauses is None else pauses
    return deliver(ledger, run, sinks, now=lambda: 9.0, wait=pauses.append)


@pytest.fixture
def ledger():
    return Kept()


def test_each_sink_gets_each_effect_and_the_ledger_says_so(ledger):
    ledger.decide(route(1), notify(1))
    ledger.decide(page(2))
    one, other = Taker("one"), Taker("other")
    keys = [*map(key, (route(1), notify(1), page(2)))]

    assert {*told(ledger, one, other)} == {
        Delivery(sink, k) for sink in ("one", "other") for k in keys
    }

    assert one.got == other.got == keys
    assert Counter(ledger.told) == Counter((k, sink, "") for sink in ("one", "other") for k in keys)
    noted = [e for e in ledger.written if e.kind == "told"]
    assert {(e.actor, e.at, tuple(e.body)) for e in noted} == {("servanda", 9.0, ("key", "sink"))}


def test_what_was_told_is_not_told_again(ledger):
    ledger.decide(route(1), notify(1))
    told(ledger, Taker())
    again = Taker()
    assert told(ledger, again) == ()
    assert again.tried == []


def test_a_run_that_is_not_there_tells_nothing(ledger):
    assert told(ledger, Taker(), run="nobody") == ()


def test_another_run_is_none_of_its_business(ledger):
    ledger.decide(route(7), run="other")
    ledger.decide(notify(1))
    ledger.decide(route(8), run="other")
    sink = Taker()
    told(ledger, sink)
    assert sink.got == [notify(1).key]
    assert ledger.written[-1].n == 2


def test_a_sink_is_given_what_it_takes_and_no_more(ledger):
    ledger.decide(route(1), notify(1))
    people = Taker("people", kinds=("notify", "page"))
    told(ledger, people)
    assert people.tried == [notify(1).key]
    assert ledger.told == [(notify(1).key, "people", "")]


def test_who_is_busy_is_asked_three_times_and_the_effect_stays_pending(ledger):
    ledger.decide(notify(1))
    pauses, sink = [], Taker("sink", "busy", "busy", "busy", "busy", "taken")
    assert told(ledger, sink, pauses=pauses) == (
        Delivery("sink", notify(1).key, "sink: status 503"),
    )
    assert (pauses, len(sink.tried), ledger.told) == ([0.5, 1.0], 3, [])
    assert told(ledger, sink, pauses=pauses) == (Delivery("sink", notify(1).key),)
    assert (sink.got, pauses) == ([notify(1).key], [0.5, 1.0, 0.5])


def test_a_sink_that_is_down_does_not_stop_the_others(ledger):
    ledger.decide(notify(1))
    ledger.decide(notify(2))
    down, up = Taker("down", *["busy"] * 3), Taker("up")
    assert told(ledger, down, up) == (
        Delivery("down", notify(1).key, "down: status 503"),
        Delivery("up", notify(1).key),
        Delivery("up", notify(2).key),
    )
    assert {*down.tried} == {notify(1).key}


def test_messages_do_not_overtake_each_other(ledger):
    ledger.decide(notify(1))
    ledger.decide(page(2))
    ledger.decide(notify(3))
    sink = Taker("sink", "taken", "refused")
    told(ledger, sink)
    assert sink.tried == [notify(1).key, page(2).key]
    told(ledger, sink)
    assert sink.got == [notify(1).key, page(2).key, notify(3).key]


def test_a_rollback_does_not_wait_behind_a_message_that_is_refused(ledger):
    ledger.decide(notify(1))
    ledger.decide(notify(2), route(2))
    sink = Taker("sink", "taken", "refused")
    assert told(ledger, sink) == (
        Delivery("sink", route(2).key),
        Delivery("sink", notify(1).key, "sink: status 404"),
    )
    assert sink.got == [route(2).key]


def test_routes_go_out_everywhere_before_messages_do_anywhere(ledger):
    order = []
    ledger.decide(notify(1), route(1))
    sinks = [Taker(name, before=lambda e, n=name: order.append((n, e.kind))) for name in "ab"]
    told(ledger, *sinks)
    assert order == [("a", "route"), ("b", "route"), ("a", "notify"), ("b", "notify")]


def test_a_route_that_was_not_taken_is_not_sent_late(ledger):
    """A quarter of the traffic, sent behind a rollback, would undo it."""
    ledger.decide(route(1))
    down, up = Taker("down", *["busy"] * 3), Taker("up")
    told(ledger, down, up)
    ledger.decide(route(2))
    ledger.decide(route(3))

    assert told(ledger, down, up) == (
        Delivery("down", route(1).key, why="superseded by revision 3"),
        Delivery("down", route(2).key, why="superseded by revision 3"),
        Delivery("down", route(3).key),
        Delivery("up", route(2).key, why="superseded by revision 3"),
        Delivery("up", route(3).key),
    )

    assert down.got == [route(3).key]
    assert up.got == [route(1).key, route(3).key]
    assert (route(1).key, "down", "superseded by revision 3") in ledger.told
    assert told(ledger, down, up) == ()


def test_an_older_route_is_superseded_even_where_the_newest_was_taken(ledger):
    """Another promoter told the newest one first."""
    ledger.decide(route(1))
    ledger.decide(route(2))
    ledger.hear(route(2), "sink")
    sink = Taker()
    assert told(ledger, sink) == (Delivery("sink", route(1).key, why="superseded by revision 2"),)
    assert sink.tried == []


def test_an_older_route_stays_superseded_where_the_newest_is_not_taken(ledger):
    ledger.decide(route(1))
    ledger.decide(route(2))
    sink = Taker("sink", "refused")
    told(ledger, sink)
    told(ledger, sink)
    assert sink.tried == [route(2).key] * 2
    assert sink.got == [route(2).key]


def test_a_route_without_a_turn_supersedes_by_its_key(ledger):
    ledger.decide(route(1))
    ledger.decide(Effect("route", "the-last"))
    first, second = told(ledger, Taker())
    assert first.why == "superseded by the-last"
    assert second == Delivery("sink", "the-last")


@pytest.mark.parametrize("name", ["sink", "other"])
def test_a_route_is_dropped_where_a_newer_one_is_decided_during_a_pause(ledger, name):
    ledger.decide(route(1))
    sink = Taker("sink", "busy")

    def wait(_):
        ledger.decide(route(2))
        ledger.hear(route(2), name)

    found = deliver(ledger, RUN, [sink], now=lambda: 9.0, wait=wait)
    assert found[0] == Delivery("sink", route(1).key, why="superseded by revision 2")
    assert sink.tried == [route(1).key, *([route(2).key] if name == "other" else [])]


def test_an_effect_that_somebody_else_told_during_a_pause_is_not_sent_again(ledger):
    ledger.decide(notify(1), notify(2))
    sink = Taker("sink", "busy")
    found = deliver(
        ledger, RUN, [sink], now=lambda: 9.0, wait=lambda _: ledger.hear(notify(1), "sink")
    )
    assert found == (Delivery("sink", notify(2).key),)
    assert sink.tried == [notify(1).key, notify(2).key]


def test_a_delivery_is_noted_though_another_promoter_appended_meanwhile(ledger):
    ledger.decide(notify(1))
    ledger.fates.append(lambda: ledger.decide(notify(2)))
    sink = Taker()
    assert told(ledger, sink) == (Delivery("sink", notify(1).key), Delivery("sink", notify(2).key))
    assert ledger.told == [(notify(1).key, "sink", ""), (notify(2).key, "sink", "")]


def test_a_delivery_that_two_promoters_made_is_noted_once(ledger):
    ledger.decide(notify(1))
    ledger.fates.append(lambda: ledger.hear(notify(1), "sink"))
    assert told(ledger, Taker()) == (Delivery("sink", notify(1).key),)
    assert ledger.told == [(notify(1).key, "sink", "")]


def test_a_ledger_that_refuses_without_reason_is_not_asked_for_ever(ledger):
    def refuse(run, records, *, after):
        raise Outrun("run has later entries")

    ledger.decide(notify(1))
    ledger.append = refuse
    with pytest.raises(Outrun):
        told(ledger, Taker())


@pytest.mark.parametrize("moment", ["killed before", "killed behind"])
@pytest.mark.parametrize("where", ["deliver", "append"])
def test_a_kill_repeats_at_most_one_delivery_with_its_key(ledger, where, moment):
    ledger.decide(notify(1), notify(2))
    sink = Taker()
    (sink if where == "deliver" else ledger).fates.append(moment)
    with pytest.raises(Killed):
        told(ledger, sink)
    told(ledger, sink)
    repeated = (where, moment) in (("deliver", "killed behind"), ("append", "killed before"))
    assert sink.got == [notify(1).key] * (1 + repeated) + [notify(2).key]


def test_the_same_effect_in_two_entries_is_one(ledger):
    ledger.decide(notify(1))
    ledger.decide(notify(1))
    sink = Taker()
    told(ledger, sink)
    assert sink.got == [notify(1).key]


@pytest.mark.parametrize(
    ("effects", "said"),
    [
        ([{"kind": "route"}], "entry 1: effects[0].key is missing"),
        (
            [{"kind": "rout", "key": "k"}],
            "entry 1: effects[0].kind is 'rout', not 'route' or 'notify' or 'page'",
        ),
        ("none", "entry 1: effects is 'none', not a list"),
    ],
)
def test_effects_that_are_none_are_refused_before_anything_is_sent(ledger, effects, said):
    ledger.decide()
    ledger.written[0].body["effects"] = effects
    ledger.decide(notify(1))
    sink = Taker()
    with pytest.raises(LedgerError) as error:
        told(ledger, sink)
    assert str(error.value) == f"{said}\n  hint: was it written by another version, or by hand?"
    assert sink.tried == []


def test_a_receiver_that_drops_repeats_by_their_key_was_told_once(ledger):
    """Over real HTTP: busy, dropped behind the reading, and killed before it was noted."""
    ledger.decide(route(1), notify(1))
    ledger.decide(page(2))
    ledger.fates.append("killed before")
    pauses, seen = [], {}
    with Receiver((429, {"retry-after": "3"}), "drop") as receiver:
        with pytest.raises(Killed):
            told(ledger, Webhook(receiver.url), pauses=pauses)
        told(ledger, Webhook(receiver.url), pauses=pauses)
    for body, (_, headers) in zip(receiver.got, receiver.headers, strict=True):
        assert seen.setdefault(headers["idempotency-key"], body) == body
    assert [*seen.values()] == [message(e) for e in (route(1), notify(1), page(2))]
    assert (len(receiver.got), pauses) == (6, [3.0, 1.0])


# --- whatever fails, whenever

KINDS = {"route": route, "notify": notify, "page": page}
TRIES = ["taken", "taken", "busy", "refused", "killed before", "killed behind"]
APPENDS = ["written", "killed before", "killed behind", "outrun", "outrun by a route", "heard"]
lists = {"max_size": 12}
decisions = st.lists(st.sampled_from([*KINDS]), max_size=3, unique=True)


class World:
    """Promoters that decide and tell, receivers that fail, and an eye on both."""

    def __init__(self):
        self.ledger, self.turn = Kept(), 0
        self.spared = Counter()  # (key, sink) -> repeats that nobody can help
        people = ("notify", "page")
        self.sinks = [Taker("a"), Taker("b"), Taker("people", kinds=people)]
        for sink in self.sinks:
            sink.before = lambda effect, sink=sink: self.watch(effect, sink)

    def watch(self, effect, sink):
        """What is being sent was not told, and a route is the newest of those decided."""
        assert effect.kind in sink.kinds
        assert (effect.key, sink.name) not in {(k, s) for k, s, _ in self.ledger.told}
        if effect.kind == "route":
            assert effect.key == self.routes()[-1]

    def effects(self):
        found = [e for entry in self.ledger.written for e in entry.body.get("effects", ())]
        return [(e["key"], e["kind"]) for e in found]

    def routes(self):
        return [k for k, kind in self.effects() if kind == "route"]

    def decide(self, kinds):
        self.turn += 1
        self.ledger.decide(*(KINDS[kind](self.turn) for kind in kinds))

    def outrun(self, fate):
        """What somebody else appends before an append; None where no one does."""
        if fate == "outrun":
            return lambda: self.decide(["notify"])
        if fate == "outrun by a route":
            return lambda: self.decide(["route"])
        return self.heard if fate == "heard" else fate

    def heard(self):
        """Another promoter delivered and noted what is pending first at a sink."""
        noted = {(k, s) for k, s, _ in self.ledger.told}
        for sink in self.sinks:
            kept = [k for k, kind in self.effects() if kind in sink.kinds and kind != "route"]
            for k in [k for k in kept if (k, sink.name) not in noted][:1]:
                self.spared[k, sink.name] += k in sink.got  # two may deliver at the same time
                sink.got.append(k)
                self.ledger.hear(Effect("notify", k), sink.name)
                return

    def tell(self):
        """Returns what was told, or None where the promoter was killed."""
        before = [len(sink.got) for sink in self.sinks]
        try:
            return told(self.ledger, *self.sinks)
        except Killed:
            noted = {(k, s) for k, s, _ in self.ledger.told}
            open_ = [
                (k, sink.name)
                for sink, had in zip(self.sinks, before, strict=True)
                for k in sink.got[had:]
                if (k, sink.name) not in noted
            ]
            assert len(open_) <= 1
            self.spared.update(open_)
            return None


@given(
    st.lists(decisions | st.just("tell"), **lists),
    st.lists(st.sampled_from(APPENDS), **lists),
    st.tuples(*[st.lists(st.sampled_from(TRIES), **lists)] * 3),
)
def test_in_the_end_each_was_delivered_in_order_and_repeats_are_those_of_kills(
    steps, appends, tries
):
    world = World()
    world.ledger.fates.extend(map(world.outrun, appends))
    for sink, fates in zip(world.sinks, tries, strict=True):
        sink.fates.extend(fates)
    for step in steps:
        if step == "tell":
            world.tell()
        else:
            world.decide(step)
    for _ in range(99):
        if world.tell() == ():
            break
    else:
        raise AssertionError("there is always more to tell")

    noted = Counter((k, s) for k, s, _ in world.ledger.told)
    assert max(noted.values(), default=1) == 1
    skipped = {(k, s) for k, s, why in world.ledger.told if why}
    for sink in world.sinks:
        asked = [k for k, kind in world.effects() if kind in sink.kinds]
        assert {(k, sink.name) for k in asked} == {pair for pair in noted if pair[1] == sink.name}
        for lane in ("route",), ("notify", "page"):
            keys = [k for k, kind in world.effects() if kind in lane and kind in sink.kinds]
            first = [*dict.fromkeys(k for k in sink.got if k in keys)]
            sent = [k for k in keys if (k, sink.name) not in skipped or k in first]
            assert first == sent
        # only routes are left out, and never the newest
        assert {k for k, s in skipped if s == sink.name} <= {*world.routes()[:-1]}
        for k, times in Counter(sink.got).items():
            assert times <= 1 + world.spared[k, sink.name]


def test_a_ledger_on_disk_knows_after_a_restart_who_was_told(tmp_path):
    where, sink = str(tmp_path / "ledger.db"), Taker("sink", "taken", "busy", "busy", "busy")
    with open_ledger(where) as ledger:
        decided = Record("advanced", "somebody", 1.0, {"effects": to_plain([route(1), notify(1)])})
        ledger.append(RUN, [decided], after=0)
        assert [one.problem for one in told(ledger, sink)] == ["", "sink: status 503"]
    with open_ledger(where) as ledger:
        assert told(ledger, sink) == (Delivery("sink", notify(1).key),)
        assert told(ledger, sink) == ()
        assert verify(ledger).problems == ()
    assert sink.got == [route(1).key, notify(1).key]


def opened(name, run):
    """The first entry of a run, as a promoter writes it."""
    effects = to_plain([Effect("notify", f"{run}/1/notify", {"turn": 1})])
    body = {"contract": {"name": name}, "effects": effects}
    return Record("opened", "somebody", 1.0, body)


def test_what_was_decided_before_a_kill_is_told_by_whoever_comes_next(ledger):
    """A run that another one took back is no one's to go on with, and was still not told."""
    for run, name in (("toy-a", "toy"), ("toy-b", "toy"), ("toy-2-c", "toy-2")):
        ledger.append(run, [opened(name, run)], after=0)
    known, new = Taker("known"), Taker("new")
    told(ledger, known, run="toy-a")
    told(ledger, known, run="toy-2-c")
    for run in ("toy-a", "toy-2-c"):
        taken = Effect("notify", f"{run}/2/notify", {"turn": 2})
        ledger.decide(taken, run=run)

    found = deliver_late(ledger, "toy", [known, new], now=lambda: 9.0, wait=[].append)

    assert [(one.sink, one.key) for one in found] == [("known", "toy-a/2/notify")]
    assert known.got == ["toy-a/1/notify", "toy-2-c/1/notify", "toy-a/2/notify"]
    assert new.got == []  # old news is not for a new receiver
    assert deliver_late(ledger, "toy", [known, new], now=lambda: 9.0, wait=[].append) == ()


def test_a_run_that_ended_untold_is_told_to_all_while_no_other_began(ledger):
    """Killed before it told anybody: no one goes on with that run, nor heard of it."""
    ledger.append("toy-a", [opened("toy", "toy-a")], after=0)
    sink = Taker("sink")
    assert deliver_late(ledger, "toy", [sink], now=lambda: 9.0, wait=[].append) == ()

    ended = Record("rolled_back", "somebody", 2.0, {"state": {"status": "rolled_back"}})
    ledger.append("toy-a", [ended], after=1)
    found = deliver_late(ledger, "toy", [sink], now=lambda: 9.0, wait=[].append)

    assert [one.key for one in found] == sink.got == ["toy-a/1/notify"]
