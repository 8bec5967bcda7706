# The sink `csv` of a watch: `servanda watch DIR --csv FILE` appends a row for each step.

import csv
from pathlib import Path

from servanda.errors import ContractError
from servanda.rl.watch.sinks import SINKS, Sink


@SINKS.register("csv")
class Table(Sink):
    takes = "FILE"
    summary = "Append step, name and value of each series to FILE, as CSV."

    def __init__(self, where, wait) -> None:
        self._path = Path(where)
        with ContractError.of_system(f"--csv {where} cannot be written"):
            self._path.open("a").close()

    def series(self, step, at, values) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([step, name, value] for name, value in values.items())
