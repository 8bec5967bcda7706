# The services of deploy/compose.yaml as processes of this machine, and the shell of who tries it.
#
# A process gets the command, environment and files of its service.  Three things are mapped:
#   an address `service:port`, published or inner, is 127.0.0.1 with a free port of its own;
#   a path that is mounted is in a folder of its service: files are copied, with addresses mapped;
#   `servanda` and `python3` are those of the tests.
# The programs of others run with what their images start; none is here for Grafana.

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import yaml

from tests.deploy.live import ROOT
from tests.gateway.running import WAIT_S, until
from tests.transcripts import blocks

PAGE = ROOT / "docs" / "how-to" / "deploy.md"
DC = "docker compose -f deploy/compose.yaml --env-file deploy/demo/keys/env"
# image -> names of its program here, and what its image starts
PROGRAMS = {
    "docker.io/prom/prometheus": (
        ("prometheus",),
        "--config.file=/etc/prometheus/prometheus.yml --storage.tsdb.path=/prometheus "
        "--web.listen-address=0.0.0.0:9090 --log.level=error",
    ),
    "docker.io/prom/alertmanager": (
        ("prometheus-alertmanager", "alertmanager"),
        "--config.file=/etc/alertmanager/alertmanager.yml --storage.path=/alertmanager "
        "--web.listen-address=0.0.0.0:9093 --cluster.listen-address= --log.level=error",
    ),
}
NOT_RUN = {"grafana"}
_PATH_ENDS = r"(?![\w.-])"


def program(image):
    """The command of an image of others; None where its program is not installed."""
    names, words = PROGRAMS[image.rpartition(":")[0]]
    found = next(filter(None, map(shutil.which, names)), None)
    return found and [found, *words.split()]


