# What a user reads when a contract is wrong: the texts are part of the product.
#
# Every case edits one good contract in one place and states what must come out.

from __future__ import annotations

import pytest

from servanda.errors import ContractError
from tests.kit import parse

GOOD = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: tiny-int8, version: 1.0.0, annotations: {team: rl}}

kernels:
  train: {engine: transformers, model: models/tiny, dtype: float32}
  infer: {engine: transformers, model: models/tiny, quantization: int8_dynamic}
stable: {engine: transformers, model: models/tiny, dtype: bfloat16}

workload:
  prompts: data/prompts.jsonl
  sampling: {temperature: 1.0, top_p: 1.0, max_new_tokens: 24, seed: 7}
golden: {prompts: data/golden.jsonl}

slices:
  - {name: domain, split: labels.domain}
  - {name: unsure, match: {context.entropy_nats: {gte: 3.0}}}
  - {name: depth, split: context.position, at: [8, 16]}

confidence: 0.95

numerical:
  - {id: drift, metric: logit_osc_nats, aggregate: max, at_most: 0.6}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.02, slices: [all, domain]}
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.2}
  - {id: k3, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.001}
  - {id: d2, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: {times: 3, of: stable}}
runtime:
  envelope: {batch_size: [1, 32], prompt_tokens: [1, 512]}
observability:
  clauses:
    - {id: fidelity, metric: sampler_fidelity}
    - {id: finite, metric: valid_ratio, at_least: 0.999, stages: [offline, shadow]}
escalation:
  - {when: {clause: tail, is: violated}, do: [{divert: slice}, {page: oncall}]}
  - {when: {section: statistical, is_not: holds}, do: [hold, {sample: 0.1}]}
  - {when: {diverted_traffic: {gte: 0.3}}, do: [hold]}
routing: {dwell: 15m}
promotion:
  offline: {prompt_groups: [400, 6000]}
"""


def error_of(*edits: tuple[str, str]) -> ContractError:
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is in the text {text.count(old)} times"
        text = text.replace(old, new)
    with pytest.raises(ContractError) as caught:
        parse(text, "x.yaml", engines=["table", "transformers"], faults=["rope_base", "scale"])
    return caught.value


def test_the_good_contract_is_good():
    contract, _ = parse(GOOD, "x.yaml", engines=["transformers"])

    assert contract.metadata.name == "tiny-int8"


def test_the_example_of_the_style_guide():
    head = "statistical:\n  - {id: kl, metric: k33, at_most: 0.001}\n"
    tail = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: llama}
kernels: {train: {engine: table}, infer: {engine: table}}
workload: {prompts: p.jsonl}
"""
    statistical = head.split("\n", 1)[1]

    with pytest.raises(ContractError) as caught:
        parse("statistical:\n" + statistical + tail, "llama.yaml", engines=["table"])

    assert str(caught.value) == (
        "llama.yaml:2:22: no metric is named 'k33'\n"
        "    2 |   - {id: kl, metric: k33, at_most: 0.001}\n"
        "                             ^\n"
        "  hint: did you mean 'k3_nats'?"
    )


