# A call that hangs ends by its time limit, on a clock of the test's own, and the weights are back.

import signal
import threading

import pytest

pytest.importorskip("torch")

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.drill import preflight, restore
from servanda.rl.sync_drill.parallel.weight_journal import write_journal
from servanda.rl.sync_drill.signals import TimedOut, TimeLimit
from servanda.rl.sync_drill.trainee import Trainee
from servanda.rl.sync_drill.weight_snapshot import Weights
from tests.rl.sync_drill.toys import bits, pair


class Clock:
    """Time that passes when it is told to; a timer that ran out sends its signal."""

    def __init__(self):
        self.left = 0.0

    def alarm(self, seconds):
        self.left = seconds
        return 0.0, 0.0

    def hang(self):
        assert self.left > 0
        signal.raise_signal(signal.SIGALRM)


def hanging(trainee, clock, score_at=(), sync_at=()):
    """A trainee whose calls of these numbers do not return."""
    counts = {"score": 0, "sync": 0}

    def called(what, call, at):
        def wrapped(*rows):
            counts[what] += 1
            if counts[what] in at:
                clock.hang()
            return call(*rows)

        return wrapped

    score = called("score", trainee.score, score_at)
    return Trainee(trainee.module, called("sync", trainee.sync, sync_at), score)


@pytest.mark.parametrize(
    ("score_at", "sync_at", "said"),
    [
        ([1], [], "as found: score did not return within 60 s"),
        ([4], [], "all weights randomised: score did not return within 60 s"),
        ([], [1], "sync of unchanged weights: the sync did not return within 60 s"),
        ([], [4], "perturbing norms.norm: the sync did not return within 60 s"),
        ([], [9], "updates of few values: the sync did not return within 60 s"),
        ([], [13], "sync of the restored weights: the sync did not return within 60 s"),
    ],
)
def test_a_call_that_hangs_ends_the_drill_with_the_weights_as_they_were(score_at, sync_at, said):
    (trainee, engine), clock = pair(), Clock()
    before, handler = bits(trainee.module), signal.getsignal(signal.SIGALRM)

    with pytest.raises(MeasurementError) as caught:
        preflight(hanging(trainee, clock, score_at, sync_at), timeout_s=60, alarm=clock.alarm)

    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{said}\n  state: ") and "--timeout SECONDS" in problem.hint
    assert bits(trainee.module) == before
    assert signal.getsignal(signal.SIGALRM) is handler and clock.left == 0
    if sync_at != [13]:
        assert bits(engine.model) == before


def test_an_engine_that_hangs_for_good_is_said_to_hold_weights_of_the_drill():
    (trainee, _), clock = pair(), Clock()
    before = bits(trainee.module)

    with pytest.raises(MeasurementError) as caught:
        preflight(hanging(trainee, clock, sync_at=range(2, 99)), timeout_s=60, alarm=clock.alarm)

    assert "the sync that followed did not return within 60 s: the engine may hold" in str(
        caught.value
    )
    assert bits(trainee.module) == before


def test_an_engine_that_catches_every_exception_is_ended_all_the_same():
    (trainee, _), clock = pair(), Clock()

    def sync():
        try:
            clock.hang()
        except Exception:
            pytest.fail("the engine kept it")

    with pytest.raises(MeasurementError, match="the sync did not return"):
        preflight(Trainee(trainee.module, sync, trainee.score), timeout_s=1, alarm=clock.alarm)


def test_a_wait_that_never_ends_ends_by_the_clock_of_the_process():
    with pytest.raises(TimedOut), TimeLimit(0.02)():
        threading.Event().wait()


def test_the_timer_of_a_test_runner_goes_on():
    signal.setitimer(signal.ITIMER_REAL, 3000)
    try:
        with TimeLimit(60)():
            pass
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert 0 < left <= 3000


def test_without_a_limit_or_outside_the_main_thread_no_timer_is_armed():
    from concurrent.futures import ThreadPoolExecutor

    (trainee, _), armed = pair(), []

    def alarm(seconds):
        armed.append(seconds)
        return 0.0, 0.0

    assert preflight(trainee, timeout_s=None, alarm=alarm).outcome == "holds"
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(preflight, trainee, timeout_s=9, alarm=alarm).result()
    assert result.outcome == "holds" and armed == []


def test_a_journal_is_kept_where_the_sync_of_the_restored_weights_hangs(tmp_path):
    journal, (trainee, _) = tmp_path / "j", pair()
    write_journal(journal, Weights(trainee.module).local.kept)
    hangs = Trainee(trainee.module, threading.Event().wait, trainee.score)

    with pytest.raises(MeasurementError, match="the sync raised TimedOut"):
        restore(hangs, journal, timeout_s=0.02)
    assert journal.exists()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e20])
def test_a_time_limit_that_no_timer_takes_is_refused_before_the_drill(seconds):
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(MeasurementError, match=r"the time limit of a call is .* s\n  hint: write"):
        preflight(pair()[0], timeout_s=seconds)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_timer_that_cannot_be_set_leaves_no_handler_of_ours():
    def broken(seconds):
        raise OSError("no timer")

    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OSError, match="no timer"), TimeLimit(1.0, broken)():
        pass
    assert signal.getsignal(signal.SIGALRM) is handler
