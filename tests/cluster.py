# A PostgreSQL cluster for one test session, of the server's own binaries, thrown away at its end.

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

USER, PASSWORD = "ana", "s3cret/p@ss"
_TRIES = 5  # a port that was free may be taken by the time the server asks for it


def binaries():
    """The folder of initdb and postgres; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(found).parent] if found else []
    return next((place for place in places if (place / "postgres").exists()), None)


@dataclass
class Cluster:
    """A running server: a socket in `folder` that trusts, and a port that asks for a password."""

    bin: Path
    folder: Path
    port: int
    names: count = field(default_factory=lambda: count(1))

    @property
    def url(self):
        """Over the socket, as the superuser of the cluster."""
        return f"postgresql://servanda@/postgres?host={self.folder}&port={self.port}"

    def place(self):
        """The URL of a fresh, empty schema: a database of its own would be 7 MB each."""
        name = f"place_{next(self.names)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self.url}&options=-csearch_path%3D{name}"

    def restart(self):
        """As after a crash: what was committed is there, and every connection is lost."""
        data, log = str(self.folder / "data"), str(self.folder / "log")
        made = _call(
            self.bin,
            self.folder,
            "pg_ctl",
            "restart",
            "-m",
            "immediate",
            "-w",
            "-D",
            data,
            "-l",
            log,
        )
        assert made.returncode == 0, made.stdout

    def execute(self, *statements, url=None):
        """The rows of the last one that gives any."""
        import psycopg

        rows = []
        with psycopg.connect(url or self.url, autocommit=True) as db:
            for statement in statements:
                found = db.execute(statement)
                rows = found.fetchall() if found.description else rows
        return rows


@contextmanager
def running():
    """A cluster; it is stopped and removed whatever happens."""
    where = binaries()
    folder = Path(tempfile.mkdtemp(prefix="servanda-pg-"))
    who = _who()
    if who:
        shutil.chown(folder, "postgres", "postgres")
    data, log = str(folder / "data"), str(folder / "log")
    # it stops the server once this process lets go of its pipe, by whatever end
    stop = '"$1" stop -m immediate -t 10 -D "$2/data"; rm -rf "$2"'
    keeper = subprocess.Popen(
        ["sh", "-c", f"cat; {stop}", "keeper", str(where / "pg_ctl"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        **who,
    )
    try:
        made = _call(
            *(where, folder),
            *("initdb", "--no-sync", "-D", data, "-U", "servanda", "-E", "UTF8", "--locale=C"),
            *("--auth-local=trust", "--auth-host=scram-sha-256"),
        )
        assert made.returncode == 0, made.stdout
        for _ in range(_TRIES):
            port = _free_port()
            # only clients are killed here, so what the system has in its cache is kept
            options = f"-k {folder} -p {port} -c listen_addresses=127.0.0.1 -c fsync=off"
            started = _call(
                where, folder, "pg_ctl", "start", "-w", "-D", data, "-l", log, "-o", options
            )
            if started.returncode == 0:
                break
        else:
            raise AssertionError(f"{started.stdout}\n{Path(log).read_text()}")
        cluster = Cluster(where, folder, port)
        cluster.execute(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
        yield cluster
    finally:
        keeper.stdin.close()
        keeper.wait()


def _who():
    """The server refuses to run as root."""
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if not os.getuid() else {}


def _call(where, folder, *command):
    return subprocess.run(
        [str(where / command[0]), *command[1:]],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        **_who(),
    )


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place(store, folder, request):
    """Of a ledger that is not there yet, in this store."""
    if store == "sqlite":
        return str(folder / "ledger.db")
    return request.getfixturevalue("cluster").place()
