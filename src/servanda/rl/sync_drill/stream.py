# A trainer's sync as a stream of (name, tensor): its names held against the trained parameters, and
# some of its tensors perturbed on their way.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servanda.runner.bisect.weight_layout import MISPLACED, origins_in

if TYPE_CHECKING:
    from torch import Tensor, nn

# what wraps a module adds to its names
_WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_layer)\."
)
_ADAPTER = re.compile(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?:\.\w+)?(?:\.weight)?$")
# several tensors that engines hold as one; a name has one of these at its end
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_DIGITS = re.compile(r"\d+")
_ONE_EXPERT = re.compile(r"(\bexperts\.)\d+\.")
_COUNTED = 200  # most names from which a change of prefix is guessed


class Stream:
    """A sync that sends (name, tensor) one after the other; call it to sync.

    Args:
        pairs: returns the trainer's iterator of (name, tensor) for one sync, such as the one that
            it gives to vLLM's load_weights.
        load: gives the iterator to the engine.
        names: trained parameter -> its names in the stream; for parameters that it lacks the names
            are guessed: other prefixes, fused tensors, merged adapters, stacked experts.
        checkpoint: folder with the weights that training started from. Streamed tensors are then
            held against its tensors by value; one in the place of another is named.
    """

    def __init__(
        self,
        pairs: Callable[[], Iterable[tuple[str, Tensor]]],
        load: Callable[[Iterator[tuple[str, Tensor]]], Any],
        *,
        names: Mapping[str, Sequence[str]] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.pairs, self.load = pairs, load
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.names = {name: tuple(sent) for name, sent in (names or {}).items()}
        self._perturbed: dict[str, float] = {}

    def __call__(self) -> None:
        self.load(self._sent())

    def perturb(self, sizes: Mapping[str, float]) -> None:
        """Add noise to tensors of these names in later syncs, as a multiple of their spread."""
        self._perturbed = dict(sizes)

    def contents(self) -> dict[str, tuple[tuple[int, ...], int, bool]]:
        """name -> (shape, bytes, whether noise can be added); nothing is loaded."""
        return {
            name: (tuple(tensor.shape), tensor.nbytes, _is_plain(tensor))
            for name, tensor in self.pairs()
        }

    def misplaced(self) -> tuple[str, ...]:
        """Tensors that hold another one of the checkpoint, or its rows in another order.

        A sentence for each; () if they are as in the checkpoint, but for training, or if there is
        none.  Tensors in a form that the checkpoint has not, fused or quantised, are passed over.

        Raises:
            MeasurementError: the checkpoint cannot be read.
        """
        if self.checkpoint is None:
            return ()
        plain = (
            (name, tensor.detach().float().cpu().numpy())
            for name, tensor in self.pairs()
            if _is_plain(tensor)
        )
        found = origins_in(self.checkpoint).of(plain)
        return tuple(f"{o.name} {o.text}" for o in found if o.kind in MISPLACED)

    def _sent(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.pairs():
            size = self._perturbed.get(name)
            yield name, tensor if size is None else _perturbed(name, tensor, size)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _perturbed(name: str, tensor: Tensor, size: float) -> Tensor:
    """A copy of a tensor with noise; the trainer may stream its parameters themselves."""
    import torch

    from servanda.rl.sync_drill.noise import Sums, noise
    from servanda.rl.sync_drill.parallel.shards import local, place_of

    with torch.no_grad():
        copy = tensor.detach().clone()
        values = local(copy)
        scale = size * Sums.of(values).moments(tensor.shape)[1]
        values.add_(scale * noise(values, place_of(name, copy), f"stream/{name}"))
    return copy


@dataclass(frozen=True)
class StreamNames:
    """The names in a stream, held against the trainer's.

    Args:
        tensors, bytes: number and size of the streamed tensors.
        missing: trained parameters that never appear.
        unknown: streamed names of no parameter or buffer of the trainer.
        misplaced: as `Stream.misplaced`.
        guessed: whether names were guessed.
    """

    tensors: int
    bytes: int
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()
    guessed: bool = True


def stream_names(stream: Stream, module: nn.Module) -> StreamNames:
    """The names that a sync would send, against those of a module; nothing is loaded."""
    sent = stream.contents()
    trained: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            trained.setdefault(id(parameter), []).append(name)
    known = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    known += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    found = matched(known, [*sent], stream.names)
    missing = [names[0] for names in trained.values() if not any(found[name] for name in names)]
    used = {name for names in found.values() for name in names}
    return StreamNames(
        tensors=len(sent),
        bytes=sum(size for _, size, _ in sent.values()),
        missing=tuple(missing),
        unknown=tuple(name for name in sent if name not in used),
        misplaced=stream.misplaced(),
        guessed=any(name not in stream.names for name in known),
    )


def matched(
    parameters: Sequence[str], sent: Sequence[str], given: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """parameter -> the streamed names that carry it; () for none, or not all of its parts.

    >>> matched(["model.layers.0.q_proj.weight"], ["layers.0.qkv_proj.weight"], {})
    {'model.layers.0.q_proj.weight': ('layers.0.qkv_proj.weight',)}
    """
    there = {*sent}
    found = {
        name: tuple(given[name]) if {*given.get(name, ())} <= there else ()
        for name in parameters
        if name in given
    }
    forms = {name: _forms(name) for name in parameters if name not in given}
    plain: dict[str, tuple[str, ...]] = {}
    for name in sent:
        own = _plain(name)
        for key in {own, _stacked(own)}:
            plain[key] = (*plain.get(key, ()), name)
    # the changes of prefix that explain most names
    prefixes = Counter[tuple[str, str]]()
    for options in [*forms.values()][:_COUNTED]:
        carriers = {part for parts in options for part in parts}
        prefixes.update(pair for part in carriers for pair in _prefixes(part, plain))
    order = [("", ""), *(pair for pair, _ in prefixes.most_common(4))]
    for name, options in forms.items():
        tried = (
            [plain.get(added + p.removeprefix(cut), ()) * p.startswith(cut) for p in needed]
            for needed in options
            for cut, added in order
        )
        complete = next((parts for parts in tried if all(parts)), [])
        found[name] = tuple(part for parts in complete for part in parts)
    return found


def _plain(name: str) -> str:
    return _WRAPPED.sub("", name.removeprefix("base_model.model."))


def _stacked(name: str) -> str:
    """The name of the tensor of all experts, for a tensor of one of them."""
    return (
        _ONE_EXPERT.sub(r"\1", name).removesuffix(".weight") if _ONE_EXPERT.search(name) else name
    )


def _forms(name: str) -> list[list[str]]:
    """The names that may carry a parameter: each a list of which all are needed."""
    own = _plain(name)
    merged = _ADAPTER.sub(".weight", own)
    forms = [[own], *([[merged]] if merged != own else [])]
    for fused, parts in _FUSED.items():
        one = (part for part in parts if f".{part}" in merged)
        forms += [[merged.replace(f".{part}", f".{fused}")] for part in one]
        if f".{fused}" in merged:
            forms.append([merged.replace(f".{fused}", f".{part}") for part in parts])
    return [*forms, *([[_stacked(own)]] if _stacked(own) != own else [])]


def _prefixes(name: str, plain: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(removed, added) at the start of a name that make it one of the stream; no layer's number may
    be lost.
    """
    parts = name.split(".")
    for cut in range(min(3, len(parts) - 1) + 1):
        head, tail = ".".join(parts[:cut]), ".".join(parts[cut:])
        if _DIGITS.search(head):
            return
        for other in plain:
            if other == tail or other.endswith(f".{tail}"):
                added = other.removesuffix(tail)
                if not _DIGITS.search(added):
                    yield (f"{head}." if head else "", added)
