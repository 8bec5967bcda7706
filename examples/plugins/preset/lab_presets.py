# The preset `lab-int8`: `servanda compare A B --preset lab-int8`.

from servanda.contract.presets import add_preset

# the layout of `servanda contract presets --show fp8`: `compare` replaces whole blocks of it
_TEXT = """\
# int8 weights in the lab's cluster: may the build serve?
# `servanda compare A B --preset lab-int8` completes it.
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata:
  name: lab-int8
  version: 1.0.0

# placeholders: compare writes the two kernels here
kernels:
  train: {engine: transformers, model: path/to/model}
  infer: {engine: transformers, model: path/to/model}

# placeholders: compare writes the prompts here
workload:
  prompts: path/to/prompts.jsonl
  sampling: {temperature: 1.0, top_p: 1.0, max_new_tokens: 64, seed: 7}

# compare adds a split for each label of the prompts with 2 to 8 values
slices:
  - {name: depth, split: context.position, at: [8, 24]}

claim: population

statistical:
  # twice the mean of the builds that served without complaints; a slice may be twice as far off
  - {id: whole, metric: tv, aggregate: mean, at_most: 0.03, slices: [all]}
  - {id: slice, metric: tv, aggregate: mean, at_most: 0.06, slices: [depth]}
"""

add_preset("lab-int8", "serving", _TEXT)
