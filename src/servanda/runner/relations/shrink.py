# The smallest counterexample: fewer requests beside it, fewer tokens of each.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from servanda.runner.relations.relation import Relation
from servanda.runner.relations.subject import Request

BUDGET = 80  # cases that are run for it


def shrink(
    relation: Relation, request: Request, fails: Callable[[Request], bool], budget: int = BUDGET
) -> Request:
    """A request that fails as the given one does, and is not larger.

    Greedy: every cut that still fails is kept, the largest cuts first.

    Args:
        fails: whether the relation is violated by a request.
    """
    left, best = budget, request

    def attempt(smaller: Request) -> bool:
        nonlocal left, best
        if left <= 0:
            return False
        left -= 1
        if fails(smaller):
            best = smaller
            return True
        return False

    def fewer(keep: int) -> bool:
        dropped = len(best.others) - keep
        return any(
            attempt(replace(best, others=best.others[:at] + best.others[at + dropped :]))
            for at in range(0, keep + 1, dropped)
        )

    def shortened(n: int) -> Callable[[int], bool]:
        def cut(keep: int) -> bool:
            others = (*best.others[:n], best.others[n][:keep], *best.others[n + 1 :])
            return attempt(replace(best, others=others))

        return cut

    _cut(best.width, lambda keep: attempt(replace(best, width=keep)))
    _cut(len(best.others), fewer, least=0)
    _cut(len(best.prompt), lambda keep: attempt(replace(best, prompt=best.prompt[:keep])))
    _cut(
        len(best.prompt),
        lambda keep: attempt(relation.cut_front(best, len(best.prompt) - keep)),
    )
    for n in range(len(best.others)):
        _cut(len(best.others[n]), shortened(n))
    return best


def _cut(length: int, attempt: Callable[[int], bool], least: int = 1) -> None:
    """Try to keep less and less of something; an accepted attempt is kept."""
    step = (length + 1) // 2
    while step:
        while length - step >= least and attempt(length - step):
            length -= step
        step //= 2
