# The examples for Kubernetes: their commands are run, and the objects held against the schemas that
# Argo Rollouts, Gateway API, KServe and Kubernetes publish.

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from servanda.cli.main import main
from tests import kit

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "integrations" / "kubernetes"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
CRDS = os.environ.get("SERVANDA_CRDS")  # a folder with the YAML of custom resource definitions


def load(path):
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def job():
    [metric] = load(EXAMPLES / "analysis_job.yaml")["spec"]["metrics"]
    return metric["provider"]["job"]["spec"]


def test_the_command_of_the_job_ends_with_the_code_that_its_policy_reads(tmp_path):
    [container] = job()["template"]["spec"]["containers"]
    assert container["command"] == ["servanda"]
    ledger = str(tmp_path / "ledger.db")

    def run(*words):
        return CliRunner().invoke(main, [*map(str, words)], env={"SERVANDA_LEDGER": ledger})

    def code(path, stage):
        words = [w.replace("{{args.stage}}", stage) for w in container["args"]]
        words[words.index("/contract/my.kernelcontract.yaml")] = path
        done = run(*words)
        assert done.exit_code == 2 or json.loads(done.stdout)["yes"] == (done.exit_code == 0)
        return done.exit_code

    (tmp_path / "new").mkdir()
    path, _ = kit.write(tmp_path, limit=0.6)
    new, _ = kit.write(tmp_path / "new", limit=0.5)
    run("promote", path, "--run-dir", tmp_path / "run", "--quiet")
    yes, later, wrong = code(path, "offline"), code(new, "offline"), code(path, "nothing")
    run("promotion", "rollback", load(path)["metadata"]["name"], "--reason", "a test")
    back = code(path, "offline")

    assert (yes, later, wrong, back) == (0, 3, 2, 1)
    [rule] = job()["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["operator"] == "NotIn"
    assert rule["onExitCodes"]["values"] == [yes, later]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(CRDS is None, reason="SERVANDA_CRDS names no folder of CRDs")
def test_an_example_is_valid_by_the_published_schema(name):
    example = load(EXAMPLES / name)
    group, _, version = example["apiVersion"].partition("/")
    for path in Path(CRDS).glob("*.yaml"):
        crd = load(path)
        spec = crd["spec"]
        if (spec["group"], spec["names"]["kind"]) == (group, example["kind"]):
            schema = next(v for v in spec["versions"] if v["name"] == version)
            break
    else:
        pytest.fail(f"no definition of {example['kind']} in {CRDS}")
    errors = [
        *Draft202012Validator(closed(schema["schema"]["openAPIV3Schema"])).iter_errors(example)
    ]
    assert not errors, [f"{list(e.path)}: {e.message}" for e in errors]


def closed(schema):
    """A schema of Kubernetes as one of JSON Schema that refuses unknown keys."""
    if not isinstance(schema, dict):
        return schema
    made = {k: v for k, v in schema.items() if not k.startswith("x-") and k != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        made["properties"] = {k: closed(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            made[key] = closed(schema[key])
    return made


def test_the_job_is_valid_by_the_schema_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    metadata = {"name": "can-promote"}
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job()}

    validate.validate(made, "1.33", strict=True)

    made["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["codes"] = [3]
    with pytest.raises(validate.ValidationError):
        validate.validate(made, "1.33", strict=True)
