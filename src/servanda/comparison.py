# Two kernels and no YAML: what is compared, on what, against which limits, as a contract.

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import servanda
from servanda import language, presets, run
from servanda import plan as planning
from servanda.contract import Contract, Golden, Kernel, Kernels, Workload, WorkloadSampling
from servanda.corpus import Corpus
from servanda.cost import Cost, cost_of
from servanda.engines import engine_names
from servanda.engines.pack_file import Pack, read_pack
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError, Where
from servanda.faults import FAULTS
from servanda.identity import digest_of
from servanda.kernel_string import parse_kernel, shown
from servanda.measurement import Open, Watch, unwatched
from servanda.packing import make_pack
from servanda.plan import Plan
from servanda.probe import Engines, encoded, probe
from servanda.starter import Parts, completed, starting_slices
from servanda.stats import units_at_best
from servanda.verdict import Verdict

CONTRACT = "contract.kernelcontract.yaml"
SHIPPED = "prompts.jsonl"
_FIRST = 256  # prompt groups before which nothing holds, where a run has more
_PACKED = 1024  # prompt groups of a pack, where nobody says how many


@dataclass(frozen=True)
class Asked:
    """What a user asks of `compare`; None: decided by what is compared."""

    a: str
    b: str
    prompts: Path | None = None
    golden: Path | None = None
    preset: str | None = None
    referee: str | None = None
    sequences: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    run_dir: Path | None = None


@dataclass(frozen=True)
class Sides:
    """Who draws, who re-scores, who is shown beside; and the pack, if one draws."""

    train: Kernel
    infer: Kernel
    stable: Kernel | None = None
    pack: Pack | None = None


