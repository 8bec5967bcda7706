# A comparison of two kernels without YAML, as a contract: kernels, prompts and limits.
#
# Its texts are a file, the shipped ones, or those of a pack; it knows their lengths, and those of a
# few responses that it does not judge.

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from servanda.contract import presets
from servanda.contract.clause import Claim
from servanda.contract.identity import digest_of, same_policy
from servanda.contract.model import Contract
from servanda.contract.workload import WorkloadSampling
from servanda.engines import BUILTIN
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError
from servanda.judgement import plan as planning
from servanda.judgement.clauses.base import FORMAT
from servanda.judgement.clauses.format_cost import FormatKernel, format_kernel
from servanda.judgement.contract_text import Parts, completed
from servanda.judgement.cost import Cost, cost_of
from servanda.judgement.plan import Plan
from servanda.judgement.slice_choice import starting_slices
from servanda.judgement.verdict import Verdict
from servanda.runner import load, run
from servanda.runner.compare.sides import Sides, fitting_preset, roles, sides_of, who
from servanda.runner.host_memory import refuse_oversize
from servanda.runner.measurement import Watch, unwatched
from servanda.runner.probe import Engines, encoded, probe
from servanda.runner.round_files import in_order
from servanda.theory.sampling import uniforms
from servanda.theory.stats.interval import units_at_best
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch

SHIPPED = "prompts.jsonl"


def shipped(name: str) -> Path:
    """A corpus in the package, or in the repository of a clone."""
    if path := presets.shipped(f"data/{name}"):
        return path
    raise MeasurementError(
        "the shipped prompts are not here",
        hint="install the wheel, or name your own with --prompts FILE",
    )


def prompts_of(file: Path | None, sides: Sides) -> tuple[Corpus, str]:
    """The prompts, and their description."""
    if sides.pack is not None:
        text = sides.pack.schedule.prompts
        own = Corpus.parse(text, f"{sides.pack.file}:prompts.jsonl")
        if file is not None and read_corpus(file).digest != own.digest:
            raise ContractError(
                f"{file} is not what the pack {sides.pack.file} was drawn on",
                hint="leave --prompts out: the pack has its prompts",
            )
        return own, f"the pack's {len(own):,} prompts"
    path = file or shipped(SHIPPED)
    corpus = read_corpus(path)
    whose = f"{path}" if file else "the shipped prompts (--prompts FILE for your own)"
    return corpus, f"{len(corpus):,} prompts: {whose}"


def plain_texts(file: Path | None) -> list[str]:
    """The prompts of a comparison that are texts, in the order of the file."""
    corpus = read_corpus(file or shipped(SHIPPED))
    return [prompt.text for prompt in corpus.prompts if prompt.token_ids is None]


def golden_of(file: Path | None, sides: Sides) -> Corpus | None:
    """The golden texts: those of the file, or those of a pack."""
    if sides.pack is None:
        return read_corpus(file) if file is not None else None
    text = sides.pack.schedule.golden
    own = None if text is None else Corpus.parse(text, f"{sides.pack.file}:golden.jsonl")
    if file is not None and (own is None or read_corpus(file).digest != own.digest):
        raise ContractError(
            f"{file} is not what the pack {sides.pack.file} was made with",
            hint="leave --golden out: a pack has its golden texts, or none",
        )
    return own


def read_corpus(path: Path) -> Corpus:
    """A corpus file that an option names.

    Raises:
        ContractError: it is missing, cannot be read, or has invalid lines.
    """
    if not path.exists():
        raise ContractError(
            f"there is no file {path}", hint='name a file of lines such as {"prompt": "..."}'
        )
    return load.read_corpus(path)


_LOOKS = 16  # responses that are sampled for their lengths
DREW = "Tokens of the answers that were drawn to choose depths:"


