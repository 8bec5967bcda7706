# Digests that a server reports of its tensors, joined with the trainer's.
#
# Whether a digest changes needs no knowledge of layouts.  Equality with the trainer's bytes is
# claimed only where a tensor, or a known fusion of several, has them in some dtype.

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from servanda.report.format import count
from servanda.rl.sync_drill.weight_groups import weight_groups
from servanda.rl.sync_drill.weight_snapshot import Weights

Digests = Mapping[str, str]

# fused tensors of vLLM and SGLang -> their parts in a checkpoint, rows one after another
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHORT = 16  # hexadecimal digits of a digest of SGLang: the first half of 8 bytes of SHA-256
# of no bytes: vLLM on a CPU keeps the packed form of a matrix elsewhere, and empties the parameter
_EMPTY = hashlib.sha256().hexdigest()
_FEW = 4  # names in a line


@dataclass(frozen=True)
class DigestTrail:
    """Digests of one server at four times of a test.

    Args:
        found: before the first sync; idle: after a sync of unchanged weights.
        randomised: after a sync of random weights; returned: after the last sync.
    """

    found: Digests
    idle: Digests
    randomised: Digests
    returned: Digests


def digest_line(module: nn.Module, trail: DigestTrail) -> str:
    """What the digests of one server show, as text."""
    groups = weight_groups(Weights(module, copy=False).aliases)
    number = len(trail.returned)
    trail = DigestTrail(*(_filled(each) for each in astuple(trail)))
    equal = equal_tensors(module, trail.returned)
    covered = {source for sources in equal.values() for source in sources}
    rest = [group.name for group in groups if not covered.issuperset(group.tensors)]
    parts = [
        f"{len(equal)} of {count(number, 'tensor')} have the trainer's bytes after the last sync",
        f"by behaviour only: {_few(rest)}" if rest else "each group is compared bit for bit",
    ]
    if empty := number - len(trail.returned):
        parts.append(f"{count(empty, 'digest')} of empty tensors, which show nothing")
    parts += [
        f"{label}: {_few(names)}"
        for label, names in (
            ("changed by a sync of unchanged weights", unequal(trail.found, trail.idle)),
            ("not changed by a sync of random weights", _same(trail.idle, trail.randomised)),
            ("not as before after the last sync", unequal(trail.idle, trail.returned)),
        )
        if names
    ]
    return "; ".join(parts)


def unequal(before: Digests, after: Digests) -> list[str]:
    """Names of tensors that do not have the same digest at both times."""
    return sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))


def _filled(digests: Digests) -> Digests:
    return {name: digest for name, digest in digests.items() if digest != _EMPTY}


def _same(before: Digests, after: Digests) -> list[str]:
    return sorted(name for name, digest in before.items() if after.get(name) == digest)


def equal_tensors(module: nn.Module, digests: Digests) -> dict[str, tuple[str, ...]]:
    """Tensors of a server with the trainer's bytes, and the trainer's tensors they consist of."""
    own = dict(module.named_parameters())
    joined = {name: sources for name in digests if (sources := _sources(name, own))}
    size = {name: sum(own[source].numel() for source in joined[name]) for name in joined}
    dtypes = [*dict.fromkeys([*(p.dtype for p in own.values()), *_DTYPES])]
    equal: dict[str, tuple[str, ...]] = {}
    # the smallest first: one that is equal tells the server's dtype
    for name in sorted(joined, key=lambda name: size[name]):
        for dtype in dtypes:
            if _is_digest(digests[name], [own[source].detach() for source in joined[name]], dtype):
                equal[name], dtypes = joined[name], [dtype]
                break
    return equal


def _sources(name: str, own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The trainer's tensors of which a server's tensor may consist; () where unknown."""
    name = name.rpartition(":")[2]
    if name in own:
        return (name,)
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            sources = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
            return sources if all(source in own for source in sources) else ()
    return ()


def _is_digest(digest: str, tensors: list[Tensor], dtype: torch.dtype) -> bool:
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.to("cpu", dtype).contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return digest in (sha.hexdigest(), sha.hexdigest()[:_SHORT])


def _few(names: list[str]) -> str:
    def shown() -> Iterator[str]:
        yield from (name.rpartition(":")[2] for name in names[:_FEW])
        if len(names) > _FEW:
            yield f"and {len(names) - _FEW} more"

    return ", ".join(shown())
