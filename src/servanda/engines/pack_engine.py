# Engine `pack`: a kernel that is not here, by what it drew and recorded elsewhere.
#
# It returns its sequences where the schedule is that of the pack, and refuses anything
# else: a draw that is not in the file cannot be made up.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.engines.base import ENGINES
from servanda.engines.pack_file import read_pack
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling, best_columns
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch, Trace, some

_ANEW = "write a new pack for this contract with `servanda tools measure CONTRACT --side train -o`"


@ENGINES.register("pack")
class PackEngine:
    """Replays a reference pack: draws, and its own noise floor."""

    def __init__(self, kernel: Kernel) -> None:
        if not kernel.model:
            raise MeasurementError(
                "engine 'pack' needs a model", hint="write `model: x.pack` beside the engine"
            )
        self.kernel = kernel
        self.pack = read_pack(kernel.model)

    def describe(self) -> Description:
        own = self.pack.description
        return Description(
            fingerprint={**own.fingerprint, "pack": self.pack.digest},
            tensors=own.tensors,
            tokens=own.tokens,
            vocab_size=own.vocab_size,
            eos=own.eos,
            context=own.context,
            full_logits=False,
            top=self._best_NK.shape[1] if self.pack.golden_rows is not None else 0,
            decodes=False,
            config=own.config,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            if text not in self._ids:
                raise MeasurementError(
                    f"the pack {self.pack.file} was made on other prompts: it has no {text[:40]!r}",
                    hint=f"compare on the pack's own prompts, or {_ANEW}",
                )
        return [self._ids[text] for text in texts]

    def vocabulary(self) -> list[str]:
        return self.pack.vocabulary

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        self._refuse_other_schedules(batch, sampling, seed)
        return self._recorded(self.pack.drawn, batch)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        self._refuse(sampling == self._sampling, "sampling", self._sampling, sampling)
        again = self.pack.again
        if set(batch.sequence_S) <= set(again.sequence_S.tolist()):
            trace = some(again, list(batch.sequence_S))
            if trace.continuations == tuple(batch.continuations):
                return trace
        raise MeasurementError(
            f"the pack {self.pack.file} cannot score tokens that it did not draw",
            hint="make it the infer kernel, the side that draws; the other kernel re-scores",
        )

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        raise MeasurementError(
            f"the pack {self.pack.file} has no full logits",
            hint="leave out `golden:` and the numerical section for this kernel",
        )

    def top(self, batch: Batch, path: Path) -> Trace:
        """What the pack holds of its golden texts, found by their token ids."""
        rows = self.pack.golden_rows
        if rows is None:
            raise MeasurementError(
                f"the pack {self.pack.file} was made without golden texts",
                hint=f"leave out `golden:` and the numerical section, or {_ANEW}",
            )
        self._refuse(path == self.pack.golden_path, "golden.path", self.pack.golden_path, path)
        texts = [(*p, *c) for p, c in zip(batch.prompts, batch.continuations, strict=True)]
        if odd := [text for text in texts if text not in self._golden]:
            raise MeasurementError(
                f"the pack {self.pack.file} has other golden texts: none begins {odd[0][:8]}",
                hint=f"name the pack's own golden.jsonl, or {_ANEW}",
            )
        at_N = np.concatenate([self._golden[text] for text in texts])
        best_NK, logp_NK = self._best_NK[at_N], _lists(rows["top_logp"])[at_N]
        columns = {"logp": rows["logp"].to_numpy()[at_N], **best_columns(best_NK, logp_NK)}
        given = batch.continuations
        return Trace.of(batch, [*map(len, given)], [t for c in given for t in c], columns)

    def close(self) -> None:
        pass

    @cached_property
    def _ids(self) -> Mapping[str, list[int]]:
        """Text -> its token ids, of the prompts and of the golden texts."""
        ids: dict[str, list[int]] = {}
        for name, text in (("prompts", self.pack.prompts), ("golden", self.pack.golden)):
            if text is not None:
                lines = Corpus.parse(text, name).prompts
                ids |= {p.text: t for p, t in zip(lines, self.pack.tokens[name], strict=True)}
        return ids

    @cached_property
    def _best_NK(self) -> NDArray[np.int64]:
        """The best token ids of every golden position, in the pack's order."""
        assert self.pack.golden_rows is not None
        return _lists(self.pack.golden_rows["top_ids"]).astype(np.int64)

    @cached_property
    def _golden(self) -> Mapping[tuple[int, ...], NDArray[np.int64]]:
        """Token ids of a golden text -> its rows."""
        assert self.pack.golden_rows is not None
        text_N = self.pack.golden_rows["text"].to_numpy()
        ids = self.pack.tokens["golden"]
        return {tuple(ids[text]): np.flatnonzero(text_N == text) for text in np.unique(text_N)}

    @cached_property
    def _sampling(self) -> Sampling:
        return self.pack.workload.sampling.transform

    @cached_property
    def _prompt_tokens(self) -> Mapping[int, int]:
        drawn = self.pack.drawn
        return dict(zip(drawn.sequence_S.tolist(), drawn.prompt_tokens_S.tolist(), strict=True))

    def _refuse(self, same: bool, what: str, mine: object, wanted: object) -> None:
        if not same:
            raise MeasurementError(
                f"the pack {self.pack.file} was drawn with other {what}: {mine}, and {wanted} "
                "is asked",
                hint=_ANEW,
            )

    def _refuse_other_schedules(self, batch: Batch, sampling: Sampling, seed: int) -> None:
        self._refuse(sampling == self._sampling, "sampling", self._sampling, sampling)
        width = self.pack.workload.sampling.max_new_tokens
        self._refuse(width == batch.width, "max_new_tokens", width, batch.width)
        if seed != self.pack.seed:
            raise MeasurementError(
                f"the pack {self.pack.file} holds the draws of one attempt with one seed, and "
                "other prompts, another seed or a fresh attempt draw anew",
                hint=f"go on without --fresh, or {_ANEW}",
            )

    def _recorded(self, trace: Trace, batch: Batch) -> Trace:
        known = set(trace.sequence_S.tolist())
        missing = [s for s in batch.sequence_S if s not in known]
        if missing:
            raise MeasurementError(
                f"the pack {self.pack.file} holds {self.pack.groups:,} prompt groups, and "
                f"sequence {missing[0]} is not among them",
                hint="lower the second number of promotion.offline.prompt_groups, give the "
                "workload "
                f"the pack's samples and round, or {_ANEW}",
            )
        for sequence, prompt in zip(batch.sequence_S, batch.prompts, strict=True):
            if len(prompt) != self._prompt_tokens[sequence]:
                raise MeasurementError(
                    f"the pack {self.pack.file} drew sequence {sequence} from another prompt",
                    hint=_ANEW,
                )
        return some(trace, list(batch.sequence_S))


def _lists(column: pa.ChunkedArray) -> NDArray[np.floating]:
    """A column of lists of one length as rows, [N, K]."""
    values = column.combine_chunks()
    return values.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
