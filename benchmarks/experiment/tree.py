# The tree of a prompt's answers under two kernels, level by level, until little mass is left.
#
# A node is a context that was looked at: prompt and a beginning of an answer.  Its mass is the
# probability that an answer begins so, under train (P) and under infer (Q).
# Axes: R rows of a level, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from servanda.theory.sampling import log_softmax

Floats = NDArray[np.float64]


class Steps(Protocol):
    """A kernel that goes from contexts to the next: logprobs [R, V], nats, float64."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Floats: ...

    def go_on(self, parent_R: Sequence[int], token_R: Sequence[int]) -> Floats:
        """After one more token; `parent_R` are rows of the level before."""
        ...


class ModelSteps:
    """A causal model of Transformers, decoding with a cache as an engine does."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model
        self.temperature = temperature

    def start(self, prompts: Sequence[Sequence[int]]) -> Floats:
        columns = max(map(len, prompts))
        ids_RT = torch.tensor([[0] * (columns - len(p)) + [*p] for p in prompts])
        self.mask_RT = torch.tensor([[0] * (columns - len(p)) + [1] * len(p) for p in prompts])
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids_RT)

    def go_on(self, parent_R: Sequence[int], token_R: Sequence[int]) -> Floats:
        rows_R = torch.tensor(parent_R)
        self.cache.batch_select_indices(rows_R)
        self.mask_RT = torch.nn.functional.pad(self.mask_RT[rows_R], (0, 1), value=1)
        return self._forward(torch.tensor(token_R)[:, None])

    def _forward(self, ids_RT: torch.Tensor) -> Floats:
        position_RT = (self.mask_RT.cumsum(-1) - 1).clamp_min(0)[:, -ids_RT.shape[1] :]
        with torch.no_grad():
            logits_R1V = self.model(
                input_ids=ids_RT,
                attention_mask=self.mask_RT,
                position_ids=position_RT,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        return log_softmax(logits_R1V[:, -1].double().numpy() / self.temperature)


@dataclass
class Node:
    """One context.

    Args:
        prompt: its number.
        tokens: of the answer so far.
        P, Q: mass.
        p_V, q_V: of the next token.
        children: token -> node.
        reward_V: reward of the answers that end here, by their last token; 0 of others.
    """

    prompt: int
    tokens: tuple[int, ...]
    P: float
    Q: float
    p_V: Floats
    q_V: Floats
    children: dict[int, Node]
    reward_V: Floats


@dataclass(frozen=True)
class Tree:
    """Nodes by level, the shortest contexts first, and the mass of answers not looked at.

    Args:
        rest_p, rest_q: mean over prompts.
    """

    nodes: tuple[Node, ...]
    prompts: int
    rest_p: float
    rest_q: float


def grow(
    train: Steps,
    infer: Steps,
    prompts: Sequence[Sequence[int]],
    reward: Callable[[int, tuple[int, ...]], float],
    *,
    ends: Sequence[int],
    width: int,
    least: float,
    breadth: int,
) -> Tree:
    """Follow every beginning of an answer that either kernel is likely to write.

    Args:
        reward: (number of a prompt, a whole answer, its end included) -> reward.
        ends: tokens that end an answer.
        width: the most tokens of one; an answer cut there has reward 0.
        least: mean mass (P + Q) / 2 below which a beginning is left alone.
        breadth: of a prompt, the most beginnings of one length.
    """
    level: list[Node] = []
    nodes: list[Node] = []
    found = zip(train.start(prompts), infer.start(prompts), strict=True)
    for prompt, (p_V, q_V) in enumerate(found):
        level.append(_node(prompt, (), 1.0, 1.0, np.exp(p_V), np.exp(q_V)))
    for depth in range(1, width + 1):
        nodes += level
        wanted = []
        for row, node in enumerate(level):
            for end in ends:
                node.reward_V[end] = reward(node.prompt, (*node.tokens, end))
            if depth == width:
                continue
            mass_V = (node.P * node.p_V + node.Q * node.q_V) / 2
            mass_V[list(ends)] = -1.0  # an answer ends there
            likely = np.flatnonzero(mass_V >= least).tolist()
            wanted += [(node.prompt, -mass_V[token], row, token) for token in likely]
        kept, count = [], dict.fromkeys(range(len(prompts)), 0)
        for prompt, _, row, token in sorted(wanted):
            count[prompt] += 1
            if count[prompt] <= breadth:
                kept.append((row, token))
        if not kept:
            break
        rows, tokens = zip(*kept, strict=True)
        logp_RV, logq_RV = train.go_on(rows, tokens), infer.go_on(rows, tokens)
        following = []
        for (row, token), logp_V, logq_V in zip(kept, logp_RV, logq_RV, strict=True):
            node = level[row]
            child = _node(
                node.prompt,
                (*node.tokens, token),
                node.P * node.p_V[token],
                node.Q * node.q_V[token],
                np.exp(logp_V),
                np.exp(logq_V),
            )
            node.children[token] = child
            following.append(child)
        level = following
    return _closed(nodes, len(prompts), ends, width)


def _node(prompt: int, tokens: tuple[int, ...], P: float, Q: float, p: Floats, q: Floats) -> Node:
    return Node(prompt, tokens, P, Q, p, q, {}, np.zeros(len(p)))


def _closed(nodes: list[Node], prompts: int, ends: Sequence[int], width: int) -> Tree:
    seen = np.zeros(2)
    for node in nodes:
        last = [*ends] if len(node.tokens) + 1 < width else slice(None)
        seen += node.P * node.p_V[last].sum(), node.Q * node.q_V[last].sum()
    rest_p, rest_q = 1.0 - seen / prompts
    return Tree(tuple(nodes), prompts, float(rest_p), float(rest_q))
