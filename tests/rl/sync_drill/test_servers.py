# The sync drill over HTTP: real servers in another process take over checkpoints, or fail to.

import re

import pytest

torch = pytest.importorskip("torch")

from servanda.errors import MeasurementError  # noqa: E402
from servanda.rl import Trainee, preflight  # noqa: E402
from tests.rl.served_weights import begun, saved, serving, small_model, trained  # noqa: E402
from tests.rl.server_faults import SERVER_FAULTS  # noqa: E402
from tests.rl.sync_drill.toys import bits  # noqa: E402

REPLICAS = 3
NAMED = [name for name, fault in SERVER_FAULTS.items() if fault.causes]
REFUSED = [name for name, fault in SERVER_FAULTS.items() if fault.error]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_model(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def servers(folder):
    with serving(folder, "vllm", REPLICAS) as urls:
        yield urls


@pytest.fixture(scope="module")
def sglang(folder):
    with serving(folder, "sglang") as (url,):
        yield url


def scores_of(urls, dialect="vllm"):
    module = small_model()
    servers = trained(module, urls, dialect).replicas
    return [replica.score([[1, 2, 3, 4], [5, 6, 7, 8]]) for replica in servers.all]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMED)
def test_a_fault_of_a_server_has_its_name(servers, name):
    module, fault = small_model(), SERVER_FAULTS[name]
    before = bits(module)
    begun(servers[0], name)

    result = preflight(trained(module, servers[0]))

    assert result.cause in fault.causes, str(result)
    assert result.outcome == ("violated" if result.cause else "holds")
    assert bits(module) == before
    if name == "none":
        assert not result.warnings and result.exit_code == 0


@pytest.mark.slow
def test_a_factor_is_found_where_the_server_had_it_before_the_test(servers):
    begun(servers[0], "scaled")
    module = small_model()
    preflight(trained(module, servers[0]))

    again = preflight(trained(module, servers[0]))

    assert again.found.distance == pytest.approx(again.found.idle, rel=0.1)  # no sync moved it
    assert (again.outcome, again.cause) == ("violated", "scaled"), str(again)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFUSED)
def test_a_server_that_fails_is_an_error_with_its_url_and_the_next_move(servers, name):
    module, fault = small_model(), SERVER_FAULTS[name]
    before = bits(module)
    begun(servers[0], name)
    patience_s = 2.0 if name == "hangs" else 60.0

    with pytest.raises(MeasurementError) as caught:
        preflight(trained(module, servers[0], timeout_s=patience_s))

    (problem,) = caught.value.problems
    assert fault.error in problem.message and servers[0] in problem.message
    assert fault.hint in problem.hint
    assert bits(module) == before
    if name in ("status_500", "hangs"):
        assert "weights restored bit for bit, and synced to the engine once more" in str(problem)


@pytest.mark.slow
def test_the_digests_say_what_was_compared_bit_for_bit(servers):
    begun(servers[0], "keeps_head")

    (line,) = preflight(trained(small_model(), servers[0])).digests

    assert line.startswith(f"{servers[0]}: 14 of 15 tensors have the trainer's bytes")
    assert line.endswith("not changed by a sync of random weights: lm_head.weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"),
    [("ignores", "never_synced"), ("late", "late"), ("scaled", "scaled"), ("stops", "stopped")],
)
def test_one_replica_of_three_is_named_by_its_url(servers, name, cause):
    for url in servers:
        begun(url)
    begun(servers[1], name)
    module = small_model()
    start = scores_of(servers)

    result = preflight(trained(module, servers))

    assert (result.outcome, result.cause) == ("violated", cause)
    assert [r.outcome for r in result.replicas] == ["holds", "violated", "holds"]
    assert re.match(f"replica {servers[1]}: .*; 2 others follow$", result.sentence)
    assert f"replica  {servers[0]} ✓" in str(result)
    # each has the weights from before, except one that cannot take them over
    ends = [*zip(start, scores_of(servers), strict=True)]
    for before, after in ends[::2] if name in ("scaled", "stops") else ends:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_replicas_that_follow_share_one_test(servers):
    for url in servers:
        begun(url)

    result = preflight(trained(small_model(), servers))

    assert result.outcome == "holds" and not result.warnings
    assert result.sentence.endswith("on each of 3 replicas")
    assert result.syncs == preflight(trained(small_model(), servers[0])).syncs


@pytest.mark.slow
def test_a_replica_that_no_test_judged_is_no_pass(servers, monkeypatch):
    monkeypatch.setattr("servanda.rl.sync_drill.servers.replica_drill._TESTS", 1)
    for url in servers[:2]:
        begun(url)
    begun(servers[1], "ignores")

    result = preflight(trained(small_model(), servers[:2]))

    assert [r.outcome for r in result.replicas] == ["holds", "inconclusive"]
    assert result.exit_code == 3
    assert f"replica {servers[1]}: its scores differ from those of each tested" in result.sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "version_only", "stale_prefixes"])
def test_sglang_is_drilled_by_its_own_endpoints(sglang, name):
    begun(sglang, name)

    result = preflight(trained(small_model(), sglang, "sglang"))

    assert result.cause in SERVER_FAULTS[name].causes, str(result)
    assert result.digests[0].startswith(f"{sglang}: 14 of 14 tensors")


@pytest.mark.slow
def test_a_version_that_never_changes_is_noted_where_the_sync_is_the_trainers(sglang):
    begun(sglang)
    module = small_model()
    own = trained(module, sglang, "sglang").sync

    result = preflight(Trainee.from_urls(module, sglang, sync=lambda: own()))

    assert result.outcome == "holds"
    assert f"{sglang} claims the weight version 'default' before and after" in result.warnings[0]


@pytest.mark.slow
def test_adapters_are_merged_into_the_checkpoint(servers):
    from tests.trainers import adapt

    begun(servers[0])

    result = preflight(trained(adapt(small_model()), servers[0]))

    assert result.outcome == "holds", str(result)
    assert {group.kind for group in result.groups} == {"adapter"}


@pytest.mark.slow
def test_servers_that_cannot_be_tested_are_refused_at_once(servers, sglang):
    module = small_model()
    with pytest.raises(MeasurementError, match="'localhost' is not the address of a server"):
        Trainee.from_urls(module, "localhost", sync=print)
    with pytest.raises(MeasurementError, match="is given twice"):
        Trainee.from_vllm(module, [servers[0], servers[0]])
    with pytest.raises(MeasurementError, match="does not answer as a server of dialect 'vllm'"):
        Trainee.from_vllm(module, sglang)
    with pytest.raises(MeasurementError, match="does not answer as a server of dialect 'sglang'"):
        Trainee.from_sglang(module, servers[0])
