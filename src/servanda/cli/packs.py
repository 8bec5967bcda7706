# `servanda tools packs`: baseline files in registries.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.options import FILE, shared
from servanda.cli.stdout import show, show_json
from servanda.contract.text_file import whole
from servanda.engines.packs.pack_registry import address_of, fetched, pinned, push, store_at
from servanda.errors import MeasurementError
from servanda.report.table import table

_FORMAT = shared("--format", type=click.Choice(["text", "json"]))


@click.group("packs")
def packs() -> None:
    """Publish baseline files to a registry, list and fetch them.

    A registry is oci://HOST/PATH, https://HOST/PATH, hf://ORGANISATION/REPOSITORY or a folder. A
    pack in it is REGISTRY/NAME:TAG; REGISTRY/NAME@sha256:DIGEST can be given wherever a path of a
    baseline file can.
    """


@packs.command("push")
@click.argument("pack", type=FILE)
@click.argument("to", metavar="REGISTRY/NAME:TAG")
@click.option("--sign", "key", type=FILE, help="SSH key that signs it, such as ~/.ssh/id_ed25519.")
@_FORMAT
def push_command(pack: Path, to: str, key: Path | None, format_: str) -> None:
    """Publish a baseline file under a name and a tag.

    Prints its address by digest, which always names the same content. A tag can be moved by the
    next push.
    """
    address = push(pack, address_of(to), key)
    if format_ == "json":
        show_json({"address": str(address), "digest": address.digest, "signed": key is not None})
        return
    show(f"{address}" + (" (signed)" if key else " (not signed)"))


@packs.command("pull")
@click.argument("address", metavar="REGISTRY/NAME:TAG")
@shared("-o", type=FILE, help="Also copy the pack there.")
@click.option(
    "--signers",
    type=FILE,
    help="Accept only packs signed by a key in this file of allowed signers.  "
    "[default: SERVANDA_PACK_SIGNERS]",
)
@_FORMAT
def pull_command(address: str, output: Path | None, signers: Path | None, format_: str) -> None:
    """Fetch a baseline file, verify it and keep it in the cache.

    Its digest is verified at every read, and its signature where signers are named.
    """
    found = pinned(address_of(address))
    file, signer = fetched(found, signers)
    if output is not None:
        refused = MeasurementError.of_system(
            f"{output} cannot be written", hint="name another file"
        )
        with refused, whole(output) as part:
            part.write_bytes(file.read_bytes())
    if format_ == "json":
        show_json({"address": str(found), "file": str(output or file), "signer": signer or None})
        return
    by = f"signed by {signer}" if signer else "the signature was not asked for"
    show(f"{found}: {output or file}, digest verified, {by}")


@packs.command("list")
@click.argument("registry", metavar="REGISTRY")
@click.argument("name", metavar="[NAME]", default="")
@_FORMAT
def list_command(registry: str, name: str, format_: str) -> None:
    """List the packs of a registry with their tags, or those of one name."""
    found = store_at(registry).tags(name)
    rows = [(n, tag, digest) for n in sorted(found) for tag, digest in found[n].items()]
    if format_ == "json":
        show_json([{"name": n, "tag": t, "address": f"{registry}/{n}@{d}"} for n, t, d in rows])
    elif rows:
        show("\n".join(table([("name", "tag", "digest"), *rows])))
    else:
        show(f"{registry} has no pack {name!r}" if name else f"{registry} has no packs")
