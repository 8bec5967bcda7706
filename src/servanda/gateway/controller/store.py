# The store of a controller: its durable data.
#
# A commit is one transaction: the state, the progress of each gateway's rows, the records for the
# ledger, and the numbers of each sample.  It stores no text, and of users only a keyed hash.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from servanda.errors import MeasurementError
from servanda.gateway.controller.intake import Start

SAMPLES, SAMPLES_S = 200_000, 7 * 86_400.0  # kept: most of them, and their age
STARTS = 256  # of gateways, kept
SEEDS = 65_536  # kept
CLEANED_EVERY = 64  # commits between two cleanups
LEASE_S = 10.0  # how long a leader that is gone keeps the lead
ANEW = "start a new state: name another --state"  # the next move for one of another form
_SERVERS = ("postgresql", "postgres")


@dataclass(frozen=True)
class Sample:
    """The stored numbers of one scored request in one cell."""

    at: float
    slice: str
    clause: str
    total: float
    tokens: int
    missing: int
    chance: float
    key: str


@dataclass(frozen=True)
class Commit:
    """The data of one transaction.

    Args:
        meta: name -> plain data.
        taken: per gateway process, number of the first row that is not in the state.
        outbox: number -> record for the ledger.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    taken: Mapping[Start, int] = field(default_factory=dict)
    outbox: Mapping[int, Any] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    seeds: Sequence[int] = ()


class StandbyError(MeasurementError):
    """Another leader leads."""


class Store(Protocol):
    """The store of one contract; any thread may use it.

    `name`: its place, for messages.  `term`: grows from leader to leader.  `leads`: whether this
    process may answer and act now.  `lost`: whether it may never again, because another leader
    leads or a commit may have been stored.
    """

    name: str

    @property
    def term(self) -> int: ...

    @property
    def leads(self) -> bool: ...

    @property
    def lost(self) -> bool: ...

    def meta(self, name: str) -> Any:
        """Stored plain data, or None."""
        ...

    def taken(self) -> dict[Start, int]: ...

    def seeds(self) -> tuple[int, ...]: ...

    def outbox(self, most: int = 256) -> dict[int, Any]:
        """Records that are not in the ledger yet, oldest first."""
        ...

    def behind(self) -> int:
        """The number of records that are not in the ledger yet."""
        ...

    def commit(self, commit: Commit) -> None:
        """Store all of it, or nothing.

        Raises:
            MeasurementError: it could not be stored; a retry may succeed unless `lost`.
        """
        ...

    def delete_outbox(self, until: int) -> None:
        """Delete the records up to a number: the ledger has them."""
        ...

    def check_present(self) -> None:
        """Refuse to write to a deleted or replaced file.

        Raises:
            MeasurementError: the file is gone or was replaced.
        """
        ...

    def renew(self, commit: Commit) -> None:
        """Create the file again with all data if it is gone.

        Raises:
            MeasurementError: it cannot be created.
        """
        ...

    def close(self) -> None:
        """Let another leader lead."""
        ...


def is_server(place: str | Path) -> bool:
    """Whether a place is the URL of a database server, which several leaders may share."""
    return str(place).partition("://")[0] in _SERVERS and "://" in str(place)


def open_store(
    place: str | Path, contract: str, *, leader: str = "", lease_s: float = LEASE_S
) -> Store:
    """The store of a contract.

    Args:
        place: a folder, created if missing; or postgresql://..., for several leaders.
        leader: how messages name this leader, such as the URL of its page.
        lease_s: how long it keeps the lead in PostgreSQL when it is gone.

    Raises:
        StandbyError: another leader leads.
        MeasurementError: it cannot be used.
    """
    if not is_server(place):
        from servanda.gateway.controller.sqlite_store import SqliteStore

        return SqliteStore(Path(place))
    try:
        from servanda.gateway.controller.postgres_store import PostgresStore
    except ImportError as error:
        raise MeasurementError(
            f"a state in PostgreSQL needs psycopg: {str(error).strip().splitlines()[0]}",
            hint="pip install 'servanda[postgres]'",
        ) from None
    return PostgresStore(str(place), contract, leader, lease_s)
