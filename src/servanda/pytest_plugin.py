# The plug-in of pytest: a fixture that reads contracts, and an assertion that one holds.
#
# pytest loads this module in every session of an environment that has servanda installed, so it
# imports nothing of servanda before a test asks for it.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servanda.contract.model import Contract
    from servanda.judgement.clauses.base import CellVerdict
    from servanda.judgement.verdict import Verdict

_SHOWN = 3  # cells that the first line of a failure names; the report has all of them


@pytest.fixture(scope="module")
def kernel_contract(request: pytest.FixtureRequest) -> Callable[[str | Path], Contract]:
    """Read a contract: `kernel_contract("gate.kernelcontract.yaml")` returns a Contract.

    A relative path starts from the folder of the test's file; if there is no such file, from
    pytest's rootdir. The fixture has the scope of the module, so that a fixture of a module, which
    measures once for several tests, can use it.

    Raises:
        ContractError: every problem of the text at once, each with its place; or there is no such
            file.
    """

    def read(path: str | Path) -> Contract:
        from servanda.errors import ContractError
        from servanda.runner.load import load

        # of an absolute path, only itself
        places = dict.fromkeys(
            folder / path for folder in (request.path.parent, request.config.rootpath)
        )
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise ContractError(
                f"there is no contract {str(path)!r}; looked for {', '.join(map(str, places))}",
                hint="a path starts from the folder of the test's file, or from pytest's rootdir",
            )
        return load(found)

    return read


def assert_holds(
    promised: Contract | Verdict,
    *,
    run_dir: str | Path | None = None,
    max_time_s: float | None = None,
) -> Verdict:
    """Fail unless every enforced clause holds; the failure has the report as text.

    Args:
        promised: a contract, which is measured first, or a verdict.
        run_dir: directory that keeps the measurements of a contract; a later call continues there.
            None: a temporary one.
        max_time_s: no round of measurements starts after these seconds; None: without end.

    Returns:
        The verdict.

    Raises:
        AssertionError: a clause is violated, not decided, or in error, or measuring failed. The
            first line names the cells (a cell is one clause on one slice).
        TypeError: `promised` is neither a contract nor a verdict.
    """
    __tracebackhide__ = True
    from servanda.contract.model import Contract
    from servanda.judgement.verdict import Verdict

    if isinstance(promised, Contract):
        verdict = _measured(promised, run_dir, max_time_s)
    elif not isinstance(promised, Verdict):
        raise TypeError(
            f"assert_holds takes a contract or a verdict, not {type(promised).__name__}: "
            "read a file with the fixture kernel_contract"
        )
    elif run_dir is not None or max_time_s is not None:
        raise TypeError("run_dir and max_time_s are for a contract: a verdict was measured already")
    else:
        verdict = promised
    if verdict.exit_code != 0:
        raise AssertionError(f"{_first_line(verdict)}\n\n{verdict}")
    return verdict


def _measured(contract: Contract, run_dir: str | Path | None, max_time_s: float | None) -> Verdict:
    __tracebackhide__ = True
    import time
    from tempfile import TemporaryDirectory

    from servanda.errors import Interrupted, ServandaError
    from servanda.runner.run import check

    end = None if max_time_s is None else time.monotonic() + max_time_s
    deadline = None if end is None else lambda: time.monotonic() >= end
    try:
        if run_dir is not None:
            return check(contract, run_dir=run_dir, deadline=deadline)
        with TemporaryDirectory(prefix="servanda-") as folder:
            return check(contract, run_dir=Path(folder) / "run", deadline=deadline)
    except Interrupted:
        raise KeyboardInterrupt from None  # which ends the session, as everywhere in pytest
    except ServandaError as error:
        failed = f"{contract.metadata.name}: there is no verdict: {error}"
    raise AssertionError(failed)


def _first_line(verdict: Verdict) -> str:
    """The outcome with the cells that caused it: the line that pytest's summary shows."""
    from servanda.report.cell_text import worst_first
    from servanda.report.summary import headline

    bad = worst_first(c for c in verdict.cells if c.enforced and c.outcome == verdict.outcome)
    if not bad:
        return f"{verdict.contract}: {verdict.outcome}: {headline(verdict).text}"
    named = "; ".join(map(_cell, bad[:_SHOWN]))
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"{verdict.contract}: {verdict.outcome}: {named}{more}"


def _cell(cell: CellVerdict) -> str:
    from servanda.report.cell_text import sentence
    from servanda.report.format import line

    found = sentence(cell).removeprefix(f"{cell.outcome}: ").rstrip(".")
    return f"{line(cell.clause)} on {line(cell.place)} ({found})"
