# The whole language: every key in one contract, and what is said where one of them is wrong.

from __future__ import annotations

import pytest

from servanda.contract.clause import Load, Relative
from servanda.contract.model import Contract
from servanda.contract.objective import Weighting
from servanda.errors import ContractError
from servanda.judgement.clauses.gradient import advantage_bound
from servanda.judgement.clauses.scope import known_by_name, slices_of
from servanda.judgement.lint.sections import RUNTIME_METRICS
from servanda.judgement.slices.rules import FIELDS, TOKEN_CLASSES, cuts_of
from servanda.runner import run
from tests import kit
from tests.kit import parse

WHOLE = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: whole}
kernels:
  train: {engine: table, mask: replayed}
  infer: {engine: table, path: decode}
stable: {engine: table}
weights: {identity: derived, changes: never}
workloads:
  chat: {prompts: chat.jsonl}
  code: {prompts: code.jsonl, samples: 2}
golden: {prompts: golden.jsonl}
labels:
  tenant: {from: api_key}
  team: {from: request.metadata.team}
slices:
  - {name: tenant, split: labels.tenant}
  - {name: depth, split: context.position, at: [8, 16]}
  - {name: after, split: context.previous_class}
  - {name: rare, match: {outcome.rank: {gte: 10}}}
  - {name: digits, match: {outcome.token_class: {in: [digit]}}}
reward: {range: [-1, 1]}
gradient: {advantage: {group_size: 8}, score_norm: logit_space, weighting: {tis: 2.0}}
numerical:
  - {id: drift, metric: logit_osc_nats, at_most: {times: 4, of: self_noise}}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.02, workload: code}
  - {id: tail, metric: tv, aggregate: mean, at_most: {times: 2, of: stable}, slices: tenant}
  - {id: gap, metric: mass_gap, at_most: 0.01, severity: critical}
runtime:
  envelope: {batch_size: [1, 32], path: decode, outside: refuse}
  clauses:
    - {id: ttft, metric: time_to_first_token_seconds, aggregate: p95,
       at_most: {times: 1.1, of: stable}, load: {concurrency: 8, new_tokens: 32}}
    - {id: speed, metric: tokens_per_second, at_least: 1000, load: {concurrency: 4}}
    - {id: bitwise, metric: batch_invariance_nats, at_most: 0, stages: [canary]}
escalation:
  - {when: {clause: tail, is: violated}, do: [{divert: slice}]}
routing: {dwell: 1.5h, without_snapshot: stable}
promotion:
  offline: {prompt_groups: [400, 6000]}
  shadow: {share: 0.05}
  canary: {steps: [0.01, 0.05, 1], dwell: 10m}
  valid_for: 30d
