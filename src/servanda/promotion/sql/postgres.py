# A database of PostgreSQL, as a URL names it: how it is connected to and read, and what its errors
# say without secrets.  psycopg 3, of the extra [postgres].

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from servanda.errors import ServandaError

_SECRETS = ("password", "sslpassword", "passfile")


class Database:
    """A database; it is connected to by `connect`.

    Args:
        url: postgresql://[user[:password]@]host[:port]/database[?options], as of libpq.
        noun: what is kept there, for messages.
        error: raised where it cannot be reached.
        patience_s: seconds after which a silent connection is given up, and the wait for a lock.
        idle_s: seconds after which the server ends a transaction whose client stands still, so that
            others get its locks.

    Raises:
        ServandaError: of the kind `error`; the end of the password is ambiguous.
    """

    def __init__(
        self,
        url: str,
        noun: str,
        error: type[ServandaError],
        *,
        patience_s: float,
        idle_s: float,
    ) -> None:
        self._url, self._noun, self._error = url, noun, error
        self._session = {
            "connect_timeout": "10",
            "keepalives_idle": "30",
            "tcp_user_timeout": str(int(patience_s * 1000)),
            "application_name": "servanda",
        }
        self._patience_s, self._idle_s = patience_s, idle_s
        self.name = self._without_password()
        self._secrets = _secrets(url)

    def connect(self) -> psycopg.Connection:
        """A connection that commits each statement, outside of its transactions.

        Raises:
            ServandaError: of the kind `error`; the server cannot be reached or refuses.
        """
        try:
            options = {**self._session, **conninfo_to_dict(self._url), "client_encoding": "UTF8"}
            db = psycopg.connect(**options, autocommit=True, prepare_threshold=None)
            db.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, false)",
                (f"{self._idle_s}s",),
            )
            self.settle(db, local=False)
        except psycopg.Error as error:
            text = self.message(error)
        else:
            return db
        if "password" in text or "authentication" in text:
            hint = "give user and password in the URL, in PGPASSWORD or in ~/.pgpass"
        elif "does not exist" in text:
            hint = "create it with createdb or createuser, or correct the URL"
        else:
            hint = (
                f"is the server running there? A path instead of a URL keeps the {self._noun} in "
                "SQLite"
            )
        raise self._error(f"{self.name} cannot be opened: {text}", hint=hint)

    def settle(self, db: psycopg.Connection, *, local: bool) -> None:
        """End long waits for a lock, and let a returned commit survive a power cut.

        Args:
            local: for this transaction alone, whichever session a pooler gives it.
        """
        db.execute("SELECT set_config('lock_timeout', %s, %s)", (f"{self._patience_s}s", local))
        db.execute(
            "SELECT set_config('synchronous_commit', 'on', %s) "
            "WHERE current_setting('synchronous_commit') = 'off'",
            (local,),
        )

    def message(self, error: psycopg.Error) -> str:
        """The server's message, in one line without secrets."""
        first = next(iter(str(error).strip().split("\n")), "") or type(error).__name__
        text = re.sub(r"^connection failed: (connection to )?", "", first)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _without_password(self) -> str:
        scheme, _, rest = self._url.partition("://")
        place, _, query = rest.partition("?")
        authority, slash, path = place.partition("/")
        if "@" in path or "@" in query or authority.count("@") > 1:
            raise self._error(
                f"the {scheme} URL of the {self._noun} has an @ where none can be",
                hint="in a user or a password write %40 for @, %2F for /, %3F for ?, %3A for :",
            )
        user, at, host = authority.rpartition("@")
        options = [(k, v) for k, v in parse_qsl(query) if k not in _SECRETS]
        options_text = f"?{urlencode(options, safe='/=,')}" if options else ""
        return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{path}{options_text}"


def fetched(db: psycopg.Connection, query: str, *values: object) -> list[tuple[Any, ...]]:
    """The rows of a statement, whose values stand at each `?`; none if it gives none."""
    # in binary, so that times are exact whatever the server's settings
    with db.cursor(binary=True, row_factory=tuple_row) as cursor:
        cursor.execute(query.replace("?", "%s").encode(), values)
        return cursor.fetchall() if cursor.description else []


def lost(db: psycopg.Connection, error: psycopg.Error) -> bool:
    """Whether an error ended the connection, which is closed then."""
    state = error.sqlstate or ""
    # an error without a state comes from the client, so it concerns the connection
    own = not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    ended = db.closed or own or state.startswith(("57P", "08"))
    if ended:
        db.close()
    return ended


def _secrets(url: str) -> list[str]:
    """Texts that must not be printed, the longest first."""
    place, _, query = url.partition("://")[2].partition("?")
    password = place.partition("@")[0].partition(":")[2] if "@" in place else ""
    secrets = {password, unquote(password)}
    secrets |= {value for name, value in parse_qsl(query) if name in _SECRETS}
    return sorted(secrets - {""}, key=len, reverse=True)
