# The request for a derivation, and the check that its budgets are meaningful.

from __future__ import annotations

import math
from dataclasses import dataclass

from servanda.authoring.derive.sizes import MOST
from servanda.contract.clause import Claim
from servanda.contract.model import Contract, Kernel
from servanda.contract.objective import Gradient, GroupAdvantage, Reward, Weighting
from servanda.errors import ContractError, Problem
from servanda.judgement.clauses.gradient import advantage_bound, score_norm_of
from servanda.judgement.lint.sections import learning
from servanda.theory.bounds.gradient import Loss, loss_weights
from servanda.theory.bounds.importance_weights import PSI, Psi


@dataclass(frozen=True)
class Request:
    """Budgets with their kernels and texts; None: not requested.

    Args:
        prompts, golden: paths as written in the contract.
        tokens: most new tokens of a response.
        lines: most, and mean, lines of a prompt group.
        reward_drift: of the expected reward of whole responses, in units of the reward.
        reward_of: name of your own reward in contracts: the budget is then for it, with samples of
            both kernels; "": for every reward in the range.
        bias: of a policy gradient, in units of advantage x score norm.
        loss: divisor of a token's loss; the bias is per response unless it is token_mean.
        ratio_share: share of the clip range that the kernels may use.
        capture: format of the coarser side's recorded logprobs, see precision.py.
        aligned: whether the kernels agree operation by operation, so that field data does not
            apply.
        most: prompt groups that a run may have.
    """

    name: str
    train: Kernel
    infer: Kernel
    prompts: str
    tokens: int
    golden: str | None = None
    lines: tuple[int, float] = (1, 1.0)
    reward_drift: float | None = None
    reward_range: tuple[float, float] = (0.0, 1.0)
    reward_of: str = ""
    bias: float | None = None
    advantage: float | GroupAdvantage | None = None
    score_norm: float | str | None = None
    weighting: Weighting | None = None
    loss: Loss = "token_mean"
    clip_range: tuple[float, float] | None = None
    ratio_share: float | None = None
    confidence: float = 0.95
    claim: Claim = "population"
    capture: str = "float32"
    aligned: bool = False
    most: int = MOST

    @property
    def reward_gap(self) -> bool:
        """Whether the budget is for one measured reward."""
        return bool(self.reward_of)

    @property
    def span(self) -> float:
        """The range of the reward."""
        return self.reward_range[1] - self.reward_range[0]

    @property
    def share(self) -> float:
        """The budget as a share of the reward's range: a TV of whole responses."""
        assert self.reward_drift is not None
        return self.reward_drift / self.span

    @property
    def psi(self) -> Psi:
        if self.weighting is None:
            return PSI["naive"]()
        ((name, value),) = self.weighting.given.items()
        return PSI[name](value)

    @property
    def factor(self) -> float:
        """Advantage x score norm."""
        advantage, norm = advantage_bound(self.declared), score_norm_of(self.declared)
        assert advantage is not None and norm is not None
        return advantage * norm

    @property
    def gap(self) -> float:
        """The weight gap that the bias budget allows."""
        assert self.bias is not None
        return self.bias / self.factor

    @property
    def counted(self) -> tuple[float, float]:
        """The total weight of the longest response's tokens, and the root of the sum of squares: 1
        and 1 if each token is a unit.
        """
        weight_N = loss_weights(self.loss, [1 if self.loss == "token_mean" else self.tokens])
        return float(weight_N.sum()), math.hypot(*weight_N.tolist())

    @property
    def declared(self) -> Contract:
        """The parts of the contract about the trainer."""
        reward = Reward.model_construct(range=self.reward_range, of=self.reward_of or None)
        gradient = Gradient.model_construct(
            advantage=self.advantage,
            score_norm=self.score_norm,
            weighting=self.weighting or "naive",
            loss=self.loss,
            clip_range=self.clip_range,
            ratio="bypass",
        )
        return Contract.model_construct(reward=reward, gradient=gradient)

    @property
    def rho(self) -> float:
        """The log-ratio that uses the share of the clip range on its narrower side, nats."""
        assert self.clip_range is not None and self.ratio_share is not None
        low, high = self.clip_range
        down = -math.log1p(-low) if low < 1 else math.inf
        return self.ratio_share * min(down, math.log1p(high))


