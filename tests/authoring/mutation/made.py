# A small contract on table kernels, and tests that notice everything about it.

from pathlib import Path

from servanda.authoring.contract_test.files import prepare_tests
from servanda.theory.stats.interval import units_at_best
from tests import kit

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: toy}
kernels:
  train: {engine: table, model: p.json}
  infer: {engine: table, model: q.json}
workload:
  prompts: prompts.jsonl
  round: 32
  sampling: {max_new_tokens: 4, seed: 1}
slices:
  - {name: first, split: labels.first}
claim: realised
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05, slices: all}
  - {id: letter, metric: tv, aggregate: mean, at_most: 0.1, slices: first}
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.3, slices: all}
observability:
  clauses:
    - {id: fidelity, metric: sampler_fidelity}
    - {id: finite, metric: valid_ratio, at_least: 0.99}
escalation:
  - {when: {clause: tail, is: violated}, do: [{page: oncall}]}
  - {when: {section: statistical, is: violated}, do: [hold]}
promotion: {offline: {prompt_groups: [32, 1600]}}
"""

HEAD = """\
apiVersion: servanda.dev/v1alpha1
kind: ContractTest
metadata: {name: toy-tests}
contract: toy.kernelcontract.yaml
seed: 3
answer_tokens: 1
cases:
"""


def often(part, rest, of, times):
    """`part` prompt groups of every `of` show one value, the others 0."""
    return " ".join([f"{rest}x{part} 0x{of - part}"] * times)


SURE = units_at_best(0.05, 0.045, 0.0)  # tokens, at the alpha of a first attempt

# where both kernels agree on every token, `holds` comes at a known number of them: one less, and
# it is open; a log ratio of -d has (1 - w)+ = 1 - exp(-d) at every token
SHARP = f"""\
  - name: as soon as it can be certain, and not before
    traffic: "0x400"
    expect:
      - {{after: {SURE - 1}, cells: {{tv: inconclusive}}}}
      - {{after: {SURE}, cells: {{tv: holds}}}}
      - {{after: 400, verdict: holds, actions: []}}
  - name: a little less than may be
    traffic: "-0.0356x1600"
    expect: [{{verdict: holds}}]
  - name: a little more than may be
    traffic: "-0.0726x1600"
    expect: [{{verdict: violated, cells: {{tv: violated}}}}]
  - name: one letter has less than may be
    traffic: {{first=a: "-0.0726x1600", rest: "0x1600"}}
    expect: [{{cells: {{"letter on first=a": holds}}}}]
  - name: one letter has more than may be
    traffic: {{first=a: "-0.155x1600", rest: "0.01x1600"}}
    expect:
      - after: 480
        verdict: violated
        cells: {{"letter on first=a": violated, tv: inconclusive}}
  - name: few tokens lie beyond
    traffic: "{often(7, 0.5, 100, 16)}"
    expect: [{{verdict: holds, cells: {{tail: holds}}}}]
  - name: too many tokens lie beyond
    traffic: "{often(15, 0.5, 100, 16)}"
    expect:
      - verdict: violated
        cells: {{tail: violated, tv: holds}}
        actions: [{{page: oncall}}, hold]
  - name: many tokens lie within by little
    traffic: "0.2x1600"
    expect: [{{verdict: holds}}]
  - name: many tokens lie beyond by little
    traffic: "0.4x1600"
    expect: [{{verdict: violated}}]
  - name: another temperature
    traffic: "0x1600"
    temperature: 0.5
    expect: [{{cells: {{fidelity: violated}}}}]
  - name: a few are lost
    traffic: "0x993 _x7"
    expect: [{{verdict: holds}}]
  - name: too many are lost
    traffic: "0x985 _x15"
    expect: [{{verdict: error, cells: {{finite: error}}}}]
"""

GOOD = """\
  - name: a good kernel passes
    traffic: "0x64"
    expect: [{after: 0, verdict: inconclusive}]
"""


def written(folder, cases=SHARP, contract=CONTRACT, p=None, q=None):
    """The tests of a folder to which contract, kernels and cases are written."""
    folder = Path(folder)
    kit.table(folder, "p.json", p or {"": kit.BASE})
    kit.table(folder, "q.json", q or {"": kit.moved(kit.BASE, 0.01)})
    lines = [f'{{"prompt": "{text}", "labels": {{"first": "{text}"}}}}' for text in "abc"]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "toy.kernelcontract.yaml").write_text(contract)
    path = folder / "toy.kerneltest.yaml"
    path.write_text(HEAD + cases)
    return prepare_tests(path)
