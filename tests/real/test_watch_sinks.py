# Series and alerts of a watch in real libraries, each in an environment that has it.
#
# SERVANDA_VENVS holds `integrations`, which `make test-integrations` makes; W&B and SwanLab write
# offline, so nothing leaves this machine.

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-dump"


def python_of(venvs, name):
    python = venvs / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment {name} in {venvs}")
    return str(python)


def watched(python, folder, *options):
    """A watch of the example in another environment; its printed lines."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(folder / "swanlog"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    command = [python, "-m", "servanda", "watch", str(TINY), "--once", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "failed, and the watch goes on" not in done.stdout
    return done.stdout


def asked(python, folder, code):
    """What a few lines in that environment print, as JSON."""
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_trackio_has_every_step_and_both_alerts(venvs, tmp_path):
    python = python_of(venvs, "integrations")
    watched(python, tmp_path, "--trackio", "servanda-test/run-1")
    code = (
        "import json, sqlite3, glob\n"
        f"(path,) = glob.glob({str(tmp_path / 'trackio')!r} + '/servanda-test*.db')\n"
        "db = sqlite3.connect(path)\n"
        "steps = [r[0] for r in db.execute('select step from metrics order by step')]\n"
        "alerts = [list(r) for r in db.execute('select title, level from alerts')]\n"
        "print(json.dumps([steps, alerts]))\n"
    )
    steps, alerts = asked(python, tmp_path, code)
    assert steps == [*range(1, 17)]
    drift = "the drift is x2.36 [1.96, 2.75] of that in the first 5 steps (an estimate)"
    assert alerts == [
        ["step 10: violated on first 3 tokens of turn 2 and later", "error"],
        [f"step 12: {drift}", "warn"],
    ]


def test_tensorboard_reads_the_series_and_the_alerts(venvs, tmp_path):
    python = python_of(venvs, "integrations")
    watched(python, tmp_path, "--tensorboard", str(tmp_path / "tb"))
    code = (
        "import json\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        f"events = EventAccumulator({str(tmp_path / 'tb')!r})\n"
        "events.Reload()\n"
        "tags = events.Tags()\n"
        "steps = [e.step for e in events.Scalars('servanda/outcome')]\n"
        "found = events.Tensors('servanda/alerts')\n"
        "texts = [e.tensor_proto.string_val[0].decode() for e in found]\n"
        "print(json.dumps([sorted(tags['scalars']), steps, texts]))\n"
    )
    scalars, steps, texts = asked(python, tmp_path, code)
    assert len(scalars) <= 12 and "servanda/gradient_share" in scalars
    assert steps == [*range(1, 17)]
    assert [text.split(":")[0] for text in texts] == ["step 10", "step 12"]


def test_wandb_keeps_an_offline_run(venvs, tmp_path):
    python = python_of(venvs, "integrations")
    watched(python, tmp_path, "--wandb", "servanda-test/run-1")
    (data,) = (tmp_path / "wandb").glob("offline-run-*/run-run-1.wandb")
    written = data.read_bytes()
    assert b"servanda/gradient_share" in written
    assert b"step 10: violated on first 3 tokens" in written


def test_mlflow_has_every_step_and_both_alerts_in_one_run(venvs, tmp_path):
    python = python_of(venvs, "integrations")
    for _ in range(2):  # the second watch continues the run
        watched(python, tmp_path, "--mlflow", "servanda-test/run-1")
    code = (
        "import json, mlflow\n"
        f"client = mlflow.MlflowClient('sqlite:///{tmp_path}/mlflow.db')\n"
        "found = client.get_experiment_by_name('servanda-test').experiment_id\n"
        "(run,) = client.search_runs([found])\n"
        "history = client.get_metric_history(run.info.run_id, 'servanda/outcome')\n"
        "files = [f.path for f in client.list_artifacts(run.info.run_id, 'servanda/alerts')]\n"
        "path = client.download_artifacts(run.info.run_id, files[0])\n"
        "names = sorted(run.data.metrics)\n"
        "steps = [m.step for m in history]\n"
        "alert = run.data.tags['servanda.alert']\n"
        "rest = [run.info.run_name, run.info.status, files, open(path).read(), alert]\n"
        "print(json.dumps([names, steps, *rest]))\n"
    )
    names, steps, run, status, files, text, alert = asked(python, tmp_path, code)
    assert (run, status) == ("run-1", "FINISHED")
    assert steps == [*range(1, 17)] * 2
    assert len(names) <= 12 and "servanda/gradient_share" in names
    assert [file.split("/")[-1][:11] for file in files] == ["step-000010", "step-000012"]
    assert text.startswith("step 10: violated on first 3 tokens of turn 2 and later")
    assert alert.startswith("step 12: the drift is")


def test_swanlab_keeps_an_offline_run(venvs, tmp_path):
    python = python_of(venvs, "integrations")
    watched(python, tmp_path, "--swanlab", "servanda-test/run-1")
    (data,) = (tmp_path / "swanlog").glob("run-*/*.swanlab")
    assert b"servanda/gradient_share" in data.read_bytes()
    texts = [file.read_text() for file in sorted(data.parent.glob("media/**/*.txt"))]
    assert [text.split(":")[0] for text in texts] == ["step 10", "step 12"]
