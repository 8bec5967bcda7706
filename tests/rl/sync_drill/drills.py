# Drills of real engines: shipped models, the trainer's sync or a broken one.

from itertools import product
from typing import NamedTuple

from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.engines.weight_sync import WeightSync
from servanda.rl.sync_drill.drill import preflight
from servanda.rl.sync_drill.trainee import Trainee
from tests.trainers import KINDS, MODELS, adapt, open_engine, score, trainer

LAYER = 1  # that one_layer and one_mlp leave out
DEPTH = {"llama": 4, "qwen3": 3}
FORMS = ("bfloat16", "int8_weight_only", "int4_g32")


class Drill(NamedTuple):
    """What is drilled.

    Args:
        kind: of model, as of tests.trainers.KINDS.
        form: of engine, as of tests.trainers.FORMATS.
        fault: of SYNC_FAULTS, at its default; "" for a sync that works.
        adapters: "fresh", whose B are 0, "trained", or "" for none.
    """

    kind: str
    form: str
    fault: str = ""
    adapters: str = ""
    seed: int = 0


NORMS = {
    "llama": {"norms.input_layernorm", "norms.post_attention_layernorm", "norms.norm"},
    "qwen3": {
        *("norms.input_layernorm", "norms.post_attention_layernorm", "norms.norm"),
        *("norms.q_norm", "norms.k_norm"),
    },
}
# fault -> what a drill calls it, where that is not its own name
CALLED = {"one_norm": "deaf", "norm_class_stale": "norms_stale", "adapter_scaled": "scaled"}
OF_ADAPTERS = ("adapter_ignored", "adapter_scaled")


WORKING = [
    Drill(kind, form, "", adapters, seed)
    for form, kind in product(FORMS, DEPTH)
    for adapters, seed in [*product(("", "fresh"), range(4)), ("trained", 4)]
]
BROKEN = [
    Drill(kind, form, fault, adapters)
    for fault, form, kind in product(SYNC_FAULTS, FORMS, DEPTH)
    for adapters in (("fresh", "trained") if fault in OF_ADAPTERS else ("",))
]


def drilled(kind, form, fault="", adapters="", seed=0, tokens=None):
    """A drill of a trainer in float32 and its engine; arguments as of Drill."""
    module, engine = trainer(kind, moved=0.0), open_engine(MODELS / KINDS[kind][0], form)
    if adapters:
        adapt(module, fresh=adapters == "fresh")
    entry = SYNC_FAULTS[fault] if fault else None
    sync = entry.inject(WeightSync, entry.default) if entry else WeightSync
    if adapters == "trained" and not fault:
        WeightSync(module, engine)()  # as the run that trained them left it

    def scored(rows):
        return score(engine, rows)

    return preflight(Trainee(module, sync(module, engine), scored, tokens), seed=seed)


def expected(kind, fault):
    """Names of the groups that a fault at its default makes deaf; None where it makes none so."""
    attn = {f"layers.{i}.attn" for i in range(DEPTH[kind])}
    mlp = {f"layers.{i}.mlp" for i in range(DEPTH[kind])}
    here = {name for name in attn | mlp if name.startswith(f"layers.{LAYER}.")}
    return {
        "never_synced": attn | mlp | NORMS[kind] | {"embed/lm_head"},
        "tied_head_stale": {"embed/lm_head"},
        "one_layer": here,
        "one_mlp": here & mlp,
        "norms_stale": NORMS[kind],
        "one_norm": {"norms.input_layernorm"},
        "norm_class_stale": {"norms.post_attention_layernorm"},
        "rows_stale": {"embed/lm_head"},
        "adapter_ignored": {f"layers.{i}.adapter" for i in range(DEPTH[kind])},
        "wrong_cast": set(),
    }.get(fault)


def named(drill, result):
    """Whether a drill calls a fault what it is, and finds what it leaves behind, and no more."""
    due = expected(drill.kind, drill.fault)
    called = CALLED.get(drill.fault, drill.fault)
    return result.cause == called and (due is None or wrong(result) == due)


def wrong(result):
    """Names of the groups that are violated.

    Norms are one group a class, in all layers; that those of the layer left out are lost is left
    out, where they are not all that is.
    """
    found = {group.name: group for group in result.groups if group.mark == "violated"}
    of_layer = {n for n, g in found.items() if g.kind == "norms" and g.lost == (f"layers.{LAYER}",)}
    rest = {*found} - of_layer
    return rest or {*found}
