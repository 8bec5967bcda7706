# What both stores ask alike, in the SQL that both understand.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from servanda.promotion.ledger.entry import COLUMNS, Row

TABLE, META = "servanda_ledger", "servanda_ledger_meta"
_COLUMNS = ", ".join(COLUMNS)
_PAGE = 500


class Queries(ABC):
    """The reading half of a `Store` over SQL.

    A store says how a place for a value is written (`hole`) and how a query is run.
    """

    hole: ClassVar[str]

    @abstractmethod
    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]: ...

    def marks(self) -> Mapping[str, str]:
        return dict(self._all(f"SELECT name, value FROM {META}"))

    def page(self, run: str | None, since: int, until: int) -> list[Row]:
        of_run, values = ("", ()) if run is None else (f"run = {self.hole} AND ", (run,))
        return self._rows(
            f"WHERE {of_run}seq > {self.hole} AND seq <= {self.hole} ORDER BY seq LIMIT {_PAGE}",
            *values,
            since,
            until,
        )

    def at(self, seq: int) -> Row | None:
        return next(iter(self._rows(f"WHERE seq = {self.hole}", seq)), None)

    def last(self, run: str | None = None) -> Row | None:
        if run is None:
            rows = self._rows("ORDER BY seq DESC LIMIT 1")
        else:
            rows = self._rows(f"WHERE run = {self.hole} ORDER BY n DESC LIMIT 1", run)
        return next(iter(rows), None)

    def runs(self) -> tuple[str, ...]:
        found = self._all(f"SELECT run FROM {TABLE} GROUP BY run ORDER BY min(seq)")
        return tuple(run for (run,) in found)

    def _rows(self, which: str, *values: object) -> list[Row]:
        return [Row(*row) for row in self._all(f"SELECT {_COLUMNS} FROM {TABLE} {which}", *values)]
