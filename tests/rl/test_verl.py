# verl's functions as recorded (scripts/record_trainer_calls.py) under the plug-in;
# tests/real_rl/test_verl.py has the real ones.

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl import DraftCounts, Monitor, package_version, verl_observer
from servanda.rl import verl as plugin
from servanda.rl.verl_observer import CONTRACT, RECOMPUTE, STATE, Halted, Watch
from tests.rl.monitor import verl_contracts
from tests.rl.monitor.verl_contracts import CORRECT, HALT, MASK, WATCH

torch = pytest.importorskip("torch")

PATH = Path(__file__).parents[1] / "data" / "verl_calls.npz"
METRICS = "verl.utils.debug.metrics"
HELPER = "verl.trainer.ppo.rollout_corr_helper"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
OTHERS = "verl.trainer.ppo.ray_trainer"
TRACKING = "verl.utils.tracking"
STAND_IN = {  # file -> text: what verl has there returns what verl returned
    "verl/__init__.py": "",
    "verl/utils/__init__.py": "",
    "verl/utils/debug/__init__.py": "",
    "verl/utils/debug/metrics.py": """\
from tests.rl.test_verl import RECORDED

def calculate_debug_metrics(data):
    return dict(RECORDED["measured"])
""",
    "verl/trainer/__init__.py": "",
    "verl/trainer/ppo/__init__.py": "",
    "verl/trainer/ppo/rollout_corr_helper.py": """\
import torch
from tests.rl.test_verl import RECORDED

def compute_rollout_correction_and_add_to_batch(batch, config):
    for name, values in RECORDED["corrected"].items():
        batch.batch[name] = torch.tensor(values)
    return batch, dict(RECORDED["told"])

""",
    "verl/trainer/ppo/v1/__init__.py": "",
    "verl/trainer/ppo/v1/trainer_base.py": """\
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics

class PPOTrainer:
    def _compute_old_log_prob(self, batch, metrics):
        metrics.update(calculate_debug_metrics(batch))
        return batch
""",
    "verl/trainer/ppo/ray_trainer.py": """\
class RayPPOTrainer:
    def _compute_old_log_prob(self, batch):
        return self.score(batch), 0.0

    def _update_actor(self, batch):
        return self.update(batch)
""",
    "verl/utils/tracking.py": """\
class Tracking:
    lines = []

    def log(self, data, step, backend=None):
        self.lines.append((data, step))
""",
}


def recorded():
    with np.load(PATH) as file:
        under = {
            place: {n.split("/")[1]: file[n] for n in file.files if n.startswith(f"{place}/")}
            for place in ("given", "corrected")
        }
        return {
            **under,
            "measured": json.loads(str(file["measured"])),
            "told": json.loads(str(file["told"])),
        }


RECORDED = recorded()


def batch():
    """A DataProto of the recorded arrays, as far as it is looked at."""
    given = {**RECORDED["given"]}
    uid = given.pop("uid").astype(object)
    tensors = {name: torch.tensor(values) for name, values in given.items()}
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": uid}, meta_info={})


