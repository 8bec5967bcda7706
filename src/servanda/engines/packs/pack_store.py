# A registry of reference packs as its kinds provide it, and the kinds that are trees of files:
#
#   index.json               {"schema": 1, "packs": {NAME: {TAG: "sha256:..."}}}
#   NAME/sha256/HEX.pack     the file, named after its digest
#   NAME/sha256/HEX.sig      its signature, if it was signed

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from servanda.errors import MeasurementError

INDEX = "index.json"
MOST_TEXT = 1 << 22  # bytes of an index, a manifest or a signature
_SCHEMA = 1


class PackStore(Protocol):
    """The packs of one place.  Nothing it returns is verified yet.

    Every method raises MeasurementError where the place cannot be reached or refuses.
    """

    def tags(self, name: str = "") -> dict[str, dict[str, str]]:
        """Name -> tag -> digest, of one name or of all; a name that is not there is left out."""
        ...

    def content(self, name: str, digest: str) -> Iterator[bytes] | None:
        """The file in pieces; None if it is not there."""
        ...

    def signature(self, name: str, digest: str) -> bytes | None: ...

    def publish(
        self, name: str, tag: str, digest: str, file: Path, signature: bytes | None
    ) -> None: ...


class Tree(Protocol):
    """Files by their paths below a place; raises as `PackStore` does."""

    place: str

    def read(self, path: str) -> Iterator[bytes] | None: ...

    def write(self, files: Mapping[str, Path | bytes], index: Callable[[bytes], bytes]) -> None:
        """Write files, and then the index, made anew of what it is; b"" if there is none."""
        ...


class TreeStore:
    """See `PackStore`; of a tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def tags(self, name: str = "") -> dict[str, dict[str, str]]:
        packs = self._packs(joined(self._tree.read(INDEX), self._tree.place) or b"")
        return packs if not name else {name: packs[name]} if name in packs else {}

    def content(self, name: str, digest: str) -> Iterator[bytes] | None:
        return self._tree.read(_path(name, digest, "pack"))

    def signature(self, name: str, digest: str) -> bytes | None:
        return joined(self._tree.read(_path(name, digest, "sig")), self._tree.place)

    def publish(
        self, name: str, tag: str, digest: str, file: Path, signature: bytes | None
    ) -> None:
        def index(before: bytes) -> bytes:
            packs = self._packs(before)
            packs.setdefault(name, {})[tag] = digest
            return json.dumps({"schema": _SCHEMA, "packs": packs}, indent=1).encode()

        files: dict[str, Path | bytes] = {_path(name, digest, "pack"): file}
        if signature is not None:
            files[_path(name, digest, "sig")] = signature
        self._tree.write(files, index)

    def _packs(self, data: bytes) -> dict[str, dict[str, str]]:
        if not data:
            return {}
        place = f"{self._tree.place}/{INDEX}"
        try:
            index: Any = json.loads(data)
            anew = "name another registry, and publish its packs there"
            MeasurementError.refuse_form(place, index["schema"], _SCHEMA, anew)
            packs = index["packs"]
            return {str(n): {str(t): str(d) for t, d in tags.items()} for n, tags in packs.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MeasurementError(
                f"{place} is no index of packs", hint="name the folder or URL of a registry"
            ) from None


def joined(pieces: Iterable[bytes] | None, place: str) -> bytes | None:
    """A small file; None if there is none.

    Raises:
        MeasurementError: it is too large.
    """
    if pieces is None:
        return None
    data = b""
    for piece in pieces:
        data += piece
        if len(data) > MOST_TEXT:
            raise MeasurementError(
                f"{place} answers with more than {MOST_TEXT:,} bytes where an index or a "
                "signature was expected",
                hint="is it a registry of packs?",
            )
    return data


def _path(name: str, digest: str, ending: str) -> str:
    return f"{name}/{digest.replace(':', '/')}.{ending}"
