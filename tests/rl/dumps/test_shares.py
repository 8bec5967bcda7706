# A dump is one attempt: its whole and all its steps share the alpha of that attempt.

from pathlib import Path

import pytest

from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.steps.judge import WHOLE_PART
from servanda.theory.stats.alpha import attempt_alpha, step_alpha


def test_the_whole_and_all_steps_together_spend_the_alpha_of_one_attempt():
    """Each step has a share, for all series of steps that begin there."""
    steps = sum(step_alpha(1 - WHOLE_PART, t) for t in range(1, 5_000))
    assert WHOLE_PART + steps <= 1.0
    assert attempt_alpha(0.05, 1) * (WHOLE_PART + steps) <= 0.045


DUMP = Path(__file__).parents[3] / "examples" / "tiny-dump"


@pytest.mark.parametrize(("steps", "part"), [((None, None), WHOLE_PART), ((10, 10), 1.0)])
def test_a_dump_of_one_step_has_only_its_whole(steps, part):
    verdict = judge_dump(DumpOptions(DUMP, steps=steps)).verdict
    assert verdict.part == part
    assert verdict.alpha == pytest.approx(0.045)
