# The derived contract as text, with the reason of every limit beside it.

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from servanda.authoring.derive.budget import Request
from servanda.contract.objective import GroupAdvantage
from servanda.contract.workload import WorkloadSampling
from servanda.judgement.contract_text import Parts, completed

_WIDTH = 100
_SEED = 7
_NAMES = {
    "reward_drift": "the drift of any reward",
    "reward_gap": "the gap of your reward",
    "policy_gradient_bias": "the bias of the policy gradient",
    "ratio_budget": "the share of the clip range",
    "tv": "the mean TV of a token",
    "abs_log_ratio_nats": "the log-ratio of 99 % of the tokens",
    "logit_osc_nats": "the drift of golden logits",
}
# the first two lines are those of a preset, which the completion omits
_TEMPLATE = """\
# derived
#
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata:
  name: derived
  version: 1.0.0
  description: {description}

kernels:

workload:

golden:

{declared}

confidence: {confidence}
claim: population

numerical:
{numerical}
statistical:
{statistical}
observability:
  record: [fingerprint, token_ids, processed_logprobs, sampling, path, batch_size]
  clauses:
    # log-ratios see the numerics; whether tokens follow the reported distribution they do not
    - {{id: fidelity, metric: sampler_fidelity}}
    - {{id: finite, metric: valid_ratio, at_least: 0.999}}
# prompt groups: the first evaluation, and the limit; a run stops when all is decided.  A kernel at
# half of its budget is expected to be decided after about {expected:,}.
promotion:
"""


@dataclass(frozen=True)
class DerivedClause:
    """A clause with its reason."""

    id: str
    metric: str
    limit: float
    why: str
    aggregate: str = ""
    monitor: bool = False

    @property
    def words(self) -> str:
        unit = " nats" if self.metric.endswith("_nats") else ""
        return f"{self.id}: {_NAMES[self.metric]} at most {self.limit:g}{unit}"

    def lines(self) -> Iterator[str]:
        mode = ", mode: monitor" if self.monitor else ""
        aggregate = f", aggregate: {self.aggregate}" if self.aggregate else ""
        yield from _comment(self.why)
        yield (
            f"  - {{id: {self.id}, metric: {self.metric}{aggregate}, "
            f"at_most: {_number(self.limit)}{mode}, slices: [all]}}"
        )


def contract_text(
    request: Request,
    statistical: Sequence[DerivedClause],
    drift: DerivedClause | None,
    why_not: str,
    expected: int,
    offline: tuple[int, int],
) -> str:
    enforced = [line for line in statistical if not line.monitor]
    monitored = [line for line in statistical if line.monitor]
    head = ["  # enforced: the budget, certified itself"]
    rows = [*head, *(row for line in enforced for row in line.lines())]
    if monitored:
        rows.append("  # monitored: none is needed to keep the budget, so none fails the contract")
        rows += [row for line in monitored for row in line.lines()]
    template = _TEMPLATE.format(
        description=json.dumps(f"Derived from {' and '.join(_budgets(request))}."),
        declared="\n".join(_declared(request)),
        confidence=f"{request.confidence:g}",
        numerical="\n".join(drift.lines()) if drift else "",
        statistical="\n".join(rows),
        expected=expected,
    )
    reason = "\n# ".join(textwrap.wrap(f"no numerical clauses: {why_not}", _WIDTH - 4))
    parts = Parts(
        name=request.name,
        train=request.train,
        infer=request.infer,
        prompts=request.prompts,
        sampling=WorkloadSampling(  # type: ignore[call-arg]
            max_new_tokens=request.tokens, seed=_SEED
        ),
        sizes=offline,
        claim=request.claim,
        golden=request.golden if drift else None,
        no_golden=reason.removeprefix("no numerical clauses: "),
        head=(
            "Derived by `servanda contract derive`: budgets become limits, each with its reason.",
        ),
    )
    return completed(template, parts).replace("\n\n\n", "\n\n")


def _budgets(request: Request) -> Iterator[str]:
    if request.reward_drift is not None:
        what = "gap" if request.reward_gap else "drift"
        budget, tokens = request.reward_drift, request.tokens
        yield f"a reward {what} of at most {budget:g} over {tokens:,} new tokens"
    if request.bias is not None:
        yield f"a policy gradient bias of at most {request.bias:g}"
    if request.ratio_share is not None:
        yield f"{request.ratio_share:g} of the clip range"


def _declared(request: Request) -> Iterator[str]:
    """The trainer's declarations, which are not measured."""
    if request.reward_drift is not None:
        low, high = request.reward_range
        of = f", of: {json.dumps(request.reward_of)}" if request.reward_of else ""
        yield f"reward: {{range: [{_number(low)}, {_number(high)}]{of}}}"
    declared = []
    if request.bias is not None:
        advantage = request.advantage
        if isinstance(advantage, GroupAdvantage):
            declared.append(f"advantage: {{group_size: {advantage.group_size}}}")
        else:
            declared.append(f"advantage: {_number(advantage or 0.0)}")
        norm = request.score_norm
        declared.append(f"score_norm: {norm if isinstance(norm, str) else _number(norm or 0.0)}")
        if request.weighting is None:
            declared.append("weighting: naive")
        else:
            ((name, value),) = request.weighting.given.items()
            values = value if isinstance(value, tuple) else (value,)
            value_text = ", ".join(map(_number, values))
            value_text = f"[{value_text}]" if isinstance(value, tuple) else value_text
            declared.append(f"weighting: {{{name}: {value_text}}}")
        declared.append(f"loss: {request.loss}")
    if request.clip_range is not None:
        low, high = request.clip_range
        declared.append(f"clip_range: [{_number(low)}, {_number(high)}], ratio: bypass")
    if declared:
        yield "# declared, not measured"
        yield f"gradient: {{{', '.join(declared)}}}"


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH - 4,
        initial_indent="  # ",
        subsequent_indent="  # ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _number(value: float) -> str:
    """A number as YAML text, exact."""
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
