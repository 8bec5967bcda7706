# The assumption `order`: what a monitor answers where the trainer chose which answers it sees.

import numpy as np

from servanda.rl import Monitor

TV, Q, TOKENS = 0.05, 0.5, 16


def done(rng, answers=600):
    """TV .05 in every context; answers whose first token diverged are not done yet.

    An answer that begins with token 0, of which train holds less, grows long; what is there to
    train on are the others, and of the long ones nothing.
    """
    first_BT = rng.random((answers, TOKENS)) < Q
    first_BT = first_BT[~first_BT[:, 0]]
    infer_BT = np.full(first_BT.shape, np.log(Q))
    train_BT = np.where(first_BT, np.log(Q - TV), np.log(Q + TV))
    return train_BT, infer_BT, np.broadcast_to(np.arange(TOKENS) < 2, first_BT.shape)


def test_a_step_of_few_selected_answers_has_a_verdict_that_names_the_selection():
    told = Monitor("verl-async").observe(*done(np.random.default_rng(0), answers=100), weights=0)
    whole = next(c for c in told.verdict.cells if (c.clause, c.slice) == ("gradient", "all"))
    assert whole.outcome != "error" and whole.limit == TV
    assert whole.value < 0.6 * TV  # the selection is what it reads, and nothing in the data says so
    spots = [s.text for s in told.verdict.blind_spots if s.subject == "sample"]
    assert spots and spots[0].startswith("the trainer selected the responses of this batch")
    assert "Not examined by this run" in str(told)
    assert "were decided before any outcome" in str(told)


def test_a_selection_that_many_answers_show_is_an_error():
    told = Monitor("verl-async").observe(*done(np.random.default_rng(0)), weights=0)
    assert told.exit_code == 4 and "sequences were selected by their outcome" in told.cause
