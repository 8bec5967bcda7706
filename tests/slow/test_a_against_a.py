# A against A: a gate that goes red when nothing changed is switched off, and rightly so.
#
# Every shipped kernel against itself, at the limits of a build change, with other prompts and
# other noise in each run.  Draws are real decoding on one side and prefill on the other.

from pathlib import Path

import pytest
from benchmarks import assumptions

from servanda.engines import open_engine
from servanda.runner import run

ROOT = Path(__file__).parents[2]
RUNS = 25  # of each kernel
KERNELS = {"float32": "dtype: float32, attention: eager", **assumptions.KERNELS}
CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: a-against-a}}
kernels:
  train: {{engine: transformers, model: {root}/models/tiny-lm, {kernel}, batch_size: 16}}
  infer: {{engine: transformers, model: {root}/models/tiny-lm, {kernel}}}
workload:
  prompts: {root}/data/prompts.jsonl
  round: 32
  sampling: {{temperature: 1.0, max_new_tokens: 16, seed: {seed}}}
claim: realised
slices:
  - {{name: domain, split: labels.domain}}
  - {{name: depth, split: context.position, at: [4, 8]}}
  - {{name: unsure, match: {{context.entropy_nats: {{gte: 1.0}}}}}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.010, slices: all}}
  - {{id: tv-slice, metric: tv, aggregate: mean, at_most: 0.015, slices: [domain, depth, unsure]}}
  - {{id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.2, slices: all}}
  - {{id: drift, metric: tv, aggregate: mean, at_most: {{times: 3.0, of: self_noise}}, slices: all}}
promotion: {{offline: {{prompt_groups: [64, 96]}}}}
"""


@pytest.fixture(scope="module")
def opened():
    """Engines of one kernel, loaded once: two, for the two sides run side by side."""
    engines = {}

    def open_(kernel, side):
        key = (kernel.model_dump_json(), side)
        if key not in engines:
            engine = open_engine(kernel)
            engine.close = lambda: None
            engines[key] = engine
        return engines[key]

    return open_


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_against_itself_is_never_red(tmp_path, opened, name):
    red = []
    for seed in range(RUNS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = folder / "a.kernelcontract.yaml"
        path.write_text(CONTRACT.format(root=ROOT, kernel=KERNELS[name], seed=seed))
        verdict = run.check(path, run_dir=folder / "run", open=opened)
        red += [(seed, c.clause, c.slice) for c in verdict.cells if c.outcome == "violated"]
        assert verdict.outcome in ("holds", "inconclusive"), verdict
    assert not red