@pytest.fixture
def verl(tmp_path, monkeypatch):
    """Stands in for verl, on the path and not yet imported; nothing of it stays."""
    for name, text in STAND_IN.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    finders = [*sys.meta_path]
    yield
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.split(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.fixture
def watched(verl, tmp_path):
    """verl's two modules, watched by a contract."""

    def make(rules, limit=0.9, stop=False):
        plugin.install(Monitor(verl_contracts.write(tmp_path, rules, limit), stop=stop))
        return importlib.import_module(METRICS), importlib.import_module(HELPER)

    return make


@pytest.mark.parametrize("before", [True, False])
def test_what_a_trainer_has_by_name_is_what_was_changed(verl, tmp_path, before):
    if before:
        importlib.import_module(TRAINER)
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)))
    trainer = importlib.import_module(TRAINER)
    for name in ("calculate_debug_metrics", "compute_rollout_correction_and_add_to_batch"):
        assert getattr(trainer, name).__servanda__
    assert importlib.import_module(METRICS).calculate_debug_metrics.__servanda__
    helper = importlib.import_module(HELPER)
    assert helper.compute_rollout_correction_and_add_to_batch.__servanda__


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("debug/metrics", "(data)", "(old, new)", "metrics.calculate_debug_metrics of verl takes "),
        ("debug/metrics", "calculate_debug", "debug", "calculate_debug_metrics of verl is not "),
        ("v1/trainer_base", "batch, metrics", "batch", "takes (self, batch), and not (self, batch"),
        ("v1/trainer_base", "PPOTrainer", "Trainer", "PPOTrainer._compute_old_log_prob of verl is"),
        ("ray_trainer", "_update_actor", "_update", "RayPPOTrainer._update_actor of verl is not"),
        (
            "utils/tracking",
            "data, step, backend",
            "data, backend",
            "Tracking.log of verl takes (self, data, b",
        ),
    ],
)
def test_a_verl_of_another_shape_is_an_error_where_it_is_imported(
    verl, tmp_path, monkeypatch, file, old, new, what
):
    (path,) = (tmp_path / "site").rglob(f"*{file}.py")
    path.write_text(path.read_text().replace(old, new))
    monkeypatch.setenv(CONTRACT, "verl-sync")
    plugin.install()
    name = ".".join(path.relative_to(tmp_path / "site").with_suffix("").parts)
    assert what in "\n".join(plugin.missing())
    with pytest.raises(MeasurementError) as caught:
        importlib.import_module(name)
    assert what in str(caught.value)
    assert str(caught.value).endswith(
        ": the run would go unwatched\n"
        "  hint: this is written against verl 0.9.1; without SERVANDA_VERL the run begins"
    )


def test_verl_is_watched_once(verl, tmp_path):
    first = plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)))
    assert plugin.install() is first


def test_what_verl_measures_is_measured_and_its_own_metrics_stay(watched):
    metrics, _ = watched(WATCH)
    found = metrics.calculate_debug_metrics(batch())
    given = RECORDED["given"]
    d_BT = given["old_log_probs"].astype(np.float64) - given["rollout_log_probs"]
    assert found["servanda/abs_log_ratio_nats"] == pytest.approx(np.abs(d_BT).mean(), rel=1e-5)
    assert found["servanda/active"] == found["servanda/compared"] == 1.0
    assert RECORDED["measured"].items() <= found.items()


def corrected(modules, data):
    metrics, helper = modules
    metrics.calculate_debug_metrics(data)
    return helper.compute_rollout_correction_and_add_to_batch(data, {})


def verls(told):
    """Metrics of verl's own."""
    return {name: value for name, value in told.items() if not name.startswith("servanda/")}


def test_what_verl_weighed_and_rejected_is_logged_and_said(watched, capsys):
    """The recorded run rejects tokens outside of a band, and the contract declares tis at 1.02."""
    found, told = corrected(watched(WATCH), batch())

    kept = float((found.batch["response_mask"] > 0).mean(dtype=float))
    assert told["servanda/loss/kept"] == pytest.approx(kept)
    assert told["servanda/loss/declared"] < 0.9
    assert verls(told) == RECORDED["told"]
    for name, values in RECORDED["corrected"].items():  # unless told, it is as verl made it
        np.testing.assert_array_equal(found.batch[name].numpy(), values)
    said = capsys.readouterr().err
    assert "the loss did not use the declared weighting (tis 1.02) on 37 of 192 tokens" in said
    assert "37 were dropped by the loss; its weights are the token's own w, and 0 outside" in said


def test_weights_that_the_monitor_wrote_are_the_declared_ones(watched, capsys):
    _, told = corrected(watched(CORRECT), batch())

    assert told["servanda/loss/mean_weight"] > 0
    assert "did not use the declared" not in capsys.readouterr().err


def test_correct_writes_the_declared_weights(watched):
    found, _ = corrected(watched(CORRECT), batch())
    given = RECORDED["given"]
    d_BT = given["old_log_probs"].astype(np.float64) - given["rollout_log_probs"]
    wanted_BT = np.minimum(np.exp(d_BT), 1.02)
    np.testing.assert_allclose(found.batch["rollout_is_weights"], wanted_BT, rtol=1e-5)


