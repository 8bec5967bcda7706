# Packs of registries: pushed, listed, and read by their digest, from a cache in the user's folder.

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from servanda.contract.pack_name import PackAddress, is_pinned_pack, pack_address
from servanda.engines.cache import alone, cache_folder, whole_file
from servanda.engines.pack_file import Pack, read_pack
from servanda.engines.packs import signature
from servanda.engines.packs.pack_store import PackStore, TreeStore
from servanda.errors import ContractError, MeasurementError
from servanda.registry import did_you_mean

MOST_BYTES = 1 << 36  # of a pack: a server without end fills no disk
_PIECE = 1 << 20
_FORMS = (
    "write oci://HOST/NAME, https://HOST/NAME, hf://ORGANISATION/REPOSITORY/NAME or FOLDER/NAME"
)


def store_at(place: str) -> PackStore:
    """The registry of a place."""
    if place.startswith("oci://"):
        from servanda.engines.packs.oci_packs import OciStore

        return OciStore(place)
    if place.startswith(("http://", "https://")):
        from servanda.engines.packs.http_packs import HttpTree

        return TreeStore(HttpTree(place))
    if place.startswith("hf://"):
        from servanda.engines.packs.hub_packs import HubTree

        return TreeStore(HubTree(place))
    from servanda.engines.packs.folder_packs import FolderTree

    return TreeStore(FolderTree(place))


def address_of(text: str) -> PackAddress:
    """The address that a text is.

    Raises:
        ContractError: it is no address.
    """
    found = pack_address(text)
    if found is None:
        raise ContractError(
            f"{text!r} is no address of a pack in a registry",
            hint=f"{_FORMS}, and behind it :TAG or @sha256:DIGEST",
        )
    return found


def digest_of_file(file: Path) -> str:
    with file.open("rb") as content:
        return f"sha256:{_hash(iter(lambda: content.read(_PIECE), b''))}"


def push(file: Path, to: PackAddress, key: Path | None = None) -> PackAddress:
    """Publish a pack, signed if there is a key; returns its address by digest.

    Raises:
        ContractError: the address has a digest, or the key cannot sign.
        MeasurementError: it is no pack, or the registry refuses it.
    """
    if to.digest:
        raise ContractError(
            f"{to} has a digest, which the pack has by itself", hint="give a tag: NAME:TAG"
        )
    read_pack(str(file))
    signed = None if key is None else signature.sign(file, key)
    digest = digest_of_file(file)
    store_at(to.place).publish(to.name, to.tag, digest, file, signed)
    return replace(to, digest=digest)


def pinned(address: PackAddress) -> PackAddress:
    """The address by digest: that of a tag now.

    Raises:
        MeasurementError: no such pack or tag, or the registry cannot be reached.
    """
    if address.digest:
        return address
    tags = store_at(address.place).tags(address.name).get(address.name)
    if not tags:
        raise MeasurementError(
            f"{address.place} has no pack {address.name!r}",
            hint=f"`servanda tools packs list {address.place}` lists those that it has",
        )
    if address.tag not in tags:
        raise MeasurementError(
            f"{address.place}/{address.name} has no tag {address.tag!r}",
            hint=did_you_mean(address.tag, tags),
        )
    return replace(address, digest=tags[address.tag])


def fetched(address: PackAddress, signers: Path | None = None) -> tuple[Path, str]:
    """A local copy of a pack, verified on every call, and who signed it.

    Args:
        signers: keys of which one has to have signed it; None: those that SERVANDA_PACK_SIGNERS
            names, or none.

    Raises:
        MeasurementError: it is not there, not what its digest says, or not signed as asked.
    """
    address = pinned(address)
    variable = os.environ.get(signature.SIGNERS)
    signers = signers or (Path(variable) if variable else None)
    place = cache_folder("packs") / f"{address.digest.replace(':', '-')}.pack"
    with alone(place):
        # a damaged copy of the cache is fetched anew
        if not place.is_file() or digest_of_file(place) != address.digest:
            _download(address, place)
        if signers is None:
            return place, ""
        beside = place.with_suffix(".sig")
        if not beside.is_file():
            data = store_at(address.place).signature(address.name, address.digest)
            if data is not None:
                with whole_file(beside) as part:
                    part.write_bytes(data)
        signed = beside.read_bytes() if beside.is_file() else None
        try:
            return place, signature.verify(place, signed, signers, str(address))
        except MeasurementError:
            beside.unlink(missing_ok=True)  # it may be signed anew, by another key
            raise


def open_pack(name: str) -> Pack:
    """A pack by its path, or by its address with a digest.

    Raises:
        MeasurementError: as `fetched` and `read_pack`.
    """
    return read_pack(str(fetched(address_of(name))[0]) if is_pinned_pack(name) else name)


def _download(address: PackAddress, place: Path) -> None:
    content = store_at(address.place).content(address.name, address.digest)
    if content is None:
        raise MeasurementError(
            f"{address.place} has no pack {address.name!r} of {address.digest}",
            hint=f"`servanda tools packs list {address.place} {address.name}` lists its digests",
        )
    with whole_file(place) as part, part.open("wb") as file:
        found = f"sha256:{_hash(content, file.write)}"
        file.flush()
        if found != address.digest:
            part.unlink()
            raise MeasurementError(
                f"{address} is not what its digest says: what was sent has {found}",
                hint="it was changed or cut off on the way or in the registry; push it again",
            )


def _hash(pieces: Iterator[bytes], write: Callable[[bytes], object] = lambda _: None) -> str:
    total, read = hashlib.sha256(), 0
    for piece in pieces:
        read += len(piece)
        if read > MOST_BYTES:
            raise MeasurementError(
                f"a pack has more than {MOST_BYTES:,} bytes", hint="is it the right address?"
            )
        total.update(piece)
        write(piece)
    return total.hexdigest()
