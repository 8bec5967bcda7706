# Contracts that steps of verl are held to, in tests.

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: verl}}
kernels:
  train: {{engine: external, title: trainer}}
  infer: {{engine: external, title: rollouts}}
weights: {{changes: every_step}}
claim: realised
workload: {{source: trainer, sampling: {{max_new_tokens: 12}}}}
gradient: {{weighting: {{tis: 1.02}}}}
slices:
  - {{name: early, match: {{context.position: {{lt: 4}}}}}}
statistical:
  - {{id: gradient, metric: tv, aggregate: mean, at_most: {limit}, slices: [early]}}
observability:
  clauses:
    - {{id: finite, metric: valid_ratio, at_least: 0.999}}
escalation: {rules}
promotion: {{offline: {{prompt_groups: [1, 1000000]}}}}
"""
NOTHING = "[]"
WATCH = "[{when: {clause: finite, is: error}, do: [{page: oncall}]}]"
CORRECT = "[{when: {clause: finite, is_not: error}, do: [correct]}]"
MASK = "[{when: {clause: gradient, is: violated}, do: [mask]}]"
HALT = "[{when: {clause: gradient, is: violated}, do: [halt]}]"


def write(folder, rules, limit=0.9):
    """The path of a contract with these rules."""
    path = folder / "verl.yaml"
    path.write_text(CONTRACT.format(rules=rules, limit=limit))
    return path