def refuse_nonsense(request: Request) -> None:
    """Refuse budgets that nothing can exceed, or with missing declarations.

    Raises:
        ContractError: the first problem, with a hint.
    """
    budgets = (request.reward_drift, request.bias, request.ratio_share)
    if all(budget is None for budget in budgets):
        raise ContractError(
            "no budget is given: there is nothing to derive",
            hint="give --reward-drift 0.05, --policy-gradient-bias 0.1, or --ratio-share 0.25",
        )
    for name, budget in zip(("reward drift", "bias", "share"), budgets, strict=True):
        if budget is not None and not 0 < budget < math.inf:
            raise ContractError(
                f"a {name} of {budget:g} is no budget: {_no_budget(budget)}",
                hint="give a number above 0",
            )
    if "pack" in (request.train.engine, request.infer.engine):
        raise ContractError(
            "a reference pack holds what was drawn for another contract",
            hint="name the kernel that it was made of",
        )
    if request.reward_gap and request.reward_drift is None:
        raise ContractError(
            "--reward-gap says how a budget is held, and none is given",
            hint="give --reward-drift: by how much your reward may differ",
        )
    _refuse_reward(request)
    _refuse_ratio(request)
    _refuse_declared(request)
    _refuse_bias(request)


def _no_budget(budget: float) -> str:
    if math.isnan(budget):
        return "it is not a number"
    if budget < 0:
        return "what it limits is never negative"
    if budget > 0:
        return "nothing can exceed it"
    return "no sample can show that two kernels are the same"


def _refuse_declared(request: Request) -> None:
    """Raise lint's findings in the declarations, in terms of the options."""
    problems = []
    for finding in learning(request.declared):
        hint = finding.hint
        if finding.path[:2] == ("gradient", "weighting"):
            hint = f"write LOW,HIGH around 1, such as --weighting {finding.path[-1]}=0.5,2"
        problems.append(Problem(finding.message, hint=hint))
    if problems:
        raise ContractError.all(problems)


def _refuse_reward(request: Request) -> None:
    low, high = request.reward_range
    if not (low < high and math.isfinite(request.span)):
        raise ContractError(
            f"the range of the reward, [{low:g}, {high:g}], is empty or endless",
            hint="give --reward-range LOW HIGH, such as 0 1",
        )
    if request.reward_drift is not None and request.reward_drift >= request.span:
        raise ContractError(
            f"no reward in [{low:g}, {high:g}] can drift by more than {request.span:g}: a budget "
            f"of {request.reward_drift:g} can never fail",
            hint=f"give a budget below {request.span:g}, or the reward's own --reward-range",
        )


def _refuse_bias(request: Request) -> None:
    if request.bias is None:
        return
    lacking = []
    if request.advantage is None:
        lacking.append("the largest advantage (--advantage 1, or --group-size 8 for GRPO)")
    if request.score_norm is None:
        lacking.append("the largest norm of grad log p (--score-norm 5, or logit_space)")
    if lacking:
        raise ContractError(
            "a bias of the policy gradient is the gap of weights times advantage times score "
            f"norm, and something is not declared: {'; '.join(lacking)}",
            hint="Servanda measures neither: both are declared, and the verdict says so",
        )
    if not 0 < request.factor < math.inf:
        raise ContractError(
            f"an advantage times a score norm of {request.factor:g} bounds nothing",
            hint="both are finite, and above 0",
        )
    most = request.psi.span[1] * request.factor * request.counted[0]
    if request.bias >= most:
        raise ContractError(
            f"with this advantage and score norm no bias exceeds {most:.3g}: a budget of "
            f"{request.bias:g} can never fail",
            hint=f"give a budget below {most:.3g}",
        )


def _refuse_ratio(request: Request) -> None:
    if (request.clip_range is None) != (request.ratio_share is None):
        raise ContractError(
            "a share of a clip range needs both: the range and the share",
            hint="give --clip-range 0.2 0.28 --ratio-share 0.25",
        )
    if request.clip_range is None or request.ratio_share is None:
        return
    low, high = request.clip_range
    finite = math.isfinite(low) and math.isfinite(high)
    if not finite or min(low, high) <= 0:
        wrong = "has no width on one side" if finite else "is none: both are numbers"
        raise ContractError(
            f"a clip range of [{low:g}, {high:g}] {wrong}",
            hint="give both distances from 1, such as 0.2 0.28",
        )
    if request.ratio_share >= 1:
        raise ContractError(
            f"a share of {request.ratio_share:g} leaves the policy's own update nothing",
            hint="give a share below 1, such as 0.25",
        )
