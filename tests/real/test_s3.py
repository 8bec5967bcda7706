# Dumps in a bucket of a real S3 server, moto's, which lives in an environment of its own.
#
# `make test-s3`: SERVANDA_VENVS holds `moto`.

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from scripts import servers

from servanda.errors import ContractError, MeasurementError
from servanda.rl.dumps.formats import open_dump
from tests.rl.dumps.formats.made import DATA, read
from tests.rl.dumps.made import write

KEYS = {"AWS_ACCESS_KEY_ID": "made", "AWS_SECRET_ACCESS_KEY": "up"}


@contextmanager
def serving(venvs, log):
    """HOST:PORT of a server with an empty bucket."""
    program = venvs / "moto" / "bin" / "moto_server"
    if not program.exists():
        pytest.skip("make test-s3")
    port = servers.free_port()
    with open(log, "wb") as words:
        process = subprocess.Popen([program, "-p", str(port)], stdout=words, stderr=words)
    try:
        for _ in range(300):
            try:
                asked(f"http://127.0.0.1:{port}/bucket", "PUT")
                break
            except OSError:  # it is not up yet
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def server(venvs, tmp_path_factory):
    with serving(venvs, tmp_path_factory.mktemp("moto") / "log") as address:
        yield address


def asked(url, method, body=b""):
    kind = {"Content-Type": "text/plain"}
    with urllib.request.urlopen(urllib.request.Request(url, body, kind, method=method)) as reply:
        return reply.status


@pytest.fixture
def url(server, monkeypatch):
    """A function: key -> its URL."""
    for name, value in {**KEYS, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    return lambda key: f"s3://{key}?endpoint_override={server}&scheme=http&region=us-east-1"


def uploaded(folder, url):
    from pyarrow.fs import FileSystem, copy_files

    store, key = FileSystem.from_uri(url)
    copy_files(str(folder), key, destination_filesystem=store)
    return url


def check(path):
    command = [sys.executable, "-m", "servanda", "check", str(path)]
    return subprocess.run(
        [*command, "--format", "json", "--quiet"], capture_output=True, check=False
    )


def test_the_verdict_is_that_of_the_folder_to_the_byte(tmp_path, url):
    folder = write(tmp_path / "run")
    here, there = check(folder), check(uploaded(folder, url("bucket/run")))
    assert here.returncode == there.returncode == 0, there.stderr
    outputs = [json.loads(done.stdout) for done in (here, there)]
    for output in outputs:
        for name in ("seconds", "elapsed_s"):
            output.pop(name, None)
            output.get("circumstances", {}).pop(name, None)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["miles", "nemo", "prime_rl", "skyrl", "slime"])
def test_every_format_is_read_from_a_bucket(name, url):
    if name in ("miles", "slime"):
        pytest.importorskip("torch")
    there = open_dump(uploaded(DATA / name, url(f"bucket/{name}")), unsafe_pickles=True)
    here = open_dump(DATA / name, unsafe_pickles=True)
    assert str(read(there).rows) == str(read(here).rows)
    assert there.about == here.about


def test_only_the_columns_that_are_read_are_fetched(tmp_path, url):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write(tmp_path / "wide", steps=[1]) / "step_000001.rank0.parquet"
    table, large = pq.read_table(path), "x" * 200_000
    wide = table.append_column("note", pa.array([large + str(at) for at in range(len(table))]))
    about = table.schema.metadata
    pq.write_table(wide.replace_schema_metadata(about), path, compression="none")
    dump = open_dump(uploaded(path.parent, url("bucket/wide")))
    (file,) = dump.files
    assert file.stat().st_size > 4_000_000
    fetched, own = [], type(file).random_access

    class Counted:
        """A file of pyarrow that notes the bytes which are read."""

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def read_buffer(self, size=None):
            data = self.file.read_buffer(size)
            fetched.append(data.size)
            return data

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(file), "random_access", lambda path: Counted(own(path)))
        assert len(read(dump).rows) == 24
    assert 0 < sum(fetched) < 1_000_000


def test_the_endpoint_may_stand_in_the_environment(tmp_path, url, server, monkeypatch):
    uploaded(write(tmp_path / "run", steps=[1]), url("bucket/env"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server}")
    assert open_dump("s3://bucket/env?region=us-east-1").steps == (1,)


def test_a_bucket_that_is_not_there_is_said(url):
    with pytest.raises(ContractError, match="there is no 's3://nowhere/run"):
        open_dump(url("nowhere/run"))


def test_a_server_that_is_not_there_is_said():
    port = servers.free_port()
    with pytest.raises(MeasurementError, match=r"cannot be read: .*NETWORK_CONNECTION"):
        open_dump(f"s3://a/run?endpoint_override=127.0.0.1:{port}&scheme=http&region=x")


def test_a_wrong_key_is_said_with_the_next_move(url, venvs, tmp_path):
    with serving(venvs, tmp_path / "log") as address:
        asked(f"http://{address}/moto-api/reset-auth", "POST", b"0")  # from now on keys are tested
        with pytest.raises(MeasurementError) as error:
            open_dump(f"s3://bucket/run?endpoint_override={address}&scheme=http&region=us-east-1")
    assert str(error.value).startswith("s3://bucket/run?endpoint_override=")
    assert "ACCESS_DENIED" in str(error.value)
    assert "hint: see its credentials" in str(error.value)
