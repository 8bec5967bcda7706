# Servanda's own dump format, written by a hook if the framework writes no logprobs.
#
# One Parquet file per step and rank, one sequence per row.  Columns: token_ids, mask, logp_train,
# logp_infer (lists), group, and "label.<name>", "sequence.<name>", "token.<name>".  A missing value
# is null.

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.dumps.formats import base
from servanda.rl.dumps.formats.padding import aligned, cells, flags, plain, split, texts

SCHEMA = "1"
_FILE = re.compile(r"[^/]*/step_(?P<step>\d+)\.rank(?P<rank>\d+)\.parquet")
_KEY = b"servanda.rollouts"
_NEEDED = ("token_ids", "mask", "logp_train", "logp_infer", "group")
_NAMED = re.compile(r"[a-z][a-z0-9_]*")
_BATCH = 64  # sequences that are held at once
_HOLED = np.array([None])  # placeholder for ids or flags that contain a null


class Writer:
    """Writes the samples and logprobs of training steps, for `servanda check`.

    Args:
        folder: created if missing; one per run.
        rank: rank of the process; each rank writes its own files.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.rank = rank

    def step(
        self,
        step: int,
        token_ids: Any,
        mask: Any,
        logp_train: Any,
        logp_infer: Any,
        *,
        lengths: Any = None,
        present: Any = None,
        groups: Sequence[object] | None = None,
        labels: Mapping[str, Sequence[object]] | None = None,
        staleness: Any = None,
        advantages: Any = None,
        rewards: Any = None,
    ) -> Path:
        """Write the sequences of a step; writing a step again replaces it.

        Arrays are NumPy's or torch's, [S, T], or lists of one list per sequence.  A column that is
        shorter than the tokens concerns the last ones, such as the response after a prompt.

        Args:
            step: step number of the trainer.
            token_ids: prompt and response, [S, T].
            mask: 1 if the trainer learns from the token, [S, T] or [S, R].
            logp_train: the trainer's, before its update, nats; NaN if missing.
            logp_infer: the sampler's, nats; NaN if missing.
            lengths: tokens of each sequence, [S], for arrays padded on the right.
            present: 1 if a cell contains a token, [S, T], for any padding.
            groups: the prompt of each sequence, [S]; without it, equal prompts are one group.
            labels: name -> value of each sequence, [S]: "env", "replica".
            staleness: age of the sampling weights in updates, [S] or the shape of the mask.
            advantages: [S] or the shape of the mask.
            rewards: [S].

        Returns:
            The file.

        Raises:
            EvidenceError: inconsistent shapes, or an invalid step.
        """
        try:
            at = index(step)
        except TypeError:
            at = -1
        if at < 0:
            raise EvidenceError(f"the step is {step!r}", hint="an integer from 0 on")
        token_S = split(token_ids, "token_ids")
        cells_S = cells(token_S, lengths, present)
        lists = {"mask": mask, "logp_train": logp_train, "logp_infer": logp_infer}
        per_token = {"staleness": staleness, "advantage": advantages}
        lists |= {f"token.{name}": v for name, v in per_token.items() if v is not None}
        lists = {"token_ids": token_S} | {n: aligned(n, v, token_S) for n, v in lists.items()}
        columns: dict[str, Any] = {
            name: [part[cells_T] for part, cells_T in zip(parts, cells_S, strict=True)]
            for name, parts in lists.items()
        }
        columns["mask"] = [flags(values) for values in columns["mask"]]
        columns["group"] = texts("groups", groups, len(token_S))
        for name, values in (labels or {}).items():
            if not _NAMED.fullmatch(name):
                raise EvidenceError(
                    f"a label is named {name!r}", hint="small letters, digits and _: env"
                )
            columns[f"label.{name}"] = texts(f"labels[{name!r}]", values, len(token_S))
        if rewards is not None:
            columns["sequence.reward"] = plain(rewards).astype(np.float64).reshape(-1)
            if len(columns["sequence.reward"]) != len(token_S):
                raise EvidenceError(
                    f"{len(token_S)} sequences, and {len(columns['sequence.reward'])} rewards"
                )
        return self._write(at, columns)

    def _write(self, step: int, columns: Mapping[str, Any]) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def column(name: str, values: Any) -> pa.Array:
            if name == "token_ids":
                return pa.array(values, pa.list_(pa.int64()))
            if name == "mask":
                return pa.array(values, pa.list_(pa.bool_()))
            if name == "group" or name.startswith("label."):
                return pa.array(values, pa.string())
            if name.startswith("sequence."):
                return pa.array(values, pa.float64())
            return pa.array([v.astype(np.float64) for v in values], pa.list_(pa.float64()))

        table = pa.table({name: column(name, values) for name, values in columns.items()})
        about = {_KEY: SCHEMA.encode(), b"step": str(step).encode()}
        table = table.replace_schema_metadata(about)
        longest = max((len(tokens) for tokens in columns["token_ids"]), default=1)
        path = self.folder / f"step_{step:06}.rank{self.rank}.parquet"
        part = path.with_name(f".{path.name}.{os.getpid()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:  # a reader sees a complete file or none
            pq.write_table(table, part, row_group_size=max(1, base.CHUNK_TOKENS // max(longest, 1)))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path


@base.importer("own")
class OwnImporter:
    framework = "Servanda"
    looks_for = "step_<N>.rank<R>.parquet"
    pickled = False

    def sniff(self, folder: Path) -> base.Detection | None:
        files = base.files_in(folder, "step_*.parquet", _FILE)
        if not files:
            return None
        version, names, why = _head(files[0])
        unread = [n for n in names if not _is_read(n)]
        return base.Detection(
            format="own",
            folder=folder,
            files=files,
            sure=not why,
            why=why or "names, columns and the version of the schema",
            notes=(f"columns that are not read: {', '.join(unread)}",) if unread else (),
            version=version,
        )

    def rows(self, files: Sequence[base.File], refused: base.Refused) -> Iterator[base.Placed]:
        for file in files:
            yield from _read(file, refused)


def _read(file: base.File, refused: base.Refused) -> Iterator[base.Placed]:
    import pyarrow.parquet as pq

    _, names, why = _head(file)
    if why:
        raise MeasurementError(why, hint="write the step again, or remove the file")
    number = 0
    try:
        with pq.ParquetFile(file.path) as parquet:
            wanted = [name for name in names if _is_read(name)]
            for batch in parquet.iter_batches(batch_size=_BATCH, columns=wanted):
                columns = {name: _pieces(batch.column(name)) for name in batch.schema.names}
                for at in range(batch.num_rows):
                    number += 1
                    row = _row({name: pieces[at] for name, pieces in columns.items()})
                    place = f"{file.name}:{number}"
                    if isinstance(row, str):
                        refused.add(row, place)
                    else:
                        yield place, row
    except Exception as error:  # pyarrow raises many types of errors for invalid bytes
        raise MeasurementError(
            f"{file.name} cannot be read: {error}", hint="write the step again, or remove the file"
        ) from None


def _head(file: base.File) -> tuple[str, list[str], str]:
    """Schema version, columns, and their problem."""
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file.path)
    except Exception as error:  # pyarrow raises many types of errors for invalid bytes
        return "", [], f"{file.name} is no Parquet file ({error})"
    version = (schema.metadata or {}).get(_KEY, b"").decode(errors="replace")
    if version != SCHEMA:
        found = f"has schema {version!r}, and not {SCHEMA!r}"
        found = found if version else "has no schema version: Servanda's writer did not write it"
        return version, schema.names, f"{file.name} {found}"
    missing = [name for name in _NEEDED if name not in schema.names]
    for name in (n for n in schema.names if _is_read(n)):
        if not _fits(name, schema.field(name).type):
            return version, schema.names, f"{file.name} has {name} as {schema.field(name).type}"
    return version, schema.names, f"{file.name} has no {', '.join(missing)}" if missing else ""


def _is_read(name: str) -> bool:
    return name in _NEEDED or name.startswith(("label.", "sequence.", "token."))


def _fits(name: str, kind: Any) -> bool:
    import pyarrow.types as pt

    if name == "group" or name.startswith("label."):
        return pt.is_string(kind) or pt.is_large_string(kind)
    if name.startswith("sequence."):
        return pt.is_floating(kind) or pt.is_integer(kind)
    if not (pt.is_list(kind) or pt.is_large_list(kind)):
        return False
    inner = {"token_ids": pt.is_integer, "mask": pt.is_boolean}.get(name, pt.is_floating)
    return bool(inner(kind.value_type))


def _pieces(array: Any) -> list[Any]:
    """The values of a column, row by row; a null list is None, a null number NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if not (pt.is_list(array.type) or pt.is_large_list(array.type)):
        return array.to_pylist()
    lengths = pc.list_value_length(array)  # pyright: ignore[reportAttributeAccessIssue]
    ends = np.cumsum(lengths.fill_null(0).to_numpy(zero_copy_only=False))
    if not len(ends):
        return []
    flat = array.flatten()
    null = None
    if flat.null_count and not pt.is_floating(flat.type):  # a missing number is NaN
        null = flat.is_null().to_numpy(zero_copy_only=False)
        flat = flat.fill_null(pa.scalar(0).cast(flat.type))
    pieces: list[Any] = np.split(flat.to_numpy(zero_copy_only=False), ends[:-1])
    if null is not None:
        holes = np.split(null, ends[:-1])
        pieces = [_HOLED if h.any() else p for p, h in zip(pieces, holes, strict=True)]
    return [p if ok else None for p, ok in zip(pieces, array.is_valid().to_pylist(), strict=True)]


def _row(values: Mapping[str, Any]) -> base.RolloutRow | str:
    """The row, or the reason why it is invalid."""
    missing = [name for name in _NEEDED[:4] if values[name] is None]
    if missing:
        return f"{missing[0]} is missing"
    token, mask = values["token_ids"], values["mask"]
    if token.dtype.kind not in "iu" or mask.dtype != bool:
        return "a token id or a flag of the mask is null"
    per_token = {n[6:]: v for n, v in values.items() if n.startswith("token.") and v is not None}
    numbers = {n[9:]: v for n, v in values.items() if n.startswith("sequence.") and v is not None}
    return base.RolloutRow(
        token=token.astype(np.int64),
        mask=mask,
        logp_train=values["logp_train"].astype(np.float64),
        logp_infer=values["logp_infer"].astype(np.float64),
        prompt=int(np.argmax(mask)) if mask.any() else len(token),
        group=values["group"] or "",
        labels={n[6:]: v for n, v in values.items() if n.startswith("label.") and v},
        per_sequence={name: float(value) for name, value in numbers.items()},
        per_token={name: value.astype(np.float64) for name, value in per_token.items()},
    )
