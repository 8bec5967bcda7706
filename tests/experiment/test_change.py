# The page about a change says what the records say.

from benchmarks import change
from benchmarks.experiment.alarms import HEALTHY, chosen
from benchmarks.experiment.change import changed
from benchmarks.experiment.record import read_runs


def test_page_is_in_step_with_the_records():
    assert change.PAGE.read_text() == change.page(read_runs()), (
        "run python -m benchmarks.change --write"
    )


def test_a_run_is_never_its_own_reference():
    runs = read_runs()
    healthy = chosen(runs, HEALTHY, "none")
    (broken,) = (r for r in chosen(runs, "one_mlp", "none") if r.settings["seed"] == 0)
    assert changed(broken, healthy) == changed(broken, healthy[1:])
    assert not any(changed(run, healthy) for run in healthy)