def answer_lengths(
    contract_file: Path,
    ids: Sequence[Sequence[int]],
    sampling: WorkloadSampling,
    sides: Sides,
    engines: Engines,
) -> tuple[int, ...]:
    """Lengths of a few responses of infer, to choose depth slices; not judged by the run.

    Those of a pack are its first ones, of which only the length is used.  A continued run keeps its
    depths, because a server may sample other responses the next time.
    """
    if contract_file.is_file():
        before = re.search(rf"(?m)^# {DREW} ([\d ]+)$", contract_file.read_text(encoding="utf-8"))
        if before:
            return tuple(map(int, before[1].split()))
    if sides.pack is not None:
        drawn = sides.pack.answers["generate"]
        lengths = drawn.length_S[~drawn.lost_S][:_LOOKS]
        return tuple(lengths.tolist()) or (sampling.max_new_tokens,)
    seed = int(digest_of(["depths", sampling.seed])[:15], 16)  # random numbers that no round uses
    rows = [int(u * len(ids)) for u in uniforms(seed, "prompt", 0, _LOOKS)]
    batch = Batch(
        tuple(range(_LOOKS)), tuple(tuple(ids[r]) for r in rows), sampling.max_new_tokens, ()
    )
    train, infer = engines.get(sides.train, "train"), engines.get(sides.infer, "infer")
    same_policy(train.describe(), infer.describe())  # before minutes of sampling
    drawn = in_order(batch, infer.generate, sampling.transform, seed)
    lengths = drawn.length_S[~drawn.lost_S]
    return tuple(lengths.tolist()) or (sampling.max_new_tokens,)


CONTRACT = "contract.kernelcontract.yaml"
_FIRST = 256  # fewest prompt groups for `holds`, in a larger run


@dataclass(frozen=True)
class Options:
    """The options of `compare`; None: decided from the kernels."""

    a: str
    b: str
    prompts: Path | None = None
    golden: Path | None = None
    preset: str | None = None
    referee: str | None = None
    claim: Claim = "realised"
    sequences: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    bitwise: bool = False
    run_dir: Path | None = None


