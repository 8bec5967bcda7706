# Addresses of reference packs in a registry: PLACE/NAME:TAG or PLACE/NAME@sha256:DIGEST, where
# PLACE is oci://HOST/PATH, https://HOST/PATH, hf://ORGANISATION/REPOSITORY or a folder.

from __future__ import annotations

import re
from dataclasses import dataclass

_SCHEMES = ("oci://", "https://", "http://", "hf://")
_DIGEST = r"sha256:[0-9a-f]{64}"
_PINNED = re.compile(f".+/[a-z0-9._-]+@{_DIGEST}", re.DOTALL)
_ADDRESS = re.compile(
    r"(?P<place>.+)/(?P<name>[a-z0-9]+(?:[._-][a-z0-9]+)*)"  # as names of OCI
    rf"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})|@(?P<digest>{_DIGEST}))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class PackAddress:
    """A pack in a registry; `digest` is of its file, and is "" where it is named by its tag."""

    place: str
    name: str
    tag: str = "latest"
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.place}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def pack_address(text: str) -> PackAddress | None:
    """The parts of an address; None if it is not written so.

    >>> pack_address("oci://host:5000/team/base:v1")
    PackAddress(place='oci://host:5000/team', name='base', tag='v1', digest='')
    >>> pack_address("base:v1")
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    return PackAddress(
        match["place"], match["name"], match["tag"] or "latest", match["digest"] or ""
    )


def is_pinned_pack(model: str | None) -> bool:
    """Whether a kernel's model is a pack in a registry, by its digest."""
    return model is not None and _PINNED.fullmatch(model) is not None


def is_elsewhere(model: str | None) -> bool:
    """Whether a model is named on another machine, so that no path of it is moved."""
    return model is not None and model.startswith(_SCHEMES)
