# Selftest: would a gate on this very server see what it is there to see?
#
# The server is compared with itself, which has to hold; then its draws are asked for with a
# temperature and with a top-p that the contract does not declare, which has to be found.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servanda.contract.model import Kernel
from servanda.engines import Engine
from servanda.engines.http import HTTPEngine
from servanda.engines.worker import spawn
from servanda.judgement.verdict import Verdict
from servanda.runner import run
from servanda.runner.compare.contract import CONTRACT, Comparison, Options, prepare
from servanda.runner.measurement import Watch
from servanda.runner.probe import Engines
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace

SEQUENCES = 2048  # prompt groups of a case at most
# what is sent, and the contract does not say
CASES: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("against itself", {}),
    ("temperature .95, undisclosed", {"temperature": 0.95}),
    ("top_p .95, undisclosed", {"top_p": 0.95}),
)


@dataclass(frozen=True)
class SelftestCase:
    """One case of a selftest.

    Args:
        by: the clauses that are violated.
    """

    case: str
    healthy: bool
    verdict: Verdict

    @property
    def by(self) -> tuple[str, ...]:
        cells = self.verdict.cells
        return tuple(dict.fromkeys(c.clause for c in cells if c.outcome == "violated"))

    @property
    def passed(self) -> bool:
        return self.verdict.outcome == ("holds" if self.healthy else "violated")


class _Undisclosed(HTTPEngine):
    """Asks for draws by another sampling, and records them as if by the declared one."""

    change: Mapping[str, float] = {}

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        trace = super().generate(batch, sampling.model_copy(update=dict(self.change)), seed)
        if "decode" in self.server.scores:
            # its own logprobs would disclose what was sent
            trace = self.score(
                replace(batch, continuations=trace.continuations), sampling, "decode"
            )
        return replace(trace, about={**trace.about, "sampling": sampling.model_dump_json()})

    def _refuse_sampling(self, sampling: Sampling) -> None:
        """Logprobs that do not disclose what was sent are the point."""


def selftest(
    url: str,
    folder: Path,
    *,
    referee: str | None = None,
    prompts: Path | None = None,
    max_new_tokens: int = 32,
    sequences: int = SEQUENCES,
    watch: Watch | None = None,
) -> Iterator[SelftestCase]:
    """The cases, one after another, as they are decided.

    Args:
        url: a kernel string of the server.
        folder: where it may measure; the caller removes it.
        referee: a kernel string of what re-scores; the server itself where it can.

    Raises:
        ContractError: an invalid kernel string.
        MeasurementError: the server does not answer, or cannot score and has no referee.
    """
    for number, (case, change) in enumerate(CASES):
        options = Options(
            a=referee or url,
            b=url,
            prompts=prompts,
            preset="vllm-upgrade",
            sequences=sequences,
            max_new_tokens=max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            run_dir=folder / str(number),
        )
        with Engines(spawn) as engines:
            comparison = prepare(options, engines)
        yield SelftestCase(case, not change, _decided(comparison, change, watch))


def _decided(comparison: Comparison, change: Mapping[str, float], watch: Watch | None) -> Verdict:
    """The verdict of a case: a fault that was not found yet is looked for in more sequences."""
    first, last = comparison.parts.sizes
    contract = comparison.folder / CONTRACT
    while True:
        # evidence is valid at every evaluation, so the same run may be asked for more
        sizes = (first, first if change else last)
        replace(comparison, parts=replace(comparison.parts, sizes=sizes)).save(contract)
        verdict = run.check(contract, run_dir=comparison.folder, open=_opening(change), watch=watch)
        if not change or verdict.outcome == "violated" or first >= last:
            return verdict
        first = min(2 * first, last)


def _opening(change: Mapping[str, float]) -> Any:
    """Opens infer so that it asks for another sampling than the declared one."""

    def opened(kernel: Kernel, side: str) -> Engine:
        if side != "infer" or not change:
            return spawn(kernel, side)
        engine = _Undisclosed(kernel)
        engine.change = change
        return engine

    return opened
