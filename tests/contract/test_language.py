# The contract language: values, places, and that only ContractError comes out of any text.

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.contract.clause import Clause, Relative
from servanda.contract.model import Observability, Runtime, Weights
from servanda.contract.policy import Promotion, Routing, StageRule
from servanda.contract.workload import WorkloadSampling
from servanda.contract.yaml_reader import Marks
from servanda.errors import ContractError
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from tests.kit import parse

EXAMPLE = """\
# yaml-language-server: $schema=./kernelcontract.schema.json
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata:
  name: tiny-lm-int8
  version: 1.0.0
  description: May the int8 kernel serve what the fp32 kernel trains?

kernels:
  train: {engine: transformers, model: models/tiny-lm, dtype: float32, attention: eager}
  infer: {engine: transformers, model: models/tiny-lm, dtype: bfloat16, attention: sdpa,
          quantization: int8_weight_only}
stable: {engine: transformers, model: models/tiny-lm, dtype: bfloat16, attention: eager}

workload:
  prompts: data/prompts.jsonl
  mode: rollout
  sampling: {temperature: 1.0, top_p: 1.0, max_new_tokens: 24, seed: 7}
golden: {prompts: data/golden.jsonl}

slices:
  - {name: domain, split: labels.domain, most: 8}
  - {name: unsure, match: {context.entropy_nats: {gte: 3.0}}}
  - {name: depth,  split: context.position, at: [8, 16]}

confidence: 0.95
claim: population
reward:   {range: [0, 1]}
gradient: {advantage: {group_size: 8}, score_norm: logit_space, weighting: {tis: 2.0}}

numerical:
  - {id: drift, metric: logit_osc_nats, aggregate: max, at_most: 0.6}
statistical:
  - {id: tv,     metric: tv, aggregate: mean, at_most: 0.02}
  - {id: tail,   metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.2, severity: critical}
  - {id: drift2, metric: k3_nats, aggregate: mean, clip: 1.0,
     at_most: {times: 3.0, of: self_noise}, mode: monitor}
  - {id: reward, metric: reward_drift, at_most: 0.25, slices: [all]}
  - {id: bias,   metric: policy_gradient_bias, at_most: 0.10, slices: [all]}
runtime:
  envelope: {batch_size: [1, 32], prompt_tokens: [1, 512], path: decode, outside: stable}
  clauses:
    - {id: ttft, metric: time_to_first_token_seconds, aggregate: p95,
       at_most: {times: 1.1, of: stable}, load: {concurrency: 8}, stages: [canary, full]}
observability:
  record: [fingerprint, token_ids, processed_logprobs, sampling, path, batch_size]
  clauses:
    - {id: fidelity, metric: sampler_fidelity}
    - {id: finite,   metric: valid_ratio, at_least: 0.999}
    - {id: coverage, metric: scoring_rate, over: 1h, at_least: 0.005,
       stages: [shadow, canary, full]}
escalation:
  - {when: {clause: tail, is: violated},                do: [{divert: slice}, {page: oncall}]}
  - {when: {section: statistical, is: violated},        do: [{divert: slice}]}
  - {when: {section: observability, is_not: holds},     do: [hold, {sample: 0.10}]}
  - {when: {diverted_traffic: {gte: 0.3}},              do: [hold, {page: oncall}]}
routing: {enter_evidence: 1000, leave_evidence: 20, dwell: 15m, without_snapshot: stable}
promotion:
  offline: {prompt_groups: [400, 6000]}
  shadow:  {prompt_groups: [1500, 20000], share: 0.05}
  canary:  {steps: [0.01, 0.05, 0.25], prompt_groups: [1500, 20000], dwell: 10m,
            approval: required, if_inconclusive: wait}
  full:    {sample: 0.01}
  valid_for: 30d
"""

