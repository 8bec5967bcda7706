# Paths that are no small text: files without a reasonable size, pipes and devices without an end.

import os
from pathlib import Path

import pytest

from servanda.contract.model import Kernel
from servanda.contract.text_file import MAX_BYTES, content
from servanda.engines import open_engine
from servanda.errors import MeasurementError
from servanda.gateway.controller.web.client import key_from
from servanda.runner import load
from tests import kit
from tests.kit import servanda

SAYS = {
    "larger": f"it has 1,099,511,627,776 bytes, and at most {MAX_BYTES:,} are read",
    "pipe": "it is a pipe or a device, not a file",
    "/dev/zero": "it is a pipe or a device, not a file",
}
VERBS = {
    "contract lint": (),
    "contract explain": (),
    "contract plan": (),
    "check": ("--run-dir", "run"),
    "promote": ("--ledger", "l.db"),
    "serve": (),
    "contract diff": ("good.kernelcontract.yaml",),
}


@pytest.fixture(params=SAYS)
def odd(request, tmp_path, monkeypatch):
    """A path, and what is said of it."""
    monkeypatch.chdir(tmp_path)
    path = Path(request.param)
    if request.param == "larger":
        path.touch()
        os.truncate(path, 1 << 40)  # without a block on the disk
    elif request.param == "pipe":
        os.mkfifo(path)
    return path, SAYS[request.param]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_what_is_no_small_file(verb, odd):
    path, said = odd
    done = servanda(*verb.split(), path, *VERBS[verb])
    assert done.exit_code == 2, done.output
    assert f"{path} cannot be read: {said}" in done.output
    assert "hint: give the path of a .kernelcontract.yaml file" in done.output
    assert ("or of a folder with a trainer's dump" in done.output) == (verb == "check")


def test_a_contract_test_is_read_by_the_same_limit(odd):
    path, said = odd
    test = Path("toy.kerneltest.yaml")
    test.symlink_to(path)
    done = servanda("contract", "test", test)
    assert done.exit_code == 2 and f"{test} cannot be read: {said}" in done.output


def test_the_file_of_a_reward_too(odd, tmp_path):
    target, said = odd
    path, _ = kit.write(tmp_path, stable=None, more="reward: {of: odd.py:score, range: [0, 1]}")
    Path("odd.py").symlink_to(target)
    done = servanda("contract", "plan", path, "--no-probe")
    assert done.exit_code == 2 and f"odd.py cannot be read: {said}" in done.output


def test_a_table_and_a_verdict_have_limits_of_their_own(odd):
    path, said = odd
    said = said.replace("1,048,576", "67,108,864")
    with pytest.raises(MeasurementError, match=f"cannot be read: {said}"):
        open_engine(Kernel(engine="table", model=str(path)))
    done = servanda("tools", "report", path)
    assert done.exit_code == 4 and f"{path} cannot be read: {said}" in done.output


@pytest.mark.parametrize(
    "words", [("contract", "lint", "-"), ("contract", "diff", "-", "good.kernelcontract.yaml")]
)
def test_standard_input_is_read_up_to_the_limit(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = kit.write(tmp_path)
    path.rename("good.kernelcontract.yaml")
    done = servanda(*words, input="# long\n" * (MAX_BYTES // 7 + 1))
    assert done.exit_code == 2
    assert f"stdin has more than the {MAX_BYTES:,} bytes that are read at most" in done.output
    assert "hint: give one contract, not its workload" in done.output


def test_a_contract_of_two_thousand_clauses_is_read(tmp_path):
    names = [f"c{n}-of-the-many-promises-of-one-contract" for n in range(2000)]
    lines = [f"  - {{id: {n}, metric: tv, aggregate: mean, at_most: 0.05}}\n" for n in names]
    path, _ = kit.write(tmp_path)
    path.write_text(path.read_text().replace("statistical:\n", "statistical:\n" + "".join(lines)))
    assert path.stat().st_size < MAX_BYTES // 4
    assert len(load.bytes_of(path)) == path.stat().st_size


def test_a_file_that_says_that_it_is_empty_is_bounded():
    """Those of /proc have no size, and a text."""
    assert content(Path("/proc/self/stat"), 1 << 16)
    with pytest.raises(OSError, match="it has more than the 4 bytes that are read at most"):
        content(Path("/proc/self/stat"), 4)


def test_a_file_of_a_key_may_be_a_pipe_and_has_an_end(tmp_path):
    with pytest.raises(Exception, match="/dev/zero holds no key"):
        key_from(Path("/dev/zero"), {})
    reading, writing = os.pipe()
    os.write(writing, b"a-key\n")
    os.close(writing)
    assert key_from(Path(f"/dev/fd/{reading}"), {}) == "a-key"
    os.close(reading)
