# Loading: contracts and corpora from files, and the resulting plan.  Engines are known only by name
# here, so reading a contract imports none.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from servanda.contract import parser
from servanda.contract.kernel_string import is_hub_name, moved_path
from servanda.contract.model import Contract, Kernel, Place
from servanda.contract.speculation import draft_of, moved_options
from servanda.contract.stages import Leg
from servanda.contract.text_file import MAX_BYTES, content
from servanda.contract.workload import Golden, NamedWorkload, Workload
from servanda.engines import engine_names
from servanda.engines.faults import FAULTS
from servanda.engines.foreign_code import kernels_of, refuse_code, refuse_metrics, refuse_outside
from servanda.errors import ContractError, Problem
from servanda.judgement import plan as planning
from servanda.judgement.lint import linter
from servanda.judgement.plan import Plan
from servanda.judgement.rewards import file_and_function
from servanda.judgement.traffic import Traffic
from servanda.traces.corpus import Corpus

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks

_SHORT = 1 << 16  # most characters of a cached text
T = TypeVar("T", Workload, NamedWorkload, Golden)
NO_CONTRACT = "give the path of a .kernelcontract.yaml file"


def load(path: str | Path) -> Contract:
    """Read a contract; the files it names are relative to it.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    path = Path(path)
    return read(bytes_of(path), str(path), path.parent)


def bytes_of(path: Path, hint: str = NO_CONTRACT) -> bytes:
    """The bytes of the file of a contract, or of its tests.

    Raises:
        ContractError: it cannot be read.
    """
    if str(path).startswith(("http:", "https:")):
        hint = "of servers: `servanda compare A B`, `servanda tools selftest URL`"
    refuse_outside([(path, None)], path.parent)
    with ContractError.of_system(f"{path} cannot be read", hint=hint):
        return content(path, MAX_BYTES)


def read(data: bytes, name: str, folder: Path) -> Contract:
    """A contract from its bytes; the files it names are found in the folder.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    contract = beside(parse(data, name), folder)
    refuse_code(contract)
    files = [(place, name) for place, name in named_files(contract) if not is_hub_name(name)]
    refuse_outside([(name, contract.where(*place)) for place, name in files], folder)
    missing = [
        Problem(
            f"there is no {name}",
            contract.where(*place),
            "paths of a contract start from the contract's own folder",
        )
        for place, name in files
        # the engine itself refuses a missing model, and only a trend needs its reference
        if place[0] not in ("stable", "trend") and not Path(name).exists()
    ]
    missing += _fault_values(contract)
    if missing:
        raise ContractError.all(missing)
    return contract


def parse(data: bytes, name: str) -> Contract:
    """A contract from its bytes alone: the files that it names are not needed.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    if len(data) > MAX_BYTES:  # of standard input
        raise ContractError(
            f"{name} has more than the {MAX_BYTES:,} bytes that are read at most",
            hint="give one contract, not its workload",
        )
    return contract_of(decoded(data, name), name)


def decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise ContractError(message, hint="save it as UTF-8") from None


def contract_of(text: str, name: str) -> Contract:
    """The contract of a text, with the installed engines and faults.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    parsed = _parsed if len(text) < _SHORT else _parsed.__wrapped__
    return parsed(text, name, tuple(FAULTS))


@lru_cache(maxsize=32)  # a run reads its contract several times
def _parsed(text: str, name: str, faults: tuple[str, ...]) -> Contract:
    def rules(contract: Contract, marks: Marks, **broken: Any) -> list[Problem]:
        refuse_metrics(contract, marks)
        return linter.check(contract, marks, engines=engine_names(), faults=faults, **broken)

    return parser.parse(text, name, rules=rules)[0]


def _fault_values(contract: Contract) -> Iterator[Problem]:
    """Check the values of faults: lint knows only their names."""
    for place, kernel in kernels_of(contract):
        for name, value in (kernel.fault or {}).items():
            problem = FAULTS[name].problem(value)
            if problem is not None:
                yield replace(problem, where=contract.where(*place, "fault", name))


def named_files(contract: Contract) -> Iterator[tuple[Place, str]]:
    """Place and name of every file and folder that a contract names; of texts first."""
    given = contract.workloads or {}
    named = given.items() if isinstance(given, Mapping) else enumerate(given)
    parts: list[tuple[Place, Workload | Golden | None]] = [
        (("workload",), contract.workload),
        *((("workloads", name), workload) for name, workload in named),
        (("golden",), contract.golden),
    ]
    for place, part in parts:
        if part and part.prompts:
            yield (*place, "prompts"), part.prompts
    for place, kernel in kernels_of(contract):
        files = {name: getattr(kernel, name) for name in ("model", "adapter", "python")}
        files["options"] = draft_of(kernel.options)
        for name, file in files.items():
            if file is not None:
                yield (*place, name), file
    yield from _reward_file(contract)
    if contract.trend and contract.trend.reference:
        yield ("trend", "reference"), contract.trend.reference


