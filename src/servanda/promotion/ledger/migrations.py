# Migrations of a stored file: what makes a store of schema n one of schema n + 1, in order.

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from servanda.errors import ServandaError

# the first makes schema 1 from nothing; one that was released is never edited
Migrations: TypeAlias = Sequence[Sequence[str]]


def pending(
    name: str, schema: int, migrations: Migrations, error: type[ServandaError]
) -> list[str]:
    """The statements that bring a store to the newest schema, all for one transaction.

    Args:
        name: the place of the store, for messages.
        schema: what the store has; 0 for an empty one.

    Raises:
        ServandaError: of the kind `error`; a later version of Servanda wrote it.
    """
    error.refuse_newer(name, schema, len(migrations))
    return [statement for migration in migrations[schema:] for statement in migration]
