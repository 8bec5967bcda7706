# The acceptance of drafts in a check, where the infer kernel counts its drafts while it draws.

import json
from dataclasses import replace

import pytest

from servanda.engines.base import ENGINES
from servanda.engines.table import TableEngine
from servanda.runner import load, run
from tests import kit

DRAFTS = (
    "options: {speculative_config: {method: draft_model, model: draft, num_speculative_tokens: 2}}"
)
CLAUSES = """runtime:
  clauses:
    - {{id: drafts, metric: draft_acceptance, at_least: 0.5{more}}}"""


class Counting(TableEngine):
    """Counts as a server does: of 200 drafts of two tokens each round, 180 and 120 are accepted."""

    options = ("speculative_config",)

    def generate(self, batch, sampling, seed):
        trace = super().generate(batch, sampling, seed)
        counts = {"drafts": 200, "proposed": 400, "accepted": 300, "by_depth": [180, 120]}
        return replace(trace, about={**trace.about, "drafts": json.dumps(counts)})


def checked(folder, monkeypatch, more="", infer="", **options):
    monkeypatch.setattr(ENGINES, "_things", {**ENGINES._things, "vllm": Counting})
    (folder / "draft").mkdir()
    path, _ = kit.write(
        folder, infer=infer, more=CLAUSES.format(more=more), bitwise=True, **options
    )
    path.write_text(path.read_text().replace("infer: {engine: table", "infer: {engine: vllm"))
    verdict = run.check(path, run_dir=folder / "run", open=run.in_process)
    return {c.slice: c for c in verdict.cells if c.clause == "drafts"}


def test_the_drafts_of_all_requests_are_judged_together(tmp_path, monkeypatch):
    (cell,) = checked(tmp_path, monkeypatch, infer=f", {DRAFTS}", claim="realised").values()

    assert cell.outcome == "holds"
    assert (cell.units, cell.value) == ("drafts", 0.75)
    assert cell.interval[0] < cell.value < cell.interval[1]
    assert cell.note == "first 1 to 2 tokens accepted: 90.0%, 60.0% of the drafts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "options", "note"),
    [
        ("", {"claim": "population"}, "the server counts the drafts of all its requests together"),
        (", slices: [after_b]", {"claim": "realised"}, "no draft was counted"),
    ],
    ids=["population", "slice"],
)
def test_they_decide_nothing_of_prompt_groups_or_of_a_slice(
    tmp_path, monkeypatch, more, options, note
):
    slices = "slices: [{name: after_b, match: {labels.first: {in: [b]}}}]"

    found = checked(tmp_path, monkeypatch, more, f", {DRAFTS}", slices=slices, **options)

    (cell,) = found.values()
    assert cell.outcome == "inconclusive"
    assert note in cell.note


def test_a_kernel_that_does_not_count_drafts_has_nothing_to_promise(tmp_path, monkeypatch):
    (cell,) = checked(tmp_path, monkeypatch).values()

    assert (cell.outcome, cell.note) == (
        "not applicable",
        "only a server, or engine vllm with options.speculative_config, counts drafts here",
    )


def test_the_place_of_a_draft_is_no_part_of_a_contracts_meaning(tmp_path):
    found = []
    for name in ("one", "two"):
        path, _ = kit.write(tmp_path / name, infer=f", {DRAFTS}")
        found.append(load.beside(load.contract_of(path.read_text(), str(path)), path.parent))
    one, two = found

    option = one.kernels.infer.options["speculative_config"]
    assert option["model"] == str(tmp_path / "one" / "draft")
    assert one.digest == two.digest
