# The fault of a sync, derived from the groups that are not synced.
#
# A fault is named only if it explains the engine's response; otherwise it is "unexplained".

from __future__ import annotations

import re
from collections.abc import Sequence

from servanda.rl.sync_drill.result import NEAR, Baseline, Part, PoisonResult, Response

_EXPERT = re.compile(r"\bexperts?[. ]\d+$|\bexperts \d+-\d+$")
# cause -> its meaning, and the next place to check
CAUSES: dict[str, str] = {
    "never_synced": "the sync returns, but no weight reaches the engine",
    "version_only": "the server claims a new version of the weights after each sync, but scores as "
    "with the old ones",
    "late": "weights reach the engine too late: the sync returns before they arrive",
    "dropped": "some weights arrive only with a later sync, or some syncs are dropped",
    "stopped": "the first syncs reach the engine, later ones do not",
    "misplaced": "the sync sends tensors in the places of others, or with rows in another order "
    "than in the checkpoint",
    "stale_replicas": "some replicas of the engine have the new weights, and others still have "
    "the old ones",
    "stale_cache": "weights reach the engine, but it scores known tokens from a cache of the old "
    "weights: reset its prefix cache after a sync",
    "adapter_ignored": "the adapters never reach the engine: rollouts come from the base model",
    "tied_head_stale": "the embedding is synced, but the head tied to it is an old copy",
    "tied_embedding_stale": "the head is synced, but the embedding tied to it is an old copy",
    "rows_stale": "some rows of the vocabulary never reach the engine",
    "shard_stale": "the shards of some ranks never reach the engine",
    "share_stale": "a part of a tensor never reaches the engine, such as a head or a rank's shard",
    "experts_stale": "some experts never reach the engine",
    "one_layer": "one layer never reaches the engine",
    "one_mlp": "the MLP of one layer never reaches the engine",
    "one_attention": "the attention of one layer never reaches the engine",
    "sparse_updates": "updates of few values do not arrive as they are sent, though whole tensors "
    "do",
    "norms_stale": "the scales of norms never reach the engine",
    "scaled": "weights reach the engine multiplied by a factor",
    "wrong_cast": "weights lose precision on their way to the engine",
    "deaf": "part of the weights never reaches the engine",
    "sync_moves": "a sync of unchanged weights moves the engine away from the trainer: check the "
    "shape, order and names of the tensors",
    "unfaithful": "the engine changes with the weights, but not as the trainer does, and no known "
    "fault explains it",
    "not_repaired": "the engine holds other weights than were sent, though all of them at once "
    "arrive, and further syncs do not repair it: a sync of differences was lost, or was applied to "
    "other weights than it was made from",
    "not_returned": "the engine does not score as before the test, though the weights are restored",
}


def cause_of(
    baseline: Baseline,
    poison: PoisonResult,
    groups: Sequence[Response],
    *,
    adapted: bool,
    layers: int,
    back: bool,
) -> str:
    """The single cause that explains the measurements; "" without a fault.

    Args:
        adapted: whether the module has trained adapters.
        layers: number of tested layers.
        back: whether the engine is as before once the restored weights are synced.
    """
    if baseline.exchanged:
        return "misplaced"
    visible = [group for group in groups if group.mark != "unseen"]
    wrong = [group for group in visible if group.mark == "violated"]
    if wrong or baseline.mixed or poison.mark == "violated":
        cause = _of_the_sync(baseline, poison, visible, wrong) or _by_the_deaf(
            visible, [group for group in wrong if not group.late], poison, adapted, layers
        )
        if cause:
            return cause
    if baseline.cast:
        return "wrong_cast"
    if baseline.scale or (wrong and all(group.scale for group in wrong) and not baseline.damaged):
        return "scaled"
    if baseline.damaged:
        return "sync_moves"
    if not wrong:
        return ""
    if back or poison.mark != "holds":
        return "unfaithful"
    # the engine is sent differences only, or it would have been repaired
    return "dropped" if any(group.stopped for group in wrong) else "not_repaired"