def test_mask_takes_the_red_slice_out_of_what_verl_left_in(watched):
    data = batch()
    data.batch["old_log_probs"][:, :4] -= 4.0
    found, _ = corrected(watched(MASK, limit=0.3), data)
    wanted_BT = RECORDED["corrected"]["response_mask"].copy()
    wanted_BT[:, :4] = 0
    np.testing.assert_array_equal(found.batch["response_mask"].numpy(), wanted_BT)


def test_another_batch_than_the_measured_one_is_not_corrected(watched):
    metrics, helper = watched(WATCH)
    metrics.calculate_debug_metrics(batch())
    other = batch()
    other.batch["old_log_probs"] = other.batch["old_log_probs"] - 1
    with pytest.raises(MeasurementError) as caught:
        helper.compute_rollout_correction_and_add_to_batch(other, {})
    assert str(caught.value) == (
        "verl corrects a batch that the monitor has not measured\n"
        "  hint: set actor_rollout_ref.rollout.calculate_log_probs=True: verl then hands over each "
        "batch with both logprobs"
    )


def test_what_a_trainer_never_takes_back_is_an_error_and_not_passed_over(watched):
    """The trainers of before V1 do not say whether they will."""
    metrics, _ = watched(CORRECT)
    metrics.calculate_debug_metrics(batch())
    with pytest.raises(ContractError, match="the contract says correct, and verl takes no batch"):
        metrics.calculate_debug_metrics(batch())


def test_a_batch_with_nan_is_the_batch_that_was_measured(watched):
    data = batch()
    data.batch["old_log_probs"][0, 0] = np.nan
    found, told = corrected(watched(WATCH), data)
    assert found is data and verls(told) == RECORDED["told"]


def test_a_run_stops_by_an_exception_when_told(watched):
    metrics, _ = watched(HALT, limit=0.3, stop=True)
    data = batch()
    data.batch["old_log_probs"] -= 4.0
    with pytest.raises(Halted, match="the contract says halt at step 1:\nverl: rollouts  against"):
        metrics.calculate_debug_metrics(data)


def test_a_run_does_not_stop_unless_told(watched):
    metrics, _ = watched(HALT, limit=0.3)
    data = batch()
    data.batch["old_log_probs"] -= 4.0
    assert metrics.calculate_debug_metrics(data)["servanda/violated_cells"] == 1.0


class Rows:
    """Stands in for a DataProto of a trainer that is no V1 trainer."""

    def __init__(self, tensors, columns, meta_info):
        self.batch, self.non_tensor_batch, self.meta_info = tensors, columns, meta_info

    def __len__(self):
        return len(self.batch["rollout_log_probs"])

    def select_idxs(self, places):
        return Rows(
            {name: values[places] for name, values in self.batch.items()},
            {name: values[places] for name, values in self.non_tensor_batch.items()},
            self.meta_info,
        )


def bypassed(ranks=2, logprobs=True, bypass=True):
    """(trainer, batch, sequences that were scored) of the trainers before V1, in bypass mode."""
    given, scored = batch(), []
    truth = given.batch["old_log_probs"]
    tensors = {**given.batch, "row": torch.arange(len(truth))}
    if logprobs:
        tensors["old_log_probs"] = tensors["rollout_log_probs"]
    else:
        del tensors["rollout_log_probs"]

    def score(part):
        scored.append(part.batch["row"].tolist())
        assert part.meta_info == {"temperature": 1.0, "micro_batch_size_per_gpu": 1}
        return SimpleNamespace(batch={"old_log_probs": truth[part.batch["row"]]})

    def update(data):
        assert data.meta_info == {"temperature": 1.0}  # nothing of ours
        return SimpleNamespace(meta_info={"metrics": {"actor/pg_loss": [0.1]}})

    trainer = importlib.import_module(OTHERS).RayPPOTrainer()
    trainer.score, trainer.update, trainer.global_steps = score, update, 5
    trainer.config = SimpleNamespace(algorithm={"rollout_correction": {"bypass_mode": bypass}})
    workers = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda _: [*range(ranks)])
    trainer.actor_rollout_wg = workers
    return trainer, Rows(tensors, given.non_tensor_batch, {"temperature": 1.0}), scored