class Service:
    """One service: its folder, and its process once it is started."""

    def __init__(self, stack, name, given):
        self.stack, self.name, self.given = stack, name, given
        self.folder = stack.folder / "services" / name
        self.targets, self.process = {}, None
        for volume in given.get("volumes", ()):
            source, target = volume.split(":")[:2]
            self.targets[target] = source
        for secret in given.get("secrets", ()):
            self.targets[f"/run/secrets/{secret}"] = stack.compose["secrets"][secret]["file"]

    @property
    def log(self):
        file = self.folder / "log"
        return file.read_text() if file.exists() else ""

    def mapped(self, text):
        """Words of a command, a variable or a file, as they are on this machine."""
        mounts = "|".join(map(re.escape, sorted(self.targets, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w./-])({mounts}){_PATH_ENDS}", rf"{self.folder}\1", text)
        own = rf"(?:0\.0\.0\.0|127\.0\.0\.1):(\d{{4}}){_PATH_ENDS}"
        text = re.sub(own, lambda m: self.stack.at(self.name, m[1]), text)
        return self.stack.mapped(text)

    def words(self, words):
        """A command line; the value of --host and --port is an address as well."""
        mapped = [self.mapped(word) for word in words]
        for option, value in (
            ("--host", lambda _: "127.0.0.1"),
            ("--port", lambda port: self.stack.at(self.name, port).rpartition(":")[2]),
        ):
            if option in words:
                at = words.index(option) + 1
                mapped[at] = value(words[at])
        ours = {"servanda": [sys.executable, "-m", "servanda"], "python3": [sys.executable]}
        return [*ours.get(mapped[0], mapped[:1]), *mapped[1:]]

    def mounted(self):
        for target, source in self.targets.items():
            place = self.folder / target.lstrip("/")
            if place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if source in self.stack.compose["volumes"]:
                volume = self.stack.folder / "volumes" / source
                volume.mkdir(parents=True, exist_ok=True)
                place.symlink_to(volume)
                continue
            path = self.stack.deploy / source
            if path.is_file():
                place.write_text(self.mapped(path.read_text()))
            elif path.is_relative_to(self.stack.deploy) and ".." not in Path(source).parts:
                for file in filter(Path.is_file, path.rglob("*")):
                    copy = place / file.relative_to(path)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_text(self.mapped(file.read_text()))
            else:
                place.symlink_to(path.resolve())
        cwd = self.folder / self.given.get("working_dir", "/").lstrip("/")
        cwd.mkdir(parents=True, exist_ok=True)
        return cwd

    def environ(self):
        given = self.given.get("environment", {})
        return self.stack.environ | {k: self.mapped(v) for k, v in given.items() if v is not None}

    def start(self):
        if self.process is not None:
            return
        for name, condition in self.given.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            self.stack.services[name].start()
            self.stack.services[name].healthy()
        cwd = self.mounted()
        if "build" in self.given:
            words = [*self.given.get("entrypoint", ["servanda"]), *self.given["command"]]
        else:
            words = program(self.given["image"])
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                self.words(words), cwd=cwd, env=self.environ(), stdout=log, stderr=log
            )

    def healthy(self):
        kind, *words = self.given["healthcheck"]["test"]
        assert kind == "CMD"

        def answers():
            assert self.process.poll() is None, f"{self.name} has ended:\n{self.log}"
            done = subprocess.run(self.words(words), env=self.environ(), stderr=subprocess.DEVNULL)
            return done.returncode == 0

        until(answers, f"{self.name} is healthy")

    def call(self, words):
        """Another program in its container: exit code and output."""
        done = subprocess.run(
            self.words(words),
            cwd=self.mounted(),
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )
        return done.returncode, done.stdout

    def end(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
        if self.process is not None:
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Stack:
    """A copy of the repository's deploy/, whose commands are called as the page writes them."""

    def __init__(self, folder):
        self.folder, self.deploy = folder, folder / "deploy"
        shutil.copytree(ROOT / "deploy", self.deploy, ignore=shutil.ignore_patterns("keys"))
        for name in ("models", "data", "examples"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        ours = folder / "bin" / "servanda"
        ours.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m servanda "$@"\n')
        ours.chmod(0o755)
        kept = ("HOME", "LANG", "PYTHONPATH", "TMPDIR")
        self.environ = {k: os.environ[k] for k in kept if k in os.environ}
        self.environ |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environ |= {"PYTHONUNBUFFERED": "1"}
        self.ports, self.said, self.keys, self.compose, self.services = {}, [], {}, {}, {}

    def read(self):
        """The compose file, with the variables of its file of the environment."""
        lines = (self.deploy / "demo" / "keys" / "env").read_text().splitlines()
        self.keys = dict(line.split("=", 1) for line in lines)
        text = (self.deploy / "compose.yaml").read_text()
        text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: self.keys[m[1]], text)
        self.compose = yaml.safe_load(text)
        given = self.compose["services"]
        self.services = {name: Service(self, name, one) for name, one in given.items()}

    def at(self, name, port):
        """The address on this machine of a port of a service."""
        key = (name, int(port))
        if key not in self.ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports[key] = free.getsockname()[1]
        return f"127.0.0.1:{self.ports[key]}"

    def mapped(self, text):
        names = "|".join(self.services)
        found = rf"(?<![\w.-])({names}):(\d{{4}}){_PATH_ENDS}"
        return re.sub(found, lambda m: self.at(m[1], m[2]), text)

    def published(self, text):
        """A line of the page: its addresses are those of the published ports."""
        inner = {}
        for name, service in self.services.items():
            for one in service.given.get("ports", ()):
                host, own, port = one.split(":")
                inner[f"{host}:{own}"] = self.at(name, port)
        return re.sub(r"127\.0\.0\.1:\d{4}", lambda m: inner[m[0]], text)

    def sh(self, line, code=0, **words):
        """Run a line that the page has, with words of it replaced; what it prints."""
        lines = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
        assert line in lines, f"{PAGE.name} has no line {line!r}"
        for word, value in words.items():
            line = re.sub(rf"\b{word}\b", value, line)
        if line.startswith("alias "):
            assert line == f"alias dc='{DC}'"
            return self.read()
        if line.startswith("export "):
            return self.said.append(line)
        if line.startswith("dc "):
            got, text = self.dc(shlex.split(line, comments=True)[1:])
        else:
            script = "\n".join([*self.said, self.published(line)])
            done = subprocess.run(
                ["sh", "-c", script],
                cwd=self.folder,
                env=self.environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=WAIT_S,
            )
            got, text = done.returncode, done.stdout
        assert got == code, (line, got, text)
        return text

    def dc(self, words):
        """`docker compose` of the verbs and options that the page uses."""
        profiles = {None}
        while words[0] == "--profile":
            profiles.add(words[1])
            words = words[2:]
        verb, *rest = words
        if verb == "down":
            return self.close(), ""
        options = {word for word in rest if word.startswith("--")}
        if verb == "up":
            assert options <= {"--build", "--detach"}
            names = [word for word in rest if word not in options]
            for name, service in self.services.items():
                (own,) = service.given.get("profiles", (None,))
                if name not in NOT_RUN and (name in names if names else own in profiles):
                    service.start()
            return 0, ""
        if verb == "logs":
            return 0, self.services[rest[-1]].log
        if verb == "exec":
            service = self.services[rest[0]]
            assert service.process.poll() is None, f"{rest[0]} has ended:\n{service.log}"
            return service.call(rest[1:])
        assert (verb, rest[0]) == ("run", "--rm"), words
        return self.services[rest[1]].call(["servanda", *rest[2:]])

    def close(self):
        for service in reversed([*self.services.values()]):
            with contextlib.suppress(ProcessLookupError):
                service.end()
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