FULL = {
    "an unknown key": (
        ("id: tv, metric:", "id: tv, metrc:"),
        """\
x.yaml:25:14: a clause has no key 'metrc'
   25 |   - {id: tv, metrc: tv, aggregate: mean, at_most: 0.02, slices: [all, domain]}
                     ^
  hint: did you mean 'metric'?""",
    ),
    "a missing key": (
        ("{id: k3, ", "{"),
        """\
x.yaml:27:5: a clause needs the key 'id'
   27 |   - {metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.001}
            ^
  hint: add id: ...""",
    ),
    "a number in quotes": (
        ("confidence: 0.95", "confidence: '0.95'"),
        """\
x.yaml:20:13: a number is wanted, found the text '0.95'
   20 | confidence: '0.95'
                    ^
  hint: write it without quotes""",
    ),
    "a version that is a number": (
        ("version: 1.0.0", "version: 1.0"),
        """\
x.yaml:3:38: text is wanted, found the number 1.0
    3 | metadata: {name: tiny-int8, version: 1.0, annotations: {team: rl}}
                                             ^
  hint: put it in quotes""",
    ),
    "an engine that is not there": (
        ("train: {engine: transformers", "train: {engine: transfomers"),
        """\
x.yaml:6:19: no engine is named 'transfomers'
    6 |   train: {engine: transfomers, model: models/tiny, dtype: float32}
                          ^
  hint: did you mean 'transformers'?""",
    ),
    "half a name of a quantization": (
        ("int8_dynamic", "int8"),
        """\
x.yaml:7:67: no quantization is named 'int8'
    7 |   infer: {engine: transformers, model: models/tiny, quantization: int8}
                                                                          ^
  hint: which one: int8_weight_only or int8_dynamic? They are different kernels""",
    ),
    "a choice that is none": (
        ("dtype: float32", "dtype: float23"),
        """\
x.yaml:6:60: dtype cannot be 'float23'
    6 |   train: {engine: transformers, model: models/tiny, dtype: float23}
                                                                   ^
  hint: did you mean 'float32'?""",
    ),
    "the mean of an unbounded metric": (
        ("clip: 1.0, at_most: 0.001", "at_most: 0.001"),
        """\
x.yaml:27:42: the mean of k3_nats has no bound, so no sample can certify it
   27 |   - {id: k3, metric: k3_nats, aggregate: mean, at_most: 0.001}
                                                 ^
  hint: add clip: 1.0, or promise aggregate: p99; mode: monitor shows it as an estimate""",
    ),
    "a limit of 0": (
        ("at_most: 0.02", "at_most: 0"),
        """\
x.yaml:25:52: a sample cannot certify 0
   25 |   - {id: tv, metric: tv, aggregate: mean, at_most: 0, slices: [all, domain]}
                                                           ^
  hint: move the clause to numerical: it measures every position of the golden texts""",
    ),
    "a limit that cannot fail": (
        ("at_most: 0.02", "at_most: 1.5"),
        """\
x.yaml:25:52: tv is at most 1: a limit of 1.5 can never fail
   25 |   - {id: tv, metric: tv, aggregate: mean, at_most: 1.5, slices: [all, domain]}
                                                           ^
  hint: write a limit below 1""",
    ),
    "a metric that needs full logits": (
        ("metric: tv", "metric: logit_osc_nats"),
        """\
x.yaml:25:22: logit_osc_nats needs full logits; a sampled token has none
   25 |   - {id: tv, metric: logit_osc_nats, aggregate: mean, at_most: 0.02, slices: [all, domain]}
                             ^
  hint: move the clause to numerical: golden texts are scored with full logits""",
    ),
    "a slice that is not declared": (
        ("[all, domain]", "[all, domian]"),
        """\
x.yaml:25:72: no slice is named 'domian'
   25 |   - {id: tv, metric: tv, aggregate: mean, at_most: 0.02, slices: [all, domian]}
                                                                               ^
  hint: did you mean 'domain'?""",
    ),
    "an average on an outcome slice": (
        (("[all, domain]", "[all, unsure]"), ("context.entropy_nats", "outcome.rank")),
        """\
x.yaml:25:72: slice 'unsure' is known only after the token is drawn, so an average over it says \
nothing: a kernel that halves the mass there reads tv 0
   25 |   - {id: tv, metric: tv, aggregate: mean, at_most: 0.02, slices: [all, unsure]}
                                                                               ^
  hint: promise mass_gap and tv_contribution there, or slice by context.*""",
    ),
    "a clause that is there twice": (
        ("id: k3", "id: tv"),
        """\
x.yaml:27:10: two clauses are named 'tv'; the first is in line 25
   27 |   - {id: tv, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.001}
                 ^
  hint: give it its own id: evidence is kept by id""",
    ),
    "a key that is there twice": (
        ("id: k3, metric: k3_nats", "id: k3, metric: k3_nats, id: k4"),
        """\
x.yaml:27:31: the key 'id' is given twice; first in line 27
   27 |   - {id: k3, metric: k3_nats, id: k4, aggregate: mean, clip: 1.0, at_most: 0.001}
                                      ^
  hint: keep one of them""",
    ),
    "a bracket that is never closed": (
        ("{prompts: data/golden.jsonl}", "{prompts: data/golden.jsonl"),
        """\
x.yaml:15:7: a ',' or '}' is missing here
   15 | slices:
              ^
  hint: it was opened in line 13""",
    ),
    "a tab": (
        ("  prompts: data/prompts.jsonl", "\tprompts: data/prompts.jsonl"),
        """\
x.yaml:11:1: a tab cannot stand here
   11 |  prompts: data/prompts.jsonl
        ^
  hint: use spaces""",
    ),
    "divert without stable": (
        ("stable: {engine", "x-stable: {engine"),
        """\
x.yaml:28:68: the limit is relative to stable, and there is no stable: kernel
   28 |   - {id: d2, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: {times: 3, of: stable}}
                                                                           ^
  hint: declare stable:, or write of: self_noise
x.yaml:36:48: divert sends traffic to stable, and there is no stable: kernel
   36 |   - {when: {clause: tail, is: violated}, do: [{divert: slice}, {page: oncall}]}
                                                       ^
  hint: declare stable: with the kernel that serves when infer may not, or hold instead""",
    ),
}


