# The promoter: a build of table kernels goes from offline to full on what it serves, or does not.


import pytest

from servanda.cli.lint import read
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.promotion.ledger.ledger import open_ledger, verify
from servanda.promotion.run.history import approve_run, disagreements, history_of, roll_back_run
from servanda.promotion.run.promoter import Build, promote
from servanda.runner.run import in_process
from servanda.runner.run_directory import Occupied, opened
from tests import cluster as clusters
from tests import kit, serving
from tests.promotion.run.histories import ACTOR

STAGES = """\
promotion:
  offline: {prompt_groups: [64, 640]}
  shadow: {prompt_groups: [64, 640], share: 0.25}
  canary: {steps: [0.1, 0.5], prompt_groups: [64, 640], dwell: 60s, approval: required}
  full: {prompt_groups: [64, 640], sample: 0.5}
stable: {engine: table, model: p.json}
"""
BROKEN = {"": kit.moved(kit.BASE, 0.25)}
N = 320  # served requests that decide a leg


class Clock:
    """A clock that a test sets."""

    def __init__(self, now=1e6):
        self.now = now

    def __call__(self):
        return self.now

    def later(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


# the ledger's own tests are of both stores; a promotion in the other one takes no other way
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def where(request, swift_path):
    return clusters.place(request.param, swift_path, request)


@pytest.fixture
def ledger(where):
    with open_ledger(where) as found:
        yield found


@pytest.fixture
def site(tmp_path, ledger, clock):
    return Site(tmp_path, ledger, clock)


class Site:
    """A contract, its servers, the log of what they served, and a ledger."""

    def __init__(self, folder, ledger, clock):
        self.folder, self.ledger, self.clock = folder, ledger, clock
        self.path = self.write()
        self.steps = []

    def write(self, q=None, **changes):
        path, _ = kit.write(self.folder, q=q, **changes)
        text = path.read_text()
        path.write_text(text[: text.index("promotion:")] + STAGES)
        return path

    def promote(self, open=in_process, **more):
        build = Build(
            self.path,
            self.folder / "run",
            (self.folder / "served.jsonl",),
            more.pop("fresh", False),
        )
        (self.folder / "served.jsonl").touch()
        return promote(
            build,
            self.ledger,
            actor=ACTOR,
            clock=self.clock,
            open=open,
            stepped=self.steps.append,
            **more,
        )

    def serve(self, history, leg, n=N, **more):
        start = more.pop("start", 0)
        rows = serving.rows(self.path, leg, n, run=history.run, start=start, seed=7, **more)
        serving.log(self.folder, rows)

    def reach(self, leg):
        """A run that has just come to a leg."""
        history = self.promote()
        while history.leg.name != leg:
            self.serve(history, history.leg.name)
            self.clock.later(61)
            history = self.promote()
            if history.state.status == "awaiting_approval":
                approve_run(self.ledger, history, actor=ACTOR, reason="well", now=self.clock())
                history = self.promote()
        return history


def test_a_conforming_build_goes_from_offline_to_full_on_what_it_serves(site):
    history = site.reach("full-1")
    site.serve(history, "full-1")

    history = site.promote()

    assert history.state.status == "completed"
    moved = [look.state.leg for look in history.evaluations]
    assert moved == sorted(moved)
    assert verify(site.ledger).problems == disagreements(site.ledger) == ()


def test_nothing_goes_forward_without_traffic(site):
    history = site.promote()

    again = site.promote()

    assert (history.leg.name, history.state.status) == ("shadow", "awaiting_evidence")
    assert again == history
    assert "0 of 64 to 640 prompt groups" in history.state.why


@pytest.mark.sampled(4)
@pytest.mark.parametrize("leg", ["shadow", "canary-1", "canary-2", "full-1"])
def test_a_build_that_breaks_on_a_leg_is_rolled_back_there(site, leg):
    """The served tokens are of another kernel than the one that says it serves."""
    history = site.reach(leg)
    kit.table(site.folder, "broken.json", BROKEN)
    broken = Kernel(engine="table", model=str(site.folder / "broken.json"))  # type: ignore[call-arg]
    site.serve(history, leg, kernel=broken)
    site.clock.later(61)

    history = site.promote()

    assert history.state.status == "rolled_back"
    assert history.leg.name == leg
    assert history.evaluations[-1].finding.groups == N
    told = [*site.ledger.entries(history.run)][-1].body["effects"][-1]["body"]
    assert (told["share"], told["mirror"]) == (0.0, 0.25)
    assert told["decided"]["n"] > 0
    assert told["decided"]["low"] > told["decided"]["limit"]


def test_a_build_that_breaks_offline_serves_nobody(site):
    site.path = site.write(q=BROKEN)

    history = site.promote()

    assert (history.leg.name, history.state.status) == ("offline", "rolled_back")
    assert "tv on " in history.state.why
    assert site.promote() == history


@pytest.mark.slow
def test_until_ends_at_the_first_leg_of_a_stage(site):
    history = site.reach("shadow")
    site.serve(history, "shadow")

    history = site.promote(until="canary")

    assert history.leg.name == "canary-1"
    assert history.evaluations[-1].leg.name == "shadow"


def test_an_unknown_stage_is_refused_before_anything_is_measured(site):
    with pytest.raises(ContractError, match="has no stage 'shadov'"):
        site.promote(until="shadov")

    assert site.ledger.runs() == ()
    assert not (site.folder / "run").exists()


def test_a_contract_that_changed_is_refused_and_nothing_is_lost(site):
    history = site.reach("canary-1")
    site.path.write_text(site.path.read_text().replace("at_most: 0.05", "at_most: 0.06"))

    with pytest.raises(EvidenceError) as error:
        site.promote()

    assert "holds evidence of another version of this contract" in str(error.value)
    assert "--fresh; servanda contract diff OLD NEW lists the changes" in str(error.value)
    assert [*site.ledger.entries(history.run)][-1].seq == history.seq


@pytest.mark.slow
def test_a_fresh_attempt_rolls_the_run_under_way_back(site):
    first = site.reach("canary-1")
    site.path.write_text(site.path.read_text().replace("at_most: 0.05", "at_most: 0.06"))
    site.clock.later(10)

    second = site.promote(fresh=True)

    assert second.run != first.run
    assert second.state.key.attempt == 2
    told = [*site.ledger.entries(first.run)][-1]
    runs = [step.history.run for step in site.steps]
    taken = site.steps[runs.index(second.run) - 1].history
    assert (taken.run, taken.state.status) == (first.run, "rolled_back")
    assert (told.kind, told.body["why"]) == (
        "rolled_back",
        f"{ACTOR} rolled back: promotion {second.run} starts",
    )


@pytest.mark.slow
def test_two_builds_are_not_promoted_at_once(site):
    first = site.reach("canary-1")
    build = Build(site.path, site.folder / "elsewhere", ())
    kit.table(site.folder, "q.json", {"": kit.moved(kit.BASE, 0.012)})

    with pytest.raises(EvidenceError) as error:
        promote(build, site.ledger, actor=ACTOR, clock=site.clock, open=in_process)

    assert f"promotion {first.run} of this contract is " in str(error.value)
    assert "two builds cannot be promoted at once" in str(error.value)


def test_the_same_build_measured_elsewhere_is_the_same_run(site):
    """Nothing in a key says where a promoter ran."""
    first = site.reach("shadow")
    build = Build(site.path, site.folder / "elsewhere", ())

    with pytest.raises(EvidenceError, match="two builds cannot be promoted at once"):
        promote(build, site.ledger, actor=ACTOR, clock=site.clock, open=in_process)

    assert site.ledger.runs() == (first.run,)


@pytest.mark.slow
def test_a_build_that_is_replaced_behind_its_url_ends_the_run(site):
    history = site.reach("canary-1")
    kit.table(site.folder, "q.json", {"": kit.moved(kit.BASE, 0.012)}, weights="toy")

    history = site.promote()

    assert history.state.status == "superseded"
    assert history.state.why == "the infer kernel changed since the promotion started"
    effects = [*site.ledger.entries(history.run)][-1].body["effects"]
    assert next(e for e in effects if e["kind"] == "route")["body"]["share"] == 0.0


@pytest.mark.slow
def test_measuring_that_fails_moves_nothing_and_halts_at_the_third_time(site):
    history = site.reach("canary-1")

    def broken(kernel, side):
        raise MeasurementError("the server is gone", hint="start it")

    seen = [site.promote(open=broken).state for _ in range(4)]

    assert [s.status for s in seen] == ["awaiting_evidence"] * 2 + ["halted"] * 2
    assert {s.leg for s in seen} == {history.state.leg}
    assert seen[2].why == "measuring failed 3 times in a row: the server is gone"
    assert "start it" in site.steps[-1].error
    site.serve(history, "canary-1")
    site.clock.later(61)
    assert site.promote().leg.name == "canary-2"


def test_a_second_promoter_is_refused_and_what_the_first_measures_has_not_failed(site):
    history = site.reach("shadow")

    with (
        opened(site.folder / "run" / "shadow", attempt=1),
        pytest.raises(Occupied, match="another"),
    ):
        site.promote()

    assert history_of(site.ledger, history.run) == history


def test_a_run_that_a_person_took_back_meanwhile_is_not_moved(site):
    history = site.reach("shadow")
    site.serve(history, "shadow")

    def opening(kernel, side):
        if site.steps is not None:
            roll_back_run(site.ledger, history, actor="Grace", reason="enough", now=site.clock())
            site.steps = None
        return open_engine(kernel)

    build = Build(site.path, site.folder / "run", (site.folder / "served.jsonl",))
    after = promote(build, site.ledger, actor=ACTOR, clock=site.clock, open=opening)

    assert after.state.status == "rolled_back"
    assert after.state.why == "Grace rolled back: enough"


def test_a_log_that_lacks_a_request_is_no_evidence(site):
    history = site.reach("shadow")
    site.serve(history, "shadow", n=100)
    site.serve(history, "shadow", n=100, start=150)

    history = site.promote()

    assert history.state.status == "awaiting_evidence"
    assert f"measuring failed: {site.folder / 'served.jsonl'}:101:1: " in history.state.why


def test_rows_of_another_run_are_not_counted(site):
    history = site.reach("shadow")
    rows = serving.rows(site.path, "shadow", N, run="another")
    serving.log(site.folder, rows)

    history = site.promote()

    assert history.leg.name == "shadow"
    assert history.evaluations[-1].finding.groups == 0


@pytest.mark.slow
def test_of_two_builds_that_begin_at_once_the_one_that_the_ledger_has_later_waits(site):
    """While the first one measures offline, the other one has begun and gone on."""
    other = site.folder / "other"
    path, _ = kit.write(other, q={"": kit.moved(kit.BASE, 0.012)})
    path.write_text(path.read_text()[: path.read_text().index("promotion:")] + STAGES)
    build, begun = Build(path, other / "run", (other / "served.jsonl",)), []

    def opening(kernel, side):
        if not begun:
            begun.append(
                promote(build, site.ledger, actor="Bob", clock=site.clock, open=in_process)
            )
        return in_process(kernel, side)

    for _ in range(2):  # and as often as it is tried
        with pytest.raises(EvidenceError) as error:
            site.promote(open=opening)

    first, second = site.ledger.runs()
    assert first == begun[0].run
    assert error.value.problems[0].message == (
        f"promotion {first} of this contract started before {second}: two builds cannot be "
        "promoted at once"
    )
    assert history_of(site.ledger, second).evaluations == ()
    assert promote(build, site.ledger, actor="Bob", clock=site.clock, open=in_process) == begun[0]
    roll_back_run(site.ledger, begun[0], actor="Bob", reason="enough", now=site.clock())
    assert site.promote().leg.name == "shadow"


@pytest.mark.slow
def test_a_fresh_attempt_from_elsewhere_takes_nothing_back_that_it_does_not_replace(site):
    """Where nothing was measured yet the attempt is the first, and that one has its run."""
    first = site.reach("canary-1")
    elsewhere = site.folder / "elsewhere"
    build = Build(site.path, elsewhere, (), fresh=True)

    with pytest.raises(EvidenceError) as error:
        promote(build, site.ledger, actor=ACTOR, clock=site.clock, open=in_process)

    assert error.value.problems[0].message == (
        f"promotion {first.run} of this build is in the ledger already, and was not started from "
        f"{elsewhere}: it is awaiting evidence on canary-1"
    )
    assert history_of(site.ledger, first.run) == first


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            "numerical:\n  - {id: drift, metric: logit_osc_nats, aggregate: max, at_most: 0.6}\n",
            "drift: golden texts are measured offline",
        ),
        (
            "statistical:\n"
            "  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05, stages: [offline]}\n"
            "  - {id: seen, metric: tv, aggregate: mean, at_most: 0.05, mode: monitor}\n",
            "tv: stages: offline; this is shadow",
        ),
    ],
)
def test_a_stage_on_which_nothing_is_judged_is_refused_before_anything_is_measured(
    site, section, said
):
    """Preconditions and what is only watched carry no one forward: such a leg would never end."""
    kit.table(site.folder, "p.json", {"": kit.BASE})
    site.path = site.write(golden=kit.golden(site.folder))
    text = site.path.read_text()
    before, after = text.index("statistical:"), text.index("promotion:")
    site.path.write_text(text[:before] + section + text[after:])

    with pytest.raises(ContractError) as error:
        site.promote()

    problem = error.value.problems[0]
    assert problem.message == (
        f"no enforced promise can be judged at shadow, so nothing could ever hold there: {said}"
    )
    assert problem.hint == (
        "add a statistical clause that is enforced at shadow, or remove promotion.shadow"
    )
    assert site.ledger.runs() == () and not (site.folder / "run").exists()
    assert read(str(site.path)).problems[0] == problem
