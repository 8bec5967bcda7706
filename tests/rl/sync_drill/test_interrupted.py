# Whatever stops a drill, and wherever: the weights are back, bit for bit.

import multiprocessing
import os
import random
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from servanda.errors import Interrupted, MeasurementError
from servanda.rl.sync_drill.drill import preflight
from servanda.rl.sync_drill.trainee import Trainee
from tests.rl.sync_drill import trials

ROOT = Path(__file__).parents[3]
LINES_OF = (
    *("drill", "trainer_response", "weight_snapshot", "parallel/local_weights"),
    *("parallel/weight_journal", "parallel/process_group"),
)
WAY_BACK = {
    "run",
    "_there_and_back",
    "_restored",
    "_returned",
    "write",
    "refuse_journal",
    "write_journal",
}
both = pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapters"])
KILLS = 6  # of each kind, with and without adapters


class Stop(BaseException):
    """What no library catches."""


def calls_of(adapted):
    """What a drill calls, in order."""
    made = []
    preflight(trials.trainee(trials.module(adapted=adapted), made.append))
    return made


def stopped_at(number, error, adapted, *, also=()):
    """(the module, what was raised) of a drill whose call of that number throws."""
    model, calls = trials.module(adapted=adapted), 0

    def before(_):
        nonlocal calls
        calls += 1
        if calls == number or calls in also:
            raise error

    with pytest.raises(BaseException) as raised:
        preflight(trials.trainee(model, before))
    return model, raised.value


# errors, at every call that the drill makes


@pytest.mark.slow
@both
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stop()], ids=lambda e: type(e).__name__)
def test_wherever_a_call_is_stopped_the_weights_are_back(adapted, error):
    whole = trials.digest(trials.module(adapted=adapted))

    for number, what in [*enumerate(calls_of(adapted), 1)][1::4]:
        model, raised = stopped_at(number, error, adapted)
        assert trials.digest(model) == whole, f"call {number}, a {what}"
        assert isinstance(raised, Interrupted if isinstance(error, KeyboardInterrupt) else Stop)
        assert isinstance(raised, Stop) or "preflight was stopped\n  state: " in str(raised)


@pytest.mark.slow
@both
def test_wherever_a_call_throws_the_weights_are_back_and_the_error_says_so(adapted):
    whole = trials.digest(trials.module(adapted=adapted))
    calls = calls_of(adapted)

    for number, what in enumerate(calls, 1):
        model, raised = stopped_at(number, RuntimeError("no room"), adapted)
        assert trials.digest(model) == whole, f"call {number}, a {what}"
        assert isinstance(raised, MeasurementError)
        (problem,) = raised.problems
        thrower = "the sync" if what == "sync" else "score"
        assert f": {thrower} raised RuntimeError: no room\n  state: " in problem.message
        state = problem.message.partition("  state: ")[2]
        idle = calls.index("sync") + 2  # the score after a sync of unchanged weights
        if number <= idle:
            assert state == "no weight was changed"
        elif number < len(calls) - 1:
            assert state == "weights restored bit for bit, and synced to the engine once more"
        else:  # the sync of the restored weights, and the score after it
            assert state == (
                "weights restored bit for bit; the engine may hold perturbed weights, so do not "
                "sample from it before a sync succeeds"
            )


@both
def test_where_the_sync_that_puts_the_engine_right_throws_too_that_is_said(adapted):
    whole = trials.digest(trials.module(adapted=adapted))
    calls = calls_of(adapted)
    third = [number for number, what in enumerate(calls, 1) if what == "sync"][2]

    model, raised = stopped_at(third, RuntimeError("no room"), adapted, also=(third + 1,))

    assert trials.digest(model) == whole
    (problem,) = raised.problems
    assert problem.message.partition("  state: ")[2] == (
        "weights restored bit for bit; the sync that followed raised RuntimeError: no room: the "
        "engine may hold perturbed weights, so do not sample from it before a sync succeeds"
    )


@pytest.mark.slow
def test_a_journal_is_gone_wherever_a_call_throws(tmp_path):
    journal = tmp_path / "journal"
    for number in range(1, len(calls_of(False)) + 1, 2):
        model, calls = trials.module(), 0

        def before(_, model=model, number=number):
            nonlocal calls
            calls += 1
            if calls == number:
                raise RuntimeError

        with pytest.raises(MeasurementError):
            preflight(trials.trainee(model, before), journal=journal)
        assert [*tmp_path.iterdir()] == []


# all else that a trainer has


