"""The units of systemd, the manifests of Kubernetes and the chart, held against the program."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from servanda.gateway.proxy.config import Limits
from servanda.runner.load import load
from tests import transcripts
from tests.deploy.live import DEPLOY, ROOT
from tests.deploy.test_containers import variables

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CHART = DEPLOY / "helm" / "servanda"
MANIFESTS = DEPLOY / "kubernetes" / "servanda.yaml"
DOCUMENTS = [*yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8"))]
WORKLOADS = {
    d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] in ("Deployment", "StatefulSet")
}
PATHS = {"/healthz": "both", "/readyz": "gateway"}


def value(words, option):
    return words[words.index(option) + 1]


def setting(unit, key):
    (found,) = re.findall(rf"^{key}=(.*)$", unit.read_text(encoding="utf-8"), re.M)
    return found


def seconds(duration):
    assert duration.endswith("s")
    return int(duration[:-1])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_the_program_as_its_command_line_reads_it(unit):
    program, *words = shlex.split(setting(unit, "ExecStart"))
    assert Path(program).name == "servanda"
    transcripts.parsed(["servanda", *words])
    state = f"/var/lib/{setting(unit, 'StateDirectory')}"
    for option in {"--state", "--ledger", "--log"} & {*words}:
        assert value(words, option).startswith(f"{state}/")
    named = {*re.findall(r"SERVANDA_\w+", unit.read_text(encoding="utf-8"))}
    assert named <= variables()


def test_the_gateway_of_a_unit_follows_the_leader_of_the_other_and_has_time_to_drain():
    gateway, leader = (shlex.split(setting(unit, "ExecStart")) for unit in UNITS)
    assert value(gateway, "--leader") == f"http://{value(leader, '--admin')}"
    least = seconds(value(gateway, "--drain")) + Limits().drain_s
    assert int(setting(UNITS[0], "TimeoutStopSec")) > least


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    # verify wants a program that is there
    text = unit.read_text(encoding="utf-8").replace("/opt/servanda/bin/servanda", sys.executable)
    (tmp_path / unit.name).write_text(text)
    verify, security = ["verify", "--man=no"], ["security", "--offline=true", "--threshold=25"]
    for words in (verify, security):  # exposure: at most 2.5 of 10
        words = ["systemd-analyze", *words, str(tmp_path / unit.name)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_limits_calls_addresses_and_memory(unit):
    assert setting(unit, "SystemCallFilter") == "@system-service"
    families = {*setting(unit, "RestrictAddressFamilies").split()}
    assert {"AF_INET", "AF_INET6"} <= families <= {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"}
    assert re.fullmatch(r"\d+G", setting(unit, "MemoryMax"))


def containers():
    for name, workload in WORKLOADS.items():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        yield name, workload["spec"]["template"]["spec"], container


def test_a_container_runs_the_program_and_mounts_what_its_command_names():
    for _, pod, container in containers():
        words = container["args"]
        transcripts.parsed(["servanda", *words])
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for word in words:
            if word.startswith("/"):
                assert any(word.startswith(f"{mount}/") for mount in mounts), word
        assert {env["name"] for env in container["env"]} <= variables()
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_probes_and_services_use_ports_that_the_program_listens_on():
    listening = {}
    for name, pod, container in containers():
        words = container["args"]
        own = int((value(words, "--port" if "--port" in words else "--admin")).rpartition(":")[2])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert [*ports.values()] == [own]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                asked = container[probe]["httpGet"]
                assert ports[asked["port"]] == own
                assert PATHS[asked["path"]] in ("both", container["name"])
        listening[name] = (pod, ports)
    for service in (d for d in DOCUMENTS if d["kind"] == "Service"):
        (workload,) = (w for w in WORKLOADS.values() if _selects(service, w))
        _, ports = listening[workload["metadata"]["name"]]
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    (gateway,) = (c["args"] for _, _, c in containers() if c["name"] == "gateway")
    assert value(gateway, "--leader") == "http://servanda-leader:8081"
    assert "servanda-leader" in {d["metadata"]["name"] for d in DOCUMENTS if d["kind"] == "Service"}


def _selects(service, workload):
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return service["spec"]["selector"].items() <= labels.items()


def test_a_pod_has_time_to_drain():
    for _, pod, container in containers():
        if container["name"] == "gateway":
            least = seconds(value(container["args"], "--drain")) + Limits().drain_s
            assert pod["terminationGracePeriodSeconds"] > least


def test_the_contract_of_the_manifests_is_one(tmp_path):
    (config,) = (d for d in DOCUMENTS if d["kind"] == "ConfigMap")
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    contract = load(tmp_path / "contract.kernelcontract.yaml")
    assert contract.stable is not None and contract.routing.mode == "observe"


def test_the_manifests_are_what_the_chart_renders():
    chart = pytest.importorskip("helm_python.chart", reason="pip install helm-python-sdk")
    assert chart.lint(str(CHART))["errors"] == []
    with chart.Chart.load(str(CHART)) as loaded:
        rendered = loaded.render(name="servanda", namespace="default")
    documents = [d for name in sorted(rendered) for d in yaml.safe_load_all(rendered[name])]
    assert documents == DOCUMENTS


def test_kubernetes_accepts_the_manifests():
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in DOCUMENTS:
        schemas.validate(document, "1.30", strict=True)


def test_the_version_of_the_chart_is_that_of_the_package():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    version = re.search(r'"([\d.]+)"', (ROOT / "src/servanda/_version.py").read_text())[1]
    assert about["version"] == about["appVersion"] == version
