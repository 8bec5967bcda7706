# The precision ladder: real formats of a bundled model, and where the report puts the candidate.

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from servanda.judgement.breakdown import Rung
from servanda.judgement.verdict import Verdict
from servanda.report.rungs import by_distance, place
from servanda.runner import precision_ladder
from servanda.runner.run import in_process
from tests import kit
from tests.test_command_line import servanda

ROOT = Path(__file__).parents[2]

CONTRACT = {
    "apiVersion": "servanda.dev/v1alpha1",
    "kind": "KernelContract",
    "metadata": {"name": "ladder"},
    "kernels": {
        "train": {"engine": "transformers", "model": str(ROOT / "models/tiny-lm")},
        "infer": {
            "engine": "transformers",
            "model": str(ROOT / "models/tiny-lm"),
            "dtype": "bfloat16",
            "quantization": "w8a8",
        },
    },
    "golden": {"prompts": "golden.jsonl"},
    "numerical": [{"id": "tv", "metric": "tv", "aggregate": "mean", "at_most": 0.1}],
    "observability": {"record": ["fingerprint", "token_ids", "sampling", "path", "batch_size"]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    lines = (ROOT / "data/golden.jsonl").read_text().splitlines()
    texts = [json.loads(line) for line in lines[::40]]
    rows = [{"prompt": text["prompt"][:200]} for text in texts[:4]]
    (tmp_path / "golden.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("servanda.runner.run.spawn", in_process)
    return tmp_path


def checked(contract, *options):
    Path("c.yaml").write_text(yaml.safe_dump(contract))
    return servanda("check", "c.yaml", "--ladder", "--run-dir", "run", "--quiet", *options)


@pytest.mark.slow
def test_the_candidate_stands_beside_its_own_format(folder, monkeypatch):
    some = ("bfloat16", "bfloat16, head in float32", "w8a8", "nvfp4")
    rungs = {name: precision_ladder.RUNGS[name] for name in some}
    none = {"missing": {"dtype": "bfloat16", "quantization": "q8_0"}}  # another engine's
    monkeypatch.setattr(precision_ladder, "RUNGS", rungs | none)

    done = checked(
        CONTRACT, "--report", "page.html", "--report", "page.md", "--report", "page.json"
    )

    assert done.exit_code == 0, done.output
    verdict = Verdict.from_dict(json.loads((folder / "page.json").read_text()))
    order = by_distance(verdict.circumstances.rungs)
    distance = {rung.name: rung.tv for rung in order if not rung.candidate}
    own = next(rung for rung in order if rung.candidate)
    assert own.tv == pytest.approx(distance["w8a8"], rel=1e-9)  # the same kernel
    assert 0 < distance["bfloat16, head in float32"] < distance["bfloat16"] < own.tv
    assert own.tv < distance["nvfp4"]
    assert "not measured: missing: engine 'transformers' has no quantization 'q8_0'" in done.stdout
    assert "\n→ infer kernel" in done.stdout
    assert "Precision ladder: mean tv to the train kernel" in (folder / "page.html").read_text()
    assert "Precision ladder: the model of train" in (folder / "page.md").read_text()


def test_a_reference_that_cannot_be_emulated_is_refused_with_its_engine(folder):
    kit.write(folder, golden=kit.golden(folder))

    done = servanda("check", "toy.kernelcontract.yaml", "--ladder", "--quiet")

    assert done.exit_code == 4
    assert not (folder / "runs").exists()  # refused before anything was measured
    assert done.stderr == (
        "the precision ladder emulates formats in the engine transformers, and train runs in "
        "table\n"
        "  hint: leave out --ladder, or let train be the transformers kernel of the same weights\n"
    )


def test_the_ladder_is_of_contracts_and_not_of_dumps(tmp_path):
    done = servanda("check", tmp_path, "--ladder")

    assert done.exit_code == 2
    assert "this is for a contract: leave out --ladder" in done.stderr


@pytest.mark.parametrize(
    ("tv", "sentence"),
    [
        (0.0005, "the infer kernel is nearer than bfloat16"),
        (0.003, "the infer kernel is farther away than bfloat16 and nearer than nvfp4"),
        (0.00102, "the infer kernel is as far away as bfloat16"),
        (0.5, "the infer kernel is farther away than nvfp4"),
        (None, ""),
    ],
)
def test_the_place_of_the_candidate_is_a_sentence(tv, sentence):
    formats = (Rung("nvfp4", 0.02), Rung("bfloat16", 0.001), Rung("none", missing="why"))

    assert place((*formats, Rung("B", tv, candidate=True))) == sentence