@both
@pytest.mark.parametrize("number", [None, 6, 11])
def test_the_trainer_has_all_else_that_it_had(adapted, number):
    """Gradients, modes, what is trained, which tensors are one, where they lie, random numbers."""
    model = trials.module(adapted=adapted)
    model.train()
    model.model.layers[0].eval()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn_like(weight)

    def state():
        named = [*model.named_parameters(remove_duplicate=False)]
        return (
            [(n, id(w), w.data_ptr(), w.requires_grad, w.grad is None) for n, w in named],
            [w.grad.tolist() for _, w in named if w.grad is not None],
            [part.training for part in model.modules()],
            torch.is_grad_enabled(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            [np.array(part).tolist() for part in np.random.get_state()[1:]],
            {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
        )

    calls, before = 0, state()

    def throw(_):
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError

    if number is None:
        preflight(trials.trainee(model, throw))
    else:
        with pytest.raises(MeasurementError):
            preflight(trials.trainee(model, throw))

    assert state() == before


def test_bits_that_no_arithmetic_gives_back_come_back():
    """NaN with a payload and -0.0, in a tensor that the engine never uses."""
    model = trials.module()
    odd = torch.tensor([0x7FC01234, -0x80000000], dtype=torch.int32).view(torch.float32)
    model.register_parameter("unused", torch.nn.Parameter(odd.clone()))
    whole = trials.digest(model)

    preflight(trials.trainee(model))

    assert trials.digest(model) == whole


# Ctrl-C between any two lines of the drill's own code


OWN = {str(ROOT / "src" / "servanda" / "rl" / "sync_drill" / f"{name}.py") for name in LINES_OF}


class AtLine:
    """Counts the lines that the drill runs of its own, and presses Ctrl-C at one of them."""

    def __init__(self, number=0):
        self.number, self.lines = number, []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _called(self, frame, event, _):
        return self._line if frame.f_code.co_filename in OWN else None

    def _line(self, frame, event, _):
        if event == "line":
            self.lines.append(frame.f_code.co_name)
            if len(self.lines) == self.number:
                signal.raise_signal(signal.SIGINT)
        return self._line


def interrupted_at(number, model, journal):
    with AtLine(number) as at, suppress(Interrupted, KeyboardInterrupt):
        preflight(trials.trainee(model), journal=journal)
    return at.lines


# cut off inside open(), a file is closed by anyone who collects it
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@both
def test_ctrl_c_between_any_two_lines_leaves_the_weights_as_they_were(tmp_path, adapted):
    """A sample of the lines of measuring, and each line of the way back."""
    whole = trials.digest(trials.module(adapted=adapted))
    journal = tmp_path / "journal"
    lines = interrupted_at(0, trials.module(adapted=adapted), journal)
    back = [n for n, name in enumerate(lines, 1) if name in WAY_BACK]
    numbers = sorted({*back, *random.Random(4).sample(range(1, len(lines)), 6)})
    assert len(back) >= 10

    for number in numbers:
        model = trials.module(adapted=adapted)
        interrupted_at(number, model, journal)
        assert trials.digest(model) == whole, f"line {number}, of {lines[number - 1]}"
        assert [*tmp_path.iterdir()] == [], f"line {number}, of {lines[number - 1]}"


@pytest.mark.slow
@both
def test_ctrl_c_at_the_end_of_a_no_grad_leaves_gradients_on_and_parts_in_their_modes(adapted):
    """The third line of each write is its `with` again, before torch's own way back."""
    lines = interrupted_at(0, trials.module(adapted=adapted), None)
    writes = [n for n, name in enumerate(lines, 1) if name == "_write"][2::3]
    assert len(writes) > 10

    for number in (writes[0], writes[-1]):
        model = trials.module(adapted=adapted)
        model.train()
        interrupted_at(number, model, None)
        assert torch.is_grad_enabled(), f"line {number}"
        assert all(part.training for part in model.modules())


# signals, in processes of their own


@pytest.fixture(scope="module")
def processes():
    """Processes that have torch already when they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.rl.sync_drill.trials"])
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))  # where it looks for them
        forkserver.ensure_running()
    return context


def started(processes, target, *arguments):
    """(process, what it says, a word to it)."""
    says, mouth = processes.Pipe(duplex=False)
    ear, tell = processes.Pipe(duplex=False)
    child = processes.Process(target=target, args=(mouth, ear, *arguments))
    child.start()
    mouth.close()
    ear.close()
    return child, says, tell


def heard(child, says, tell, hear):
    """All that a drill says until its process ends.

    `hear` is told of each call's number, and has the signal that the drill gets there, if any.
    """
    said = []
    with suppress(EOFError):
        while True:
            said.append(says.recv())
            signum = hear(said[-1][0]) or 0
            with suppress(ConnectionError):  # it may be gone
                os.write(tell.fileno(), bytes([signum]))
    child.join()
    return said


def signalled(processes, journal, adapted, number, signum, *, handler="", early=False):
    """(exit code, all it said) of a drill that gets a signal at its call of that number.

    Early, it is let go on from the call before, and the signal lands wherever it then is.
    """
    child, says, tell = started(processes, trials.drilled, str(journal), adapted, handler)

    def hear(at):
        if early and at == number - 1:
            os.write(tell.fileno(), bytes(1))
        if at != number - early:
            return None
        if early or signum == signal.SIGKILL:
            return os.kill(child.pid, signum)
        return signum

    said = heard(child, says, tell, hear)
    return child.exitcode, said


def numbers(adapted, seed):
    """Seeded moments of a drill: numbers of its calls."""
    last = len(calls_of(adapted))
    return random.Random(seed).sample(range(2, last + 1), KILLS)


@both
@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True], ids=["in a call", "between calls"])
def test_after_sigterm_the_weights_are_back_and_the_trainers_own_handler_runs(
    processes, tmp_path, adapted, early
):
    whole = trials.digest(trials.module(adapted=adapted))
    for number in numbers(adapted, seed=1):
        code, said = signalled(
            processes,
            tmp_path / "journal",
            adapted,
            number,
            signal.SIGTERM,
            handler="exit",
            early=early,
        )
        assert (code, said[-1]) == (trials.EXIT, ("end", "", whole)), f"call {number}"
        assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@both
def test_without_a_handler_sigterm_ends_the_trainer_once_engine_and_weights_are_back(
    processes, tmp_path, adapted
):
    whole = trials.digest(trials.module(adapted=adapted))
    for number in numbers(adapted, seed=2):
        code, said = signalled(processes, tmp_path / "journal", adapted, number, signal.SIGTERM)
        assert code == -signal.SIGTERM
        assert said[-1][1:] in (("sync", whole), ("score", whole)), f"call {number}"
        assert [*tmp_path.iterdir()] == []


@both
@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True], ids=["in a call", "between calls"])
def test_after_sigkill_a_new_process_puts_the_weights_back(processes, tmp_path, adapted, early):
    whole = trials.digest(trials.module(adapted=adapted))
    journal = tmp_path / "journal"
    last = len(calls_of(adapted))
    landed = 0
    for number in numbers(adapted, seed=3):
        code, said = signalled(processes, journal, adapted, number, signal.SIGKILL, early=early)
        assert code == -signal.SIGKILL
        if number < last - 1:  # the last sync and score have the weights back
            assert journal.exists() or early
        if not journal.exists():
            assert number >= last - 1
            assert said[-1][2] == whole
            continue
        landed += 1
        child, says, _ = started(processes, trials.restored, str(journal), adapted)
        assert says.recv() == (whole, ["sync"])
        child.join()
        assert child.exitcode == 0
        assert [*tmp_path.iterdir()] == []
    assert landed >= KILLS // 2


@pytest.mark.slow
def test_a_second_drill_does_not_write_over_the_journal_of_a_killed_one(processes, tmp_path):
    journal = tmp_path / "journal"
    signalled(processes, journal, False, 8, signal.SIGKILL)
    kept = journal.read_bytes()

    with pytest.raises(
        MeasurementError, match="is there already: an interrupted preflight test left it"
    ):
        preflight(trials.trainee(trials.module()), journal=journal)

    assert journal.read_bytes() == kept


def test_a_second_sigterm_during_the_way_back_waits_for_the_weights(processes, tmp_path):
    """Impatient schedulers send it twice."""
    whole = trials.digest(trials.module())
    journal = str(tmp_path / "journal")
    child, says, tell = started(processes, trials.drilled, journal, False, "exit")
    sent = []

    def hear(at):
        if at == "end" or at < 8 or len(sent) == 3:
            return None
        sent.append(at)
        return signal.SIGTERM

    said = heard(child, says, tell, hear)
    assert len(sent) >= 2
    assert (child.exitcode, said[-1]) == (trials.EXIT, ("end", "", whole))


def test_a_trainee_of_another_thread_is_drilled_without_signals():
    """Python lets only the main thread have handlers."""
    from concurrent.futures import ThreadPoolExecutor

    model = trials.module()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(preflight, trials.trainee(model)).result()

    assert (result.outcome, result.cause) == ("holds", "")
    assert isinstance(trials.trainee(model), Trainee)
