# Sealed files: a zip of members, and a head in JSON with the format and the digest of each.
#
# Any tool can look inside; nothing in such a file is ever executed.

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servanda.contract.identity import digest_of, digest_of_bytes
from servanda.errors import MeasurementError

FORMAT = 1
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same content is the same file, whenever it was written


@dataclass(frozen=True)
class FileKind:
    """One kind of sealed file, as messages name it.

    Args:
        head: the member that has the keys `stated`, among others.
        command: writes one; anew: the next move where a file cannot be used.
    """

    noun: str
    head: str
    stated: tuple[str, ...]
    command: str
    anew: str

    def read(self, file: str, keep: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The head of a file, and its members, which are held against their digests.

        Args:
            keep: whether the members are returned; {} otherwise.

        Raises:
            MeasurementError: no such file, another kind, of another format, or damaged.
        """
        members: dict[str, bytes] = {}
        odd: list[str] = []
        try:
            with zipfile.ZipFile(file) as archive:
                if self.head not in archive.namelist():
                    raise MeasurementError(
                        f"{file} is a zip file, but no {self.noun}: it has no {self.head}",
                        hint=f"{self.noun}s are written by `{self.command}`",
                    )
                head = json.loads(archive.read(self.head))
                self._refuse_foreign(file, head)
                for member, digest in head["members"].items():
                    data = archive.read(member)
                    odd += [member] * (digest_of_bytes(data) != digest)
                    if keep:
                        members[member] = data
        except FileNotFoundError:
            raise MeasurementError(
                f"there is no {self.noun} {file}", hint=f"write one with `{self.command}`"
            ) from None
        except zipfile.BadZipFile as error:
            raise MeasurementError(
                f"{file} is no {self.noun}, or only a part of one: {error}", hint=self.anew
            ) from None
        except MeasurementError:
            raise
        except Exception as error:  # zlib speaks of damage in an error of its own
            raise self.unreadable(file, error) from None
        claimed = {key: value for key, value in head.items() if key != "digest"}
        if digest_of(claimed) != head.get("digest"):
            odd.append(self.head)
        if odd:
            raise MeasurementError(
                f"{file} is damaged: {odd[0]} is not what its digest says", hint=self.anew
            )
        return head, members

    def _refuse_foreign(self, file: str, head: Any) -> None:
        stated = isinstance(head, dict) and all(key in head for key in self.stated)
        if not stated or not isinstance(head["format"], int):
            lacking = f"neither {' nor '.join(self.stated)}" if self.stated[1:] else "no format"
            raise MeasurementError(
                f"{file} is no {self.noun}: its {self.head} states {lacking}", hint=self.anew
            )
        MeasurementError.refuse_form(file, head["format"], FORMAT, self.anew, "format")

    def unreadable(self, file: str, error: Exception) -> MeasurementError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return MeasurementError(f"{file} cannot be read: {reason}", hint=self.anew)


def sealed(head: Mapping[str, Any]) -> dict[str, Any]:
    """The head as anyone who reads it will see it, with its format and its digest."""
    head = json.loads(json.dumps({"format": FORMAT, **head}))
    return {**head, "digest": digest_of(head)}


def write_member(archive: zipfile.ZipFile, name: str, data: bytes, compress: int) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = compress
    archive.writestr(info, data)
