# The check sample_ratio: whether infer served the share of the users that a step planned it to.

import json
import random
from dataclasses import replace

import pytest

from servanda.contract.stages import Leg
from servanda.errors import EvidenceError
from servanda.gateway.routing.router import place
from servanda.promotion.run.request_log_files import read_log
from tests import kit, serving
from tests.promotion.run.test_looking import at, cell

SPLIT = "{id: split, metric: sample_ratio, stages: [canary, full]}"
CANARY = Leg("canary", share=0.05, first=64, last=640, part=1 / 7)
SLICES = "slices: [{name: first, split: labels.first}]"


def write(folder, clause=SPLIT, **more):
    golden = f"observability: {{clauses: [{clause}]}}"
    return kit.write(folder, golden=golden, limit=0.3, slices=SLICES, **more)[0]


def assignments(n, share=0.05, leg="canary-1", **more):
    """The first requests of n users, split by a keyed hash as a router does it.

    Args:
        share: of a user's label, or of all.
    """
    rows = []
    for user in range(n):
        label = "abc"[user % 3]
        planned = share[label] if isinstance(share, dict) else share
        pool = "infer" if place(b"salt", "share", f"user {user}") < planned else "stable"
        row = {"run": "r1", "leg": leg, "at": 1000.0 + user, "key": f"{user:x}", "pool": pool}
        rows.append({**row, "labels": {"first": label}, **more})
    return rows


def found(path, lines, leg=CANARY, requests=64):
    served = serving.rows(path, leg.name, requests)
    rows = [*served, *lines]
    random.Random(1).shuffle(lines)
    return at(path, serving.log(path.parent, rows), leg)


def test_a_split_as_planned_holds(tmp_path):
    path = write(tmp_path)

    split = cell(found(path, assignments(4000)), "split")

    assert (split.outcome, split.n, split.units) == ("holds", 4000, "users")
    assert split.value == pytest.approx(0.05, abs=0.01)
    assert split.note.endswith("of 4,000 users, and the step plans 5 %: not rejected")


def test_a_router_with_another_share_rolls_a_canary_back(tmp_path):
    """The route says 5 %, and the router splits at 3 %."""
    path = write(tmp_path)

    result = found(path, assignments(4000, 0.03))

    split = cell(result, "split")
    assert split.outcome == result.verdict.outcome == "violated"
    assert split.note.startswith(f"infer served {100 * split.value:.3g} % of 4,000 users, and the ")
    assert "step plans 5 %; it differs most in first=" in split.note
    assert cell(result, "tv").outcome == "inconclusive"  # its tokens are of other traffic


def test_a_slice_that_never_reaches_infer_is_named(tmp_path):
    path = write(tmp_path, "{id: split, metric: sample_ratio, slices: [all, first]}")

    result = found(path, assignments(9000, {"a": 0.05, "b": 0.0, "c": 0.05}))

    assert "it differs most in first=b: 0 % of 3,000 users" in cell(result, "split").note
    assert cell(result, "split", "first=b").outcome == "violated"
    assert cell(result, "split", "first=a").outcome == "holds"


def test_failures_of_infer_are_not_a_wrong_split(tmp_path):
    """Half of the users that infer was to serve were answered by stable."""
    path, lines = write(tmp_path), assignments(4000)
    mine = [line for line in lines if line["pool"] == "infer"]
    moved = [{**line, "pool": "stable", "because": "failover"} for line in mine[::3]]
    for line in mine[1::3]:
        line |= {"pool": "stable", "because": "breaker"}
    path_of = serving.log(tmp_path, [*serving.rows(path, "canary-1", 64), *lines, *moved])

    split = cell(at(path, path_of, CANARY), "split")

    assert split.outcome == "violated"
    assert f"{len(mine[::3])} failed over to stable" in split.note
    assert f"{len(mine[1::3])} came while its circuit breaker was open" in split.note
    assert "so the split is right and infer fails" in split.note


def test_only_the_first_request_of_a_user_counts(tmp_path):
    path, lines = write(tmp_path), assignments(1500)
    again = [{**line, "at": 9000.0 + i} for i, line in enumerate(lines[:1] * 3000)]

    split = cell(at(path, serving.log(tmp_path, [*lines, *again]), CANARY), "split")

    assert split.n == 1500
    assert split.outcome == "holds"


def test_users_whom_the_step_does_not_split_are_counted_apart(tmp_path):
    path = write(tmp_path)
    pinned = [{**one, "key": f"p{one['key']}", "apart": "first=a pinned", "pool": "stable"}
              for one in assignments(500)]  # fmt: skip

    split = cell(found(path, [*assignments(4000), *pinned]), "split")

    assert (split.outcome, split.n) == ("holds", 4000)
    assert split.note.endswith("because the step does not decide their share: 500 first=a pinned")


def test_too_few_users_are_inconclusive_with_the_number_that_decides(tmp_path):
    path = write(tmp_path)

    split = cell(found(path, assignments(300)), "split")

    assert (split.outcome, split.open) == ("inconclusive", True)
    assert "half of that share is rejected by 1," in split.note


def test_a_log_without_assignments_is_inconclusive_and_says_what_to_write(tmp_path):
    path = write(tmp_path)

    split = cell(found(path, []), "split")

    assert split.outcome == "inconclusive"
    assert split.note == (
        'the log has no assignment: write a line with "pool" for the first request of each user on '
        "the step, by either pool (docs/how-to/traffic.md)"
    )


def test_in_full_a_few_failovers_are_within_the_tolerance(tmp_path):
    full = replace(CANARY, stage="full", share=1.0)
    path, lines = write(tmp_path), assignments(2000, 1.0, "full-1")
    for line in lines[::100]:
        line |= {"pool": "stable", "because": "failover"}

    assert cell(found(path, lines, full), "split").outcome == "holds"
    strict = write(tmp_path / "strict", SPLIT.replace("stages", "at_most: 0, stages"))
    assert cell(found(strict, lines, full), "split").outcome == "violated"


def test_it_does_not_apply_where_infer_serves_nobody(tmp_path):
    path = write(tmp_path, "{id: split, metric: sample_ratio}")
    for stage, why in (
        ("offline", "nothing is served offline: it concerns the split of traffic"),
        ("shadow", "infer serves no user in shadow, so there is no split"),
    ):
        split = cell(found(path, [], Leg(stage, first=32, last=640)), "split")
        assert (split.outcome, split.note) == ("not applicable", why)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "train"}, "'pool' is \"train\", and a user is served by infer or stable"),
        ({"because": "failover", "pool": "infer"}, "'because' is 'failover', and infer served"),
        ({"kei": "x"}, "an assignment has no key 'kei'"),
        ({"key": None}, "'key' is missing"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place(tmp_path, change, message):
    path = write(tmp_path)
    lines = [json.loads(json.dumps({**assignments(1)[0], **change}))]

    with pytest.raises(EvidenceError, match=r"served\.jsonl:65:1") as refused:
        found(path, lines)

    assert message in str(refused.value)


def test_the_requests_of_a_log_are_read_without_its_assignments(tmp_path):
    path = write(tmp_path)
    rows = serving.rows(path, "canary-1", 3)
    mixed = [rows[0], *assignments(5), *rows[1:]]

    assert [r.index for r in read_log([serving.log(tmp_path, mixed)])] == [0, 1, 2]
