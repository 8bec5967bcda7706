# Nothing measured is lost, doubled or drawn again, whatever stops a run.

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from servanda.errors import Interrupted, MeasurementError
from servanda.runner import run
from servanda.runner.measurement import Progress
from tests import kit

KILLS = 6  # tests/slow/test_kill.py does the same 50 times
SEED = 5


def write(folder):
    return kit.write(
        folder,
        q={"": kit.moved(kit.BASE, 0.02), "a": kit.moved(kit.BASE, 0.03)},
        golden=kit.golden(folder),
        slices="slices: [{name: first, split: labels.first}]",
        more="  - {id: real, metric: tv, aggregate: mean, at_most: 0.2, claim: realised}",
        limit=0.1,
        first=600,
        last=600,
        round=24,
    )[0]


def timeless(verdict):
    """A verdict's JSON without how long it took, which no two runs share."""
    data = json.loads(verdict)
    data["circumstances"]["seconds"] = None
    return json.dumps(data)


def content(file):
    text = file.read_bytes()
    return timeless(text).encode() if file.name == "verdict.json" else text


def files(root):
    """Digest of every file of a run directory but the lock."""
    return {
        str(p.relative_to(root)): hashlib.sha256(content(p)).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def command(path, root):
    """`servanda check` as a user starts it, every engine in its worker."""
    argv = [sys.executable, "-m", "servanda", "check", str(path), "--run-dir", str(root)]
    return [*argv, "--quiet", "--format", "json"]


def measured(path, root):
    """An undisturbed `check`: (what it printed, its files, seconds)."""
    started = time.monotonic()
    done = subprocess.run(command(path, root), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return timeless(done.stdout), files(root), time.monotonic() - started


def killed_at(path, root, moment):
    """Whether `check` was still at work when it was killed after that many seconds."""
    child = subprocess.Popen(
        command(path, root), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        child.wait(moment)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
    return child.wait() == -signal.SIGKILL


def kill_and_resume(folder, kills, seed):
    """Kill `check` at that many random moments, each of a run of its own, and resume it."""
    path = write(folder)
    printed, whole, took = measured(path, folder / "whole")
    rng = random.Random(seed)
    landed = 0
    for trial in range(5 * kills):  # a moment after the end is no trial
        root = folder / f"killed-{trial}"
        if killed_at(path, root, rng.uniform(0.0, took)):
            landed += 1
            resumed, kept, _ = measured(path, root)
            assert (resumed, kept) == (printed, whole), f"trial {trial}"
        if landed == kills:
            return
    raise AssertionError(f"only {landed} of {kills} kills landed")


@pytest.mark.slow
def test_kill_9_at_random_moments_leaves_no_trace_in_the_evidence(tmp_path):
    kill_and_resume(tmp_path, KILLS, SEED)


@pytest.mark.slow
def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(tmp_path):
    path = write(tmp_path)
    root = tmp_path / "run"

    def stop(progress: Progress):
        if progress.what == "prompt groups" and progress.done >= 48:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="what was measured is kept") as caught:
        run.check(path, run_dir=root, open=run.in_process, watch=stop)
    assert caught.value.exit_code == 130
    kept = files(root)
    assert any(name.endswith("000001.train.parquet") for name in kept)
    verdict = run.check(path, run_dir=root, open=run.in_process)
    assert kept.items() <= files(root).items()
    assert verdict == run.check(path, run_dir=tmp_path / "whole", open=run.in_process)


@pytest.mark.slow
def test_a_partial_file_is_thrown_away_and_a_damaged_one_named(tmp_path):
    path = write(tmp_path)
    root = tmp_path / "run"
    whole = run.check(path, run_dir=root, open=run.in_process)
    victim = root / "attempt-1" / "rounds" / "000003.train.parquet"
    data = victim.read_bytes()
    victim.rename(victim.with_name(victim.name + ".partial"))
    assert run.check(path, run_dir=root, open=run.in_process) == whole
    assert victim.read_bytes() == data and not list(root.rglob("*.partial"))
    run.check(path, run_dir=root, open=run.in_process)
    victim = root / "attempt-1" / "rounds" / "000002.infer.parquet"
    victim.write_bytes(victim.read_bytes()[:100])
    with pytest.raises(MeasurementError, match="delete that one file") as caught:
        run.check(path, run_dir=root, open=run.in_process)
    assert str(victim) in str(caught.value)


def test_two_processes_do_not_measure_in_one_directory(tmp_path):
    path = write(tmp_path)
    from servanda.runner.run_directory import opened

    busy = pytest.raises(MeasurementError, match="another servanda is measuring")
    with opened(tmp_path / "run"), busy:
        run.check(path, run_dir=tmp_path / "run", open=run.in_process)


@pytest.mark.slow
def test_changed_text_and_changed_prompts_expire_the_evidence(tmp_path):
    path = write(tmp_path)
    root = tmp_path / "run"
    run.check(path, run_dir=root, open=run.in_process)
    text = path.read_text()
    path.write_text(text.replace("at_most: 0.1}", "at_most: 0.11}"))
    with pytest.raises(MeasurementError, match="the contract changed since") as caught:
        run.check(path, run_dir=root, open=run.in_process)
    assert "--fresh opens attempt 2" in str(caught.value)
    path.write_text("# a comment is no change\n" + text)
    run.check(path, run_dir=root, open=run.in_process)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + '{"prompt": "d", "labels": {"first": "a"}}\n')
    with pytest.raises(MeasurementError, match="the prompts or golden texts changed since"):
        run.check(path, run_dir=root, open=run.in_process)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX")
def test_a_full_disk_keeps_what_was_measured(tmp_path):
    """A limit on the size of files stands in for the disk: the write itself fails."""
    path = write(tmp_path)
    root = tmp_path / "run"
    code = (
        "import resource, signal, sys, servanda\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from servanda.runner import run\n"
        "def stop(p):\n"
        "    if p.what == 'prompt groups' and p.done >= 48:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "try:\n"
        "    run.check(sys.argv[1], run_dir=sys.argv[2], open=run.in_process, watch=stop)\n"
        "except servanda.ServandaError as error:\n"
        "    print(error)\n"
        "    sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, root],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stderr
    assert "cannot be written: File too large" in done.stdout
    assert "finished rounds are kept" in done.stdout
    assert run.check(path, run_dir=root, open=run.in_process).exit_code == 0
