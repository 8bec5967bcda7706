# What is odd in a few sequences of one step among many is no broken step; in half of them it is.

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.rl.dumps.formats.parquet import Writer

STEPS, SEQUENCES, PROMPT, TOKENS = 8, 32, 8, 64
ODD = 5  # the step that is changed


def made(step):
    """Ids [S, T], loss mask and both logprobs [S, K] of one step."""
    rng = np.random.default_rng(step)
    infer = -rng.exponential(1.0, (SEQUENCES, TOKENS)) - 0.06
    train = np.minimum(infer + rng.normal(0, 0.01, infer.shape), -1e-6)
    ids = rng.integers(0, 9999, (SEQUENCES, PROMPT + TOKENS))
    return ids, np.ones((SEQUENCES, TOKENS)), train, infer


def zeros(n, ids, mask, train, infer):
    unsure = np.argwhere(train < -1.5)
    at = np.random.default_rng(0).permutation(len(unsure))[:n]
    infer[tuple(unsure[at].T)] = 0.0


def repeated(n, ids, mask, train, infer):
    for column in (ids, train, infer):
        column[SEQUENCES - n :] = column[:n]


def carried_over(n, ids, mask, train, infer):
    before = made(ODD - 1)
    for column, earlier in zip((ids, mask, train, infer), before, strict=True):
        column[:n] = earlier[:n]


def copied(n, ids, mask, train, infer):
    train[:n] = infer[:n]


def shifted(n, ids, mask, train, infer):
    infer[:n] = np.roll(infer[:n], 1, axis=1)


def dump(folder, change, n):
    writer = Writer(folder)
    for step in range(1, STEPS + 1):
        ids, mask, train, infer = made(step)
        if step == ODD:
            change(n, ids, mask, train, infer)
        writer.step(step, ids, mask, train, infer)
    return folder


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("verb", "option"), [("check", "--quiet"), ("watch", "--once")])
@pytest.mark.parametrize(
    ("change", "few", "many"),
    [(zeros, 4, 60), (repeated, 4, 16), (carried_over, 2, 20), (copied, 2, 12), (shifted, 1, 12)],
)
def test_a_few_odd_ones_of_a_step_spoil_no_dump_and_many_do(
    tmp_path, change, few, many, verb, option
):
    def exit_code(n):
        folder = dump(tmp_path / str(n), change, n)
        return CliRunner().invoke(main, [verb, str(folder), option]).exit_code

    assert exit_code(0) == 0
    # one response of rows that do not line up is far off, and a check of the whole is left open
    assert exit_code(few) == (3 if (change, verb) == (shifted, "check") else 0)
    assert exit_code(many) == 4


@pytest.mark.parametrize(("verb", "option"), [("check", "--quiet"), ("watch", "--once")])
@pytest.mark.parametrize(("change", "n"), [(zeros, 4), (copied, 2)])
def test_a_few_odd_ones_of_every_step_do(tmp_path, monkeypatch, change, n, verb, option):
    """No step shows it alone; the watch adds them up."""
    writer = Writer(tmp_path / "dump")
    for step in range(1, STEPS + 1):
        ids, mask, train, infer = made(step)
        change(n, ids, mask, train, infer)
        writer.step(step, ids, mask, train, infer)
    assert CliRunner().invoke(main, [verb, str(tmp_path / "dump"), option]).exit_code == 4


def test_what_a_watch_added_up_is_kept_over_its_next_start(tmp_path):
    """Three steps of two odd ones each, and one look a step: five are too many."""
    writer, codes = Writer(tmp_path / "dump"), []
    for step in range(1, 4):
        ids, mask, train, infer = made(step)
        copied(2, ids, mask, train, infer)
        writer.step(step, ids, mask, train, infer)
        asked = [
            "watch",
            str(tmp_path / "dump"),
            "--once",
            "--state-file",
            str(tmp_path / "state"),
        ]
        codes.append(CliRunner().invoke(main, asked).exit_code)
    assert 4 not in codes[:2] and codes[2] == 4


def test_a_step_that_is_written_anew_with_what_another_has_is_not_sound(tmp_path):
    folder, state = tmp_path / "dump", ["--once", "--state-file", str(tmp_path / "state")]

    def write(step, as_step):
        ids, mask, train, infer = made(as_step)
        Writer(folder).step(step, ids, mask, train, infer)

    for step in range(1, 4):
        write(step, step)
    watch = ["watch", str(folder), *state]
    assert CliRunner().invoke(main, watch).exit_code == 0
    write(3, 2)
    again = CliRunner().invoke(main, watch)
    assert again.exit_code == 4, again.output