def _reward_file(contract: Contract) -> Iterator[tuple[Place, str]]:
    parts = file_and_function((contract.reward and contract.reward.of) or "")
    if parts is not None:
        yield ("reward", "of"), parts[0]


def beside(contract: Contract, folder: Path) -> Contract:
    """The contract with its paths resolved against its own folder."""

    place = partial(moved_kernel, lambda path: str(folder / path))
    sides = {side: place(getattr(contract.kernels, side)) for side in ("train", "infer")}
    changes: dict[str, object] = {"kernels": contract.kernels.model_copy(update=sides)}
    if contract.stable:
        changes["stable"] = place(contract.stable)

    for _, file in _reward_file(contract):
        assert contract.reward is not None and contract.reward.of is not None
        of = f"{folder / file}{contract.reward.of.removeprefix(file)}"
        changes["reward"] = contract.reward.model_copy(update={"of": of})

    if contract.trend and contract.trend.reference:
        reference = str(folder / contract.trend.reference)
        changes["trend"] = contract.trend.model_copy(update={"reference": reference})

    def texts(part: T) -> T:
        prompts = str(folder / part.prompts) if part.prompts else ""
        return part.model_copy(update={"prompts": prompts})

    if contract.workload:
        changes["workload"] = texts(contract.workload)
    if contract.golden:
        changes["golden"] = texts(contract.golden)
    if isinstance(contract.workloads, Mapping):
        changes["workloads"] = {name: texts(w) for name, w in contract.workloads.items()}
    elif contract.workloads:
        changes["workloads"] = tuple(map(texts, contract.workloads))
    return contract.model_copy(update=changes)


def moved_kernel(move: Callable[[str], str], kernel: Kernel) -> Kernel:
    """A kernel with moved paths; a name of the Hub stays."""
    places = {"model": kernel.model, "adapter": kernel.adapter, "python": kernel.python}
    moved = {name: moved_path(move, path) for name, path in places.items() if path}
    options = moved_options(kernel.options, lambda path: moved_path(move, path))
    return kernel.model_copy(update={**moved, "options": options})


def compile(  # noqa: A001 - the field's word
    contract: Contract,
    *,
    attempt: int = 1,
    leg: Leg | None = None,
    traffic: Traffic | None = None,
) -> Plan:
    """Fix everything that is decided before the first token: cells, prompts, seeds, alpha.

    Args:
        leg: step of a promotion; None for a single check.
        traffic: requests sent to infer on a live step; None: none yet.

    Raises:
        ContractError: an empty slice, a limit out of reach, an invalid corpus, or tokens that only
            a trainer has.
    """
    source = reward_source(contract)
    texts = corpora(contract)
    return planning.make_plan(
        contract, *texts, attempt=attempt, reward_source=source, leg=leg, traffic=traffic
    )


def reward_source(contract: Contract) -> str:
    """The source text of the contract's own reward; "" if there is none.

    Raises:
        ContractError: it cannot be read.
    """
    for place, name in _reward_file(contract):
        try:
            return content(Path(name), MAX_BYTES).decode("utf-8-sig")
        except OSError as error:
            message = f"{name} cannot be read: {error.strerror or error}"
        except UnicodeDecodeError as error:
            message = f"{name} is not UTF-8 text: {error.reason}"
        raise ContractError(message, where=contract.where(*place))
    return ""


def corpora(contract: Contract) -> tuple[dict[str, Corpus], Corpus | None]:
    """The texts of each workload, and the golden ones.

    Raises:
        ContractError: an invalid corpus, or tokens that only a trainer has.
    """
    if problem := not_measured_here(contract):
        raise ContractError.all([problem])
    texts = {n: read_corpus(w.prompts) for n, w in contract.all_workloads.items() if w.prompts}
    return texts, read_corpus(contract.golden.prompts) if contract.golden else None


def not_measured_here(contract: Contract) -> Problem | None:
    """The reason why a valid contract cannot be measured offline."""
    for name, workload in contract.all_workloads.items():
        if workload.source == "trainer":
            place = ("workload",) if contract.workload is not None else ("workloads", name)
            return Problem(
                "the tokens of this contract come from a trainer as it runs: there is nothing "
                "to measure offline",
                contract.where(*place),
                "judge what the trainer dumped: servanda check DUMP --contract FILE; or name "
                "engines and prompts to measure the kernels here",
            )
    return None


def read_corpus(name: str | Path) -> Corpus:
    """A file of prompts.

    Raises:
        ContractError: it cannot be read, or has invalid lines.
    """
    try:
        return Corpus.parse(Path(name).read_bytes().decode("utf-8-sig"), str(name))
    except OSError as error:
        raise ContractError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ContractError(f"{name} is not UTF-8 text: {error.reason}") from None