def _of_the_sync(
    baseline: Baseline, poison: PoisonResult, visible: Sequence[Response], wrong: Sequence[Response]
) -> str:
    """A fault of the whole sync, or of its timing."""
    if baseline.mixed or poison.mixed or any(group.mixed for group in wrong):
        return "stale_replicas"
    if poison.cached:
        return "stale_cache"
    late = [group for group in wrong if group.late]
    if late and len(late) == len(wrong):
        # a group that is neither right nor clearly wrong is no sync that arrived in time
        return "dropped" if any(group.mark == "holds" for group in visible) else "late"
    if poison.late and not wrong:
        return "dropped"
    return "stopped" if wrong and all(group.stopped for group in wrong) else ""


def _by_the_deaf(
    visible: Sequence[Response],
    wrong: Sequence[Response],
    poison: PoisonResult,
    adapted: bool,
    layers: int,
) -> str:
    deaf = [group for group in wrong if _is_lost(group)]
    adapters = [group for group in visible if group.kind == "adapter"]
    adapters_only = adapted and len(adapters) == len(visible)
    if adapted and adapters and all(g in deaf for g in adapters) and len(wrong) == len(adapters):
        return "adapter_ignored"
    if len(deaf) == len(visible) and (visible or (poison.follow < NEAR and poison.still)):
        return "adapter_ignored" if adapters_only else "never_synced"
    if any(not _is_lost(group) and not group.lost for group in wrong):
        return ""  # there is another fault too, so no single name explains all
    lost_parts = [name for group in wrong for name in group.lost or (group.name,)]
    if wrong and all(part.startswith(("shard ", "shards ")) for part in lost_parts):
        of_vocabulary = all(group.kind in ("embed", "head", "tied") for group in wrong)
        return "rows_stale" if of_vocabulary else "shard_stale"
    if wrong and all(map(_EXPERT.search, lost_parts)):
        return "experts_stale"
    if stale := _stale_use(wrong):
        return stale
    if deaf and all(group.kind == "norms" for group in wrong) and len(deaf) == len(wrong):
        return "norms_stale"
    lost = {group.layer for group in deaf if group.layer is not None}
    if len(lost) == 1 and layers > 1 and _all_within(wrong, lost):
        kinds = {group.kind for group in deaf}
        here = {group.kind for group in visible if group.layer in lost}
        if kinds >= here and (len(here) > 1 or here == {"adapter"}):
            return "one_layer"
        if kinds == {"mlp"}:
            return "one_mlp"
        if kinds == {"attn"}:
            return "one_attention"
    if wrong and all(map(is_rows, lost_parts)):
        return "rows_stale"
    return "deaf" if wrong else ""


def _is_lost(group: Response) -> bool:
    """Whether no part of a group reaches the engine."""
    tensors = {part.name for part in group.parts if not is_rows(part.name)}
    return group.deaf_as_a_whole or bool(group.lost and {*group.lost} >= tensors > set())


def is_rows(name: str) -> bool:
    """Whether a part is rows of tensors: of a vocabulary, or of stacked experts."""
    return name.startswith(("row ", "rows ", "expert ", "experts "))


def _all_within(wrong: Sequence[Response], layers: set[int]) -> bool:
    """Whether only these layers are wrong; the norms of a layer are judged with all norms."""
    names = {f"layers.{layer}" for layer in layers}
    for group in wrong:
        if group.kind == "norms":
            if not {*group.lost} <= names:
                return False
        elif group.layer not in layers:
            return False
    return True


def _stale_use(wrong: Sequence[Response]) -> str:
    """A tied tensor that is synced in one of its uses only."""
    if len(wrong) != 1 or wrong[0].kind != "tied":
        return ""
    uses: list[Part] = [part for part in wrong[0].parts if not is_rows(part.name)]
    lost = [part.name for part in uses if part.name in wrong[0].lost]
    if len(lost) != 1 or len(uses) < 2:
        return ""
    return "tied_head_stale" if "head" in lost[0] or "out" in lost[0] else "tied_embedding_stale"
