# How the actors of kernels are asked for; a real cluster is in tests/real_ray.

import pytest

from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.runner.ray_cluster import Cluster
from servanda.runner.ray_engines import RemoteEngine, actor_of, engines_on


def test_without_an_address_kernels_are_child_processes():
    with engines_on(None) as open_:
        assert open_ is spawn


@pytest.mark.parametrize("text", ["infer", "infer=1", "infer={", "all={}", '={"num_gpus": 1}'])
def test_an_actor_that_is_not_written_so_is_refused(text):
    with pytest.raises(MeasurementError, match=r"does not say how.*\n.*SIDE=JSON"):
        actor_of(text)


def test_a_verb_is_called_in_the_actor_and_its_result_is_taken_once(monkeypatch):
    calls = []

    class Actor:
        class call:  # noqa: N801 - as Ray names a method of an actor
            @staticmethod
            def remote(*call):
                calls.append(call)
                return call

    monkeypatch.setattr(Cluster, "actor", lambda *_: Actor)
    monkeypatch.setattr("servanda.runner.ray_cluster.Task.result", lambda self: [self.reference])
    engine = RemoteEngine(Cluster("local", 2), None, "infer", {})  # type: ignore[arg-type]
    assert engine.encode(["a"]) == [("encode", ["a"])]
    assert [*engine.logits("batch", "prefill")] == [("logits", "batch", "prefill")]
    assert len(calls) == 2
