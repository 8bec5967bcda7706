# Kernels in actors of a real Ray cluster: their evidence is that of child processes.

import subprocess
import sys
from functools import partial

import pytest

from servanda.errors import ServandaError
from servanda.runner import run
from servanda.runner.ray_cluster import connected
from servanda.runner.ray_engines import RemoteEngine, engines_on
from tests import kit
from tests.real_ray.conftest import CLIENTS, NODE

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def engine(cluster, kernel, side):
    return RemoteEngine(cluster, kernel, side, {})


@pytest.fixture
def contract(tmp_path):
    golden = kit.golden(tmp_path)
    more = "numerical:\n  - {id: tv-logits, metric: tv, aggregate: mean, at_most: 0.5}"
    path, _ = kit.write(tmp_path, stable="", golden=golden, more=more, first=256, last=256)
    return path


def test_a_node_that_is_killed_under_a_kernel_changes_no_evidence(nodes, contract, tmp_path):
    alone = run.check(contract, run_dir=tmp_path / "alone")
    seen, killed = [], []

    def watch(progress):
        """Kill the node of an actor, though not the head, in the middle of the rounds."""
        seen.append((progress.what, progress.done))
        if killed or progress.what != "prompt groups" or progress.done < 64:
            return
        homes = {node for node, _ in cluster.spent}
        victim = next(n for n in nodes.list_all_nodes()[1:] if n.node_id in homes)
        nodes.remove_node(victim, allow_graceful=False)
        killed.append(victim)

    with connected(nodes.address) as cluster:
        place = tmp_path / "there"
        there = run.check(contract, run_dir=place, open=partial(engine, cluster), watch=watch)
    nodes.add_node(**NODE)
    assert killed
    assert ("prompt groups", 256) in seen
    assert there.evidence == alone.evidence
    assert there.key == alone.key
    assert [c.value for c in there.cells] == [c.value for c in alone.cells]
    one, other = (
        sorted(path.name for path in (tmp_path / name).rglob("*.parquet"))
        for name in ("alone", "there")
    )
    assert one == other


def test_the_command_line_measures_on_a_cluster(nodes, contract, tmp_path):
    def servanda(*words):
        command = [sys.executable, "-m", "servanda", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    pack = ("tools", "measure", contract.name, "--side", "infer", "--format", "json", "--quiet")
    alone, there = (
        servanda(*pack, "-o", "infer.pack", *on)
        for on in ((), ("--on", f"ray://127.0.0.1:{CLIENTS}"))
    )
    assert there.returncode == alone.returncode == 0, there.stderr
    assert there.stdout == alone.stdout
    refused = servanda(
        "check",
        contract.name,
        "--on",
        nodes.address,
        "--ray-actor",
        'infer={"num_gpus": 1}',
        "--quiet",
    )
    assert refused.returncode == 4
    assert "an actor needs 1 GPU, and" in refused.stderr
    unknown = servanda("check", contract.name, "--ray-actor", "infer=1", "--quiet")
    assert unknown.returncode == 4
    assert "does not say how to start an actor" in unknown.stderr


def test_an_engine_that_refuses_its_kernel_is_quoted(nodes, contract):
    text = contract.read_text().replace("model: q.json", "model: none.json")
    contract.write_text(text)
    with pytest.raises(ServandaError) as alone:
        run.check(contract)
    with engines_on(nodes.address) as open_, pytest.raises(ServandaError) as there:
        run.check(contract, open=open_)
    assert str(there.value) == str(alone.value)
    assert type(there.value) is type(alone.value)
