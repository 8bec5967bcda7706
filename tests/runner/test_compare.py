# Two kernels and no YAML: the verdict, the contract that is left, what is said, and mistakes.

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from servanda.cli.compare import answer_lines
from servanda.contract.identity import Description, differences
from servanda.engines import BUILTIN
from servanda.engines.base import ENGINES
from servanda.engines.folder import config_values, sampling_defaults
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, IdentityError, MeasurementError
from servanda.judgement.verdict import FORMATS, Circumstances, Verdict
from servanda.runner import run
from servanda.runner.compare.contract import CONTRACT, Options, compare, costed, plan_of, prepare
from servanda.runner.compare.reference import PackOptions, measure_pack, pack_contract
from servanda.runner.compare.sides import sides_of
from servanda.runner.probe import Engines
from tests import kit
from tests.kit import servanda
from tests.report.made import verdict

ROOT = Path(__file__).parents[2]
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """p.json, and q.json at TV 0.01 from it; 60 prompts of two tasks."""
    monkeypatch.chdir(tmp_path)
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    kit.table(tmp_path, "q.json", {"": kit.moved(kit.BASE, 0.01)})
    kit.table(tmp_path, "bad.json", {"": kit.moved(kit.BASE, 0.2)})
    lines = [
        {"prompt": "a b" if i % 2 else "c", "labels": {"task": "ab"[i % 2], "row": str(i)}}
        for i in range(60)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def asked(b="q.json", a="table:p.json", **options):
    options = {"prompts": Path("prompts.jsonl"), "preset": "nvfp4", "max_new_tokens": 6} | options
    return Options(a, f"table:{b}", **options)


def ready(**options):
    with Engines(run.in_process) as engines:
        return prepare(asked(**options), engines)


def compared(deadline=None, **options):
    with Engines(run.in_process) as engines:
        comparison = prepare(asked(**options), engines)
        return comparison, compare(comparison, engines, deadline=deadline)


@pytest.mark.slow
@pytest.mark.parametrize(("b", "outcome"), [("q.json", "holds"), ("bad.json", "violated")])
def test_a_comparison_ends_in_a_verdict_and_its_contract(tables, b, outcome):
    comparison, verdict = compared(b=b)
    assert verdict.outcome == outcome
    kept = comparison.folder / CONTRACT
    again = run.check(kept, run_dir=comparison.folder, open=run.in_process)
    assert again.evidence == verdict.evidence and again.outcome == outcome
    elsewhere = run.check(kept, run_dir=tables / "elsewhere", open=run.in_process)
    assert elsewhere.evidence == verdict.evidence


def test_the_contract_keeps_the_reasons_of_its_limits(tables):
    text = ready().text(tables)
    assert text.startswith("# servanda compare table:p.json table:q.json: written by it")
    assert "NVFP4" not in text.splitlines()[0]
    assert "logprobs cannot speak for task quality" in text
    assert "placeholder" not in text and "path/to" not in text
    assert "slices: [task, depth]" in text
    assert "train: {engine: table, model: p.json, path: decode}" in text


def test_a_saved_contract_finds_its_files_from_its_own_folder(tables):
    path = tables / "deep" / "er" / "x.kernelcontract.yaml"
    ready().save(path)
    contract = run.load(path)
    assert Path(contract.kernels.infer.model).resolve() == tables / "q.json"
    assert contract.digest == ready().contract().digest


def test_labels_of_two_to_eight_values_become_slices(tables):
    comparison = ready()
    assert [rule.name for rule in comparison.parts.slices] == ["task", "depth"]
    said = "\n".join(comparison.said)
    assert "label 'row' differs on every line: an identifier, and no slice" in said


def test_prompts_of_many_lengths_are_sliced_by_length(tables):
    texts = ["a", "a b " * 20, "c " * 200]
    (tables / "long.jsonl").write_text("\n".join(json.dumps({"prompt": t}) for t in texts))
    by_length = ready(prompts=Path("long.jsonl")).parts.slices[0]
    assert (by_length.split, by_length.at) == ("request.prompt_tokens", (16.0, 64.0))


def test_a_slice_that_its_run_could_not_judge_is_left_out_and_said(tables):
    lines = [{"prompt": "a", "labels": {"task": "rare" if i == 0 else "often"}} for i in range(200)]
    (tables / "rare.jsonl").write_text("\n".join(map(json.dumps, lines)))
    comparison = ready(prompts=Path("rare.jsonl"), claim="population")
    assert [rule.name for rule in comparison.parts.slices] == ["task-often", "depth"]
    said = "\n".join(comparison.said)
    assert "1 of 2 values of label 'task' ('rare') would have 10 of the" in said
    assert "judged with the whole alone" in said


@pytest.mark.slow
def test_a_rare_value_takes_no_other_value_with_it(tables):
    """18 % of the prompts are at 3.5 times the limit; another value is rarer still."""
    often, differs = kit.BASE, kit.moved(kit.BASE, 0.14)
    kit.table(tables, "b.json", {"": often, "b": differs, "d": differs})
    of = ["b"] * 18 + ["rare"] * 1 + ["often"] * 81
    lines = [{"prompt": "b" if kind == "b" else "c", "labels": {"kind": kind}} for kind in of]
    (tables / "kinds.jsonl").write_text("\n".join(map(json.dumps, lines)))

    comparison, verdict = compared(b="b.json", prompts=Path("kinds.jsonl"), max_new_tokens=2)

    assert [rule.name for rule in comparison.parts.slices] == ["kind-often", "kind-b"]
    assert "1 of 3 values of label 'kind' ('rare') would have" in "\n".join(comparison.said)
    assert ("kind-b", "violated") in {(c.slice, c.outcome) for c in verdict.cells}
    spots = [spot.text for spot in verdict.blind_spots]
    assert (
        "label 'kind': 'rare', 1 % of the prompts, not by itself: judged with the whole alone"
        in spots
    )


def test_values_that_are_rare_alone_are_judged_together(tables):
    of = [f"rare{i % 5}" for i in range(20)] + ["often"] * 80
    lines = [{"prompt": "c", "labels": {"kind": kind}} for kind in of]
    (tables / "kinds.jsonl").write_text("\n".join(map(json.dumps, lines)))

    comparison, verdict = compared(prompts=Path("kinds.jsonl"), sequences=400, max_new_tokens=2)

    assert comparison.parts.slices[0].most == 1
    assert {"kind=often", "kind=(other)"} <= {c.slice for c in verdict.cells}
    assert any("judged together in one slice" in spot.text for spot in verdict.blind_spots)


def test_identical_kernels_hold_where_answers_are_short(tables):
    """An end of text nearly everywhere: one answer in a thousand is longer than two tokens."""
    ending = [0.01, 0.005, 0.005, 0.01, 0.97]
    for name in ("short.json", "short2.json"):
        kit.table(tables, name, {"": ending})
    before = (16.0, 32.0)  # a third and two thirds of the room, which nothing reaches

    comparison, verdict = compared(
        a="table:short.json", b="short2.json", max_new_tokens=48, sequences=800
    )

    assert verdict.outcome == "holds", str(verdict)
    depth = [rule for rule in comparison.parts.slices if rule.name == "depth"]
    assert all(rule.at != before for rule in depth)
    assert any("answers drawn to look have" in line for line in comparison.said)
    again = ready(a="table:short.json", b="short2.json", max_new_tokens=48, sequences=800)
    assert again.contract().digest == comparison.contract().digest


def test_the_depths_of_a_run_that_is_continued_are_those_that_it_began_with(tables):
    with Engines(run.in_process) as engines:
        comparison = prepare(asked(), engines)
        comparison.save(comparison.folder / CONTRACT)
        kept = comparison.folder / CONTRACT
        text = kept.read_text()
        drawn = text.split("to choose depths: ")[1].splitlines()[0]
        kept.write_text(text.replace(drawn, "1 1 1"))
        assert "depth" not in [r.name for r in prepare(asked(), engines).parts.slices]


def test_what_is_compared_is_said_first(tables):
    said = ready(preset=None).said
    assert said[0] == "compare   table q.json  (B) against  table p.json  (A, today)"
    assert said[1].strip() == "B generates, A re-scores the same tokens by decoding, as it serves"
    trained = ready(preset="trl")
    assert trained.said[1].endswith("re-scores the same tokens by prefill, as a trainer")
    assert (trained.parts.train.path, ready().parts.train.path) == (None, "decode")
    assert "60 prompts: prompts.jsonl" in said[2]
    assert "preset vllm-upgrade: neither is quantised" in said[3]


def test_the_claim_is_that_of_the_tokens_measured_unless_asked(tables):
    assert ready().parts.claim == "realised"
    assert "claim     realised: the tokens that are measured" in "\n".join(ready().said)
    assert ready(sequences=2000, claim="population").parts.claim == "population"
    with pytest.raises(ContractError, match="64 prompt groups are too few for a claim about all"):
        ready(sequences=64, claim="population")


def test_a_referee_judges_the_candidate_and_shows_today(tables):
    comparison, verdict = compared(a="table:bad.json", referee="table:p.json", sequences=600)
    assert (verdict.train, verdict.infer) == ("table p.json", "table q.json")
    whole = next(c for c in verdict.cells if c.clause == "whole")
    assert whole.outcome == "holds" and whole.stable == pytest.approx(0.2, abs=0.05)
    beside = next(c for c in verdict.cells if c.clause == "against-today")
    assert not beside.enforced and beside.outcome == "holds"
    assert "limits are on B, A is shown" in comparison.said[1]


def test_golden_texts_are_judged_exactly_where_they_are_given(tables):
    kit.golden(tables)
    _, verdict = compared(golden=Path("golden.jsonl"))
    golden = next(c for c in verdict.cells if c.clause == "golden")
    assert golden.kind == "fact" and golden.value == pytest.approx(0.01)
    comparison = ready(golden=Path("golden.jsonl"), preset="trl")
    assert any("preset trl has no clause on golden texts" in line for line in comparison.said)


@pytest.mark.parametrize("name", ["vllm-upgrade", "fp8", "nvfp4", "new-gpu", "trl", "slime"])
def test_every_preset_can_be_completed(tables, name):
    kit.golden(tables)
    for golden in (None, Path("golden.jsonl")):
        contract = ready(preset=name, golden=golden).contract()
        assert run.compile(contract).cells


def pack(tables, sequences=512, golden=None):
    contract, side = pack_contract(
        PackOptions(
            "table:p.json",
            prompts=Path("prompts.jsonl"),
            golden=golden,
            sequences=sequences,
            max_new_tokens=6,
        )
    )
    return measure_pack(contract, side, tables / "p.pack", open=run.in_process)


@pytest.mark.slow
def test_a_pack_needs_no_prompts_and_says_that_the_roles_are_swapped(tables):
    pack(tables)
    (tables / "prompts.jsonl").unlink()
    options = {"a": "p.pack", "prompts": None, "max_new_tokens": None}
    comparison, verdict = compared(**options)
    assert verdict.outcome == "holds" and verdict.key.grade == "verified"
    assert verdict.infer == "reference pack p.pack: table p.json (drew)"
    assert verdict.train == "candidate table q.json (re-scores)"
    said = "\n".join(comparison.said)
    assert "the reference of the baseline file generated the tokens, B re-scores them" in said
    assert "the sampler of B is not tested" in said
    text = (comparison.folder / CONTRACT).read_text()
    assert "# no numerical clauses: the pack was made without golden texts" in text
    kept = comparison.folder / CONTRACT
    again = run.check(kept, run_dir=comparison.folder, open=run.in_process)
    assert again.evidence == verdict.evidence
    _, broken = compared(b="bad.json", **options)
    assert broken.outcome == "violated"


@pytest.mark.slow
def test_golden_texts_of_a_pack_bound_the_candidate_without_a_file(tables):
    kit.golden(tables)
    pack(tables, golden=Path("golden.jsonl"))
    (tables / "golden.jsonl").unlink()
    options = {"a": "p.pack", "prompts": None, "max_new_tokens": None}

    comparison, verdict = compared(**options)
    _, broken = compared(b="bad.json", **options)

    assert (comparison.folder / "golden.jsonl").is_file()
    text = (comparison.folder / CONTRACT).read_text()
    assert "golden: {prompts: golden.jsonl, path: decode}" in text
    found = next(c for c in verdict.cells if c.clause == "golden")
    assert (found.kind, found.outcome) == ("bound", "holds")
    assert found.interval == pytest.approx((0.01, 0.01), abs=1e-5)
    assert next(c for c in broken.cells if c.clause == "golden").outcome == "violated"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"golden": Path("other.jsonl")}, "is not what the pack p.pack was made with"),
        ({"sequences": 600}, "the pack holds 512 prompt groups, and --sequences asks for 600"),
        ({"max_new_tokens": 9}, "was drawn with max_new_tokens 6, not 9"),
        ({"temperature": 0.5}, "was drawn with temperature 1, not 0.5"),
        ({"prompts": Path("other.jsonl")}, "is not what the pack p.pack was drawn on"),
        ({"referee": "table:p.json"}, "a baseline file cannot"),
    ],
)
def test_a_pack_refuses_another_comparison(tables, options, message):
    pack(tables)
    (tables / "other.jsonl").write_text('{"prompt": "a"}\n')
    given = {"a": "p.pack", "prompts": None, "max_new_tokens": None} | options
    with pytest.raises(ContractError, match=message):
        ready(**given)


