# Reference packs: what one kernel drew and recorded, in one file, for others to re-score.
#
#   manifest.json     format, kernel, description, schedule, sampling; digests of the members
#   prompts.jsonl     the texts, as they were; golden.jsonl likewise
#   tokens.json       token ids of every line of both
#   vocabulary.json   the token of each id
#   drawn.parquet     the sequences with their processed logprobs, in launch order
#   again.parquet     a tenth of them, scored once more in other batches: the self-noise
#   golden.parquet    at each golden position: token, logprob, log-sum-exp, the best 64
#
# A zip file, so that any tool can look inside; nothing in it is ever executed.

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from servanda.contract.identity import Description, digest_of, digest_of_bytes
from servanda.contract.model import Kernel, Workload
from servanda.engines.arrow import from_table, to_table
from servanda.errors import MeasurementError
from servanda.traces.trace import Trace

FORMAT = 1
MANIFEST = "manifest.json"
GOLDEN_PATH = b"path"  # in the metadata of golden.parquet
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same content is the same file, whenever it was written
_ANEW = "copy the file again, or write it anew with `servanda tools measure -o`"


@dataclass(frozen=True)
class Pack:
    """An opened pack; its members were compared with their digests."""

    file: str
    manifest: Mapping[str, Any]
    members: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Of everything in it."""
        return str(self.manifest["digest"])

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel that drew; its model lies where the pack was made."""
        return Kernel(**self.manifest["kernel"])

    @cached_property
    def workload(self) -> Workload:
        """Sampling, samples and rounds; `prompts` names the file they came from."""
        return Workload.model_validate(self.manifest["workload"])

    @property
    def seed(self) -> int:
        """Of the schedule: the draws of one attempt."""
        return int(self.manifest["seed"])

    @property
    def groups(self) -> int:
        """Prompt groups that were drawn."""
        return int(self.manifest["groups"])

    @property
    def prompts(self) -> str:
        return self.members["prompts.jsonl"].decode("utf-8")

    @property
    def golden(self) -> str | None:
        data = self.members.get("golden.jsonl")
        return None if data is None else data.decode("utf-8")

    @property
    def tokens(self) -> dict[str, list[list[int]]]:
        """Token ids of every line of "prompts" and of "golden"."""
        return json.loads(self.members["tokens.json"])

    @property
    def vocabulary(self) -> list[str]:
        return json.loads(self.members["vocabulary.json"])

    @cached_property
    def description(self) -> Description:
        return Description.of(self.manifest["description"])

    @cached_property
    def drawn(self) -> Trace:
        return self._trace("drawn.parquet")

    @cached_property
    def again(self) -> Trace:
        return self._trace("again.parquet")

    @cached_property
    def golden_rows(self) -> pa.Table | None:
        """One row a golden position; None where the pack was made without golden texts."""
        data = self.members.get("golden.parquet")
        return None if data is None else pq.read_table(pa.BufferReader(data), use_threads=False)

    @property
    def golden_path(self) -> str:
        """How the golden texts were scored."""
        rows = self.golden_rows
        about = (rows.schema.metadata or {}) if rows is not None else {}
        return about.get(GOLDEN_PATH, b"prefill").decode()

    def _trace(self, name: str) -> Trace:
        return from_table(pq.read_table(pa.BufferReader(self.members[name]), use_threads=False))


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def write_pack(
    path: Path,
    *,
    kernel: Kernel,
    description: Description,
    workload: Workload,
    seed: int,
    groups: int,
    traces: Mapping[str, Trace],
    others: Mapping[str, bytes],
) -> Pack:
    """Write a pack in one piece.

    Args:
        traces: "drawn" and "again".
        others: every other member by its name.

    Raises:
        MeasurementError: the file cannot be written.
    """
    members = {f"{name}.parquet": parquet(to_table(trace)) for name, trace in traces.items()}
    members |= others
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "kernel": kernel.model_dump(mode="json"),
        "description": asdict(description),
        "workload": workload.model_dump(mode="json"),
        "seed": str(seed),  # longer than what some readers of JSON keep
        "groups": groups,
        "members": {name: digest_of_bytes(data) for name, data in sorted(members.items())},
    }
    manifest = json.loads(json.dumps(manifest))  # as whoever reads it will see it
    manifest["digest"] = digest_of(manifest)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            text = json.dumps(manifest, indent=1).encode()
            for name, data in [(MANIFEST, text), *sorted(members.items())]:
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(info, data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise MeasurementError(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another place"
        ) from None
    return Pack(str(path), manifest, members)


def read_pack(name: str) -> Pack:
    """Open a pack and hold its members against their digests.

    Raises:
        MeasurementError: no such file, not a pack, of a newer version, or damaged.
    """
    path = Path(name)
    try:
        with zipfile.ZipFile(path) as file:
            if MANIFEST not in file.namelist():
                raise MeasurementError(
                    f"{name} is a zip file, but no reference pack: it has no {MANIFEST}",
                    hint="packs are written by `servanda tools measure KERNEL -o x.pack`",
                )
            manifest = json.loads(file.read(MANIFEST))
            _refuse_foreign(name, manifest)
            members = {member: file.read(member) for member in manifest["members"]}
    except FileNotFoundError:
        raise MeasurementError(
            f"there is no reference pack {name}",
            hint="write one with `servanda tools measure KERNEL -o x.pack`",
        ) from None
    except zipfile.BadZipFile:
        raise MeasurementError(
            f"{name} is no reference pack, or only a part of one", hint=_ANEW
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.error) as error:
        raise MeasurementError(f"{name} cannot be read: {error}", hint=_ANEW) from None
    except Exception as error:  # zlib speaks of damage in an error of its own
        if isinstance(error, MeasurementError):
            raise
        raise MeasurementError(f"{name} is damaged: {error}", hint=_ANEW) from None
    claimed = {key: value for key, value in manifest.items() if key != "digest"}
    odd = [m for m, data in members.items() if digest_of_bytes(data) != manifest["members"][m]]
    if odd or digest_of(claimed) != manifest.get("digest"):
        raise MeasurementError(
            f"{name} is damaged: {odd[0] if odd else MANIFEST} is not what its digest says",
            hint=_ANEW,
        )
    pack = Pack(name, manifest, members)
    try:
        _ = pack.kernel, pack.workload, pack.description, pack.seed, pack.groups
    except (ValueError, KeyError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise MeasurementError(f"{name} cannot be read: {said}", hint=_ANEW) from None
    return pack


def _refuse_foreign(name: str, manifest: object) -> None:
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise MeasurementError(
            f"{name} is no reference pack: its {MANIFEST} states no format", hint=_ANEW
        )
    if version > FORMAT:
        raise MeasurementError(
            f"{name} has format {version}, and this version reads up to {FORMAT}",
            hint="upgrade servanda, or write the pack anew with this version",
        )


__all__ = ["GOLDEN_PATH", "Pack", "parquet", "read_pack", "write_pack"]
