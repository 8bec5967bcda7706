# The starter contract of `servanda contract init`, with a word on every line that needs one.

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./ \-]*[A-Za-z0-9_./\-]|[A-Za-z_./]")
_WORDS = re.compile(r"(?i)null|true|false|[-+.\d][\d.eE+\-_xo]*")

_TEXT = """\
# A kernel contract: may the infer kernel serve what the train kernel trains?
# Put your model and prompts where it says, then:  servanda contract lint {file}
#                                                  servanda contract explain {file}
#                                                  servanda check {file}
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata:
  name: {name}
  version: 1.0.0

kernels:
  # train is measured against: what your trainer runs, in full precision
  train: {{engine: {engine}, model: {model}{train}}}
  # infer is under test: what you serve
  infer: {{engine: {engine}, model: {model}{infer}}}

workload:
  prompts: prompts.jsonl    # one per line: {{"prompt": "...", "labels": {{"domain": "chat"}}}}
  sampling: {{temperature: 1.0, top_p: 1.0, max_new_tokens: 64, seed: 7}}
golden: {{prompts: golden.jsonl}}    # fixed texts, scored by both with their full vocabulary

# Parts of the traffic that are judged by themselves: an average hides a fault on one of them.
slices:
  - {{name: domain, split: labels.domain}}                   # one for each label
  - {{name: depth, split: context.position, at: [16, 32]}}   # early, middle, late
  - {{name: long, match: {{request.prompt_tokens: {{gte: 512}}}}}}

confidence: 0.95       # 1 - confidence is the chance of a wrong answer
claim: population      # of all tokens that such prompts generate; realised: of the measured ones

numerical:             # facts about the golden texts
  - {{id: drift, metric: logit_osc_nats, aggregate: max, at_most: 2.0, slices: all}}
statistical:           # promises about sampled tokens
  # at most 2 % of the probability lies on different next tokens, on the whole ...
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.02, slices: all}}
  # ... and at most 5 % on each slice
  - {{id: tv-slice, metric: tv, aggregate: mean, at_most: 0.05, slices: [domain, depth, long]}}
  # at most 1 % of the tokens have logprobs that are 0.2 nats apart
  - {{id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.2, slices: all}}
observability:         # preconditions: where one fails, the promises say nothing
  clauses:
    - {{id: fidelity, metric: sampler_fidelity}}
    - {{id: finite, metric: valid_ratio, at_least: 0.999}}

promotion:
  offline: {{prompt_groups: [400, 6000]}}    # the first evaluation, and the limit
"""
_PRECISION = {
    "transformers": (
        ", dtype: float32, attention: eager, batch_size: 16",
        ", dtype: bfloat16, attention: sdpa",
    ),
}


def starter(file: str, name: str, engine: str, model: str) -> str:
    """The text of a contract that lints clean once its files are there.

    Args:
        file: how the contract is called in its own comments.
        name: of the contract.
        engine, model: of both kernels.
    """
    train, infer = _PRECISION.get(engine, ("", ""))
    return _TEXT.format(
        file=" ".join(file.split()),
        name=_scalar(name),
        engine=_scalar(engine),
        model=_scalar(model),
        train=train,
        infer=infer,
    )


def name_of(stem: str) -> str:
    """The nearest name that a contract can have.

    >>> name_of("my model (v2)"), name_of("...")
    ('my-model-v2', 'contract')
    """
    name = re.sub(r"[^A-Za-z0-9_.\\-]+", "-", stem).strip("-._")
    return name[:80] or "contract"


def _scalar(text: str) -> str:
    """A text as YAML reads it back: quoted where plain it would be something else."""
    plain = _PLAIN.fullmatch(text) and not _WORDS.fullmatch(text) and " " not in text
    return text if plain else json.dumps(text)
