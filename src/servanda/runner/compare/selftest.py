# Selftest: whether a gate on this server detects known faults.
#
# The server is compared with itself, which must hold; then its responses are sampled with a
# temperature and a top-p that the contract does not declare, which must be detected.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servanda.contract.model import Kernel
from servanda.engines import Engine
from servanda.engines.http import HTTPEngine
from servanda.engines.worker import spawn
from servanda.judgement.cost import Cost
from servanda.judgement.verdict import Verdict
from servanda.runner import run
from servanda.runner.compare.contract import (
    CONTRACT,
    Comparison,
    Options,
    costed,
    plan_of,
    prepare,
)
from servanda.runner.measurement import Watch
from servanda.runner.probe import Engines
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace

SEQUENCES = 2048  # most prompt groups of a case
# the undeclared parameters that are sent
CASES: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("against itself", {}),
    ("temperature .95, undisclosed", {"temperature": 0.95}),
    ("top_p .95, undisclosed", {"top_p": 0.95}),
)


@dataclass(frozen=True)
class SelftestCase:
    """One case of a selftest.

    Args:
        by: the violated clauses.
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
    """Samples with other parameters, and records the samples as if with the declared ones."""

    change: Mapping[str, float] = {}

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        trace = super().generate(batch, sampling.model_copy(update=dict(self.change)), seed)
        if "decode" in self.server.scores:
            # its own logprobs would disclose the parameters
            trace = self.score(
                replace(batch, continuations=trace.continuations), sampling, "decode"
            )
        return replace(trace, about={**trace.about, "sampling": sampling.model_dump_json()})

    def _refuse_sampling(self, sampling: Sampling) -> None:
        """Refuse logprobs that disclose the sampling parameters."""


def selftest(
    url: str,
    folder: Path,
    *,
    referee: str | None = None,
    prompts: Path | None = None,
    max_new_tokens: int = 32,
    sequences: int = SEQUENCES,
    watch: Watch | None = None,
    expect: Callable[[Cost], None] | None = None,
) -> Iterator[SelftestCase]:
    """The cases, each as soon as it is decided.

    Args:
        url: kernel string of the server.
        folder: folder for measurements; the caller removes it.
        referee: kernel string of the reference scorer; default: the server itself if it can score.
        expect: called with the cost of one case, before the first.

    Raises:
        ContractError: an invalid kernel string.
        MeasurementError: the server does not respond, or cannot score and has no reference scorer.
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
            if expect is not None and number == 0:
                expect(costed(plan_of(comparison), engines, watch=watch))
        yield SelftestCase(case, not change, _decided(comparison, change, watch))


def _decided(comparison: Comparison, change: Mapping[str, float], watch: Watch | None) -> Verdict:
    """The verdict of a case; an undetected fault is tested on more sequences."""
    first, last = comparison.parts.sizes
    contract = comparison.folder / CONTRACT
    while True:
        # evidence is valid at every evaluation, so the same run may continue
        sizes = (first, first if change else last)
        replace(comparison, parts=replace(comparison.parts, sizes=sizes)).save(contract)
        verdict = run.check(contract, run_dir=comparison.folder, open=_opening(change), watch=watch)
        if not change or verdict.outcome == "violated" or first >= last:
            return verdict
        first = min(2 * first, last)


def _opening(change: Mapping[str, float]) -> Any:
    """Open infer with sampling parameters other than the declared ones."""

    def opened(kernel: Kernel, side: str) -> Engine:
        if side != "infer" or not change:
            return spawn(kernel, side)
        engine = _Undisclosed(kernel)
        engine.change = change
        return engine

    return opened