def test_a_pack_is_no_candidate_and_one_of_other_weights_is_refused(tables):
    pack(tables)
    with Engines(run.in_process) as engines, pytest.raises(ContractError) as caught:
        prepare(Options("table:p.json", "p.pack"), engines)
    assert "give the pack first" in caught.value.problems[0].hint
    kit.table(tables, "new.json", {"": kit.BASE}, weights="new")
    with pytest.raises(IdentityError, match="the weights differ"):
        compared(a="p.pack", b="new.json", prompts=None, max_new_tokens=None)


@pytest.mark.slow
def test_a_gross_fault_stops_within_a_tenth(tables):
    """A slice that lies on its limit would take the whole budget; the whole breaks long before."""
    stays = [0.0, 0.0, 0.95, 0.0, 0.05]  # who begins with c goes on with c
    kit.table(tables, "p.json", {"": kit.BASE, "c": stays})
    near = kit.moved(stays, 0.08, a=2, b=4)
    kit.table(tables, "near.json", {"": kit.moved(kit.BASE, 0.3), "c": near})
    _, verdict = compared(b="near.json", sequences=20000)
    assert verdict.outcome == "violated" and verdict.groups <= 2048
    assert any(c.open for c in verdict.cells)


def test_a_run_out_of_time_says_what_is_open_and_promises_nothing(tables):
    looks = iter([False, False] + [True] * 9)  # before the first round, after it, after the second
    _, verdict = compared(deadline=lambda: next(looks), preset="vllm-upgrade")
    assert verdict.groups == 128 and verdict.outcome == "inconclusive"
    assert verdict.circumstances.stopped == "time"
    whole = next(c for c in verdict.cells if c.clause == "whole")
    assert whole.note.startswith("the time was over before this was decided")
    _, verdict = compared(deadline=lambda: True)
    assert (verdict.groups, verdict.outcome, verdict.exit_code) == (0, "inconclusive", 3)
    assert {c.note for c in verdict.cells} == {"the time was over before this was decided"}


