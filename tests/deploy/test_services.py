"""The units of systemd, the manifests of Kubernetes and the chart, held against the program."""

import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
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


def workloads(documents):
    return {
        d["metadata"]["name"]: d for d in documents if d["kind"] in ("Deployment", "StatefulSet")
    }


def containers(documents=DOCUMENTS):
    for name, workload in workloads(documents).items():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        yield name, workload["spec"]["template"]["spec"], container


def runs_what_it_mounts(documents):
    """Each container's command is one, and its paths, variables and volumes are there."""
    for name, pod, container in containers(documents):
        words = container["args"]
        transcripts.parsed(["servanda", *words])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        claims = workloads(documents)[name]["spec"].get("volumeClaimTemplates", ())
        volumes = {one["name"] for one in pod["volumes"]}
        assert {*mounts.values()} == volumes | {one["metadata"]["name"] for one in claims}
        for word in words:
            if word.startswith("/") and "*" not in word:
                assert any(f"{word}/".startswith(f"{mount}/") for mount in mounts), word
        assert {env["name"] for env in container["env"]} <= variables()
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_a_container_runs_the_program_and_mounts_what_its_command_names():
    runs_what_it_mounts(DOCUMENTS)


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
        (workload,) = (w for w in workloads(DOCUMENTS).values() if _selects(service, w))
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
    assert rendered({}) == DOCUMENTS


def rendered(values):
    """The documents of the chart with these values, after lint."""
    chart = pytest.importorskip("helm_python.chart", reason="pip install helm-python-sdk")
    with chart.Chart.load(str(CHART)) as loaded:
        files = loaded.render(values, name="servanda", namespace="default")
    assert chart.lint(str(CHART), values)["errors"] == []
    return [d for name in sorted(files) for d in yaml.safe_load_all(files[name])]


SECRET = {"name": "SERVANDA_SLACK", "valueFrom": {"secretKeyRef": {"name": "slack", "key": "url"}}}
STATE = "postgresql://servanda@db/servanda"
LARGE = {"prompts": "x" * 1_048_576}


def test_the_chart_has_a_value_for_each_part_of_the_documents():
    leader = {"replicas": 2, "state": STATE, "webhook": "router", "args": ["--lease", "5s"]}
    gateway = {
        "replicas": 1,
        "allow": ["/v1/files/*"],
        "log": "served",
        "args": ["--log-keep", "9d"],
    }
    more = {"tls": "tls", "promptsClaim": "prompts", "models": "models", **LARGE}
    documents = rendered({"leader": leader | {"env": [SECRET]}, "gateway": gateway, **more})

    runs_what_it_mounts(documents)
    accepted(documents)
    ((_, _, serves), (_, pod, leads)) = containers(documents)
    at = "https://servanda-leader-{}.servanda-leaders:8081"
    leaders = [url for word, url in pairwise(serves["args"]) if word == "--leader"]
    assert leaders == [at.format(0), at.format(1)]
    assert value(serves["args"], "--allow") == "/v1/files/*"
    assert value(serves["args"], "--log-keep") == "9d"
    assert (value(leads["args"], "--state"), value(leads["args"], "--lease")) == (STATE, "5s")
    env = {one["name"]: one for one in leads["env"]}
    assert env["SERVANDA_LEDGER"]["value"] == STATE
    assert env["SERVANDA_WEBHOOK"]["valueFrom"]["secretKeyRef"] == {"name": "router", "key": "url"}
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert [one["claimName"] for one in claims] == ["models", "prompts"]
    for one in (serves, leads):
        probes = [one[name]["httpGet"] for name in one if name.endswith("Probe")]
        assert probes and all(probe["scheme"] == "HTTPS" for probe in probes)
        assert value(one["args"], "--tls-cert") == "/etc/servanda-tls/tls.crt"
    (stateful,) = (d for d in documents if d["kind"] == "StatefulSet")
    assert (stateful["spec"]["replicas"], stateful["spec"]["serviceName"]) == (
        2,
        "servanda-leaders",
    )
    (headless,) = (d for d in documents if d.get("spec", {}).get("clusterIP") == "None")
    assert headless["metadata"]["name"] == "servanda-leaders"
    (config,) = (d for d in documents if d["kind"] == "ConfigMap")
    assert {*config["data"]} == {"contract.kernelcontract.yaml"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"contract": " \n"},
            "contract: it is empty; --set-file contract=FILE takes it from a file",
        ),
        (
            {"prompts": ""},
            "prompts: they are empty; --set-file prompts=FILE takes them from a file",
        ),
        (LARGE, "bytes, and a ConfigMap holds 1048576; put the prompts into a volume"),
        ({"leader": {"replicas": 2}}, "leader.state to postgresql://USER@HOST/DATABASE"),
        ({"leader": {"state": "postgresql://a:b@db/c"}}, "leader.state: a password in the URL"),
        ({"gateway": {"log": "served"}}, "gateway.log: a log is that of one gateway"),
    ],
)
def test_the_chart_refuses_values_that_cannot_work(values, message):
    errors = pytest.importorskip("helm_python.errors", reason="pip install helm-python-sdk")
    with pytest.raises(errors.HelmError, match=re.escape(message)):
        rendered(values)


def accepted(documents):
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents:
        schemas.validate(document, "1.30", strict=True)
        other = document | {"spec": {**document.get("spec", {}), "unknown": 1}}
        with pytest.raises(schemas.ValidationError):
            schemas.validate(other, "1.30", strict=True)


def test_kubernetes_accepts_the_manifests():
    accepted(DOCUMENTS)


def test_the_version_of_the_chart_is_that_of_the_package():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    version = re.search(r'"([\d.]+)"', (ROOT / "src/servanda/_version.py").read_text())[1]
    assert about["version"] == about["appVersion"] == version