@pytest.mark.parametrize("name", [*FULL])
def test_the_whole_message(name):
    edit, expected = FULL[name]
    edits = edit if isinstance(edit[0], tuple) else (edit,)

    assert str(error_of(*edits)) == expected


# (what is replaced, by what, the text at the place told, a fragment of message or hint)
PLACES = [
    # the text
    ("kind: KernelContract", "kind: &k KernelContract\n---", "---", "here a second begins"),
    ("team: rl", "team: *rl", "*rl}", "no anchor is named 'rl'"),
    ("team: rl", "team: !secret rl", "!secret rl}", "a contract has no tags, found !secret"),
    ("team: rl", "1: rl", "1: rl}", "a key is text"),
    ("team: rl", "<<: {a: b}", "<<: {a: b}", "no merge key"),
    ("team: rl", 'team: "\\0"', '"\\0"}', "U+0000"),
    ("team: rl", "team: \x07", "\x07}", "character U+0007 cannot stand here"),
    ("team: rl", "team: \udcff", "\udcff}", "byte 0xff is not UTF-8"),
    ("team: rl", f"team: {'9' * 400}", "99999999999999999999", "a number of 400 digits"),
    ("team: rl", f"team: {'[' * 99}", "[[[[[[[[[[[[[[[[[[[[", "more than 64 levels deep"),
    ("team: rl", "team: &a [*a]", "&a [*a]", "holds itself"),
    ("team: rl", "team: 'rl", "'rl}", "this text is never closed"),
    ("kind: KernelContract", "kind: @x", "@x", "cannot begin with '@'"),
    ("routing: {dwell: 15m}", "routing: a: b", ": b", "a ':' is not expected here"),
    # shapes
    ("apiVersion: servanda.dev/v1alpha1", "apiVersion: v1", "v1", "apiVersion cannot be 'v1'"),
    ("metric: tv,", "metric:tv,", "metric:tv,", "write metric: tv"),
    ("golden: {prompts: data/golden.jsonl}", "golden: g", "g", "write {prompts: data/golden"),
    ("do: [hold]", "do: [5]", "5]", "text or a mapping is wanted, found the number 5"),
    ("golden:", "goldn:", "goldn: {prompts: dat", "did you mean 'golden'?"),
    ("  infer:", "  reference:", "reference: {engine: ", "two words for one key"),
    ("name: tiny-int8", "name: tiny int8", "tiny int8", "'tiny int8' cannot be a name"),
    ("temperature: 1.0", "temperature: 0", "0", "must be greater than 0, found 0"),
    ("temperature: 1.0", "temperature: '1'", "'1'", "a number is wanted, found the text '1'"),
    ("seed: 7", "seed: 7.5", "7.5}", "a whole number is wanted, found the number 7.5"),
    ("confidence: 0.95", "confidence: 95", "95", "must be less than 1, found 95"),
    ("confidence: 0.95", "confidence: .nan", ".nan", "a finite number is wanted; found the"),
    ("confidence: 0.95", "confidence:", "confidence:", "a number is wanted, found nothing"),
    ("aggregate: p99", "aggregate: p100", "p100", "a percentile such as p99"),
    ("at_most: 0.2}", "at_most: .inf}", ".inf}", "a finite number is wanted"),
    ("times: 3", "times: -3", "-3", "times must be greater than 0"),
    ("of: stable}}", "of: stabel}}", "stabel}", "did you mean 'stable'?"),
    ("dwell: 15m", "dwell: 15", "15}", "a duration is a text such as 30s"),
    ("[offline, shadow]", "[offline, shdow]", "shdow]", "stages cannot hold 'shdow'"),
    ("[offline, shadow]", "offline", "offline}", "a list is wanted, found the text 'offline'"),
    (
        "prompt_groups: [400, 6000]",
        "prompt_groups: [400]",
        "[400]",
        "a list of 2 is wanted, found one of 1",
    ),
    ("{context.entropy_nats: {gte: 3.0}}", "high", "high}", "write {labels.domain: {in: [math]}}"),
    # kernels, workload, envelope
    ("int8_dynamic", "int8_dynamc", "int8_dynamc}", "did you mean 'int8_dynamic'?"),
    ("int8_dynamic}", "w8a8, fault: {scal: {}}}", "scal: {}", "did you mean 'scale'?"),
    ("int8_dynamic}", "w8a8, fault: {}}", "{}}", "one fault at a time, found 0"),
    (
        "int8_dynamic}",
        "w8a8, sampling: {top_p: 0.9}}",
        "sampling: {top_p: 0.9}",
        "infer samples as workload.sampling",
    ),
    ("int8_dynamic}", "w8a8, batch_size: 64}", "64}", "infer runs in batches of 64, outside"),
    (
        "batch_size: [1, 32]",
        "batch_size: [1, 16]",
        "{engine: transformers",
        "train runs in batches of 32, outside",
    ),
    ("batch_size: [1, 32]", "batch_size: [32, 1]", "[32", "batch_size is empty"),
    ("  prompts: data/prompts", "  mode: score\n  prompts: d", "score", "mode: rollout"),
    ("workload:", "x-workload:", "statistical:", "there is no workload:"),
    ("golden:", "x-golden:", "numerical:", "there is no golden:"),
    ("confidence: 0.95", "reward: {range: [1, 0]}", "[1", "range of the reward is empty"),
    # slices
    ("name: domain", "name: all", "all", "the slice 'all' is always there"),
    ("name: depth", "name: domain", "domain", "two slices are named 'domain'"),
    (", split: labels.domain", "", "{name: domain}", "neither split nor match"),
    ("match: {c", "split: labels.x, match: {c", "{name: unsure", "both split and match"),
    ("labels.domain", "lables.domain", "lables.domain}", "did you mean 'labels.<name>'?"),
    ("labels.domain}", "labels.domain, at: [1]}", "[1]", "it has no edges"),
    (", at: [8, 16]", "", "context.position}", "needs the edges of its buckets"),
    ("at: [8, 16]", "at: [8, 8]", "[8", "the edges of a split increase"),
    ("{gte: 3.0}", "{get: 3.0}", "get: 3.0}", "did you mean 'gt'?"),
    ("{gte: 3.0}", "{gte: high}", "high}", "gte takes a number"),
    ("{gte: 3.0}", "{gte: 5, lt: 5}", "{gte: 5", "no context.entropy_nats can meet this"),
    ("{gte: 3.0}", "{in: 5}", "5}", "in takes a list of numbers"),
    ("{gte: 3.0}", "{exists: 1}", "1}", "exists takes true or false"),
    ("{gte: 3.0}", "{}", "{}}", "has no condition"),
    ("context.entropy_nats: {gte: 3.0}", "labels.n: {in: [3]}", "[3]", "a list of texts"),
    ("context.entropy_nats: {gte: 3.0}", "labels.n: {gt: 3}", "gt: 3}", "a label is a text"),
    # clauses
    (
        "metric: logit_osc_nats",
        "metric: valid_ratio",
        "valid_ratio",
        "a validity check, a precondition",
    ),
    ("metric: sampler_fidelity", "metric: tv", "tv}", "does not belong in observability"),
    ("at_most: 0.6", "at_least: 0.6", "at_least: 0.6}", "logit_osc_nats takes at_most"),
    (", at_most: 0.2}", "}", "{id: tail", "clause 'tail' has no limit"),
    ("at_most: 0.2}", "at_most: -0.2}", "-0.2}", "a limit of -0.2 can never hold"),
    ("at_most: 0.001", "at_most: 2", "2}", "k3_nats is at most 1 after clip"),
    ("aggregate: p99, ", "", "{id: tail", "add aggregate: p99, or mean with clip: 1.0"),
    ("aggregate: p99", "aggregate: max", "max", "a sample cannot certify a maximum"),
    ("aggregate: p99", "aggregate: p99, clip: 1.0", "clip: 1.0", "p99 does not need it"),
    ("at_most: 0.02", "at_most: 0.02, clip: 0.5", "clip: 0.5", "tv is bounded"),
    ("sampler_fidelity}", "sampler_fidelity, at_most: 1}", "at_most: 1}", "takes no limit"),
    ("at_least: 0.999", "at_most: 0.999", "at_most: 0.999", "valid_ratio takes at_least"),
    ("at_least: 0.999", "at_least: 99.9", "99.9", "valid_ratio is at most 1"),
    (", at_least: 0.999", "", "{id: finite", "add at_least: 0.999"),
    ("[offline, shadow]", "[]", "[]}", "is judged at no stage"),
    ("[offline, shadow]", "[shadow, shadow]", "shadow]", "listed twice"),
    # escalation, promotion
    ("clause: tail", "clause: tial", "tial", "no clause is named 'tial'"),
    ("section: statistical", "section: statistics", "statistics", "did you mean 'statistical'?"),
    ("is: violated", "is: broken", "broken}", "is cannot be 'broken'"),
    (", is: violated", "", "{clause: tail}", "needs one of is and is_not"),
    ("when: {clause: tail", "when: {claus: tail", "claus: tail", "did you mean 'clause'?"),
    ("{gte: 0.3}", "{gte: 30}", "{gte: 30}", "a share between 0 and 1"),
    ("[hold]", "[holt]", "holt]", "no action is named 'holt'"),
    ("[hold]", "[{hold: now}]", "hold: now}", "hold takes no value"),
    ("[hold]", "[page]", "page]", "page takes the name of whom to page"),
    ("{sample: 0.1}", "{sample: 10}", "10}", "a share above 0 and at most 1"),
    ("divert: slice", "divert: all, x: 1", "{divert: all", "found 2"),
    ("[400, 6000]", "[6000, 400]", "[6000", "did you mean [400, 6000]?"),
    ("[400, 6000]", "[0, 400]", "[0", "needs at least 1 prompt group"),
]


@pytest.mark.parametrize(("old", "new", "at", "fragment"), PLACES)
def test_the_place_of_a_problem(old, new, at, fragment):
    error = error_of((old, new))
    lines = GOOD.replace(old, new).split("\n")

    told = [p for p in error.problems if fragment in str(p)]

    assert len(told) == 1, str(error)
    where = told[0].where
    assert where is not None
    assert lines[where.line - 1][where.column - 1 :].startswith(at), str(error)


def test_a_contract_without_clauses_promises_nothing():
    text = GOOD[: GOOD.index("numerical:")]

    with pytest.raises(ContractError) as caught:
        parse(text, "x.yaml", engines=["transformers"])

    assert str(caught.value) == (
        "x.yaml:1:1: the contract promises nothing: it has no clause\n"
        "    1 | apiVersion: servanda.dev/v1alpha1\n"
        "        ^\n"
        "  hint: add one under statistical, such as "
        "{id: tv, metric: tv, aggregate: mean, at_most: 0.02}"
    )


def test_a_missing_engine_names_those_that_are_there():
    edit = ("train: {engine: transformers", "train: {engine: onnx")

    assert error_of(edit).problems[0].hint == "known: table, transformers"
