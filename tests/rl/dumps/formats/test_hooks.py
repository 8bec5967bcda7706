# The hooks of docs/how-to/dumps.md, run as they stand there against stand-ins of the frameworks.

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import open_dump
from tests.rl.dumps.formats.made import DATA, EXPECTED, read
from tests.rl.dumps.formats.test_own import padded

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "dumps.md"
BLOCKS = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def block(word):
    (found,) = [code for code in BLOCKS if word in code]
    return compile(found, str(PAGE), "exec")


def modules(monkeypatch, name, **names):
    """A package with those names in its last module."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    module.__dict__.update(names)
    return module


def test_the_reading_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "exp_008").symlink_to(DATA / "nemo")
    monkeypatch.chdir(tmp_path)
    exec(block("dump.refused"), {})
    assert capsys.readouterr().out == "3 4 14\n\n"


def responses():
    """What both frameworks hand over: responses padded on the right."""
    return {
        "tokens": padded([s.response for s in EXPECTED], 7),
        "mask": padded([s.loss for s in EXPECTED], 7),
        "train": padded([s.train for s in EXPECTED], 7).astype(np.float32),
        "infer": padded([s.infer for s in EXPECTED], 7).astype(np.float32),
        "real": padded([[1] * len(s.response) for s in EXPECTED], 7),
    }


def holds(rows):
    for row, expected in zip(rows, EXPECTED, strict=True):
        assert row["tokens"] == expected.response
        assert row["mask"] == [m == 1 for m in expected.loss]
        assert row["train"].tolist() == expected.train
        assert row["infer"].tolist() == expected.infer


def test_the_hook_for_verl_writes_what_it_is_handed(tmp_path, monkeypatch):
    metrics = modules(
        monkeypatch, "verl.utils.debug.metrics", calculate_debug_metrics=lambda _: {"a": 1}
    )
    monkeypatch.chdir(tmp_path)
    exec(block("import verl"), {})
    made = responses()
    data = SimpleNamespace(
        batch={
            "responses": made["tokens"],
            "response_mask": made["mask"],
            "old_log_probs": made["train"],
            "rollout_log_probs": made["infer"],
            "attention_mask": np.concatenate([np.ones((4, 3), dtype=int), made["real"]], axis=1),
        },
        non_tensor_batch={"uid": np.array(["a", "a", "b", "b"])},
    )
    assert [metrics.calculate_debug_metrics(data) for _ in range(2)] == [{"a": 1}] * 2
    dump = open_dump(tmp_path)
    assert dump.steps == (0, 1)
    rows = read(dump).rows
    holds(rows[:4])
    assert [row["group"] for row in rows[:4]] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("complete", [True, False])
def test_the_hook_for_trl_writes_what_it_is_handed(tmp_path, monkeypatch, complete):
    torch = pytest.importorskip("torch")
    made = responses()
    prompts = padded([s.prompt for s in EXPECTED], 4, left=True)
    arrays = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts != 0).astype(int),
        "completion_ids": made["tokens"],
        "completion_mask": made["real"],
        "tool_mask": np.where(made["real"] == 1, made["mask"], 1),
        "old_per_token_logps": made["train"],
        "advantages": np.array([0.5, -0.5, 0.25, -0.25]),
    }
    if complete:
        arrays["sampling_per_token_logps"] = made["infer"]

    class GRPOTrainer:
        accelerator = SimpleNamespace(process_index=2, num_processes=3)
        state = SimpleNamespace(global_step=7)
        model = SimpleNamespace(training=True)
        use_vllm, vllm_mode, rollout_func = True, "server", None

        def __init__(self, *args):
            assert args == (...,)  # of the page

        def train(self):
            self._generate_and_score_completions([{"task": "math"}] * len(EXPECTED))

        def _generate_and_score_completions(self, inputs):
            return {name: torch.tensor(np.asarray(values)) for name, values in arrays.items()}

    modules(monkeypatch, "trl", GRPOTrainer=GRPOTrainer)
    monkeypatch.chdir(tmp_path)
    if complete:
        exec(block("from trl"), {})
        rows = read(open_dump(tmp_path)).rows
        assert [row["tokens"] for row in rows] == [s.tokens for s in EXPECTED]
        assert [
            row["infer"][-len(s.response) :].tolist() for row, s in zip(rows, EXPECTED, strict=True)
        ] == [s.infer for s in EXPECTED]
        assert len({row["group"] for row in rows}) == 2
        assert rows[0]["source"] == "rollouts/step_000008.rank2.parquet:1"
        assert (rows[0]["env"], rows[0]["rank"]) == ("math", "2")
        assert set(rows[1]["advantage"].tolist()) == {-0.5}
    else:  # a run that dumps nothing says so at its first step
        with pytest.raises(MeasurementError, match="TRL's batch has no logprobs of the sampler"):
            exec(block("from trl"), {})
        assert not list(tmp_path.iterdir())