"""


def read(text: str) -> Contract:
    return parse(text, "x.yaml", engines=["table"])[0]


def test_the_whole_contract_means_what_it_says():
    contract = read(WHOLE)

    assert contract.workload is None
    assert list(contract.all_workloads) == ["chat", "code"]
    assert contract.workload_of(contract.statistical[0]) == "code"
    assert contract.workload_of(contract.statistical[1]) == "chat"
    assert contract.kernels.train.mask == "replayed"
    assert contract.labels["team"].source == "request.metadata.team"
    assert contract.weights.identity == "derived"
    assert contract.gradient is not None
    assert advantage_bound(contract) == pytest.approx(7 / 8**0.5)
    assert contract.gradient.weighting == Weighting(tis=2.0)
    assert contract.runtime.clauses[0].load == Load(concurrency=8, new_tokens=32)
    assert contract.runtime.clauses[0].at_most == Relative(times=1.1, of="stable")
    assert contract.routing.dwell == 5400.0
    assert contract.routing.enter_evidence == 1000


def test_workloads_may_be_a_list():
    listed = WHOLE.replace("  chat: {", "  - {name: chat, ").replace(
        "  code: {", "  - {name: code, "
    )

    assert read(listed).all_workloads == read(WHOLE).all_workloads
    assert read(listed).digest == read(WHOLE).digest


def test_which_workload_is_the_first_is_part_of_what_is_promised():
    """A clause that names none is judged on it, and traffic is it."""
    chat, code = (f"  {name}: {{prompts: {name}.jsonl" for name in ("chat", "code"))
    lines = WHOLE.splitlines(keepends=True)
    i, j = (next(i for i, line in enumerate(lines) if line.startswith(p)) for p in (chat, code))
    lines[i], lines[j] = lines[j], lines[i]

    turned = read("".join(lines))

    assert turned.all_workloads == read(WHOLE).all_workloads
    assert turned.workload_of(turned.statistical[1]) == "code"
    assert turned.digest != read(WHOLE).digest


def test_the_single_workload_has_a_name_too():
    text = WHOLE.replace("workloads:", "workload: {prompts: p.jsonl}\nx-other:")

    contract = read(text.replace("workload: code", "workload: workload"))

    assert list(contract.all_workloads) == ["workload"]
    assert contract.workload_of(contract.statistical[0]) == "workload"


@pytest.mark.parametrize("mode", ["python", "json"])
def test_a_contract_survives_its_own_dump(mode):
    contract = read(WHOLE)

    again = Contract.model_validate(contract.model_dump(mode=mode))

    assert again == contract
    assert again.digest == contract.digest


def test_the_place_of_files_does_not_count_and_their_number_does():
    moved = WHOLE.replace("chat.jsonl", "elsewhere/chat.jsonl")
    fewer = WHOLE.replace("  chat: {prompts: chat.jsonl}\n", "")

    assert read(moved).digest == read(WHOLE).digest != read(fewer).digest


def test_a_clause_speaks_of_the_slices_on_which_its_metric_is_defined():
    contract = read(WHOLE)
    tv, tail, gap = contract.statistical

    assert slices_of(contract, "statistical", tv) == ("all", "tenant", "depth", "after")
    assert slices_of(contract, "statistical", tail) == ("tenant",)
    assert slices_of(contract, "statistical", gap) == ("rare", "digits")
    assert slices_of(contract, "runtime", contract.runtime.clauses[0]) == ("all",)
    assert known_by_name(contract) == {
        "all": "request",
        "tenant": "request",
        "depth": "context",
        "after": "context",
        "rare": "outcome",
        "digits": "outcome",
    }


def test_a_split_of_a_class_makes_a_slice_of_each(tmp_path):
    path, _ = kit.write(tmp_path)
    corpus = run.compile(run.load(path)).schedules[0].corpus

    cuts = cuts_of(read(WHOLE).slices, corpus)["after"]

    assert [cut.name for cut in cuts] == [f"after={name}" for name in TOKEN_CLASSES]


def test_every_field_says_what_it_is():
    for name, field in FIELDS.items():
        assert field.known == name.split(".")[0]
        assert field.meaning


# (what is replaced, by what, the text at the place told, a fragment of message or hint)
PLACES = [
    # workloads
    ("workloads:", "workload: {prompts: p}\nworkloads:", "workloads:", "are both given"),
    ("workload: code", "workload: cod", "cod}", "did you mean 'code'?"),
    (
        "  chat: {prompts: chat.jsonl}\n  code: {",
        "  - {name: chat, prompts: p}\n  - {name: chat, ",
        "chat, prompts: code",
        "two workloads are named 'chat'",
    ),
    ("chat: {prompts: chat.jsonl}", "chat: {samples: 2}", "{samples: 2}", "the key 'prompts'"),
    ("chat: {prompts: chat.jsonl}", "chat: {promts: x}", "promts", "did you mean 'prompts'?"),
    ("chat.jsonl}", "chat.jsonl, mode: score}", "score}", "measures mode: rollout"),
    (
        "  chat: {prompts: chat.jsonl}\n  code: {prompts: code.jsonl, samples: 2}\n",
        "  []\n",
        "[]",
        "a list of 1 is wanted, found one of 0",
    ),
    ("of: self_noise}", "of: self_noise}, workload: chat", "workload: chat", "not on a workload"),
    ("chat: {prompts", "chat: {source: trainer, prompts", "prompts: chat", "brings its own"),
    ("chat: {prompts: chat.jsonl}", "chat: {source: trainer}", "trainer}", "another from prompts"),
    ("train: {engine: table", "train: {engine: external", "external", "no workload comes from"),
    ("stable: {engine: table}", "stable: {engine: external}", "external}", "no engine is named"),
    # weights, masks
    ("identity: derived", "identity: derivd", "derivd", "did you mean 'derived'?"),
    ("changes: never", "changes: every_step", "every_step}", "claim: realised"),
    ("mask: replayed", "mask: none", "none}", "mask cannot be 'none'"),
    # labels
    ("from: api_key", "from: apikey", "apikey}", "did you mean 'api_key'?"),
    (
        "from: request.metadata.team",
        "from: request.team",
        "request.team}",
        "request.metadata.<key>",
    ),
    ("from: api_key", "form: api_key", "form", "did you mean 'from'?"),
    ("tenant: {from: api_key}", "tenant: api_key", "api_key", "write {tenant: {from: api_key}}"),
    # slices
    ("outcome.rank", "outcome.rnak", "outcome.rnak", "did you mean 'outcome.rank'?"),
    ("in: [digit]", "in: [digits]", "digits]", "did you mean 'digit'?"),
    ("in: [digit]", "gte: 3", "gte: 3", "a class is a text, gte compares numbers"),
    ("previous_class}", "previous_class, at: [1]}", "[1]", "it has no edges"),
    ("0.02, workload: code", "0.02, slices: [rare]", "rare]", "halves the mass there reads tv 0"),
    ("0.01, severity", "0.01, slices: tenant, severity", "tenant", "the same mass on slice"),
    ("outcome.rank: {gte: 10}", "context.p_max: {gte: 1}", "mass_gap,", None),
    # relative limits
    ("times: 4, of: self", "times: 1.5, of: self", "1.5", "red needs twice the floor anyway"),
    ("times: 4, of: self_noise", "times: 4, of: stable", "stable}", "by train and infer only"),
    ("stable: {engine: table}\n", "", "{times: 2, of: stable}", "declare stable:, or write of:"),
    ("stable: {engine: table}\n", "", "{times: 1.1, of: stable}", "stable:, or write a number"),
    # runtime
    ("p95,", "p99.99,", "p99.99", "a percentile from p50 to p99.9"),
    ("p95,", "max,", "max", "the longest wait of all cannot be promised"),
    ("aggregate: p95,", "", "{id: ttft", "add aggregate: p95, or mean"),
    (", load: {concurrency: 4}", "", "{id: speed", "add load: {concurrency: 8}"),
    ("{concurrency: 4}", "{}", "{}", "a load needs the key 'concurrency'"),
    ("{concurrency: 4}", "{concurrency: 0}", "0}", "concurrency must be at least 1"),
    ("{concurrency: 4}", "4", "4}", "write {concurrency: 8}"),
    ("at_least: 1000", "at_most: 1000", "at_most", "tokens_per_second takes at_least"),
    ("at_least: 1000", "at_least: 0", "0,", "the clause can never fail"),
    ("at_least: 1000, ", "", "{id: speed", "add at_least: 1000"),
    ("at_most: 0, ", "at_most: -1, ", "-1", "is never negative, found a limit of -1"),
    ("at_most: 0, ", "at_most: {times: 2, of: stable}, ", "{times: 2", "nothing to be relative"),
    ("times: 1.1, of: stable", "times: 1.1, of: self_noise", "self_noise}", "no noise floor to be"),
    ("at_most: 0, ", "at_most: 0, aggregate: mean, ", "aggregate: mean", "takes no aggregate"),
    ("at_most: 0, ", "at_most: 0, load: {concurrency: 2}, ", "load", "takes no load"),
    ("at_least: 1000", "at_least: 1000, clip: 1", "clip: 1", "takes no clip"),
    ("workload: code", "load: {concurrency: 2}", "load", "is measured under no load"),
    (
        "id: tv, metric: tv",
        "id: tv, metric: tokens_per_second",
        "tokens_per",
        "a matter of runtime",
    ),
    ("[1, 32], path: decode", "[1, 32], path: prefil", "prefil", "did you mean 'prefill'?"),
    ("path: decode}", "path: prefill}", "prefill}", "does not certify decoding"),
    ("golden.jsonl}", "golden.jsonl, path: prefill}", "prefill}", "golden texts are prefilled"),
    ("outside: refuse", "outside: reject", "reject}", "did you mean 'refuse'?"),
    # stages, promotion, routing
    ("[canary]", "[full]", "[full]", "add promotion.full, or remove stages"),
    ("[0.01, 0.05, 1]", "[0.05, 0.01]", "[0.05", "shares that increase"),
    ("[0.01, 0.05, 1]", "[0.5, 1.1]", "[0.5", "above 0 and at most 1"),
    ("[0.01, 0.05, 1]", "[]", "[]", "write them in order, such as [0.01, 0.1]"),
    ("share: 0.05", "share: 0", "0}", "share must be greater than 0"),
    ("share: 0.05", "steps: [0.1]", "steps", "shadow has no steps: that is a matter of canary"),
    ("[400, 6000]}", "[400, 6000], sample: 0.1}", "sample", "offline has no sample"),
    ("dwell: 10m", "dwell: 10 m", "10 m}", "a duration is a number and ms, s, m, h or d"),
    # learning
    ("range: [-1, 1]", "range: [1, 1]", "[1", "range of the reward is empty"),
    ("group_size: 8", "group_size: 1", "1}", "group_size must be at least 2"),
    ("{group_size: 8}", "{group: 8}", "group", "an advantage has no key 'group'"),
    ("{group_size: 8}", "0", "0,", "advantage must be greater than 0"),
    ("logit_space", "logits", "logits", "score_norm cannot be 'logits'"),
    ("{tis: 2.0}", "{tis: 0.5}", "0.5", "tis must be at least 1"),
    ("{tis: 2.0}", "{tis: 2.0, clip: 1}", "{tis", "one weighting, found tis, clip"),
    ("{tis: 2.0}", "{mis: [2, 0.5]}", "[2", "the band of mis is empty"),
    ("{tis: 2.0}", "{icepop: [2, 3]}", "[2", "leaves out 1"),
    ("{tis: 2.0}", "naiv", "naiv}", "did you mean 'naive'?"),
    # escalation
    ("slices: tenant}", "slices: [tenant, depth]}", "divert", "slice 'depth' of clause 'tail'"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("old", "new", "at", "fragment"), PLACES)
def test_the_place_of_a_problem(old, new, at, fragment):
    assert WHOLE.count(old) == 1, f"{old!r} is in the text {WHOLE.count(old)} times"
    text = WHOLE.replace(old, new)
    if fragment is None:  # legal: the clause speaks of the slice of outcomes that is left
        assert slices_of(read(text), "statistical", read(text).statistical[2]) == ("digits",)
        return
    with pytest.raises(ContractError) as caught:
        read(text)

    told = [p for p in caught.value.problems if fragment in str(p)]

    assert len(told) == 1, str(caught.value)
    where = told[0].where
    assert where is not None
    line = text.split("\n")[where.line - 1]
    assert line[where.column - 1 :].startswith(at), str(caught.value)


def test_a_contribution_without_a_slice_of_outcomes():
    text = WHOLE.replace("outcome.rank: {gte: 10}", "context.p_max: {gte: 0.5}")
    text = text.replace("outcome.token_class: {in: [digit]}", "context.p_max: {lt: 0.5}")

    with pytest.raises(ContractError) as caught:
        read(text)

    assert [p.message for p in caught.value.problems] == [
        "mass_gap is what a slice of outcomes contributes, and none is declared"
    ]


def test_a_section_without_a_routable_slice_cannot_divert():
    text = WHOLE.replace("{clause: tail", "{section: statistical")
    text = text.replace("workload: code}", "slices: depth}").replace(
        "slices: tenant}", "slices: after}"
    )

    with pytest.raises(ContractError) as caught:
        read(text)

    assert [p.message for p in caught.value.problems] == [
        "no slice of section 'statistical' is known before the request, so no request can be "
        "diverted for it"
    ]


def test_every_runtime_metric_says_what_it_takes():
    for name, metric in RUNTIME_METRICS.items():
        load = ", load: {concurrency: 1}" if metric.load else ""
        aggregate = ", aggregate: p99" if metric.aggregate else ""
        clause = f"{{id: new, metric: {name}{aggregate}, {metric.limit}: {metric.example}{load}}}"
        read(WHOLE.replace("  clauses:\n", f"  clauses:\n    - {clause}\n"))


TRAINER = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: rl}
kernels: {train: {engine: external, title: FSDP}, infer: {engine: external, title: vLLM}}
workload: {source: trainer}
weights: {changes: every_step}
claim: realised
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05, slices: all}
"""


