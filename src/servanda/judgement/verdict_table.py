# A verdict for notebooks: its text, and its cells as a table.

from __future__ import annotations

from dataclasses import fields
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from servanda.errors import MeasurementError
from servanda.judgement.clauses.base import CellVerdict, Outcome

_LEFT_OUT = ("interval", "where", "assumptions")


class CellTable:
    """The table formats of a verdict."""

    cells: tuple[CellVerdict, ...]
    outcome: Outcome
    contract: str
    evidence: str

    def to_arrow(self) -> Any:
        """A pyarrow.Table: one row per cell, with its e-values; a missing number is null.

        Metadata of the table: outcome, contract and evidence digest of the verdict.
        """
        pa = import_module("pyarrow")  # a heavy import, needed only for a table
        rows = [
            {
                **{f.name: getattr(cell, f.name) for f in fields(cell) if f.name not in _LEFT_OUT},
                "low": cell.interval[0] if cell.interval else None,
                "high": cell.interval[1] if cell.interval else None,
            }
            for cell in self.cells
        ]
        about = {"outcome": self.outcome, "contract": self.contract, "evidence": self.evidence}
        return pa.Table.from_pylist(rows).replace_schema_metadata(about)

    def to_pandas(self) -> Any:
        """The table of `to_arrow` as a pandas.DataFrame.

        Raises:
            MeasurementError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise MeasurementError(
                "a DataFrame needs pandas, which is not installed",
                hint="pip install 'servanda[pandas]', or use to_arrow()",
            )
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        return html_of(self)


def html_of(result: object) -> str:
    """The HTML of a result's text, for a notebook."""
    return f"<pre>{escape(str(result))}</pre>"
