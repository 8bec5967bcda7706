# A training run of a shipped model with a real engine in bfloat16.

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.rl.follow_faults import CAUSES, HELD, Run, followed, kept

QUANTISED = ("fp8_block", "w8a8", "nvfp4")
RUN = Run("qwen3", rate=3e-5, quantised=QUANTISED)


@pytest.mark.slow
def test_an_engine_in_bfloat16_follows_and_its_slope_is_close_to_1():
    steps = followed(kept(RUN))

    assert not any(step.outcome == "violated" for step in steps)
    assert all(step.interval[0] < 1 < step.interval[1] for step in steps)
    assert steps[-1].slope == pytest.approx(1, abs=0.03)
    assert 0.01 < steps[-1].worst.slope.rest_nats < 0.05  # the rounding of the kernel


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in HELD if name])
def test_an_engine_of_older_weights_is_found_at_its_first_sync_and_named(fault):
    steps = followed(kept(RUN), fault)

    late = next(s.version for s in steps if s.outcome == "violated")
    assert late == (4 if fault == "stopped" else 1)
    assert steps[-1].cause == CAUSES[fault]
    assert {s.cause for s in steps} <= {"", "undecided", "never_synced", CAUSES[fault]}


def test_one_replica_of_eight_is_found_by_its_name():
    step = followed(kept(RUN), "never_synced", replicas=8)[-1]

    assert step.cause == "stale_replicas" and "1 of 8 replicas (r7)" in step.sentence


@pytest.mark.slow
def test_an_engine_cannot_follow_less_than_its_rounding_and_the_sent_weights_show_that():
    """At the start all weights are numbers of bfloat16, and no update reaches the next one."""
    scores = kept(Run("qwen3", rate=1e-6, steps=3, moved=0.0))

    blind, told = followed(scores, exact=True), followed(scores)

    assert blind[-1].slope < 0.5
    assert not any(step.outcome == "violated" for step in told)


@pytest.mark.slow
@pytest.mark.parametrize("form", QUANTISED)
def test_a_quantised_engine_is_not_violated_and_one_that_stands_still_is(form):
    scores = kept(RUN)

    steps = followed(scores, form, exact=True)
    still = followed(scores._replace(engines={"": scores.engine(form)}), "never_synced", exact=True)

    assert not any(step.outcome == "violated" for step in steps)
    seen = still[-1].worst.slope.moved_nats > still[-1].worst.floor_nats  # not in fp8 and NVFP4
    assert still[-1].cause in (("never_synced",) if seen else ("", "never_synced"))