def test_in_bypass_mode_other_trainers_have_a_share_scored_before_the_update(verl, tmp_path):
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)), 0.25)
    trainer, data, scored = bypassed()
    metrics = trainer._update_actor(data).meta_info["metrics"]

    (rows,) = scored
    assert len(rows) == 4
    given = {name: values[rows] for name, values in RECORDED["given"].items()}
    d_BT = given["old_log_probs"].astype(np.float64) - given["rollout_log_probs"]
    wanted = np.abs(d_BT[given["response_mask"] > 0]).mean()
    assert metrics["servanda/abs_log_ratio_nats"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["servanda/share"] == 0.25 and metrics["servanda/compared"] == 1.0
    assert metrics["actor/pg_loss"] == [0.1]
    np.testing.assert_array_equal(
        data.batch["old_log_probs"].numpy(), RECORDED["given"]["rollout_log_probs"]
    )


def test_a_trainer_that_scores_every_batch_has_none_scored_twice(verl, tmp_path):
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)))
    trainer, data, scored = bypassed(bypass=False)
    assert trainer._update_actor(data).meta_info["metrics"] == {"actor/pg_loss": [0.1]}
    assert not scored


def test_a_batch_that_bypass_mode_never_takes_back_is_an_error(verl, tmp_path):
    plugin.install(Monitor(verl_contracts.write(tmp_path, CORRECT)))
    trainer, data, _ = bypassed()
    with pytest.raises(ContractError, match="says correct, and verl takes no batch back"):
        trainer._update_actor(data)


@pytest.mark.parametrize(
    ("recompute", "ranks", "hint"),
    [
        (0, 2, "leave out SERVANDA_VERL_RECOMPUTE=0: the trainer then scores 6 % of the sequences"),
        (0.06, 64, "a batch needs at least one sequence for each rank of the actor"),
    ],
)
def test_bypass_mode_is_said_once_and_nothing_is_compared(
    verl, capsys, tmp_path, recompute, ranks, hint
):
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)), recompute)
    trainer, data, scored = bypassed(ranks)
    for _ in range(2):
        metrics = trainer._update_actor(data).meta_info["metrics"]
    assert metrics["servanda/active"] == 1.0 and metrics["servanda/compared"] == 0.0
    assert not scored
    assert capsys.readouterr().err == (
        "servanda: verl runs in bypass mode, where old_log_probs are those of the rollout: there "
        f"are no train logprobs, and nothing is compared.\n  hint: {hint}\n"
    )


ACTOR = {"actor/pg_loss": 0.1}


@pytest.mark.parametrize(
    ("updated", "why", "hint"),
    [
        (True, "its rollout returned no logprobs", f"set {verl_observer.ASKED}"),
        (
            False,
            "its trainer calls no function of verl that is watched",
            "`python -m servanda.rl.verl --check` lists the trainers that are judged",
        ),
    ],
)
def test_a_first_step_that_nobody_judged_is_said_once_when_it_is_logged(
    verl, tmp_path, capsys, updated, why, hint
):
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)))
    tracking = importlib.import_module(TRACKING).Tracking()
    tracking.log(data={"val/acc": 0.5}, step=0)
    if updated:
        trainer, data, _ = bypassed(logprobs=False)
        trainer._update_actor(data)
    assert not capsys.readouterr().err
    for step in (1, 2):
        tracking.log(data=ACTOR, step=step, backend=["console"])
    assert tracking.lines == [({"val/acc": 0.5}, 0), (ACTOR, 1), (ACTOR, 2)]
    assert capsys.readouterr().err == (
        f"servanda: error: step 1 of verl's log has no servanda/active: {why}, and this run is not "
        f"judged.\n  hint: {hint}\n"
    )


def test_nothing_is_said_of_a_run_that_is_judged(verl, tmp_path, capsys):
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)))
    tracking = importlib.import_module(TRACKING).Tracking()
    tracking.log({**ACTOR, "servanda/active": 1.0}, 1)
    tracking.log(ACTOR, 2)
    assert not capsys.readouterr().err


def test_bypass_mode_is_no_agreement():
    found = Watch(Monitor("verl-sync")).without_train(batch())
    assert found["servanda/coverage"] == found["servanda/compared"] == 0.0
    assert "servanda/abs_log_ratio_nats" not in found