SMALL = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: small}
kernels: {train: {engine: table}, infer: {engine: table}}
workload: {prompts: p.jsonl}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 1e-3}
"""


def read(text: str):
    return parse(text, "x.yaml", engines=["transformers", "table"], faults=["scale"])


def problems_of(text: str):
    with pytest.raises(ContractError) as caught:
        read(text)
    return caught.value.problems


def places_of(text: str) -> list[tuple[int, int]]:
    return [(p.where.line, p.where.column) for p in problems_of(text) if p.where]


def test_the_example_means_what_it_says():
    contract, _ = read(EXAMPLE)

    assert contract.metadata.version == "1.0.0"
    assert contract.kernels.infer.quantization == "int8_weight_only"
    assert contract.workload is not None
    assert contract.workload.sampling.max_new_tokens == 24
    ids = " ".join(clause.id for _, _, clause in contract.clauses())
    assert ids == "drift tv tail drift2 reward bias ttft fidelity finite coverage"
    assert contract.statistical[0].at_most == 0.02
    assert contract.statistical[1].percentile == 99.0
    assert contract.statistical[2].at_most == Relative(times=3.0, of="self_noise")
    assert contract.statistical[0].slices is None
    assert contract.statistical[3].slices == ("all",)
    assert contract.observability.clauses[2].over == 3600.0
    assert contract.promotion.canary is not None
    assert contract.promotion.canary.dwell == 600.0
    assert contract.slices[2].at == (8.0, 16.0)
    assert contract.escalation[2].do == ("hold", {"sample": 0.1})


def test_every_part_has_its_place():
    _, marks = read(EXAMPLE)

    assert str(marks["statistical", 1, "metric"]) == "x.yaml:35:26"
    assert str(marks.key(("statistical", 1, "metric"))) == "x.yaml:35:18"
    assert marks["statistical", 1, "metric"].text == EXAMPLE.split("\n")[34]
    assert marks.near(("statistical", 1, "clip", "nothing")) == marks["statistical", 1]
    assert marks[()].line == 2
    for path in marks:
        key = marks.key(path)
        if path and isinstance(path[-1], str):
            assert EXAMPLE.split("\n")[key.line - 1][key.column - 1 :].startswith(path[-1])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 1e-3),
        ("1", 1),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("+.5", 0.5),
        ("-.inf", float("-inf")),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-31", "2026-01-31"),
        ("=", "="),
        ("~", None),
        ("", None),
        ("NULL", None),
        ("True", True),
        ("false", False),
        ("'1'", "1"),
        ('"true"', "true"),
        ("|\n      a\n      b\n", "a\nb\n"),
    ],
)
def test_scalars_follow_yaml_1_2(written, value):
    text = SMALL.replace("{name: small}", f"\n  name: small\n  annotations:\n    on: {written}")

    contract, _ = read(text)

    assert contract.metadata.annotations == {"on": value}
    assert type(contract.metadata.annotations["on"]) is type(value)


def test_x_keys_and_annotations_are_free():
    text = SMALL.replace("id: tv,", "id: tv, x-why: [of, {x: 1}],")
    text = text.replace("small}", "small, annotations: {x-a: 1, any: {thing: [1]}}}")

    contract, marks = read(text + "x-shared: {nothing: here}\n")

    assert contract.metadata.annotations == {"x-a": 1, "any": {"thing": [1]}}
    assert marks["x-shared", "nothing"].line == 8


def test_reference_and_candidate_are_train_and_infer():
    text = SMALL.replace("train:", "reference:").replace("infer:", "candidate:")

    contract, marks = read(text)

    assert contract == read(SMALL)[0]
    assert marks.key(("kernels", "train")).column == 11


def test_everything_wrong_is_told_at_once_and_in_the_order_of_the_text():
    text = EXAMPLE
    for old, new in [
        ("dtype: float32", "dtype: fp8"),  # a choice
        ("seed: 7", "seed: x"),  # a type
        ("most: 8", "mst: 8"),  # a key
        ("confidence: 0.95", "confidence: 0.95\nconfidence: 0.9"),  # twice
        ("metric: tv", "metric: vt"),  # lint
        ("at_most: 0.2,", "at_most: 0.2, clip: yes,"),  # hides the lint of its own clause only
        ("metric: valid_ratio, ", ""),  # missing
        ("{page: oncall}]}\nrouting", "{page: 1}]}\nrouting"),  # lint
    ]:
        assert old in text
        text = text.replace(old, new, 1)

    messages = [p.message for p in problems_of(text)]

    assert messages == [
        "dtype cannot be 'fp8'",
        "a whole number is wanted, found the text 'x'",
        "a slice has no key 'mst'",
        "the key 'confidence' is given twice; first in line 26",
        "no metric is named 'vt'",
        "a number is wanted, found the text 'yes'",
        "a clause needs the key 'metric'",
        "page takes the name of whom to page",
    ]
    assert places_of(text) == sorted(places_of(text))


def test_a_value_that_was_refused_is_not_complained_about_twice():
    text = SMALL.replace("aggregate: mean", "agregate: mean")

    assert [p.message for p in problems_of(text)] == ["a clause has no key 'agregate'"]


def test_a_percentile_at_0_is_a_share_and_can_be_certified():
    contract, _ = read(SMALL.replace("mean, at_most: 1e-3", "p99, at_most: 0"))

    assert contract.statistical[0].at_most == 0.0


BAD = SMALL.replace("metric: tv", "metric: vt")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_in_three_ways(end):
    assert places_of(BAD.replace("\n", end)) == [(7, 22)]


def test_columns_count_characters_and_no_byte_order_mark():
    assert places_of(BAD.replace("id: tv,", "x-é漢🙂: 🙂, id: tv,")) == [(7, 32)]
    assert problems_of(BAD.replace("id: tv,", "x-\t: a, id: tv,"))[0].where is not None
    assert places_of("\ufeff" + BAD) == [(7, 22)]
    assert places_of("\ufeff" + BAD.replace("apiVersion: s", "apiVersion: t"))[0] == (1, 13)


def test_places_in_block_style_and_of_empty_values():
    clause = "  - id: tv\n    metric: tv\n    aggregate:\n      mean\n    at_most: # none\n\n"
    text = SMALL[: SMALL.index("  - {")] + clause + "    clip: 1\n"

    assert places_of(text) == [(7, 5), (13, 5)]  # no limit; nothing to clip
    assert places_of(text + "  -\n  - \n    1\n") == [(14, 4), (16, 5)]
    assert places_of(text + "golden:\nclaim:\n") == [(7, 5), (13, 5), (15, 1)]


def test_an_alias_may_be_used_and_an_anchor_moved_and_its_value_has_the_place_of_the_anchor():
    text = SMALL.replace("train: {engine: table}, infer: {engine: table}", "train: &k {engine: t}")
    text = text.replace("{engine: t}", "{engine: table}, infer: *k, x-a: &k 1")

    assert read(text)[0] == read(SMALL)[0]
    text = SMALL + (
        "x-limit: &limit -1\n"
        "numerical:\n"
        "  - {id: a, metric: tv, at_most: *limit}\n"
        "  - {id: b, metric: tv, at_most: *limit}\n"
        "golden: {prompts: g.jsonl}\n"
    )

    assert places_of(text) == [(8, 10), (8, 10)]


def test_an_alias_bomb_is_refused_early():
    levels = "".join(f"x-{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
    problems = problems_of("x-0: &a0 [x, x, x]\n" + levels)

    assert "more than 100000 values" in problems[0].message


def test_a_long_line_is_cut_without_moving_the_caret():
    early = BAD.replace("1e-3}", f"1e-3, x-a: {'a' * 5000}}}")
    late = BAD.replace("{id: tv", f"{{x-a: {'a' * 5000}, id: tv")

    assert [len(p.where.text) for p in problems_of(early) if p.where] == [201]
    assert [(p.where.column, p.where.text) for p in problems_of(late) if p.where] == [(5029, "")]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "---\n...\n"])
def test_an_empty_text_is_an_empty_contract(text):
    (problem,) = problems_of(text)

    assert problem.message == "the contract is empty"


# Anything at all may be in a file: only ContractError comes out, and each place is in the text.

_lines = [line for line in EXAMPLE.split("\n") if line]
_scraps = st.sampled_from([*"{}[]:,-&*!|>'\"%@`#?~<\\\t\n\r \0é\ufeff\u2028", "\r\n", "- ", ": "])
_words = """1 -1 0 1.5 1e-3 1e999 .nan .inf true null yes tv all p99 mean '' '0' 15m abc labels.x
*nothing &a "\\0" "\\ud800" "\\UFFFFFFFF" << !tag -"""
_keys = "id metric at_most gte in times of clause is divert x-a 1"
_values = st.recursive(
    st.sampled_from([*_words.split(), "9" * 400, "&a 1", "!t 1"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(_keys.split()), inner, max_size=3).map(
            lambda data: "{" + ", ".join(f"{key}: {value}" for key, value in data.items()) + "}"
        )
    ),
    max_leaves=6,
)
_SPOTS = [m.span(1) for m in re.finditer(r": +([^\s{\[,}\]][^,}\]\n]*|\[.*?\]|\{.*?\})", EXAMPLE)]
_at = st.integers(0, len(EXAMPLE) - 1)
_edits = st.one_of(
    st.tuples(st.just("delete"), _at, st.integers(1, 30)),
    st.tuples(st.just("insert"), _at, _scraps),
    st.tuples(st.just("swap"), _at, _at),
    st.tuples(st.just("line"), _at, st.sampled_from([*_lines, "---", "...", "%YAML 1.1"])),
    st.tuples(st.just("drop line"), st.integers(0, len(_lines) - 1), st.just(0)),
    st.tuples(st.just("value"), st.sampled_from(_SPOTS), _values),
    st.tuples(st.just("value"), st.sampled_from(_SPOTS), _values),
)


def edited(text: str, kind: str, at, what) -> str:
    if kind == "delete":
        return text[:at] + text[at + what :]
    if kind == "insert":
        return text[:at] + what + text[at:]
    if kind == "swap":
        first, second = sorted((min(at, len(text) - 1), min(what, len(text) - 1)))
        characters = list(text)
        characters[first], characters[second] = characters[second], characters[first]
        return "".join(characters)
    if kind == "line":
        start = text.rfind("\n", 0, at) + 1
        return text[:start] + what + "\n" + text[start:]
    if kind == "drop line":
        lines = text.split("\n")
        return "\n".join(lines[:at] + lines[at + 1 :])
    return text[: at[0]] + what + text[at[1] :]


def only_contract_errors(text: str) -> None:
    try:
        contract, marks = read(text)
    except ContractError as error:
        places = [p.where for p in error.problems]
        assert str(error)
    else:
        assert contract.digest
        assert isinstance(marks, Marks)
        places = [marks[path] for path in marks]
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    for where in places:
        assert where is not None
        assert where.file == "x.yaml"
        assert 1 <= where.line <= len(lines)
        assert 1 <= where.column <= len(lines[where.line - 1]) + 1


@pytest.mark.slow
@given(st.lists(_edits, min_size=1, max_size=3))
def test_only_contract_errors_come_out_of_a_broken_text(edits):
    text = EXAMPLE
    for edit in edits:
        text = edited(text, *edit) or "\n"

    only_contract_errors(text)


@given(st.text(max_size=60))
def test_only_contract_errors_come_out_of_any_text(text):
    only_contract_errors(text)


def test_stage_and_routing_keys_have_one_word():
    text = EXAMPLE.replace("routing: {", "routing: {min_users: 7, scorer_utilisation: 0.25, ")
    contract, _ = read(text)
    assert contract.promotion.offline.sequences == (400, 6000)
    assert (contract.routing.keys, contract.routing.budget) == (7, 0.25)

    broken = text.replace("[400, 6000]", "9", 1).replace(": 7, ", ": 0, ")
    problems = problems_of(broken)
    assert [problem.message for problem in problems] == [
        "min_users must be at least 1, found 0",
        "a list is wanted, found the number 9",
    ]
    assert problems[1].hint == "the first evaluation and the limit, such as [400, 6000]"
    (problem,) = problems_of(text.replace("prompt_groups: [400", "prompt_group: [400", 1))
    assert problem.hint == "did you mean 'prompt_groups'?"
    (problem,) = problems_of(text.replace("prompt_groups: [400", "sequences: [400", 1))
    assert problem.message == "a stage has no key 'sequences'"
    assert "prompt_groups" in problem.hint


PARTS = [Observability, Promotion, Routing, Runtime, StageRule, Weights, WorkloadSampling]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_default_that_is_not_checked_when_its_module_loads_is_what_the_check_gives(part):
    unchecked, checked = part.model_construct(), part.model_validate({})
    assert unchecked == checked
    assert unchecked.model_dump() == checked.model_dump()
    assert unchecked.model_fields_set == checked.model_fields_set == set()


def test_the_validity_checks_of_a_contract_without_any_are_valid_clauses():
    for guard in DEFAULT_GUARDS:
        assert Clause.model_validate(guard.model_dump(exclude_unset=True)) == guard