def test_a_contract_of_a_trainer_is_read_and_not_checked_offline(tmp_path):
    path = tmp_path / "rl.kernelcontract.yaml"
    path.write_text(TRAINER)

    contract = run.load(path)
    with pytest.raises(ContractError) as caught:
        run.compile(contract)

    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{path}:5:11: the tokens of this contract come from a trainer as it runs: there is "
        "nothing to measure offline\n"
        "    5 | workload: {source: trainer}\n"
        "                  ^\n"
        "  hint: judge what the trainer dumped: servanda check DUMP --contract FILE; or "
        "name engines and prompts "
        "to measure the kernels here"
    )


def test_a_trainer_runs_both_kernels():
    with pytest.raises(ContractError) as caught:
        read(TRAINER.replace("{engine: external, title: vLLM}", "{engine: table}"))

    assert [str(p.where) for p in caught.value.problems] == ["x.yaml:4:67"]
    assert "so infer is not opened here" in str(caught.value)


def test_each_of_several_workloads_is_measured_by_itself(tmp_path):
    """One prompt is served wrongly, and only the workload that has it is red."""
    path, _ = kit.write(
        tmp_path,
        q={"": kit.BASE, "b": kit.moved(kit.BASE, 0.3)},
        prompts=("a",),
        width=1,
        more="  - {id: other, metric: tv, aggregate: mean, at_most: 0.05, workload: second}",
    )
    (tmp_path / "second.jsonl").write_text('{"prompt": "b"}\n')
    text = path.read_text()
    start, end = text.index("workload:\n"), text.index("claim:")
    first = text[start:end].replace("workload:\n", "").replace("\n  ", "\n    ")
    second = first.replace("prompts.jsonl", "second.jsonl")
    both = f"workloads:\n  first:\n  {first}  second:\n  {second}"
    path.write_text(text[:start] + both + text[end:])

    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)

    outcomes = {(c.clause, c.workload): c.outcome for c in verdict.cells}
    assert outcomes["tv", "first"] == "holds"
    assert outcomes["other", "second"] == "violated"
    assert {("sampler_fidelity", "first"), ("sampler_fidelity.second", "second")} <= {*outcomes}
    assert verdict == run.check(path, run_dir=tmp_path / "run", open=run.in_process)


def test_files_of_every_workload_are_looked_for(tmp_path):
    path = tmp_path / "x.kernelcontract.yaml"
    path.write_text(WHOLE)

    with pytest.raises(ContractError) as caught:
        run.load(path)

    assert [p.where.line for p in caught.value.problems if p.where] == [10, 11, 12]
