# How often a slice is found where there is none: in 240 draws that are alike everywhere.

import numpy as np

from servanda.judgement.causes.slice_search import ALPHA, find_sequences, find_slices
from tests.judgement.causes.gaps import table

DRAWS = 240
MOST = 6  # more than so many of DRAWS have probability below .02 at a rate of ALPHA


def test_slices_are_hardly_ever_found_where_nothing_is_apart():
    found = odd = 0
    for seed in range(DRAWS):
        rng = np.random.default_rng([1, seed])
        labels = {name: _of(rng, int(rng.integers(2, 9))) for name in ("replica", "env")}
        drawn = table(
            [2, seed],
            steps=int(rng.choice([1, 3, 8])),
            size=int(rng.choice([8, 24, 64])),
            noise=float(rng.choice([0.01, 0.1, 0.5, 1.5])),
            spread=float(rng.choice([0.0, 0.2, 0.4])),
            labels=labels,
        )
        # without a limit, every difference is in excess of it
        limit = float(rng.choice([0.0, 0.01, 0.025]))
        found += bool(find_slices(drawn, limit))
        odd += find_sequences(drawn, limit) is not None
    assert ALPHA == 0.01
    assert found <= MOST
    assert odd <= MOST


def _of(rng, values):
    texts = [f"v{i}" for i in rng.integers(0, values, 64)]
    return texts.__getitem__
