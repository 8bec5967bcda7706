# Packed batches of TRL's AsyncGRPOTrainer under the mixin; tests/real_rl/test_trl.py is the run.

import queue
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl import Monitor
from servanda.rl.trl import MonitoredAsync, Origins
from tests.rl.monitor import verl_contracts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

WIDTH, PROMPT = 24, 2
RNG = np.random.default_rng(0)
SAMPLED = [-RNG.exponential(1.0, WIDTH).astype(np.float32) for _ in range(3)]
SCORED = [np.minimum(logp + 0.01, 0).astype(np.float32) for logp in SAMPLED]
VERSIONS = (3, 4, 4)


def sample(i):
    """A response as TRL's worker puts it into its queue."""
    return SimpleNamespace(
        completion_mask=np.array([0] * PROMPT + [1] * WIDTH),
        old_log_probs=np.array([0.0] * PROMPT + SAMPLED[i].tolist()),
        model_version=VERSIONS[i],
        group_id=i // 2,
    )


def packed(*which):
    """The loss terms of some responses, as TRL packs them into a row, and padding behind."""
    index = torch.arange(len(which) * WIDTH)[None]
    pad = torch.full((1, 5), -1)
    zeros = torch.zeros(1, 5)

    def row(parts):
        return torch.cat([torch.tensor(np.concatenate(parts))[None].float(), zeros], dim=1)

    return {
        "token_index": torch.cat([index, pad], dim=1),
        "old_log_probs": row([SAMPLED[i] for i in which]),
        "advantages": row([np.full(WIDTH, float(i)) for i in which]),
        "segment_id": row([np.full(WIDTH, at) for at, _ in enumerate(which)]).long(),
    }


class Model(torch.nn.Module):
    """Gives the recorded logprobs of the responses that it is asked for."""

    def forward(self, which):
        logp = np.concatenate([SCORED[i] for i in which])
        return SimpleNamespace(log_probs=torch.tensor(logp)[None])


class Async:
    """Stands in for AsyncGRPOTrainer: what the mixin reads, and a loss that runs the model."""

    def __init__(self):
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
        self.args = SimpleNamespace(weight_sync_steps=1)
        self.state = SimpleNamespace(global_step=0)
        self.rollout_queue, self.model_version = queue.Queue(), 5
        self.callbacks, self._metrics = [], {"train": defaultdict(list)}

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def compute_loss(self, model, inputs):
        return model(inputs["which"]).log_probs.sum()


class Kept(MonitoredAsync, Async): ...


@pytest.fixture
def held(tmp_path):
    def make(rules=verl_contracts.WATCH, limit=0.9, **monitor):
        path = verl_contracts.write(tmp_path, rules, limit)
        return Kept(monitor=Monitor(path, **monitor))

    return make


def stepped(trainer, *batches):
    """A step of these micro-batches, up to the end of its update."""
    model = Model().train()
    for i in range(len(SAMPLED)):
        trainer.rollout_queue._queue.put(sample(i))
        trainer.rollout_queue.get(timeout=60)
    for which in batches:
        trainer.compute_loss(model, {**packed(*which), "which": which})
    trainer.state.global_step += 1
    trainer.model_version += 1  # the sync comes before the monitor's callback
    control = SimpleNamespace(should_training_stop=False)
    trainer.callbacks[-1].on_step_end(trainer.args, trainer.state, control)
    return control


def test_a_step_is_all_its_micro_batches_and_each_response_by_itself(held):
    trainer = held()
    stepped(trainer, (0, 1), (2,))
    log = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert (log["servanda/observed_tokens"], log["servanda/observed_sequences"]) == (3 * WIDTH, 3)
    d = np.abs(np.concatenate(SCORED).astype(np.float64) - np.concatenate(SAMPLED))
    assert log["servanda/abs_log_ratio_nats"] == pytest.approx(d.mean(), rel=1e-5)
    assert (log["servanda/coverage"], log["servanda/active"]) == (1.0, 1.0)
    assert log["servanda/staleness/max"] == 2.0  # version 5 trains what 3 sampled
    assert log["servanda/staleness/mean"] == pytest.approx((2 + 1 + 1) / 3)


def test_responses_have_the_group_and_the_weights_that_the_queue_named(held):
    trainer = held()
    seen = []

    def observe(*_, **given):
        seen.append(given)
        return SimpleNamespace(metrics={}, action=())

    trainer.monitor.observe = observe
    stepped(trainer, (2, 0))
    (given,) = seen
    assert given["groups"] == ["1", "0"] and given["staleness"] == [1, 2]
    assert given["labels"] == {"rank": ["0", "0"], "weight_version": ["4", "3"]}
    assert given["weights"] == 0
    np.testing.assert_array_equal(given["advantages"][:, 0], [2.0, 0.0])


def test_a_response_that_the_queue_never_named_has_no_age(held):
    trainer = held()
    trainer.rollout_queue = Origins(queue.Queue())  # another rank took it, and has not said so
    trainer.rollout_queue._queue = SimpleNamespace(put=lambda _: None, get=lambda **_: sample(0))
    stepped(trainer, (1, 2))
    assert "servanda/staleness/max" not in trainer._metrics["train"]


@pytest.mark.parametrize("stop", [True, False])
def test_a_run_ends_when_the_contract_says_halt(held, monkeypatch, stop):
    monkeypatch.setitem(globals(), "SCORED", [logp - 4 for logp in SAMPLED])
    trainer = held(verl_contracts.HALT, 0.3, stop=stop)
    assert stepped(trainer, (0, 1, 2)).should_training_stop == stop


def test_a_step_without_a_seen_loss_is_an_error(held):
    with pytest.raises(MeasurementError, match="step 1 ended without a loss whose logprobs"):
        stepped(held())


def test_a_contract_that_acts_on_tokens_is_refused(held):
    with pytest.raises(ContractError, match="loss is computed before a step is judged"):
        held(verl_contracts.MASK)