def cost_of(**options):
    with Engines(run.in_process) as engines:
        comparison = prepare(asked(**options), engines)
        plan = plan_of(comparison)
        return plan, costed(plan, engines)


def test_the_cost_counts_the_very_tokens_that_a_run_has(tables):
    plan, cost = cost_of(sequences=512)
    _, verdict = compared(sequences=512)
    assert cost.exact and cost.probed == 16 and cost.seconds > 0 and cost.disk_bytes > 0
    lengths = {"a b": 2, "c": 1}
    prompts = plan.schedules[0].corpus.prompts
    units = [u for i in range(8) for u in plan.schedules[0].units(i)]
    assert cost.prompt_tokens == sum(lengths[prompts[u.row].text] for u in units)
    assert cost.sequences == len(units) == 512 and cost.new_tokens_at_most == 512 * 6
    assert verdict.outcome == "holds" and cost.expected == 256 < cost.sequences
    assert cost_of(sequences=2000, claim="population")[1].expected > 256
    assert cost.new_tokens == pytest.approx(verdict.tokens / verdict.groups * 512, rel=0.5)


def test_what_a_plan_decides_is_what_a_run_decides(tables):
    _, cost = cost_of(sequences=2000, claim="population")
    whole = next(d for d in cost.decides if d.clause == "whole")
    assert 0 < whole.holds < whole.holds_even < whole.limit == 0.04
    assert whole.limit < whole.violated_even < whole.violated
    assert whole.units == "prompt groups" and whole.n == 2048  # rounds are whole
    halves = [d for d in cost.decides if d.slice.startswith("task=")]
    assert [d.n for d in halves] == [1024, 1024]


