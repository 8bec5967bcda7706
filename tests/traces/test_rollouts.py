# Derived columns of rollouts, against loops over the mask.

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.traces.rollouts import Rollouts

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5)


def rollouts(mask):
    flat = np.array([flag for sequence in mask for flag in sequence], dtype=bool)
    return Rollouts(
        step=1,
        length_S=np.array([len(sequence) for sequence in mask]),
        token_N=np.arange(len(flat)),
        mask_N=flat,
        logp_train_N=np.zeros(len(flat)),
        logp_infer_N=np.zeros(len(flat)),
        group_S=tuple("g" for _ in mask),
        source_S=tuple("s" for _ in mask),
    )


@given(masks)
def test_turns_and_positions_are_counted_as_by_hand(mask):
    turn, turn_token, position, prompt = [], [], [], []
    for sequence in mask:
        turns, inside, seen, before = 0, -1, -1, 0
        for flag in sequence:
            if flag:
                seen += 1
                inside += 1
                turns += inside == 0
            else:
                inside = -1
                before += seen < 0
            turn.append(turns if flag else 0)
            turn_token.append(inside)
            position.append(seen if flag else -1)
        prompt.append(before)
    made = rollouts(mask)
    assert made.turn_N.tolist() == turn
    assert made.turn_token_N.tolist() == turn_token
    assert made.position_N.tolist() == position
    assert made.prompt_tokens_S.tolist() == prompt


def test_a_column_of_another_size_is_refused_by_name():
    with pytest.raises(EvidenceError, match="1 sequences of 2 tokens, and 3 values of token_N"):
        Rollouts(1, np.array([2]), np.zeros(3), *[np.zeros(2)] * 3, ("g",), ("s",))
