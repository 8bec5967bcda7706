# Foreign code: what a contract makes run that is neither Servanda's nor a library's.
#
# A contract is data, but it may name code: a function of a file, an interpreter, an engine, a
# metric or a dialect of an installed package.  --no-code refuses all of them, for CI on pull
# requests from strangers; the package of a metric is not even imported.  It is passed on as the
# variable SERVANDA_NO_CODE, so that child processes refuse them as well.
# So is a key that a kernel names: a contract chooses both the variable and where it is sent.
#
# Never run, whatever a contract names: code in a model's folder (no remote code is trusted),
# pickles (weights are safetensors, GGUF or ONNX), and faults, which are Servanda's own.

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servanda.contract.model import Contract, Kernel, Place
from servanda.contract.server_dialects import DIALECTS
from servanda.engines.base import BUILTIN
from servanda.errors import ContractError, Problem, Where
from servanda.judgement.rewards import file_and_function
from servanda.theory.divergence.base import DIVERGENCES

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks

NO_CODE = "SERVANDA_NO_CODE"
_HINT = "look at it, then call without --no-code (without SERVANDA_NO_CODE); or remove it"


@dataclass(frozen=True)
class Code:
    """One thing that runs, or a key that is sent.

    Args:
        place: in the contract; text: what it is, such as "runs the interpreter .venvs/vllm".
    """

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place))} {self.text}"


def code_of(contract: Contract) -> tuple[Code, ...]:
    """Everything that measuring a contract would run of others' code."""
    kernels = kernels_of(contract)
    codes = [code for place, kernel in kernels for code in code_of_kernel(kernel, place)]
    reward = (contract.reward and contract.reward.of) or ""
    if parts := file_and_function(reward):
        codes.append(Code(("reward", "of"), f"runs {parts[1]} of {parts[0]}"))
    return (*codes, *metrics_of(contract))


def metrics_of(contract: Contract) -> Iterator[Code]:
    """The metrics of installed packages; these packages are not imported."""
    for _, place, clause in contract.clauses():
        if (package := DIVERGENCES.package_of(clause.metric)) is not None:
            text = f"runs metric {clause.metric!r} of the installed package {package!r}"
            yield Code((*place, "metric"), text)


def keys_of(contract: Contract) -> tuple[Code, ...]:
    """Every key of this machine's environment that measuring a contract would send."""
    return tuple(
        key for place, kernel in kernels_of(contract) for key in key_of_kernel(kernel, place)
    )


def kernels_of(contract: Contract) -> Iterator[tuple[Place, Kernel]]:
    """The place and the kernel of each side, and of `stable` where there is one."""
    yield ("kernels", "train"), contract.kernels.train
    yield ("kernels", "infer"), contract.kernels.infer
    if contract.stable is not None:
        yield ("stable",), contract.stable


def key_of_kernel(kernel: Kernel, place: Place) -> Iterator[Code]:
    """The key that opening one kernel would send."""
    if kernel.key_env is not None:
        yield Code((*place, "key_env"), f"sends the key in {kernel.key_env} to {kernel.url}")


def code_of_kernel(kernel: Kernel, place: Place) -> Iterator[Code]:
    """What opening one kernel would run of others' code."""
    if kernel.python is not None:
        yield Code((*place, "python"), f"runs the interpreter {kernel.python}")
    if kernel.engine not in (*BUILTIN, "external"):
        yield Code((*place, "engine"), f"runs engine {kernel.engine!r} of an installed package")
    if kernel.dialect is not None and (package := DIALECTS.package_of(kernel.dialect)) is not None:
        text = f"runs dialect {kernel.dialect!r} of the installed package {package!r}"
        yield Code((*place, "dialect"), text)


def code_is_refused() -> bool:
    """Whether --no-code was given, to this process or the one that started it."""
    return os.environ.get(NO_CODE, "0") not in ("", "0")


def refuse_code(contract: Contract) -> None:
    """Under --no-code, a contract that runs code or sends a key; nothing of it was done yet.

    Raises:
        ContractError: naming each place.
    """
    _refuse((*code_of(contract), *keys_of(contract)), contract)


def refuse_metrics(contract: Contract, marks: Marks) -> None:
    """Under --no-code, metrics of installed packages, before lint would import these.

    Raises:
        ContractError: naming each place.
    """
    if code_is_refused():
        _raise([_problem(code, marks.near(code.place)) for code in metrics_of(contract)])


def refuse_code_of_kernel(kernel: Kernel, name: str) -> None:
    """Under --no-code, a kernel that runs code or sends a key; `name` is what messages call it.

    Raises:
        ContractError: naming each key.
    """
    _refuse((*code_of_kernel(kernel, (name,)), *key_of_kernel(kernel, (name,))), None)


def _refuse(codes: tuple[Code, ...], contract: Contract | None) -> None:
    if code_is_refused():
        _raise([_problem(code, contract and contract.where(*code.place)) for code in codes])


def _problem(code: Code, where: Where | None) -> Problem:
    return Problem(f"{code}, and --no-code refuses it", where, _HINT)


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise ContractError.all(problems)
