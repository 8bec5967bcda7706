# One side alone: the source of a reference pack for `servanda tools measure`.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from servanda.contract import presets
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Contract, Kernel, Kernels
from servanda.contract.workload import Golden, Workload
from servanda.engines import engine_names
from servanda.engines.recorded_file import Pack
from servanda.engines.worker import spawn
from servanda.errors import ContractError
from servanda.runner import load, run
from servanda.runner.compare.prompts import SHIPPED, read_corpus, shipped
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.measurement import Open, Watch, unwatched
from servanda.runner.reference_pack import make_pack

_PACKED = 1024  # default number of prompt groups of a pack


@dataclass(frozen=True)
class PackOptions:
    """The options of `measure`: a contract and its side, or a kernel and its texts."""

    what: str
    side: str | None = None
    prompts: Path | None = None
    golden: Path | None = None
    sequences: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


def pack_contract(options: PackOptions) -> tuple[Contract, str]:
    """The contract and the side of a pack.

    Raises:
        ContractError: inconsistent options, or an invalid text.
    """
    own = ("prompts", "golden", "max_new_tokens", "temperature", "top_p")
    if options.what.endswith((".yaml", ".yml")):
        given = [name for name in own if getattr(options, name) is not None]
        if given:
            raise ContractError(
                f"--{given[0].replace('_', '-')} is the contract's to say",
                hint="write it in the contract, or name a kernel instead of the contract",
            )
        contract = run.load(options.what)
        return _sized(contract, options.sequences), options.side or "train"
    if options.side is not None:
        raise ContractError("--side names a side of a contract, and this is a kernel")
    kernel = parse_kernel(options.what, engines=engine_names(), name="KERNEL")
    refuse_missing(kernel, options.what, "KERNEL")
    sampling = {n: getattr(options, n) for n in own[2:] if getattr(options, n) is not None}
    template = load.contract_of(presets.preset_text("fp8"), "fp8")
    assert template.workload is not None
    prompts = options.prompts or shipped(SHIPPED)
    for file in (prompts, options.golden):
        if file is not None:
            read_corpus(file)
    workload = Workload(  # type: ignore[call-arg]
        prompts=str(prompts), sampling=template.workload.sampling.model_copy(update=sampling)
    )
    changes = {
        "kernels": Kernels(train=kernel, infer=kernel),
        "workload": workload,
        "golden": Golden(prompts=str(options.golden), path="decode") if options.golden else None,
        "slices": (),
    }
    return _sized(template.model_copy(update=changes), options.sequences or _PACKED), "train"


def _sized(contract: Contract, sequences: int | None) -> Contract:
    if sequences is None:
        return contract
    offline = contract.promotion.offline.model_copy(update={"sequences": (1, sequences)})
    promotion = contract.promotion.model_copy(update={"offline": offline})
    return contract.model_copy(update={"promotion": promotion})


def measure_pack(
    contract: Contract, side: str, out: Path, *, open: Open = spawn, watch: Watch | None = None
) -> Pack:
    """A reference pack of one side of a contract.

    Raises:
        ContractError, MeasurementError: as in compile and packing.
    """
    kernel: Kernel = getattr(contract.kernels, side)
    # a pack has no promises: its contract only defines the samples
    drawing = contract.model_copy(update={"numerical": (), "statistical": ()})
    return make_pack(run.compile(drawing), kernel, out, open=open, watch=watch or unwatched)