# the command line


ON = ("--prompts", "prompts.jsonl", "--preset", "nvfp4", "--max-new-tokens", "6")


@pytest.mark.slow
def test_compare_prints_in_order_and_exits_as_its_verdict(tables):
    done = servanda("compare", "table:p.json", "table:q.json", *ON, "--save-contract", "kept.yaml")
    assert done.exit_code == 0, done.output
    places = [done.stdout.index(text) for text in ("compare   ", "cost  ", "HOLDS: ", "contract  ")]
    assert places == sorted(places)
    assert re.search(r"\(timed on (16|8) sequences\)", done.stdout)
    assert Path("kept.yaml").exists()
    [kept] = Path("runs").glob(f"*/{CONTRACT}")
    checked = servanda("check", kept, "--run-dir", kept.parent, "--quiet")
    assert checked.exit_code == 0 and "HOLDS: " in checked.stdout


@pytest.mark.slow
def test_a_plan_measures_nothing_and_json_is_nothing_but_json(tables):
    done = servanda("compare", "table:p.json", "table:q.json", *ON, "--plan")
    assert done.exit_code == 0 and "holds if at most" in done.stdout
    assert not Path("runs").exists()
    done = servanda("compare", "table:p.json", "table:bad.json", *ON, "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["outcome"] == "violated"


def test_plan_of_a_contract_with_and_without_a_probe(tables):
    path, _ = kit.write(tables / "k")
    done = servanda("contract", "plan", path, "--no-probe")
    assert done.exit_code == 0, done.output
    assert "tokens estimated from characters" in done.stdout and "timed" not in done.stdout
    assert "`holds` costs e = 22, `violated` e = 44" in done.stdout
    probed = servanda("contract", "plan", path, "--quiet")
    assert re.search(r"timed on (16|8) sequences", probed.stdout) and "on disk" in probed.stdout


@pytest.mark.slow
def test_measure_writes_a_pack_and_names_the_next_command(tables):
    done = servanda(
        "tools",
        "measure",
        "table:p.json",
        *ON[:2],
        *ON[4:],
        "--sequences",
        320,
        "-o",
        "x.pack",
        "--quiet",
    )
    assert done.exit_code == 0, done.output
    assert "x.pack: table p.json, 320 prompt groups" in done.stdout
    assert "next: servanda compare x.pack KERNEL" in done.stdout
    done = servanda("compare", "x.pack", "table:q.json", "--preset", "nvfp4", "--quiet")
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_check_stops_when_its_time_is_over(tables):
    path, _ = kit.write(tables / "k")
    done = servanda("check", path, "--max-time", "0s", "--quiet")
    assert done.exit_code == 3 and "INCONCLUSIVE" in done.stdout
    later = servanda("check", path, "--max-time", "1h", "--quiet")  # the same run goes on
    assert later.exit_code == 0, later.output


def test_presets_are_listed_and_shown():
    done = servanda("contract", "presets")
    assert done.exit_code == 0 and "vllm-upgrade" in done.stdout and "slime" in done.stdout
    assert "kind: KernelContract" in servanda("contract", "presets", "--show", "fp8").stdout


# the most likely mistakes


def test_a_file_a_tokenizer_and_a_preset_that_do_not_fit_are_said(tables):
    done = servanda("compare", "table:p.json", "table:x.json", *ON)
    assert done.exit_code == 2
    assert done.stderr == (
        "B:1:7: there is no x.json\n"
        "    1 | table:x.json\n"
        "              ^\n"
        "  hint: name a file or a folder, or a model of the Hub as hf://ORGANISATION/NAME\n"
    )
    done = servanda("compare", "table:p.json", "table:q.json", "--prompts", "x.jsonl")
    assert done.exit_code == 2 and "there is no file x.jsonl" in done.stderr
    kit.table(tables, "other.json", {"": kit.BASE}, tokens=["a", "b", "c", "x", "<eos>"])
    done = servanda("compare", "table:p.json", "table:other.json", *ON)
    assert done.exit_code == 4 and "the tokenizers differ" in done.stderr
    done = servanda("compare", "table:p.json", "table:q.json", "--preset", "fp88")
    assert done.exit_code == 2
    assert done.stderr == "there is no preset 'fp88'\n  hint: did you mean 'fp8'?\n"


@pytest.mark.parametrize("verb", [("check", "x.yaml"), ("compare", "table:p", "table:q")])
def test_a_bad_duration(verb):
    done = servanda(*verb, "--max-time", "10 minutes")
    assert done.exit_code == 2
    assert "a duration is a number and ms, s, m, h or d: 30s, 5m, 1h, 7d" in done.stderr


def test_prompts_of_another_vocabulary(tables):
    with pytest.raises(MeasurementError, match="the table has no token 'z'"):
        Path("z.jsonl").write_text('{"prompt": "z"}\n')
        ready(prompts=Path("z.jsonl"))


@pytest.mark.parametrize(
    "verb",
    [("compare", "table:p.json", "table:q.json"), ("tools", "measure", "table:p.json", "-o", "p")],
)
def test_a_line_that_a_kernel_cannot_run_is_named_before_anything_is_drawn(tables, verb):
    Path("odd.jsonl").write_text('{"token_ids": [1, 2]}\n{"token_ids": [1, 99]}\n')
    done = servanda(*verb, "--prompts", "odd.jsonl")
    assert done.exit_code == 2
    assert "odd.jsonl:2:1: id 99 in a prompt for a vocabulary of 5 ids" in done.stderr
    assert "odd.jsonl:1" not in done.stderr and not Path("p").exists()


@pytest.mark.slow
@needs_torch
def test_a_folder_without_a_config(tables):
    (tables / "empty").mkdir()
    done = servanda("compare", "transformers:empty", "transformers:empty", "--quiet")
    assert done.exit_code == 4 and "has no config.json" in done.stderr


@needs_torch
@pytest.mark.slow
def test_a_real_model_against_its_pack(tables):
    model = f"transformers:{ROOT / 'models' / 'tiny-lm'}"
    lines = (ROOT / "data" / "prompts.jsonl").read_text().splitlines()
    (tables / "real.jsonl").write_text("\n".join([x for x in lines if len(x) < 200][:48]))
    golden = (ROOT / "data" / "golden.jsonl").read_text().splitlines()[:2]
    (tables / "golden.jsonl").write_text("\n".join(golden))
    texts = ("--prompts", "real.jsonl", "--golden", "golden.jsonl")
    few = ("--sequences", 64, "--max-new-tokens", 8, "-o", "real.pack", "--quiet")
    done = servanda("tools", "measure", f"{model}@float32", *texts, *few)
    assert done.exit_code == 0, done.output
    candidate = f"{model}@bfloat16,attention=sdpa"
    done = servanda("compare", "real.pack", candidate, "--preset", "nvfp4", "--quiet")
    assert done.exit_code == 0, done.output
    assert "HOLDS" in done.stdout and "re-scores" in done.stdout


class _Clock(TableEngine):
    """An engine of another package: it needs no model, and records no batch size."""

    def __init__(self, kernel):
        model = "q.json" if kernel.engine == "slow_clock" else "p.json"
        super().__init__(kernel.model_copy(update={"model": model}))

    def trace_of(self, trace):
        about = {k: v for k, v in trace.about.items() if k != "batch_size"}
        return replace(trace, about=about)

    def generate(self, batch, sampling, seed):
        return self.trace_of(super().generate(batch, sampling, seed))

    def score(self, batch, sampling, path):
        return self.trace_of(super().score(batch, sampling, path))


def test_engines_of_other_packages_can_be_compared(tables, monkeypatch):
    """By their names alone, and by the contract that compare itself writes."""
    for name in ("clock", "slow_clock"):
        monkeypatch.setitem(ENGINES._things, name, _Clock)
    names = (*BUILTIN, "clock", "slow_clock")
    for module in ("runner.compare.sides", "runner.load"):
        monkeypatch.setattr(f"servanda.{module}.engine_names", lambda: names)
    wanted = Options(
        "clock", "slow_clock", prompts=Path("prompts.jsonl"), preset="nvfp4", max_new_tokens=6
    )
    with Engines(run.in_process) as engines:
        comparison = prepare(wanted, engines)
        verdict = compare(comparison, engines)

    assert verdict.outcome == "holds", verdict
    assert "batch_size" not in comparison.text(Path())


def test_the_key_of_config_json_that_differs_is_told(tmp_path):
    """An epsilon and a theta are named with both values; who wrote the file is not."""
    config = json.loads((ROOT / "models/tiny-lm/config.json").read_text())
    other = config | {"rms_norm_eps": 1e-3, "transformers_version": "4.0", "dtype": "float16"}
    other["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 5e5}

    def said(one, two):
        sides = (config_values(c) for c in (one, two))
        return differences(*(Description({}, {}, "", 0, (), config=c) for c in sides))

    text = (
        "config.json differs (train / infer): rms_norm_eps 1e-06 / 0.001, "
        "rope_parameters.rope_theta 10000.0 / 500000.0"
    )
    assert said(config, other) == (text,)
    assert said(config, config | {"dtype": "float16", "transformers_version": "4.0"}) == ()
    untold = [Description({"config": d}, {}, "", 0, ()) for d in ("70cc1111", "7c042222")]
    assert "digest 70cc1111 on train, 7c042222 on infer" in differences(*untold)[0]
    assert differences(untold[0], untold[0]) == ()
    told = [
        Description({"engine": "x", "default.top_k": "40"} | more, {}, "", 0, ())
        for more in ({}, {"default.repeat_penalty": "1.1"})
    ]
    assert differences(*told) == (
        "sampling defaults differ (train / infer): repeat_penalty absent / 1.1",
    )
    made = verdict("violated", circumstances=Circumstances(differences=(text,)))
    for name in ("text", "markdown", "html", "json", "github"):
        assert "rms_norm_eps" in FORMATS[name](made).replace("\\", ""), name
    assert Verdict.from_dict(made.to_dict()).circumstances.differences == (text,)


def test_the_sampling_defaults_of_a_folder_are_part_of_its_fingerprint(tmp_path):
    assert sampling_defaults(ROOT / "models/tiny-lm") == {}  # it has none: digests stay
    said = {"temperature": 0.6, "repetition_penalty": 1.1, "transformers_version": "5"}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == {
        "default.temperature": "0.6",
        "default.repetition_penalty": "1.1",
    }
    assert sampling_defaults(tmp_path / "none") == {}


@pytest.mark.parametrize("other", ["train", "infer"])
def test_a_kernel_that_ends_its_responses_at_another_id_does_not_hold(tables, other):
    """The laws of every token are equal; one of the two goes on where the other stops."""
    data = json.loads((tables / "p.json").read_text())
    (tables / "q.json").write_text(json.dumps({**data, "eos": data["tokens"][2]}))
    names = ("q.json", "table:p.json") if other == "infer" else ("p.json", "table:q.json")

    _, verdict = compared(b=names[0], a=names[1], sequences=256)

    assert verdict.outcome == "violated"
    whole = next(cell for cell in verdict.cells if cell.clause == "whole" and cell.slice == "all")
    assert whole.outcome == "violated" and whole.value > 0.1
    ends = (2, 4) if other == "train" else (4, 2)
    line = "the ids that are told to end a response differ (train / infer): {} / {}".format(*ends)
    assert line in verdict.circumstances.differences


@pytest.mark.parametrize(
    ("b", "asked", "answer"),
    [
        (
            "q.json",
            ("--sequences", "256"),
            "B may replace A, as far as this run looked: no limit of",
        ),
        ("bad.json", ("--sequences", "256"), "B may not replace A: it breaks preset nvfp4"),
        ("q.json", ("--max-time", "0s"), "not known yet whether B may replace A by preset nvfp4"),
    ],
)
def test_the_first_line_of_an_answer_is_whether_b_may_replace_a(tables, b, asked, answer):
    words = ("compare", "table:p.json", f"table:{b}", "--prompts", "prompts.jsonl", *asked)
    words += ("--preset", "nvfp4", "--max-new-tokens", "6", "--run-dir", "run")

    done = servanda(*words)

    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("answer    "))
    assert answer in lines[at] and "weights verified" in lines[at + 3]


def test_the_settings_in_which_two_kernels_differ_are_named():
    def lines(a, b, outcome):
        sides = sides_of(f"transformers:.@{a}", f"transformers:.@{b}")
        options = Options(f"transformers:.@{a}", f"transformers:.@{b}")
        made = SimpleNamespace(sides=sides, preset="fp8", options=options)
        return answer_lines(SimpleNamespace(outcome=outcome), made)

    many = lines("float32,attention=eager", "bfloat16,attention=sdpa", "holds")
    one = lines("float32", "bfloat16", "violated")

    assert many[1:] == [
        "settings  A and B differ in dtype float32 and bfloat16; attention eager and sdpa: change "
        "one at a time to see which matters"
    ]
    assert one[1].endswith("servanda bisect transformers:.@float32 transformers:.@bfloat16 names "
                           "the module")  # fmt: skip
    assert lines("float32", "float32", "holds")[1:] == []
