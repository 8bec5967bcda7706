# A dump in an object store is the dump of the same files in a folder.
#
# The store here is a folder that pyarrow opens by a file:// URL; `make test-s3` asks a server.

import json
import pickle
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyarrow.fs import LocalFileSystem

from servanda.cli import main
from servanda.errors import ContractError, MeasurementError
from servanda.report.json import render
from servanda.rl.dumps import storage
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.storage import RemotePath, place
from servanda.rl.watch.dump import DumpSource, WatchOptions
from tests.rl.dumps.formats.made import DATA, nemo, read
from tests.rl.dumps.made import write


def remote(path):
    """The RemotePath of a folder, asked through pyarrow."""
    return RemotePath(Path(path).absolute().as_uri(), str(Path(path).absolute()))


def plain(verdict):
    """The JSON of a verdict without seconds."""
    data = json.loads(render(verdict))
    data.get("circumstances", {}).pop("seconds", None)
    data.pop("seconds", None)
    return data


@pytest.mark.parametrize("name", ["miles", "nemo", "prime_rl", "skyrl", "slime"])
def test_every_format_is_read_from_a_store_as_from_a_folder(name):
    if name in ("miles", "slime"):
        pytest.importorskip("torch")
    here = open_dump(DATA / name, unsafe_pickles=True)
    there = open_dump(remote(DATA / name), unsafe_pickles=True)
    assert there.about == here.about
    assert [file.name for file in there.detection.files] == [f.name for f in here.detection.files]
    assert str(read(there).rows) == str(read(here).rows)


def test_the_verdict_is_that_of_the_folder(tmp_path):
    folder = write(tmp_path / "run")
    here, there = (judge_dump(DumpOptions(path)) for path in (folder, remote(folder)))
    assert plain(there.verdict) == plain(here.verdict)
    assert there.contract_text == here.contract_text


def test_a_zipped_file_a_single_file_and_a_step_are_read(tmp_path):
    import gzip

    path = nemo(tmp_path)
    (tmp_path / "train_data_step4.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert open_dump(remote(path)).steps == (3,)
    dump = pickle.loads(pickle.dumps(open_dump(remote(tmp_path))))
    assert dump.steps == (3, 4)
    assert read(dump.of([4])).steps == [4]


def test_a_listing_is_made_once_for_a_dump_and_again_for_the_next(tmp_path, monkeypatch):
    asked = []
    own = RemotePath._list
    monkeypatch.setattr(
        RemotePath, "_list", lambda path: (asked.append(bool(path.listed)), own(path))[1]
    )
    nemo(tmp_path)
    path = remote(tmp_path)
    assert open_dump(path).steps == (3,)
    assert asked.count(False) == 1
    nemo(tmp_path, step=4)
    assert open_dump(path).steps == (3, 4)


def test_a_growing_dump_is_followed(tmp_path):
    made = write(tmp_path / "made", steps=range(1, 4))
    growing = tmp_path / "run"
    growing.mkdir()
    source = DumpSource(WatchOptions(remote(growing)))
    assert [*source.poll(final=False)] == []
    assert "holds no dump" in source.missing
    for step in (1, 2):
        shutil.copy(made / f"step_{step:06}.rank0.parquet", growing)
    assert [step.step for step in source.poll(final=False)] == [1]
    shutil.copy(made / "step_000003.rank0.parquet", growing)
    assert [step.step for step in source.poll(final=True)] == [2, 3]


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ContractError, match=r"there is no '.*/nowhere'"):
        open_dump(remote(tmp_path / "nowhere"))
    (tmp_path / "log.txt").touch()
    with pytest.raises(ContractError, match=r"holds no dump; .*it holds log.txt"):
        open_dump(remote(tmp_path))


def test_a_store_that_refuses_is_named_with_the_next_move(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError("AWS Error ACCESS_DENIED during HeadObject operation")

    monkeypatch.setattr(RemotePath, "_info", refuse)
    with pytest.raises(MeasurementError) as error:
        open_dump(RemotePath("s3://bucket/run?region=eu-west-1", "bucket/run"))
    assert str(error.value) == (
        "s3://bucket/run?region=eu-west-1 cannot be read: AWS Error ACCESS_DENIED during "
        "HeadObject operation\n"
        "  hint: see its credentials (of S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        "AWS_PROFILE), its region and its endpoint: docs/how-to/check_a_dump.md"
    )
    source = DumpSource(WatchOptions(RemotePath("s3://bucket/run", "bucket/run")))
    assert [*source.poll(final=False)] == []  # a watch goes on asking
    assert "ACCESS_DENIED" in source.missing


def test_the_keys_of_a_url_are_not_printed():
    path = place("s3://AKIA:s3cret@bucket/run?region=x&endpoint_override=localhost:1&scheme=http")
    assert path.key == "bucket/run"
    assert (path / "a.jsonl").parent.parent.key == "bucket"
    assert str(path) == "s3://bucket/run?region=x&endpoint_override=localhost:1&scheme=http"
    assert str(path / "a.jsonl").startswith("s3://bucket/run/a.jsonl?")
    with pytest.raises(ContractError) as error:
        open_dump("s4://AKIA:s3cret@bucket/run")
    assert "s3cret" not in str(error.value)
    assert "s4://bucket/run cannot be opened: Unrecognized filesystem type" in str(error.value)
    assert "known: s3://BUCKET/KEY" in str(error.value)


def test_a_url_of_azure_keeps_its_container():
    assert str(place("abfs://box@account.dfs.core.windows.net/run")) == (
        "abfs://box@account.dfs.core.windows.net/run"
    )


def test_a_path_and_a_file_url_stay_on_this_machine(tmp_path):
    assert place("runs/s3") == Path("runs/s3")
    assert place(tmp_path) is not None
    assert place(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


def test_the_command_line_takes_a_url(tmp_path, monkeypatch):
    folder = write(tmp_path / "a run")
    url = "s3://bucket/a run?scheme=http&region=x"
    monkeypatch.setattr(storage, "_opened", lambda _: (LocalFileSystem(), str(folder)))
    ran = CliRunner().invoke(main, ["check", url, "--quiet"])
    assert ran.exit_code == 0, ran.output
    assert "found    12 files of Servanda" in ran.output
    assert "check 's3://bucket/a run?scheme=http&region=x' --save-contract" in ran.output
    same = CliRunner().invoke(main, ["check", url, "--quiet"])
    assert same.exit_code == 0, same.output
