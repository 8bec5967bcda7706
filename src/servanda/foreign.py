# Foreign code: what a contract makes run that is neither Servanda's nor a library's.
#
# A contract is data, but it may name code: a function of a file, an interpreter, an engine of an
# installed package.  --no-code refuses all three, for CI on pull requests from strangers.  It is
# passed on as the variable SERVANDA_NO_CODE, so that child processes refuse them as well.
#
# Never run, whatever a contract names: code in a model's folder (no remote code is trusted),
# pickles (weights are safetensors, GGUF or ONNX), and faults, which are Servanda's own.

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from servanda.contract import Contract, Kernel, Place
from servanda.engines import BUILTIN
from servanda.errors import ContractError, Problem
from servanda.rewards import file_and_function

NO_CODE = "SERVANDA_NO_CODE"
_HINT = (
    "read the code, and run it without --no-code (without SERVANDA_NO_CODE); or take the key out"
)


@dataclass(frozen=True)
class Code:
    """One thing that runs.

    Args:
        place: in the contract; text: what it is, such as "runs the interpreter .venvs/vllm".
    """

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place))} {self.text}"


def code_of(contract: Contract) -> tuple[Code, ...]:
    """Everything that measuring a contract would run of others' code."""
    kernels = {("kernels", side): getattr(contract.kernels, side) for side in ("train", "infer")}
    found: list[Code] = []
    for place, kernel in {**kernels, ("stable",): contract.stable}.items():
        found += code_of_kernel(kernel, place) if kernel is not None else ()
    of = (contract.reward and contract.reward.of) or ""
    if parts := file_and_function(of):
        found.append(Code(("reward", "of"), f"runs {parts[1]} of {parts[0]}"))
    return tuple(found)


def code_of_kernel(kernel: Kernel, place: Place) -> Iterator[Code]:
    """What opening one kernel would run of others' code."""
    if kernel.python is not None:
        yield Code((*place, "python"), f"runs the interpreter {kernel.python}")
    if kernel.engine not in (*BUILTIN, "external"):
        yield Code((*place, "engine"), f"runs engine {kernel.engine!r} of an installed package")


def code_is_refused() -> bool:
    """Whether --no-code was given, to this process or the one that started it."""
    return os.environ.get(NO_CODE, "0") not in ("", "0")


def refuse_code(contract: Contract) -> None:
    """Under --no-code, a contract that runs code; nothing of it was executed yet.

    Raises:
        ContractError: naming each place.
    """
    _refuse(code_of(contract), contract)


def refuse_code_of_kernel(kernel: Kernel, name: str) -> None:
    """Under --no-code, a kernel that runs code; `name` is what messages call it.

    Raises:
        ContractError: naming each key.
    """
    _refuse(tuple(code_of_kernel(kernel, (name,))), None)


def _refuse(found: tuple[Code, ...], contract: Contract | None) -> None:
    problems = [
        Problem(
            f"{code}, and --no-code refuses it", contract and contract.where(*code.place), _HINT
        )
        for code in found
    ]
    if problems and code_is_refused():
        raise ContractError.all(problems)
