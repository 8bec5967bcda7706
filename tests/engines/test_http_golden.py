# Golden texts where a server gives its likeliest tokens, and not the size of its vocabulary.

import numpy as np

from servanda.contract.identity import Description
from servanda.runner import golden
from servanda.traces.trace import Batch, Trace

LOGITS_NV = np.log([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]])
BATCH = Batch((0,), ((3,),), 2, ((0, 3),))


class Near:
    """Full logits here, of four tokens."""

    def describe(self):
        return Description({}, {}, "", 4, ())

    def logits(self, batch, path):
        yield LOGITS_NV


class Far:
    """The two likeliest tokens of the same kernel, by a server."""

    def describe(self):
        return Description({}, {}, "", 0, (), full_logits=False, top=2)

    def top(self, batch, path):
        best = {"id.0": [0, 3], "logp.0": LOGITS_NV.max(axis=1), "id.1": [1, 2]}
        best["logp.1"] = np.log([0.25, 0.3])
        columns = {"logp": np.log([0.5, 0.4]), **best}
        return Trace(
            *map(np.array, ([0], [2], [False], [1], [0, 3])),
            columns={name: np.array(values, dtype=float) for name, values in columns.items()},
        )


def test_a_server_that_hides_its_vocabulary_has_that_of_the_other_side():
    sides = {"train": Near(), "infer": Far()}
    both = dict.fromkeys(sides, BATCH)

    trace = golden._bounded(both, sides, dict.fromkeys(sides, "prefill"))

    tv = (trace.columns["joint.tv.low"], trace.columns["joint.tv.high"])
    # the true distance is 0, and what the server left out is 0.25 and 0.3 of the mass
    assert (tv[0] <= 1e-6).all() and (tv[1] <= 0.31).all()
    assert np.allclose(trace.columns["joint.tail"], [0.25, 0.3])
