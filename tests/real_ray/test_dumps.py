# A dump that the nodes of a real Ray cluster read: three nodes, of which one is killed on the way.

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from servanda.errors import MeasurementError
from servanda.rl.dumps import judge, workers
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.runner import ray_cluster
from servanda.runner.ray_cluster import connected
from tests.real_ray.conftest import CLIENTS, NODE
from tests.rl.dumps import made
from tests.rl.dumps.test_workers import answer_of, faulty, told

ray = pytest.importorskip("ray")
# Ray leaves files of its own open
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

VICTIM = "victim"  # a file with the node that will be killed
LOG = "SERVANDA_TEST_LOG"  # in the folder of a dump: a line when a node begins or ends a step


@pytest.fixture(autouse=True)
def read_again(monkeypatch):
    """No dump is small enough to stay in memory; its head is all of it but one block."""
    monkeypatch.setattr(judge, "HEAD_TOKENS", 1_000)


def slowly(plan, dump, step, number):
    """A step on a node, which goes on once all nodes have begun one; it hangs on the victim."""
    where = ray.get_runtime_context().get_node_id()
    folder = dump.detection.folder
    log(dump, f"begun {where} {step}")
    while len({node for _, node, _ in lines(folder)}) < 3:
        time.sleep(0.05)
    if where == (folder / VICTIM).read_text():
        time.sleep(3600)
    result = workers.of_step_on_node(plan, dump, step, number)
    log(dump, f"done {where} {step}")
    return result


def log(dump, line):
    with open(dump.detection.folder / LOG, "a") as file:
        file.write(f"{line}\n")


def lines(folder):
    path = folder / LOG
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def ends(plan, dump, step, number):
    os._exit(7)


def test_a_node_that_is_killed_changes_no_bit_and_each_step_counts_once(
    nodes, tmp_path, monkeypatch
):
    folder = faulty(tmp_path / "dump")
    alone = answer_of(folder, 1)
    monkeypatch.setattr(workers, "of_step_on_node", slowly)
    *_, victim = nodes.list_all_nodes()
    (folder / VICTIM).write_text(victim.node_id)

    def kill():
        while True:
            found = lines(folder)
            done = [step for what, _, step in found if what == "done"]
            if done and victim.node_id in {node for _, node, _ in found}:
                nodes.remove_node(victim, allow_graceful=False)
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill, daemon=True)
    with connected(nodes.address) as cluster:
        assert cluster.ahead == 6
        killer.start()
        answer = judge_dump(DumpOptions(folder, cluster=cluster))
    killer.join(60)
    nodes.add_node(**NODE)
    assert not killer.is_alive()
    begun = [step for what, _, step in lines(folder) if what == "begun"]
    assert len(begun) > len(set(begun)) == 11  # a step was lost, and read again
    assert len(cluster.spent) == 11
    assert told(answer) == alone


def test_a_file_that_a_node_cannot_read_is_named(nodes, tmp_path):
    folder = made.write(tmp_path / "dump", steps=range(1, 5))
    last = sorted(folder.glob("*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with (
        connected(nodes.address) as cluster,
        pytest.raises(MeasurementError, match=rf"{last.name} .*\n.*write the step again") as error,
    ):
        judge_dump(DumpOptions(folder, cluster=cluster))
    assert type(error.value) is MeasurementError
    assert error.value.exit_code == 4


def test_a_file_that_is_not_on_a_node_is_named_with_the_node(nodes, tmp_path, monkeypatch):
    folder = made.write(tmp_path / "dump", steps=range(1, 5))
    real = workers.results

    def without_the_last(*arguments):
        sorted(folder.glob("*.parquet"))[-1].unlink()
        return real(*arguments)

    monkeypatch.setattr(workers, "results", without_the_last)
    with (
        connected(nodes.address) as cluster,
        pytest.raises(MeasurementError, match=r"step_000004.* is not on node .*\n.*nodes share"),
    ):
        judge_dump(DumpOptions(folder, cluster=cluster))


def test_a_task_that_ends_its_process_is_given_up_after_some_attempts(nodes, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_RETRIES", 1)
    with connected(nodes.address) as cluster:
        task = cluster.submit(ends, b"", None, 1, 1)
        with pytest.raises(MeasurementError, match=r"lost 2 times on .*\n.*memory"):
            task.result()


def test_a_node_with_another_release_is_refused(nodes, monkeypatch):
    monkeypatch.setattr(ray_cluster, "__version__", "0.0.7")
    with connected(nodes.address) as cluster:
        task = cluster.submit(len, ())
        with pytest.raises(MeasurementError, match=r"and this is 0\.0\.7\n.*same release"):
            task.result()


def command(folder, *options):
    arguments = [sys.executable, "-m", "servanda", "check", str(folder)]
    return [*arguments, "--format", "json", *options]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A dump that is read again by the command line: 2.1 million tokens."""
    from benchmarks import large_dump

    folder = tmp_path_factory.mktemp("large")
    large_dump.write(folder, 4 * large_dump.STEP)
    return folder


def test_the_command_line_connects_to_a_cluster(nodes, large):
    run = {"capture_output": True, "text": True, "timeout": 300}
    alone = subprocess.run(command(large, "--jobs", "1"), **run)
    there = subprocess.run(command(large, "--on", f"ray://127.0.0.1:{CLIENTS}"), **run)
    assert there.returncode == alone.returncode == 0, there.stderr
    assert "computed by 4 tasks on " in there.stderr
    drop = '"seconds"'
    one, other = (
        [line for line in ended.stdout.splitlines() if drop not in line] for ended in (alone, there)
    )
    assert one == other


def test_ctrl_c_ends_the_command_and_its_tasks(nodes, large):
    process = subprocess.Popen(
        command(large, "--on", nodes.address), stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("reading"):
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "stopped" in process.stderr.read()
    with connected(nodes.address):
        for _ in range(100):
            if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
                return
            time.sleep(0.2)
    raise AssertionError("a task goes on")