def test_the_environment_names_the_contract_and_the_state_file(watched, tmp_path, monkeypatch):
    monkeypatch.setenv(CONTRACT, str(verl_contracts.write(tmp_path, WATCH)))
    monkeypatch.setenv(STATE, str(tmp_path / "steps.jsonl"))
    Watch().observe(batch())
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert json.loads(line)["name"] == "verl"


def test_in_bypass_mode_six_percent_are_scored_unless_told(monkeypatch):
    monkeypatch.delenv(RECOMPUTE, raising=False)
    assert Watch().recompute == 0.06
    monkeypatch.setenv(RECOMPUTE, "0")
    assert Watch().recompute == 0


def test_a_scored_share_is_judged_and_named_with_its_seconds(monkeypatch):
    import servanda.rl.verl_observer as observer

    given = batch()
    part = SimpleNamespace(
        batch={name: values[:8] for name, values in given.batch.items()},
        non_tensor_batch={"uid": given.non_tensor_batch["uid"][:8]},
    )
    for name, result in {"chosen": [0], "about": {}, "scored": part, "padded": part}.items():
        monkeypatch.setattr(observer, name, lambda *_, result=result: result)
    rollout = SimpleNamespace(calculate_log_probs=True)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    trainer = SimpleNamespace(config=config)
    keys = Keys(["key"] * 17, [{"is_padding": i == 16} for i in range(17)])
    watch = Watch(Monitor("verl-sync"), 0.5)
    first, second = (watch.of_bypass(trainer, keys) for _ in range(2))
    assert first["servanda/share"] == second["servanda/share"] == 0.5
    assert first["servanda/observed_sequences"] == 8
    assert "servanda/score_seconds_share" not in first
    assert 0 < second["servanda/score_seconds_share"] < 1


@pytest.mark.parametrize("text", ["half", "2", "-0.1", "nan"])
def test_a_share_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv(RECOMPUTE, text)
    with pytest.raises(ContractError) as caught:
        _ = Watch().recompute
    assert str(caught.value) == (
        f"SERVANDA_VERL_RECOMPUTE is {text!r}\n  hint: a share of sequences, such as 0.05"
    )


@pytest.mark.parametrize(
    ("found", "refused"), [("0.7.1", 1), ("0.9.1", 0), ("0.10.0", 0), ("1.0", 1)]
)
def test_an_unsupported_verl_is_refused_with_its_version_and_the_next_move(
    verl, tmp_path, monkeypatch, found, refused
):
    monkeypatch.setattr(package_version, "version", lambda _: found)
    monkeypatch.setenv(CONTRACT, "verl-sync")
    said = (
        f"verl {found} is installed, and its batches may mean something else\n"
        "  hint: Servanda supports verl 0.9 to 0.x, tested with 0.9.1: pip install verl==0.9.1"
    )
    assert (plugin.missing() == [said]) == bool(refused)
    sys.modules.pop(METRICS, None)
    plugin.install(Monitor(verl_contracts.write(tmp_path, WATCH)))
    if not refused:
        importlib.import_module(METRICS)
        return
    with pytest.raises(MeasurementError) as caught:
        importlib.import_module(METRICS)
    assert str(caught.value) == said


def test_drafts_and_labels_are_what_verl_knows_of_each_sequence():
    spec = {"spec_num_verify_steps": 5, "spec_num_draft_tokens": 15, "spec_num_accepted_tokens": 6}
    assert verl_observer.drafts_of([spec, {"num_cached_tokens": 3}, None, spec]) == DraftCounts(
        10, 30, 12
    )
    assert verl_observer.drafts_of([{"num_cached_tokens": 3}, None]) is None  # absent is not zero
    assert verl_observer.drafts_of([{**spec, "spec_num_accepted_tokens": 99}]) is None
    trainer = SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout={"name": "no-such"}))
    )
    tags = [{"min_global_steps": 4, "max_global_steps": 5}, {"min_global_steps": 5}, {}]
    extra = [{"num_cached_tokens": 16}, {"num_cached_tokens": None}, None]
    assert verl_observer._engine_labels(trainer, tags, extra) == {
        "weight_version": ["4-5", "5", ""],
        "cached_tokens": ["16", "", ""],
    }
    trainer.config.actor_rollout_ref.rollout.clear()  # a configuration that names no engine
    assert verl_observer._engine_labels(trainer, [{}], []) == {}


