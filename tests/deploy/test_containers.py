"""The Dockerfile and the compose file, held against the program, the repository and each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from servanda.gateway.http.api_keys import Keys
from servanda.runner.load import load
from tests import transcripts
from tests.deploy.live import DEPLOY, ROOT

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
CONTRACT = DEPLOY / "demo" / "tiny-int8.kernelcontract.yaml"
# where the programs of others listen
OTHERS = {"prometheus": 9090, "alertmanager": 9093, "grafana": 3000}


def variables():
    """Every environment variable that the program names."""
    sources = (ROOT / "src").rglob("*.py")
    texts = (path.read_text(encoding="utf-8") for path in sources)
    return {name for text in texts for name in re.findall(r"\bSERVANDA_[A-Z_]+\b", text)}


def commands():
    """Name and command line of the services that run `servanda`."""
    for name, service in OURS.items():
        if "entrypoint" not in service:
            yield name, ["servanda", *service["command"]]


def listens(name):
    """The port of a service, of its command or of the other program."""
    words = SERVICES[name].get("command", ())
    for option in ("--port", "--admin"):
        if option in words:
            return int(words[words.index(option) + 1].rpartition(":")[2])
    return OTHERS[name]


def test_the_command_of_a_service_is_one_of_the_program():
    found = dict(commands())
    assert {*found} == {*OURS} - {"users", "pager"}
    for words in found.values():
        transcripts.parsed(words)


def test_every_variable_of_a_service_is_one_that_the_program_reads():
    for name, service in OURS.items():
        assert {*service.get("environment", ())} <= variables(), name
    interpolated = {*re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text())}
    script = (DEPLOY / "demo" / "keys.sh").read_text()
    assert interpolated == {*re.findall(r'echo "(\w+)=', script)}


def test_every_port_and_address_is_one_that_a_service_listens_on():
    for name, service in SERVICES.items():
        for published in service.get("ports", ()):
            address, own, inner = published.rsplit(":", 2)
            assert (address, int(inner)) == ("127.0.0.1", listens(name)), name
            assert own == inner
    monitoring = (
        DEPLOY / "prometheus" / "prometheus.yml",
        DEPLOY / "alertmanager" / "alertmanager.yml",
        *DEPLOY.glob("grafana/provisioning/*/*"),
    )
    texts = [path.read_text() for path in (DEPLOY / "compose.yaml", CONTRACT, *monitoring)]
    found = re.findall(r"[/@\"](\w+):(\d{4})\b", "\n".join(texts))
    used = {(host, int(port)) for host, port in found if host in SERVICES}
    assert used == {(name, listens(name)) for name in SERVICES if name in dict(used)}
    assert {host for host, _ in used} >= {
        "infer",
        "stable",
        "leader",
        "gateway",
        "prometheus",
        "pager",
    }


def test_every_file_that_is_mounted_is_there_and_is_the_one_that_the_command_names():
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            if source in COMPOSE["volumes"]:
                continue
            assert (DEPLOY / source).exists(), (name, source)
            assert mode == ["ro"], (name, volume)
            if target.startswith("/srv/"):  # as in the repository, for the contract's paths
                assert (ROOT / target.removeprefix("/srv/")).samefile(DEPLOY / source)
        secrets = {f"/run/secrets/{secret}" for secret in service.get("secrets", ())}
        named = {word for word in service.get("command", ()) if word.startswith("/run/secrets/")}
        assert named <= secrets, name


def test_no_service_of_ours_may_change_more_than_its_volumes():
    for name, service in OURS.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["build"]["target"] in re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.M)
        assert service["image"] == f"servanda:{service['build']['target']}"
    assert "train: {engine: transformers" in CONTRACT.read_text()
    loads_models = {name for name, service in OURS.items() if service["image"] == "servanda:engine"}
    assert loads_models == {"stable", "infer", "leader", "promote"}


def test_the_contract_of_the_demonstration_is_one():
    contract = load(CONTRACT)
    assert contract.kernels.infer.url == "http://infer:8000"
    assert contract.stable.url == "http://stable:8000"


def test_the_script_makes_the_keys_that_the_services_read(tmp_path):
    shutil.copy(DEPLOY / "demo" / "keys.sh", tmp_path)
    made = [subprocess.run(["sh", "keys.sh"], cwd=tmp_path, capture_output=True, text=True)]
    before = {file.name: file.read_text() for file in (tmp_path / "keys").iterdir()}
    made.append(subprocess.run(["sh", "keys.sh"], cwd=tmp_path, capture_output=True, text=True))

    assert [done.returncode for done in made] == [0, 1]
    assert "remove it to make new keys" in made[1].stderr
    assert {file.name: file.read_text() for file in (tmp_path / "keys").iterdir()} == before
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    mounted = {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert {*before} == mounted | {"env"}
    keys = Keys.read(tmp_path / "keys" / "keys.yaml")

    def who(key):
        return keys.who(f"Bearer {key}")

    assert who(before["viewer_key"]).may("read")
    env = dict(line.split("=", 1) for line in before["env"].splitlines())
    assert who(env["SERVANDA_GATEWAY_KEY"]).may("follow")
    assert who(env["SERVANDA_ADMIN_KEY"]).may("pin")
    users = json.loads(before["users.json"])
    assert len({who(user).name for user in users if who(user).may("ask")}) == 40


def test_scripts_pass_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(
        ["shellcheck", DEPLOY / "demo" / "keys.sh"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_image_holds_packages_that_there_are_and_no_root():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    groups = [words.split(",") for words in re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)]
    assert groups == [["gateway", "postgres"], ["gateway", "postgres", "serve", "transformers"]]
    for extra in {extra for group in groups for extra in group}:
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.M) == ["10001:10001"]
    # the last one is that of `docker build` without --target
    assert re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.M)[-1] == "gateway"


def test_the_context_has_what_the_package_is_built_from():
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.M)
    assert all((ROOT / path).exists() for path in allowed)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    included = re.search(r"force-include\]\n(.*?)\n\n", project, re.S)[1]
    needed = [*re.findall(r'^"(\S+)" =', included, re.M), "src", "hatch_build.py", "README.md"]
    assert {*needed} <= {*allowed}
