# The records of the experiment: how they are read, and what holds for those that are committed.

from benchmarks.experiment import pilot
from benchmarks.experiment.pictures import WEIGHTINGS
from benchmarks.experiment.record import CONTRACT, RESULTS, read_runs
from click.testing import CliRunner

from servanda.cli.main import main


def test_the_contract_of_the_experiment_is_sound():
    done = CliRunner().invoke(main, ["contract", "lint", str(CONTRACT)])
    assert done.exit_code == 0, done.output


def test_a_record_has_the_name_of_its_file():
    assert [run.name for run in read_runs()] == sorted(path.stem for path in RESULTS.glob("*.json"))


def test_the_rate_of_the_experiment_is_the_one_that_the_pilot_chose():
    rate = pilot.chosen(read_runs(pilot.FOLDER))
    assert {run.settings["learning_rate"] for run in read_runs()} == {rate}


def test_no_committed_checkpoint_exceeds_its_bound():
    """In logits, where the norm of a score is known; five digits were kept."""
    for run in read_runs(RESULTS):
        for seen in run.checkpoints:
            for name in WEIGHTINGS:
                assert seen["logit_bias"][name] <= seen["logit_bound"][name] * 1.0002 + 1e-15