def test_a_launcher_is_told_what_is_missing(verl, monkeypatch):
    monkeypatch.delenv(CONTRACT, raising=False)
    assert plugin.missing() == [
        "SERVANDA_VERL is not set: name a contract, or a preset such as verl-sync"
    ]
    monkeypatch.setenv(CONTRACT, "verl-snc")
    wrong, metrics, helper, trainer, others, tracking = plugin.missing()
    assert "did you mean 'verl-sync'?" in wrong
    assert metrics == (
        "verl.utils.debug.metrics is not watched: is servanda installed in this environment, and "
        "does VERL_USE_EXTERNAL_PLUGINS leave it out?"
    )
    assert helper.startswith("verl.trainer.ppo.rollout_corr_helper is not watched")
    assert trainer.startswith("verl.trainer.ppo.v1.trainer_base is not watched")
    assert others.startswith("verl.trainer.ppo.ray_trainer is not watched")
    assert tracking.startswith("verl.utils.tracking is not watched")


def test_a_launcher_is_told_which_python_lacks_verl(monkeypatch):
    monkeypatch.setenv(CONTRACT, "verl-sync")
    monkeypatch.setattr(plugin, "find_spec", lambda _: None)
    assert plugin.missing() == [
        f"verl is not installed for {sys.executable}: pip install verl==0.9.1"
    ]


def test_a_launcher_is_told_every_package_that_verl_lacks_at_once(verl, tmp_path, monkeypatch):
    """Imports in a function or after `try` may fail, and those of modules that are not loaded."""
    site = tmp_path / "site" / "verl"
    for file, text in {
        "utils/debug/metrics.py": "import transfer_queue_\nfrom os import path\n",
        "trainer/ppo/core.py": "from cachetools_.keys import hashkey\nimport torch\n",
        "trainer/ppo/v1/__init__.py": "from ..core import hashkey\nfrom verl.utils import fs_\n",
        "utils/fs_.py": "import fastapi_, json\ntry:\n    import maybe_\nexcept ImportError: ...\n"
        "def late():\n    import later_\n",
        "unused.py": "import unused_\n",
    }.items():
        path = site / file
        path.write_text(text + (path.read_text() if path.exists() else ""))
    monkeypatch.setenv(CONTRACT, "verl-sync")
    monkeypatch.setitem(plugin._PACKAGES, "fastapi_", "FastAPI")

    assert {*plugin.absent()} == {"transfer_queue_", "cachetools_", "fastapi_"}
    (told, *more) = plugin.missing()
    assert told.startswith("verl imports ") and "FastAPI" in told.split("pip install ")[1]
    assert not [line for line in more if "cannot be imported" in line]


def test_the_package_tells_verl_which_module_to_import():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    _, group = text.split('[project.entry-points."verl.plugins"]\n')
    assert group.split("\n")[0] == f'servanda = "{plugin.__name__}"'


def test_without_the_variable_nothing_is_changed(verl, monkeypatch):
    monkeypatch.delenv(CONTRACT, raising=False)
    before = [*sys.meta_path]
    importlib.reload(plugin)
    assert sys.meta_path == before


class Keys:
    """Stands in for KVBatchMeta."""

    def __init__(self, keys, tags):
        self.keys, self.tags = keys, tags

    def select_keys(self, keys):
        return keys


def drawn(step, share, size=16, ranks=2, padding=1):
    workers = SimpleNamespace(_dispatch_info={"actor": [*range(ranks)]})
    trainer = SimpleNamespace(global_steps=step, actor_rollout_wg=workers)
    return verl_observer.chosen(trainer, range(padding, size), share)


def test_the_share_that_is_scored_is_even_by_the_step_alone_and_without_padding():
    sizes = {share: len(drawn(3, share)) for share in (0.01, 0.25, 0.3, 1.0)}
    assert sizes == {0.01: 2, 0.25: 2, 0.3: 4, 1.0: 14}
    assert drawn(3, 0.25) == drawn(3, 0.25) != drawn(4, 0.25)
    assert all(0 not in drawn(step, 0.5) for step in range(20))
    assert drawn(3, 0.5, size=2, ranks=4) is None
