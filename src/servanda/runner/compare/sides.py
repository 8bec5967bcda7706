# The roles of kernels in a comparison: sampling, scoring, and the stable kernel.

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from servanda.contract import presets
from servanda.contract.kernel_string import is_hub_name, parse_kernel, shown
from servanda.contract.model import Kernel
from servanda.engines import engine_names
from servanda.engines.foreign_code import refuse_code_of_kernel
from servanda.engines.recorded import Pack
from servanda.errors import ContractError, Where


@dataclass(frozen=True)
class Sides:
    """The kernels of a comparison by role; and the pack, if it provides the samples."""

    train: Kernel
    infer: Kernel
    stable: Kernel | None = None
    pack: Pack | None = None

    @property
    def kernels(self) -> dict[str, Kernel]:
        """All running kernels, by side."""
        named = {"train": self.train, "infer": self.infer, "stable": self.stable}
        return {side: kernel for side, kernel in named.items() if kernel is not None}

    @property
    def pair(self) -> tuple[Kernel, Kernel]:
        """A and B."""
        if self.pack is not None:
            return self.pack.schedule.kernel, self.train
        return self.stable or self.train, self.infer

    @property
    def one_kernel(self) -> bool:
        """Whether A and B are one kernel: then equal bits are expected and are no evidence."""
        if self.stable is not None:
            return False
        first, second = self.pair
        there = self.pack is not None
        return _plain(first, elsewhere=there) == _plain(second, elsewhere=there)

    @property
    def as_served(self) -> Sides:
        """Let A score as it serves, by decoding: prefill is another path (law 7).

        A server scores by its available paths.
        """
        if self.stable is not None or self.train.path is not None or self.train.url is not None:
            return self
        return replace(self, train=self.train.model_copy(update={"path": "decode"}))


def _plain(kernel: Kernel, *, elsewhere: bool) -> Kernel:
    """The properties that affect a kernel's numbers, without the path of its model."""
    model = kernel.model and (PurePath(kernel.model).name if elsewhere else kernel.model)
    return kernel.model_copy(update={"title": "", "path": None, "model": model})


def sides_of(a_text: str, b_text: str, referee_text: str | None = None) -> Sides:
    """The roles of the kernel strings of a command line.

    Raises:
        ContractError: an invalid string, a missing model, a pack on the wrong side.
        MeasurementError: a pack that cannot be read.
    """
    named = ((a_text, "A"), (b_text, "B"))
    a, b = (parse_kernel(text, engines=engine_names(), name=name) for text, name in named)
    for kernel, text, name in ((a, a_text, "A"), (b, b_text, "B")):
        refuse_missing(kernel, text, name)
    if b.engine == "pack":
        raise ContractError(
            "B is the kernel under test, and a pack only holds what was drawn before",
            where=Where("B", 1, 1, b_text),
            hint="give the pack first: servanda compare reference.pack KERNEL",
        )
    if referee_text is None:
        if a.engine != "pack":
            return Sides(train=a, infer=b)
        pack = Pack.read(a.model or "")
        title = b.title or f"candidate {b} (re-scores)"
        candidate = b.model_copy(update={"path": b.path or "decode", "title": title})
        reference = a.model_copy(update={"title": f"{shown(a)}: {pack.schedule.kernel} (drew)"})
        return Sides(train=candidate, infer=reference, pack=pack)
    referee = parse_kernel(referee_text, engines=engine_names(), name="--referee")
    refuse_missing(referee, referee_text, "--referee")
    if "pack" in (a.engine, referee.engine):
        raise ContractError(
            "with a reference scorer all three kernels run, and a baseline file cannot",
            hint="compare reference.pack KERNEL: a baseline file is its own reference",
        )
    return Sides(train=referee, infer=b, stable=a)


def refuse_missing(kernel: Kernel, text: str, name: str) -> None:
    refuse_code_of_kernel(kernel, name)
    if kernel.url is not None:
        return  # whether the server responds is checked later
    model = kernel.model
    if model is not None and not is_hub_name(model) and not Path(model).exists():
        at = max(text.find(model), 0)
        raise ContractError(
            f"there is no {model}",
            where=Where(name, 1, at + 1, text),
            hint="name a file or a folder, or a model of the Hub as hf://ORGANISATION/NAME",
        )


def fitting_preset(sides: Sides) -> tuple[str, str]:
    return presets.fitting(*sides.pair)


def who(sides: Sides) -> tuple[str, ...]:
    train, infer = shown(sides.train), shown(sides.infer)
    if sides.pack is not None:
        return (f"compare   {train}  (B) against  {infer}  (A)", *roles(sides))
    if sides.stable is not None:
        first = f"compare   {infer}  (B) and  {shown(sides.stable)}  (A, today), by  {train}"
        return (first, *roles(sides))
    return (f"compare   {infer}  (B) against  {train}  (A, today)", *roles(sides))


def roles(sides: Sides) -> tuple[str, ...]:
    """The roles of the kernels, as text."""
    if sides.pack is not None:
        return (
            "          the reference of the baseline file generated the tokens, B re-scores them "
            "on its own decode path:",
            "          the numbers are about tokens of the reference, and the sampler of B is not "
            "tested",
        )
    if sides.stable is not None:
        return (
            "          A and B each generate, the reference scorer re-scores both; limits are on "
            "B, A is shown for comparison",
        )
    decodes = sides.train.path == "decode"
    how = "by decoding, as it serves" if decodes else "by prefill, as a trainer"
    return (f"          B generates, A re-scores the same tokens {how}",)
