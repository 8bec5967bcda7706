# What is wrong with a sync, told from which groups are deaf.

from __future__ import annotations

from collections.abc import Sequence

from servanda.preflight.result import RESIDUAL_WARNS, AsFound, Poisoned, Response

# cause -> what it means, and where to look
CAUSES: dict[str, str] = {
    "never_synced": "the sync returns, and nothing reaches the engine",
    "stale_cache": "weights reach the engine, which answers known tokens from a cache of the old "
    "ones: reset its prefix cache after a sync",
    "adapter_ignored": "the adapters never reach the engine: rollouts come from the base model",
    "tied_head_stale": "the embedding follows, and the head that is tied to it is an old copy",
    "tied_embedding_stale": "the head follows, and the embedding that is tied to it is an old copy",
    "one_layer": "one layer never reaches the engine",
    "one_mlp": "the MLP of one layer never reaches the engine",
    "one_attention": "the attention of one layer never reaches the engine",
    "norms_stale": "the scales of the norms never reach the engine",
    "wrong_cast": "weights lose digits on their way to the engine",
    "deaf": "part of the weights never reaches the engine",
    "unfaithful": "the engine changes with the weights, and not as the trainer does",
    "not_returned": "the engine does not score as before the drill, though the weights are back",
}


def cause_of(
    found: AsFound,
    poison: Poisoned,
    groups: Sequence[Response],
    *,
    adapted: bool,
    damaged: bool,
    layers: int,
) -> str:
    """The one cause that explains what was seen; "" where nothing is wrong.

    Args:
        adapted: the module has adapters that are trained.
        damaged: the sync of unchanged weights moved the engine away.
        layers: how many layers were drilled.
    """
    seen = [group for group in groups if group.mark != "unseen"]
    wrong = [group for group in seen if group.mark == "violated"]
    deaf = [group for group in wrong if group.deaf]
    if wrong or poison.mark == "violated":
        by_deafness = _by_the_deaf(seen, wrong, deaf, poison, adapted, layers)
        if by_deafness:
            return by_deafness
    if damaged or found.cast:
        return "wrong_cast"
    return "unfaithful" if wrong or poison.mark == "violated" else ""


def _by_the_deaf(
    seen: Sequence[Response],
    wrong: Sequence[Response],
    deaf: Sequence[Response],
    poison: Poisoned,
    adapted: bool,
    layers: int,
) -> str:
    if poison.fresh is not None and poison.fresh <= poison.limit:
        return "stale_cache"
    adapters = [group for group in seen if group.kind == "adapter"]
    if adapted and adapters and all(g in deaf for g in adapters) and len(wrong) == len(adapters):
        return "adapter_ignored"
    if seen and len(deaf) == len(seen):
        return "never_synced"
    stale = _stale_use(wrong)
    if stale:
        return stale
    if deaf and all(group.kind == "norms" for group in wrong):
        return "norms_stale"
    lost = {group.layer for group in deaf if group.layer is not None}
    if len(lost) == 1 and layers > 1 and _all_within(wrong, lost):
        kinds = {group.kind for group in deaf}
        here = {group.kind for group in seen if group.layer in lost}
        if kinds >= here and len(here) > 1:
            return "one_layer"
        if kinds == {"mlp"}:
            return "one_mlp"
        if kinds == {"attn"}:
            return "one_attention"
    partly = [part for group in wrong for part in group.parts if part.deaf]
    return "deaf" if deaf or partly else ""


def _all_within(wrong: Sequence[Response], layers: set[int | None]) -> bool:
    """Whether what is wrong lies in these layers; the norms of a layer are judged with all."""
    names = {f"layers.{layer}" for layer in layers}
    for group in wrong:
        if group.kind == "norms":
            if not {part.name for part in group.parts if part.deaf} <= names:
                return False
        elif group.layer not in layers:
            return False
    return True


def _stale_use(wrong: Sequence[Response]) -> str:
    """A tied tensor that follows in one of its uses only."""
    for group in wrong:
        if group.kind == "tied" and len(wrong) == 1:
            for part in group.parts:
                others = [p for p in group.parts if p is not part]
                if part.deaf and others and not any(p.deaf for p in others):
                    head = "head" in part.name or "out" in part.name
                    return "tied_head_stale" if head else "tied_embedding_stale"
    return ""


def shaky(groups: Sequence[Response]) -> tuple[str, ...]:
    """Names of the groups that are neither right nor wrong."""
    return tuple(g.name for g in groups if g.mark == "warns" or g.residual >= RESIDUAL_WARNS)
