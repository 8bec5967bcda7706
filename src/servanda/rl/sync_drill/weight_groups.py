# Weights by name: groups of tensors that are perturbed together.
#
# A group is a likely omission of a sync: the embedding and the head, one class
# of norms in all layers, attention or MLP of a layer, the adapters of a layer.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["embed", "head", "tied", "norms", "attn", "mlp", "other", "adapter", "rest"]

LAYER = re.compile(r"^(?:.*?\.)?(?:layers?|h|blocks?)\.(\d+)\.(.+)$")
_NORM = re.compile(r"norm|(?:^|\.)ln(?:_|\d|\.)")
_EMBED = re.compile(r"(?:^|\.)(?:embed|wte|wpe|tok_emb|word_emb)|embeddings?\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output|head|score)\.")
_ADAPTER = re.compile(r"(?:^|\.)(?:lora|adapter|dora)_?\w*")
_ATTENTION = re.compile(r"attn|attention")
_EXPERT = re.compile(r"^(.*\bexperts?\.\d+)\.")
_MLP = re.compile(r"mlp|feed_forward|ffn|moe|expert")

# more groups than this are perturbed in blocks of several
SINGLES = 12
IN_A_BLOCK = 8
PARTS = 32  # most parts of a group: experts of a layer are bundled


@dataclass(frozen=True)
class WeightGroup:
    """Tensors that are changed together.

    Args:
        name: display name.
        kind: kind of the tensors.
        layer: index of their layer; None for none or all.
        parts: distinguished part -> its tensors.
    """

    name: str
    kind: Kind
    layer: int | None
    parts: Mapping[str, tuple[str, ...]]

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for names in self.parts.values() for name in names)


def weight_groups(names: Mapping[str, Sequence[str]]) -> tuple[WeightGroup, ...]:
    """The groups of a module's tensors.

    Args:
        names: tensor -> all its names; a tied one has two.

    >>> found = weight_groups({n: [n] for n in ("wte.weight", "h.0.attn.w", "h.0.ln_1.weight")})
    >>> [group.name for group in found]
    ['embed', 'norms.ln_1', 'layers.0.attn']
    """
    parts: dict[tuple[str, Kind, int | None], dict[str, tuple[str, ...]]] = {}
    for tensor, aliases in names.items():
        name, kind, layer, part = _place(tensor, aliases)
        group = parts.setdefault((name, kind, layer), {})
        group[part] = (*group.get(part, ()), tensor)
    order: tuple[Kind, ...] = ("tied", "embed", "head", "norms")
    groups = [WeightGroup(*key, _bundled(members)) for key, members in parts.items()]
    return tuple(
        sorted(
            groups,
            key=lambda g: (
                order.index(g.kind) if g.kind in order else len(order),
                g.layer if g.layer is not None else 1 << 30,
            ),
        )
    )


def _bundled(parts: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """At most PARTS parts: neighbours are merged to `first .. last`."""
    names = [*parts]
    count = -(-len(names) // PARTS)
    if count == 1:
        return dict(parts)
    bundles = [names[i : i + count] for i in range(0, len(names), count)]
    return {
        f"{bundle[0]} .. {bundle[-1]}": tuple(t for name in bundle for t in parts[name])
        for bundle in bundles
    }


def _place(tensor: str, aliases: Sequence[str]) -> tuple[str, Kind, int | None, str]:
    """(name, kind, layer) of a tensor's group, and the part of the tensor in it."""
    name = tensor.removeprefix("base_model.model.").replace(".base_layer.", ".")
    in_layer = LAYER.search(name)
    layer = int(in_layer[1]) if in_layer else None
    short = (in_layer[2] if in_layer else name).removesuffix(".weight")
    of_layer = f"layers.{layer}" if in_layer else "rest"
    if _ADAPTER.search(name):
        return (f"{of_layer}.adapter" if in_layer else "adapter"), "adapter", layer, short
    if not in_layer and len(aliases) > 1 and any(_HEAD.search(alias) for alias in aliases):
        return "embed/lm_head", "tied", None, short
    if not in_layer and _HEAD.search(name):
        return "lm_head", "head", None, short
    if not in_layer and _EMBED.search(name):
        return "embed", "embed", None, short
    if _NORM.search(name):
        # a converter's table of names may lack one class of norms in all layers
        of_class = short.removesuffix(".bias").rpartition(".")[2]
        return f"norms.{of_class}", "norms", None, of_layer if in_layer else short
    if in_layer and _ATTENTION.search(short):
        return f"{of_layer}.attn", "attn", layer, short
    if in_layer and _MLP.search(short):
        return f"{of_layer}.mlp", "mlp", layer, expert_of(tensor) or short
    if in_layer:
        return f"{of_layer}.other", "other", layer, short
    return "rest", "rest", None, short


def expert_of(tensor: str) -> str:
    """The expert that a tensor belongs to, within its layer; "" for none.

    >>> expert_of("model.layers.3.mlp.experts.7.up_proj.weight")
    'mlp.experts.7'
    """
    in_layer = LAYER.search(tensor)
    found = _EXPERT.match(in_layer[2] if in_layer else tensor)
    return found[1] if found else ""


def blocks(groups: Sequence[WeightGroup]) -> tuple[tuple[WeightGroup, ...], ...]:
    """The groups that share a sync: one each if there are few, otherwise several layers."""
    if len(groups) <= SINGLES:
        return tuple((group,) for group in groups)
    alone = [(group,) for group in groups if group.layer is None and group.kind != "norms"]
    norms = tuple(group for group in groups if group.kind == "norms")
    alone += [norms] if norms else []
    kinds: dict[Kind, list[WeightGroup]] = {}
    for group in groups:
        if group.layer is not None:
            kinds.setdefault(group.kind, []).append(group)
    together = []
    for members in kinds.values():
        count = -(-len(members) // IN_A_BLOCK)
        size = -(-len(members) // count)
        together += [tuple(members[i : i + size]) for i in range(0, len(members), size)]
    return (*alone, *together)


def block_name(block: Sequence[WeightGroup]) -> str:
    """The display name: `layers.0-7.mlp`."""
    first, last = block[0], block[-1]
    if first is last:
        return first.name
    if first.kind == "norms":
        return "norms"
    return f"layers.{first.layer}-{last.layer}.{first.name.rpartition('.')[2]}"