@dataclass(frozen=True)
class Comparison:
    """A contract for two kernels, before anything is measured.

    Args:
        said: lines that describe the comparison and its reasons.
        folder: the run directory.
    """

    options: Options
    sides: Sides
    parts: Parts
    preset: str
    prompts: Corpus
    golden: Corpus | None
    folder: Path
    said: tuple[str, ...]

    def text(self, place: Path) -> str:
        """The contract as a file of a folder: its paths are relative to it."""

        def beside(path: str) -> str:
            return Path(os.path.relpath(path, place)).as_posix()

        parts = self.parts
        moved = replace(
            parts,
            train=load.moved_kernel(beside, parts.train),
            infer=load.moved_kernel(beside, parts.infer),
            stable=parts.stable and load.moved_kernel(beside, parts.stable),
            prompts=beside(parts.prompts),
            golden=parts.golden and beside(parts.golden),
        )
        return completed(presets.preset_text(self.preset), moved)

    def contract(self) -> Contract:
        """The contract with paths relative to the current folder; files need not exist yet."""
        here = Path()
        contract = load.contract_of(self.text(here), str(self.folder / CONTRACT))
        return load.beside(contract, here)

    def save(self, path: Path) -> None:
        """Write the contract, and next to it the texts of a pack that are in no file."""
        with MeasurementError.of_system(f"{path} cannot be written", hint="choose another place"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.sides.pack is not None:
                given = (
                    (self.options.prompts, self.parts.prompts, self.prompts),
                    (self.options.golden, self.parts.golden, self.golden),
                )
                for own_file, name, corpus in given:
                    if own_file is None and name and corpus:
                        Path(name).parent.mkdir(parents=True, exist_ok=True)
                        Path(name).write_bytes(corpus.text.encode())
            path.write_text(self.text(path.parent), encoding="utf-8")


def prepare(options: Options, engines: Engines) -> Comparison:
    """Prepare a comparison; B is opened, to count the tokens of the prompts.

    Raises:
        ContractError: an invalid kernel string, file or preset; sizes too small for a decision.
        MeasurementError: a pack that cannot be read.
    """
    sides = sides_of(options.a, options.b, options.referee)
    drawn_by_pack = sides.pack.schedule.workload if sides.pack else None
    name, why = (options.preset, "as asked") if options.preset else fitting_preset(sides)
    template = load.contract_of(presets.preset_text(name), name)
    if presets.PRESETS[name] == "serving":
        sides = sides.as_served
    corpus, prompts_text = prompts_of(options.prompts, sides)
    sampling = _sampling(options, template, sides)
    sizes = _sizes(options, template, sides)
    whole, sliced = _limits(template, name)
    template, claimed = _claimed(template, options, sizes[1], whole, sampling.max_new_tokens, sides)
    key = [options.a, options.b, options.referee, name, corpus.digest, sampling.model_dump()]
    key += [read_corpus(options.golden).digest if options.golden else ""]
    slug = f"{_slug(options.b)}-vs-{_slug(options.a)}"[:60].strip("-.") + f"-{digest_of(key)[:6]}"
    folder = options.run_dir or run.RUNS / slug
    asked = any(clause.times_format for clause in template.statistical)
    other = format_kernel(sides.train, sides.infer) if asked else None
    kernels = sides.kernels | ({FORMAT: other.kernel} if isinstance(other, FormatKernel) else {})
    if engines.open_anew is spawn:  # other kernels run elsewhere
        refuse_oversize(kernels)
    ids = encoded(corpus, engines.get(sides.infer, "infer"), sampling.max_new_tokens)
    answers = answer_lengths(folder / CONTRACT, ids, sampling, sides, engines)
    rules, left_out = starting_slices(
        corpus,
        [len(of) for of in ids],
        width=sampling.max_new_tokens,
        groups=sizes[1],
        limit=sliced,
        contract=template,
        answers=answers,
    )
    own = options.prompts or (folder / "prompts.jsonl" if sides.pack else shipped(SHIPPED))
    sliced_by = ", ".join(["all", *(rule.name for rule in rules)])
    lines = (
        *who(sides),
        f"on        {prompts_text}; temperature {sampling.temperature:g}, top_p "
        f"{sampling.top_p:g}, up to {sampling.max_new_tokens} new tokens",
        f"limits    preset {name}: {why}  (servanda contract presets --show {name})",
        f"slices    {sliced_by}",
        *(f"          {note}" for note in left_out),
        *claimed,
        *_format_lines(other),
    )
    no_golden = "no golden texts were given (--golden)"
    if sides.pack is not None:
        no_golden = "the pack was made without golden texts"
    golden = golden_of(options.golden, sides)
    if golden is not None and not template.numerical:
        no_golden = f"preset {name} has none"
        lines += (f"          golden: left out, preset {name} has no clause on golden texts",)
        golden = None
    own_golden = options.golden or folder / "golden.jsonl"
    expected = "as asked" if options.bitwise else ""
    if sides.one_kernel:
        expected = "A and B are one kernel: equal bits are expected, and show nothing"
        lines += (f"bitwise   {expected}",)
    parts = Parts(
        name=slug,
        train=sides.train,
        infer=sides.infer,
        stable=sides.stable,
        prompts=str(own),
        golden=str(own_golden) if golden else None,
        golden_path=sides.pack.schedule.golden_path if sides.pack else None,
        sampling=sampling,
        slices=rules,
        claim=template.claim,
        sizes=sizes,
        round=drawn_by_pack.round if drawn_by_pack else None,
        samples=drawn_by_pack.samples if drawn_by_pack else None,
        no_golden=no_golden,
        head=(
            f"servanda compare {options.a} {options.b}: written by it, for keeping.",
            f"Limits and their reasons are those of preset {name}; {why}.",
            *(line.replace("  ", " ").strip() for line in roles(sides)),
            f"{DREW} {' '.join(map(str, answers))}",
        ),
        # an engine of another package decides its own batch size
        unrecorded=() if {k.engine for k in kernels.values()} <= {*BUILTIN} else ("batch_size",),
        bitwise=expected,
    )
    return Comparison(options, sides, parts, name, corpus, golden, folder, lines)


def _format_lines(other: FormatKernel | str | None) -> tuple[str, ...]:
    if isinstance(other, FormatKernel):
        return (
            f"format    A in {other.kernel.dtype} scores the same tokens: it shows what "
            f"{other.format} costs",
        )
    return (f"format    what the number format costs is not measured: {other}",) if other else ()


def _limits(template: Contract, name: str) -> tuple[float, float]:
    """The smallest limit on the whole, and on the slices of a preset.

    Raises:
        ContractError: a preset of another package that lacks one of the two.
    """
    found = []
    for where in ("all", "depth"):
        clauses = (c for c in template.statistical if c.enforced and where in (c.slices or ()))
        numbers = [c.at_most for c in clauses if isinstance(c.at_most, float)]
        if not numbers:
            raise ContractError(
                f"preset {name!r} has no enforced statistical clause with a number as its limit on "
                f"slices: [{where}]",
                hint="compare needs one on [all] and one on [depth], as in `servanda contract "
                "presets --show fp8`",
            )
        found.append(min(numbers))
    return found[0], found[1]


def _sampling(options: Options, template: Contract, sides: Sides) -> WorkloadSampling:
    assert template.workload is not None
    given = {
        name: getattr(options, name)
        for name in ("temperature", "top_p", "max_new_tokens")
        if getattr(options, name) is not None
    }
    if sides.pack is None:
        return template.workload.sampling.model_copy(update=given)
    own = sides.pack.schedule.workload.sampling
    for name, value in given.items():
        if value != getattr(own, name):
            raise ContractError(
                f"the pack was drawn with {name} {getattr(own, name):g}, not {value:g}",
                hint="leave the option out, or write a new pack with it",
            )
    return own


def _sizes(options: Options, template: Contract, sides: Sides) -> tuple[int, int]:
    last = options.sequences or template.promotion.offline.sequences[1]
    if sides.pack is not None:
        if (options.sequences or 0) > sides.pack.schedule.groups:
            raise ContractError(
                f"the pack holds {sides.pack.schedule.groups:,} prompt groups, and --sequences "
                f"asks for {options.sequences:,}",
                hint="write a larger pack: servanda tools measure ... --sequences N -o",
            )
        last = min(last, sides.pack.schedule.groups)
    return min(_FIRST, last), last


def _claimed(
    template: Contract, options: Options, groups: int, limit: float, width: int, sides: Sides
) -> tuple[Contract, tuple[str, ...]]:
    """The preset with the requested claim, and its description.

    A claim about the measured tokens is decided in a fraction of the time of a population claim,
    which suits a first run.
    """
    needed = units_at_best(limit, 1 - template.confidence)
    assert needed is not None  # no preset promises 0
    larger = "a larger pack" if sides.pack is not None else f"--sequences {3 * needed}"
    if options.claim == "population":
        if 2 * needed > groups:
            raise ContractError(
                f"{groups:,} prompt groups are too few for a claim about all tokens that such "
                f"prompts would generate, at a limit of {limit:g}",
                hint=f"use {larger}, or leave --claim out",
            )
        return template.model_copy(update={"claim": "population"}), ()
    if needed > groups * width:
        raise ContractError(
            f"{groups:,} prompt groups of {width} new tokens cannot decide a limit of {limit:g}: "
            f"even identical kernels need {needed:,} tokens",
            hint=f"use {larger}, or a preset with wider limits",
        )
    lines = (
        "claim     realised: the tokens that are measured; --claim population is about all tokens",
        "          that such prompts would generate, and takes longer",
    )
    return template.model_copy(update={"claim": "realised"}), lines


def _slug(text: str) -> str:
    """A kernel string as part of a folder's name.

    >>> _slug("transformers:models/tiny-lm@bfloat16+w8a8,attention=sdpa")
    'tiny-lm-bfloat16-w8a8'
    """
    last = text.split(",", 1)[0].rsplit("/", 1)[-1].split(":", 1)[-1].removesuffix(".pack")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-.") or "kernel"


def plan_of(comparison: Comparison) -> Plan:
    """The plan of a comparison that is not on disk yet."""
    contract = comparison.contract()
    return planning.make_plan(contract, {"workload": comparison.prompts}, comparison.golden)


def costed(plan: Plan, engines: Engines, *, watch: Watch | None = None) -> Cost:
    """The cost of a plan, from a few sequences on its kernels, which stay open.

    Raises:
        IdentityError, MeasurementError: as in the probe.
    """
    return cost_of(plan, *probe(plan, engines, watch or unwatched))


def compare(
    comparison: Comparison,
    engines: Engines,
    *,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
    fresh: bool = False,
    ladder: bool = False,
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
        ladder=ladder,
    )
