# The true bias of a policy gradient: every answer that matters is enumerated, none is sampled.
#
# Token level: contexts and what follows a token as infer has them; the token itself from train
# (target) or from infer, weighed (what a trainer computes).  D_psi bounds their difference.
# Sequence level: the target is the gradient of the expected reward, all of it from train.
# Weights are those of the true ratio, as they are where an engine reports what it draws from; of
# one that does not (undisclosed_temperature), no weighting but "none" is what a trainer computes.
# An answer's advantage is the mean of what GRPO gives it beside group_size - 1 answers of infer.
# Axes: V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.experiment import grpo
from benchmarks.experiment.policy import logp_after
from benchmarks.experiment.tree import Node, Tree
from benchmarks.experiment.weights import WEIGHTINGS
from servanda.theory.bounds.gradient import LOGIT_SCORE_NORM, group_advantage_bound

Floats = NDArray[np.float64]
PROBES = 12  # tokens whose whole score is measured


def expected_advantage(success: float, group_size: int) -> tuple[float, float]:
    """The mean advantage of a wrong and of a right answer, the rest of its group being drawn.

    Args:
        success: probability that another answer of the group is right.

    >>> tuple(round(a, 3) for a in expected_advantage(0.5, 2))
    (-0.354, 0.354)
    """
    others = group_size - 1
    right = np.arange(others + 1)
    chance = [math.comb(others, k) * success**k * (1 - success) ** (others - k) for k in right]
    found = []
    for own in (0.0, 1.0):
        given = []
        for k in right:
            group = np.array([own] + [1.0] * k + [0.0] * (others - k))
            given.append(grpo.advantages(group, np.zeros(group_size, dtype=np.int64))[0])
        found.append(float(np.dot(chance, given)))
    return found[0], found[1]


def values(tree: Tree, of: Callable[[Node], Floats]) -> dict[tuple[int, ...], Floats]:
    """The expected reward after each token of each node, [V], going on by `of` a node.

    A beginning that was not followed counts as wrong; `Tree.rest_p` and `rest_q` say how much
    that can matter.
    """
    reward_V: dict[tuple[int, ...], Floats] = {}
    for node in reversed(tree.nodes):
        own_V = node.reward_V.copy()
        for token, child in node.children.items():
            own_V[token] = float(of(child) @ reward_V[_key(child)])
        reward_V[_key(node)] = own_V
    return reward_V


def _key(node: Node) -> tuple[int, ...]:
    return (node.prompt, *node.tokens)


class Gradients:
    """What multiplies grad log p of each token at each node, for each estimator and target.

    Args:
        coefficients: name -> node's key -> [V]; "token" and "sequence" are the targets, the
            others names of WEIGHTINGS.
        gap: name of a weighting -> D_psi, mean over tokens as infer draws them.
        tokens: mean length of an answer of infer.
        reward_p, reward_q: expected, mean over prompts.
    """

    def __init__(self, tree: Tree, group_size: int) -> None:
        self.tree = tree
        by_q, by_p = values(tree, lambda n: n.q_V), values(tree, lambda n: n.p_V)
        roots = [node for node in tree.nodes if not node.tokens]
        success = {n.prompt: float(n.q_V @ by_q[_key(n)]) for n in roots}
        self.reward_q = float(np.mean([*success.values()]))
        self.reward_p = float(np.mean([n.p_V @ by_p[_key(n)] for n in roots]))
        ends = {prompt: expected_advantage(m, group_size) for prompt, m in success.items()}
        names = ("token", "sequence", *WEIGHTINGS)
        self.coefficients: dict[str, dict[tuple[int, ...], Floats]] = {name: {} for name in names}
        total = dict.fromkeys(WEIGHTINGS, 0.0)
        for node in tree.nodes:
            key, (wrong, right) = _key(node), ends[node.prompt]
            advantage_V = wrong + (right - wrong) * by_q[key]
            self.coefficients["token"][key] = node.Q * node.p_V * advantage_V
            on_train_V = wrong + (right - wrong) * by_p[key]
            self.coefficients["sequence"][key] = node.P * node.p_V * on_train_V
            with np.errstate(over="ignore"):
                w_V = node.p_V / np.maximum(node.q_V, np.finfo(float).tiny)
            for name, psi in WEIGHTINGS.items():
                weighed_V = node.q_V * psi.weight(w_V)
                self.coefficients[name][key] = node.Q * weighed_V * advantage_V
                total[name] += node.Q * float(np.abs(node.p_V - weighed_V).sum())
        self.tokens = sum(node.Q for node in tree.nodes) / tree.prompts
        self.gap = {name: t / (self.tokens * tree.prompts) for name, t in total.items()}

    def in_logits(self, name: str, target: str | None = None) -> list[Floats]:
        """The gradient by the logits of each node, [V] a node; less that of `target`."""
        found = []
        for node in self.tree.nodes:
            key = _key(node)
            x_V = self.coefficients[name][key]
            x_V = x_V if target is None else x_V - self.coefficients[target][key]
            found.append(x_V - node.p_V * x_V.sum())
        return found

    def mean_norm(self, name: str, target: str | None = None) -> float:
        """Mean norm over tokens as infer draws them: what A x sqrt 2 x D_psi bounds."""
        norms = [float(np.linalg.norm(g_V)) for g_V in self.in_logits(name, target)]
        return sum(norms) / (self.tokens * self.tree.prompts)

    def norm(self, name: str, target: str | None = None) -> float:
        """Norm of the whole gradient by all logits, over the number of prompts."""
        squares = [float(g_V @ g_V) for g_V in self.in_logits(name, target)]
        return math.sqrt(sum(squares)) / self.tree.prompts