@dataclass(frozen=True)
class Comparison:
    """A contract for two kernels, before anything is measured.

    Args:
        said: what is compared, on what and why, line by line.
        folder: the run directory.
    """

    asked: Asked
    sides: Sides
    parts: Parts
    preset: str
    prompts: Corpus
    golden: Path | None
    folder: Path
    said: tuple[str, ...]

    def text(self, place: Path) -> str:
        """The contract as a file of a folder says it: its paths start from there."""

        def beside(path: str) -> str:
            return Path(os.path.relpath(path, place)).as_posix()

        def kernel(k: Kernel | None) -> Kernel | None:
            return k and k.model_copy(update={"model": beside(k.model)} if k.model else {})

        parts = self.parts
        train, infer = kernel(parts.train), kernel(parts.infer)
        assert train is not None and infer is not None
        return completed(
            presets.preset_text(self.preset),
            replace(
                parts,
                train=train,
                infer=infer,
                stable=kernel(parts.stable),
                prompts=beside(parts.prompts),
                golden=parts.golden and beside(parts.golden),
            ),
        )

    def contract(self) -> Contract:
        """The contract, with its paths from the current folder; nothing has to be there yet."""
        here = Path()
        faults, file = [*FAULTS], str(self.folder / CONTRACT)
        found, _ = language.parse(self.text(here), file, engines=engine_names(), faults=faults)
        return run.beside(found, here)

    def save(self, path: Path) -> None:
        """Write the contract, and the prompts of a pack beside it where no file has them."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            prompts = Path(self.parts.prompts)
            if self.sides.pack is not None and self.asked.prompts is None:
                prompts.parent.mkdir(parents=True, exist_ok=True)
                prompts.write_bytes(self.prompts.text.encode())
            path.write_text(self.text(path.parent), encoding="utf-8")
        except OSError as error:
            raise MeasurementError(
                f"{path} cannot be written: {error.strerror or error}", hint="choose another place"
            ) from None


def prepare(asked: Asked, engines: Engines) -> Comparison:
    """What a comparison is of; B is opened, to count the tokens of the prompts.

    Raises:
        ContractError: a kernel string, a file or a preset that is none; sizes too small.
        MeasurementError: a pack that cannot be read.
    """
    sides = _sides(asked)
    drawn_by_pack = sides.pack.workload if sides.pack else None
    name, why = (asked.preset, "as asked") if asked.preset else _fitting(sides)
    template, _ = language.parse(presets.preset_text(name), name, engines=engine_names())
    corpus, told = _prompts(asked, sides)
    sampling = _sampling(asked, template, sides)
    sizes = _sizes(asked, template, sides)
    limits = {clause.slices: clause.at_most for clause in template.statistical if clause.enforced}
    whole = min(v for s, v in limits.items() if s and "all" in s and isinstance(v, float))
    sliced = [v for s, v in limits.items() if s and "depth" in s and isinstance(v, float)]
    if template.claim == "population":
        _refuse_too_few(sizes[1], whole, template, name, sides)
    rules, left_out = starting_slices(
        corpus,
        _lengths(corpus, sides, engines),
        width=sampling.max_new_tokens,
        groups=sizes[1],
        limit=min(sliced),
        contract=template,
    )
    key = [asked.a, asked.b, asked.referee, name, corpus.digest, sampling.model_dump()]
    key += [_golden_digest(asked)]
    slug = f"{_slug(asked.b)}-vs-{_slug(asked.a)}"[:60].strip("-.") + f"-{digest_of(key)[:6]}"
    folder = asked.run_dir or run.RUNS / slug
    own = asked.prompts or (folder / "prompts.jsonl" if sides.pack else shipped(SHIPPED))
    sliced_by = ", ".join(["all", *(rule.name for rule in rules)])
    said = (
        *_who(sides),
        f"on        {told}; temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, up to "
        f"{sampling.max_new_tokens} new tokens",
        f"limits    preset {name}: {why}  (servanda presets --show {name})",
        f"slices    {sliced_by}",
        *(f"          {note}" for note in left_out),
    )
    no_golden = "no golden texts were given (--golden)"
    if sides.pack is not None:
        no_golden = "not applicable, a pack has no full logits"
        if asked.golden:
            said += ("          golden: not applicable, a pack has no full logits",)
    golden = asked.golden if sides.pack is None and template.numerical else None
    if asked.golden and sides.pack is None and not template.numerical:
        no_golden = f"preset {name} has none"
        said += (f"          golden: left out, preset {name} has no clause on golden texts",)
    parts = Parts(
        name=slug,
        train=sides.train,
        infer=sides.infer,
        stable=sides.stable,
        prompts=str(own),
        golden=str(golden) if golden else None,
        sampling=sampling,
        slices=rules,
        sizes=sizes,
        round=drawn_by_pack.round if drawn_by_pack else None,
        samples=drawn_by_pack.samples if drawn_by_pack else None,
        no_golden=no_golden,
        head=(
            f"servanda compare {asked.a} {asked.b}: written by it, for keeping.",
            f"Limits and their reasons are those of preset {name}; {why}.",
            *(line.replace("  ", " ").strip() for line in _roles(sides)),
        ),
    )
    return Comparison(asked, sides, parts, name, corpus, golden, folder, said)


def _sides(asked: Asked) -> Sides:
    a, b = (parse_kernel(getattr(asked, s.lower()), engines=engine_names(), name=s) for s in "AB")
    for kernel, text, name in ((a, asked.a, "A"), (b, asked.b, "B")):
        _refuse_missing(kernel, text, name)
    if b.engine == "pack":
        raise ContractError(
            "B is the kernel under test, and a pack only holds what was drawn before",
            where=Where("B", 1, 1, asked.b),
            hint="give the pack first: servanda compare reference.pack KERNEL",
        )
    if asked.referee is None:
        if a.engine != "pack":
            return Sides(train=a, infer=b)
        pack = read_pack(a.model or "")
        candidate = b.model_copy(
            update={
                "path": b.path or "decode",
                "title": b.title or f"candidate {b} (re-scores)",
            }
        )
        reference = a.model_copy(update={"title": f"{shown(a)}: {pack.kernel} (drew)"})
        return Sides(train=candidate, infer=reference, pack=pack)
    referee = parse_kernel(asked.referee, engines=engine_names(), name="--referee")
    _refuse_missing(referee, asked.referee, "--referee")
    if "pack" in (a.engine, referee.engine):
        raise ContractError(
            "with a referee all three kernels run, and a pack does not",
            hint="compare reference.pack KERNEL: a pack is its own referee",
        )
    return Sides(train=referee, infer=b, stable=a)


def _refuse_missing(kernel: Kernel, text: str, name: str) -> None:
    model = kernel.model or ""
    if not Path(model).exists():
        at = max(text.find(model), 0)
        raise ContractError(
            f"there is no {model}",
            where=Where(name, 1, at + 1, text),
            hint="models are local files or folders; nothing is downloaded",
        )


def _fitting(sides: Sides) -> tuple[str, str]:
    if sides.pack is not None:
        return presets.fitting(sides.pack.kernel, sides.train)
    return presets.fitting(sides.stable or sides.train, sides.infer)


def _who(sides: Sides) -> tuple[str, ...]:
    train, infer = shown(sides.train), shown(sides.infer)
    if sides.pack is not None:
        return (f"compare   {train}  with what  {infer}", *_roles(sides))
    if sides.stable is not None:
        first = f"compare   {infer}  (B) and  {shown(sides.stable)}  (A, today), by  {train}"
        return (first, *_roles(sides))
    return (f"compare   {infer}  (B) against  {train}  (A, today)", *_roles(sides))


def _roles(sides: Sides) -> tuple[str, ...]:
    """Who draws the tokens and who re-scores them, in words."""
    if sides.pack is not None:
        return (
            "          the pack's reference drew the tokens, B re-scores them on its own decode "
            "path:",
            "          the numbers speak of tokens that the reference brings forth, and B's own "
            "sampler is not looked at",
        )
    if sides.stable is not None:
        return (
            "          A and B each draw, the referee re-scores both; limits are on B, A is shown "
            "beside it",
        )
    return ("          B draws, A re-scores the same tokens",)


def shipped(name: str) -> Path:
    """A corpus that travels with the package, or lies in the repository it was cloned with."""
    package = Path(servanda.__file__).parent
    for root in (package / "_demo", package.parents[1]):
        if (root / "data" / name).is_file():
            return root / "data" / name
    raise MeasurementError(
        "the shipped prompts are not here",
        hint="install the wheel, or name your own with --prompts FILE",
    )


def _prompts(asked: Asked, sides: Sides) -> tuple[Corpus, str]:
    if sides.pack is not None:
        text = sides.pack.prompts
        own = Corpus.parse(text, f"{sides.pack.file}:prompts.jsonl")
        if asked.prompts is not None and read_corpus(asked.prompts).digest != own.digest:
            raise ContractError(
                f"{asked.prompts} is not what the pack {sides.pack.file} was drawn on",
                hint="leave --prompts out: the pack has its prompts",
            )
        return own, f"the pack's {len(own):,} prompts"
    path = asked.prompts or shipped(SHIPPED)
    corpus = read_corpus(path)
    whose = f"{path}" if asked.prompts else "the shipped prompts (--prompts FILE for your own)"
    return corpus, f"{len(corpus):,} prompts: {whose}"


def read_corpus(path: Path) -> Corpus:
    """A corpus file.

    Raises:
        ContractError: it cannot be read, or holds lines that are no prompts.
    """
    try:
        return Corpus.parse(path.read_bytes().decode("utf-8-sig"), str(path))
    except FileNotFoundError:
        raise ContractError(
            f"there is no file {path}", hint='name a file of lines such as {"prompt": "..."}'
        ) from None
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ContractError(f"{path} is not UTF-8 text: {error.reason}") from None


def _golden_digest(asked: Asked) -> str:
    return read_corpus(asked.golden).digest if asked.golden else ""


def _lengths(corpus: Corpus, sides: Sides, engines: Engines) -> list[int]:
    if sides.pack is not None:
        return [len(ids) for ids in sides.pack.tokens["prompts"]]
    return [len(ids) for ids in encoded(corpus, engines.get(sides.infer, "infer"))]


def _sampling(asked: Asked, template: Contract, sides: Sides) -> WorkloadSampling:
    assert template.workload is not None
    given = {
        name: getattr(asked, name)
        for name in ("temperature", "top_p", "max_new_tokens")
        if getattr(asked, name) is not None
    }
    if sides.pack is None:
        return template.workload.sampling.model_copy(update=given)
    own = sides.pack.workload.sampling
    for name, value in given.items():
        if value != getattr(own, name):
            raise ContractError(
                f"the pack was drawn with {name} {getattr(own, name):g}, not {value:g}",
                hint="leave the option out, or write a new pack with it",
            )
    return own


def _sizes(asked: Asked, template: Contract, sides: Sides) -> tuple[int, int]:
    last = asked.sequences or template.promotion.offline.sequences[1]
    if sides.pack is not None:
        if (asked.sequences or 0) > sides.pack.groups:
            raise ContractError(
                f"the pack holds {sides.pack.groups:,} prompt groups, and --sequences asks for "
                f"{asked.sequences:,}",
                hint="write a larger pack: servanda measure ... --sequences N -o",
            )
        last = min(last, sides.pack.groups)
    return min(_FIRST, last), last


def _refuse_too_few(
    groups: int, limit: float, template: Contract, preset: str, sides: Sides
) -> None:
    needed = units_at_best(limit, 1 - template.confidence)
    if needed is not None and needed > groups:
        where = "a larger pack" if sides.pack is not None else f"--sequences {3 * needed}"
        raise ContractError(
            f"{groups:,} prompt groups cannot decide preset {preset}: at its limit of {limit:g} "
            f"even identical kernels need {needed:,}",
            hint=f"use {where}, or a preset with wider limits",
        )


def _slug(text: str) -> str:
    """A kernel string as part of a folder's name.

    >>> _slug("transformers:models/tiny-lm@bfloat16+w8a8,attention=sdpa")
    'tiny-lm-bfloat16-w8a8'
    """
    last = text.split(",", 1)[0].rsplit("/", 1)[-1].split(":", 1)[-1].removesuffix(".pack")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-.") or "kernel"


def plan_of(comparison: Comparison) -> Plan:
    """The plan of a comparison that nothing was written of yet."""
    contract = comparison.contract()
    golden = read_corpus(comparison.golden) if comparison.golden else None
    return planning.make_plan(contract, {"workload": comparison.prompts}, golden)


def costed(plan: Plan, engines: Engines, *, watch: Watch | None = None) -> Cost:
    """The cost of a plan, by a few sequences on its kernels; they stay open for measuring.

    Raises:
        IdentityError, MeasurementError: as the probe does.
    """
    return cost_of(plan, *probe(plan, engines, watch or unwatched))


def compare(
    comparison: Comparison,
    engines: Engines,
    *,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
    fresh: bool = False,
) -> Verdict:
    """Write the contract into the run directory, and check it there."""
    path = comparison.folder / CONTRACT
    comparison.save(path)
    return run.check(
        path,
        run_dir=comparison.folder,
        fresh=fresh,
        open=engines.open,
        watch=watch,
        deadline=deadline,
    )


def measure_pack(
    contract: Contract, side: str, out: Path, *, open: Open = spawn, watch: Watch | None = None
) -> Pack:
    """A reference pack of one side of a contract.

    Raises:
        ContractError, MeasurementError: as compile and packing do.
    """
    kernel: Kernel = getattr(contract.kernels, side)
    return make_pack(run.compile(contract), kernel, out, open=open, watch=watch or unwatched)


@dataclass(frozen=True)
class Alone:
    """What a user asks of `measure`: a contract and its side, or a kernel and its texts."""

    what: str
    side: str | None = None
    prompts: Path | None = None
    golden: Path | None = None
    sequences: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


def alone(asked: Alone) -> tuple[Contract, str]:
    """The contract and the side that a pack is made of.

    Raises:
        ContractError: options that do not belong together, or a text that is wrong.
    """
    own = ("prompts", "golden", "max_new_tokens", "temperature", "top_p")
    if asked.what.endswith((".yaml", ".yml")):
        given = [name for name in own if getattr(asked, name) is not None]
        if given:
            raise ContractError(
                f"--{given[0].replace('_', '-')} is the contract's to say",
                hint="write it in the contract, or name a kernel instead of the contract",
            )
        contract = run.load(asked.what)
        return _sized(contract, asked.sequences), asked.side or "train"
    if asked.side is not None:
        raise ContractError("--side names a side of a contract, and this is a kernel")
    kernel = parse_kernel(asked.what, engines=engine_names(), name="KERNEL")
    _refuse_missing(kernel, asked.what, "KERNEL")
    sampling = {n: getattr(asked, n) for n in own[2:] if getattr(asked, n) is not None}
    template, _ = language.parse(presets.preset_text("fp8"), "fp8", engines=engine_names())
    assert template.workload is not None
    prompts = asked.prompts or shipped(SHIPPED)
    for file in (prompts, asked.golden):
        if file is not None:
            read_corpus(file)
    workload = Workload(
        prompts=str(prompts), sampling=template.workload.sampling.model_copy(update=sampling)
    )
    changes = {
        "kernels": Kernels(train=kernel, infer=kernel),
        "workload": workload,
        "golden": Golden(prompts=str(asked.golden)) if asked.golden else None,
        "slices": (),
        # a pack promises nothing: its contract only says what is drawn
        "numerical": (),
        "statistical": (),
    }
    return _sized(template.model_copy(update=changes), asked.sequences or _PACKED), "train"


def _sized(contract: Contract, sequences: int | None) -> Contract:
    if sequences is None:
        return contract
    offline = contract.promotion.offline.model_copy(update={"sequences": (1, sequences)})
    promotion = contract.promotion.model_copy(update={"offline": offline})
    return contract.model_copy(update={"promotion": promotion})
