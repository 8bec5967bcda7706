# What users get wrong: a clear error with its place and next step, exit 2 or 4, no traceback.

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.contract.model import Kernel
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.runner import run
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace, align
from tests import kit


def check(path, *options):
    """`servanda check` in process, workers and all; (exit code, stdout, stderr)."""
    done = CliRunner().invoke(
        main, ["check", str(path), "--run-dir", str(path.parent / "run"), "--quiet", *options]
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert "Traceback" not in done.output
    return done.exit_code, done.stdout, done.stderr


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


CASES = [
    # name, (old, new) in the contract, exit code, words of the message
    ("broken YAML", ("claim: population", "claim: [population"), 2, ["toy.kernelcontract.yaml:"]),
    ("unknown key", ("claim:", "clam:"), 2, ["'clam'", "did you mean 'claim'?"]),
    ("unknown metric", ("metric: tv", "metric: tvv"), 2, [":17:22:", "did you mean 'tv'?"]),
    ("impossible limit", ("at_most: 0.05", "at_most: 1.5"), 2, [":17:52:", "1.5"]),
    ("limit of nothing", ("at_most: 0.05", "at_most: 0"), 2, ["cannot certify 0"]),
    ("no prompts file", ("prompts.jsonl", "nowhere.jsonl"), 2, ["nowhere.jsonl", "start from"]),
    ("out of reach", ("at_most: 0.05", "at_most: 0.0005"), 2, ["cannot hold", "at least"]),
    ("unknown engine", ("engine: table, model: q", "engine: tabel, model: q"), 2, ["'table'"]),
    ("no such table", ("q.json", "r.json"), 2, [":6:33: there is no", "r.json"]),
]


@pytest.mark.parametrize(
    ("change", "code", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_wrong_text_is_answered_with_place_and_next_step(tmp_path, change, code, words):
    path, _ = kit.write(tmp_path)
    exit_code, out, err = check(edited(path, *change))
    assert exit_code == code and not out
    for word in words:
        assert word in err


def test_a_missing_contract(tmp_path):
    code, _, err = check(tmp_path / "nowhere.kernelcontract.yaml")
    assert code == 2 and "cannot be read: No such file or directory" in err


@pytest.mark.parametrize(
    ("metric", "what"),
    [("router_flip", "routes of experts"), ("gate_drift", "weights of experts")],
)
def test_routes_that_no_kernel_records(tmp_path, metric, what):
    more = f"  - {{id: routes, metric: {metric}, aggregate: mean, at_most: 0.02}}\n"
    path, _ = kit.write(tmp_path, more=more)
    code, _, err = check(path)
    assert code == 4 and f"train recorded no {what}" in err
    assert "let engine transformers run the model" in err


def test_a_contract_that_is_not_text(tmp_path):
    path = tmp_path / "x.kernelcontract.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = check(path)
    assert code == 2 and "not UTF-8" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "a line is a JSON object"),
        ('{"labels": {}}', "either 'prompt' or 'token_ids'"),
        ('{"prompt": ""}', "at least one character"),
        ('{"prompt": "a", "token_ids": [1]}', "either 'prompt' or 'token_ids'"),
        ('{"token_ids": [1.5]}', "not a token id"),
        ('{"prompt": "a", "labels": 3}', "'labels' is an object"),
        ('{"messages": []}', "chat template"),
        ('{"prompt": "a", "lables": {}}', "did you mean 'labels'?"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_prompt_that_is_none_is_named_by_its_line(tmp_path, line, words):
    path, _ = kit.write(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + "\n" + line + "\n")
    code, _, err = check(path)
    assert code == 2 and words in err and "prompts.jsonl:5:1:" in err


def test_an_empty_prompts_file(tmp_path):
    path, _ = kit.write(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n")
    code, _, err = check(path)
    assert code == 2 and "there is no prompt in this file" in err


def test_an_empty_slice_is_found_before_anything_runs(tmp_path):
    path, _ = kit.write(
        tmp_path, slices="slices: [{name: rare, match: {labels.first: {in: [zebra]}}}]"
    )
    code, _, err = check(path)
    assert code == 2 and "slice 'rare' of clause 'tv' is empty" in err
    assert ":17:" in err and not (tmp_path / "run" / "attempt-1").exists()


def test_a_split_by_a_label_that_no_line_has(tmp_path):
    path, _ = kit.write(tmp_path, slices="slices: [{name: dom, split: labels.frist}]")
    code, _, err = check(path)
    assert code == 2 and "label 'frist', which no line of" in err and "'first'" in err


def test_positions_that_no_answer_reaches(tmp_path):
    path, _ = kit.write(tmp_path, slices="slices: [{name: d, split: context.position, at: [4, 6]}]")
    code, _, err = check(path)
    assert code == 2 and "slice 'd>=6' of clause 'tv' is empty" in err


def test_a_clause_of_no_slice(tmp_path):
    path, _ = kit.write(tmp_path)
    code, _, err = check(edited(path, "at_most: 0.05", "at_most: 0.05, slices: []"))
    assert code == 2 and "applies to no slice" in err


def test_a_bug_of_ours_does_not_exit_as_violated(tmp_path, monkeypatch):
    path, _ = kit.write(tmp_path)

    def broken(*_, **__):
        return 1 / 0

    monkeypatch.setattr(run, "check", broken)
    code, _, err = check(path)
    assert code == 4 and "servanda failed: ZeroDivisionError" in err

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "check", interrupted)
    assert check(path)[0] == 130


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_change_the_answer(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.3)})
    command = f"{sys.executable} -m servanda check {path} --run-dir {tmp_path / 'r'} --quiet"
    script = f"({command}; echo $? > {tmp_path / 'code'}) | true"
    subprocess.run(["bash", "-c", script], check=True)
    assert (tmp_path / "code").read_text().strip() == "1"


def test_a_slice_of_lengths_that_no_prompt_has(tmp_path):
    path, _ = kit.write(
        tmp_path, slices="slices: [{name: long, match: {request.prompt_tokens: {gte: 9}}}]"
    )
    code, _, err = check(path)
    assert code == 2 and "slice 'long'" in err and "longest: 1 tokens" in err


def test_a_prompt_with_a_word_that_the_vocabulary_lacks(tmp_path):
    path, _ = kit.write(tmp_path, prompts=("a", "zebra"))
    code, _, err = check(path)
    assert code == 4 and "no token 'zebra'" in err


def test_token_ids_beyond_the_vocabulary(tmp_path):
    path, _ = kit.write(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [0, 99]}\n')
    code, _, err = check(path)
    assert code == 2 and "prompts.jsonl:1:1: id 99" in err


def test_other_tokenizers_are_refused(tmp_path):
    path, _ = kit.write(tmp_path, infer=", fault: {permuted_ids: 1}")
    code, _, err = check(path)
    assert code == 4 and "the tokenizers differ: id 0 is 'a' on train" in err


def test_other_weights_are_refused(tmp_path):
    path, _ = kit.write(tmp_path)
    kit.table(tmp_path, "q.json", {"": kit.BASE}, weights="another policy")
    code, _, err = check(path)
    assert code == 4 and "the weights differ in 1 of 1 tensors" in err


def test_a_run_directory_that_cannot_be_one(tmp_path):
    path, _ = kit.write(tmp_path)
    (tmp_path / "run").write_text("a file")
    code, _, err = check(path)
    assert code == 4 and "cannot be used as a run directory" in err


def test_unknown_options_and_formats_exit_2(tmp_path):
    path, _ = kit.write(tmp_path)
    assert check(path, "--format", "pdf")[0] == 2
    assert check(path, "--nonsense")[0] == 2


@pytest.mark.slow
def test_a_worker_killed_by_a_signal_is_named_and_the_run_goes_on(tmp_path):
    path, _ = kit.write(tmp_path, first=300, last=320)
    workers = []

    def remember(kernel, side):
        workers.append(spawn(kernel, side))
        return workers[-1]

    def kill(progress):
        if progress.what == "prompt groups" and progress.done >= 64:
            os.kill(workers[-1].pid, signal.SIGKILL)

    with pytest.raises(MeasurementError, match=r"worker \(pid \d+\) was killed by SIGKILL") as e:
        run.check(path, run_dir=tmp_path / "run", open=remember, watch=kill)
    assert "run the same command again" in str(e.value)
    assert e.value.exit_code == 4
    resumed = run.check(path, run_dir=tmp_path / "run")
    assert resumed == run.check(path, run_dir=tmp_path / "whole", open=run.in_process)


def test_a_worker_that_cannot_start_says_why():
    refused = pytest.raises(MeasurementError, match=r"infer: the table .nowhere\.json. cannot")
    with closing(spawn(Kernel(engine="table", model="nowhere.json"), "infer")) as worker, refused:
        worker.describe()


def test_a_worker_leaves_with_its_parent(tmp_path):
    """Anyone who kills -9 the parent leaves no child behind."""
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    code = (
        "import os, signal, sys\n"
        "from servanda.contract.model import Kernel\n"
        "from servanda.engines.worker import spawn\n"
        "worker = spawn(Kernel(engine='table', model=sys.argv[1]), 'infer')\n"
        "worker.describe()\n"
        "print(worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "p.json"], capture_output=True, text=True
    )
    pid = int(done.stdout)
    for _ in range(200):
        if not alive(pid):
            return
        subprocess.run([sys.executable, "-c", ""], check=True)  # some time passes
    pytest.fail(f"worker {pid} lives on")


def alive(pid):
    """Whether a process runs; a zombie that no one has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def traces(logp_train, logp_infer, tokens=(1, 2, 3)):
    def trace(logp, ids):
        return Trace(
            np.array([0]),
            np.array([len(ids)]),
            np.array([False]),
            np.array([1]),
            np.array(ids),
            {"logp": np.array(logp)},
        )

    return trace(logp_train, tokens), trace(logp_infer, (1, 2, 3))


def test_nan_and_infinities_are_missing_and_minus_inf_of_train_is_not():
    inf, nan = np.inf, np.nan
    pair = align(*traces([-1.0, -inf, nan], [-1.0, -1.0, -1.0]))
    assert pair.usable_N.tolist() == [True, True, False]
    pair = align(*traces([-1.0, -1.0, inf], [nan, -inf, -1.0]))
    assert pair.usable_N.tolist() == [False, False, False]


def test_traces_of_other_tokens_do_not_align():
    with pytest.raises(Exception, match="id 3 on infer, 4 on train"):
        align(*traces([-1.0] * 3, [-1.0] * 3, tokens=(1, 2, 4)))


def test_a_nan_from_a_kernel_ends_in_an_error_and_never_in_a_pass(tmp_path):
    """A kernel whose logprobs are NaN on one token in twenty."""
    path, _ = kit.write(tmp_path, last=400)

    def broken(kernel, side):
        engine = run.in_process(kernel, side)
        if side == "train":
            score = engine.score

            def score_with_holes(batch: Batch, sampling: Sampling, path: str) -> Trace:
                trace = score(batch, sampling, path)
                trace.columns["logp"][::20] = np.nan
                return trace

            engine.score = score_with_holes
        return engine

    verdict = run.check(path, run_dir=tmp_path / "run", open=broken)
    assert (verdict.outcome, verdict.exit_code) == ("error", 4)
    tv = next(c for c in verdict.cells if c.clause == "tv")
    assert tv.missing > 0 and tv.outcome == "inconclusive"
    assert json.dumps(verdict.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "transformers"),
        ("psycopg.rows", "postgres"),
        ("prometheus_client", "gateway"),
        ("hypothesis", None),  # of developers
        ("servanda.cli.nothing", None),  # a bug of ours
    ],
)
def test_a_missing_module_is_found_in_the_extra_that_installs_it(module, extra):
    assert import_module("servanda.cli.main")._extra_of(module) == extra


def test_a_preflight_without_torch_says_what_to_install():
    script = "import sys; sys.modules['torch'] = None; from servanda.cli import main; main()"
    command = [sys.executable, "-c", script, "preflight", "setup.py:trainee"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "needs torch" in done.stderr and "servanda[transformers]" in done.stderr