def checkpoint(
    tree: Tree, group_size: int, module: Any, prompts: Any, temperature: float
) -> dict[str, Any]:
    """The true bias at these weights, and what bounds it.

    Returns:
        rest_p, rest_q    mass of answers that were not looked at
        nodes             contexts that were
        reward_p, reward_q  expected reward of these prompts under train and infer
        tokens            mean length of an answer of infer
        advantage_max     the bound of a group-normalised advantage
        score_max         largest norm of grad log p by all parameters that was measured
        signal            mean norm over tokens of the target by logits
        gap               weighting -> D_psi, exact
        logit_bias        weighting -> mean norm over tokens of estimator - token target
        logit_bound       weighting -> advantage_max x sqrt 2 x D_psi; never below logit_bias
        logit_norm        "token", "sequence" -> norm of the target by all logits
        logit_sequence_bias  weighting -> norm by all logits of estimator - sequence target
        parameter_norm    "token", "sequence", weighting -> norm by all parameters
        parameter_bias    weighting -> [norm of estimator - token target, - sequence target]
        parameter_cosine  weighting -> cosines with the two targets
        parameter_bound   weighting -> advantage_max x score_max x D_psi x tokens: of the first
    """
    found = Gradients(tree, group_size)
    bound = group_advantage_bound(group_size)
    vectors = in_parameters(found, module, prompts, temperature)
    score = largest_score(found, module, prompts, temperature)
    targets = ("token", "sequence")
    return {
        "rest_p": tree.rest_p,
        "rest_q": tree.rest_q,
        "nodes": len(tree.nodes),
        "reward_p": found.reward_p,
        "reward_q": found.reward_q,
        "tokens": found.tokens,
        "advantage_max": bound,
        "score_max": score,
        "signal": found.mean_norm("token"),
        "gap": found.gap,
        "logit_bias": {name: found.mean_norm(name, "token") for name in WEIGHTINGS},
        "logit_bound": {n: bound * LOGIT_SCORE_NORM * gap for n, gap in found.gap.items()},
        "logit_norm": {name: found.norm(name) for name in targets},
        "logit_sequence_bias": {name: found.norm(name, "sequence") for name in WEIGHTINGS},
        "parameter_norm": {name: float(g.norm()) for name, g in vectors.items()},
        "parameter_bias": {
            name: [float((vectors[name] - vectors[t]).norm()) for t in targets]
            for name in WEIGHTINGS
        },
        "parameter_cosine": {
            name: [_cosine(vectors[name], vectors[t]) for t in targets] for name in WEIGHTINGS
        },
        "parameter_bound": {
            name: bound * score * gap * found.tokens for name, gap in found.gap.items()
        },
    }


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else math.nan


def in_parameters(
    found: Gradients, module: Any, prompts: Any, temperature: float
) -> dict[str, torch.Tensor]:
    """Each gradient by all trained parameters, flat, mean over prompts."""
    nodes = found.tree.nodes
    paths = [node for node in nodes if not node.children]
    rows: dict[tuple[int, ...], tuple[int, int]] = {}
    for row, leaf in enumerate(paths):
        for place in range(len(leaf.tokens) + 1):
            rows.setdefault((leaf.prompt, *leaf.tokens[:place]), (row, place))
    keys = [_key(node) for node in nodes]
    at = torch.tensor([rows[key] for key in keys])
    # a last token is not fed: any will do
    answers = [(*leaf.tokens, 0) for leaf in paths]
    group = np.array([leaf.prompt for leaf in paths])
    logp_SWV = logp_after(module, prompts, answers, group, temperature)
    logp_KV = logp_SWV[at[:, 0], at[:, 1]]
    vectors = {}
    for name, by_key in found.coefficients.items():
        coefficient_KV = np.stack([by_key[key] for key in keys]) / found.tree.prompts
        scalar = (torch.from_numpy(coefficient_KV).float() * logp_KV).sum()
        vectors[name] = _flat(scalar, module)
    return vectors


def largest_score(found: Gradients, module: Any, prompts: Any, temperature: float) -> float:
    """The largest norm of grad log p by all parameters, of the PROBES tokens that bend most.

    Those are the tokens with the largest Q |p - q|: no certificate, but where the bias is.
    """
    nodes = found.tree.nodes
    bend_KV = np.stack([node.Q * np.abs(node.p_V - node.q_V) for node in nodes])
    largest = np.argsort(-bend_KV, axis=None, kind="stable")[:PROBES]
    score = 0.0
    for k, token in zip(*np.unravel_index(largest, bend_KV.shape), strict=True):
        node = nodes[k]
        context = [[*prompts[node.prompt], *node.tokens]]
        logp_11V = logp_after(module, context, [(0,)], [0], temperature)
        score = max(score, float(_flat(logp_11V[0, 0, int(token)], module).norm()))
    return score


def _flat(scalar: torch.Tensor, module: Any) -> torch.Tensor:
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad(scalar, learned, retain_graph=True)
    return torch.cat([part.ravel() for part in parts]).double()
