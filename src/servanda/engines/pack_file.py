# Reference packs: what one kernel drew and recorded, in one file, for others to re-score.
#
#   manifest.json     format, kernel, description, schedule, sampling; digests of the members
#   prompts.jsonl     the texts, as they were; golden.jsonl likewise
#   tokens.json       token ids of every line of both
#   vocabulary.json   the token of each id
#   drawn.parquet     the sequences with their processed logprobs, in dispatch order
#   again.parquet     a tenth of them, scored once more in other batches: the noise floor
#   golden.parquet    at each golden position: token, logprob, log-sum-exp, the best 64

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from servanda.contract.identity import Description, digest_of_bytes
from servanda.contract.model import Kernel
from servanda.contract.text_file import whole
from servanda.contract.workload import Workload
from servanda.engines.arrow import from_parquet, from_table, to_parquet, to_table
from servanda.engines.sealed_file import FileKind, sealed, write_member
from servanda.errors import MeasurementError
from servanda.traces.trace import Trace

MANIFEST = "manifest.json"
GOLDEN_PATH = b"path"  # in the metadata of golden.parquet
_KIND = FileKind(
    "reference pack",
    MANIFEST,
    ("format",),
    "servanda tools measure KERNEL -o x.pack",
    "copy the file again, or write it anew with `servanda tools measure -o`",
)


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
        return None if data is None else from_parquet(data)

    @property
    def golden_path(self) -> str:
        """How the golden texts were scored."""
        rows = self.golden_rows
        about = (rows.schema.metadata or {}) if rows is not None else {}
        return about.get(GOLDEN_PATH, b"prefill").decode()

    def _trace(self, name: str) -> Trace:
        return from_table(from_parquet(self.members[name]))


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
    members = {f"{name}.parquet": to_parquet(to_table(trace)) for name, trace in traces.items()}
    members |= others
    manifest = sealed(
        {
            "kernel": kernel.model_dump(mode="json"),
            "description": asdict(description),
            "workload": workload.model_dump(mode="json"),
            "seed": str(seed),  # longer than what some readers of JSON keep
            "groups": groups,
            "members": {name: digest_of_bytes(data) for name, data in sorted(members.items())},
        }
    )
    text = json.dumps(manifest, indent=1).encode()
    with MeasurementError.of_system(f"{path} cannot be written", hint="choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in [(MANIFEST, text), *sorted(members.items())]:
                write_member(file, name, data, zipfile.ZIP_DEFLATED)
    return Pack(str(path), manifest, members)


def read_pack(name: str) -> Pack:
    """Open a pack and hold its members against their digests.

    Raises:
        MeasurementError: no such file, not a pack, of another format, or damaged.
    """
    manifest, members = _KIND.read(name, keep=True)
    pack = Pack(name, manifest, members)
    try:
        _ = pack.kernel, pack.workload, pack.description, pack.seed, pack.groups
    except (ValueError, KeyError, TypeError) as error:
        raise _KIND.unreadable(name, error) from None
    return pack
