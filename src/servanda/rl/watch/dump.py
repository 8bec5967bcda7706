# A trainer's dump as it grows: each new step is judged as a realised claim of its own.
#
# A step counts once the next has begun, or once none of its files has changed between two
# looks: whoever writes in place, or writes a file a rank, is not interrupted.  What is read is
# read once; only the first steps are read twice, for the slices are fixed from them.
#
# A slice that a step has too few tokens to decide is judged on the last few steps together; the
# whole is judged on the step alone.  A realised claim adds up exactly.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import Any

from servanda.contract.model import WHOLE
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.escalation import actions_of
from servanda.rl.dumps import diagnosis, preset
from servanda.rl.dumps.blocks import blocks
from servanda.rl.dumps.checks import Finding, Soundness, of_step
from servanda.rl.dumps.formats import FORMATS, Dump, open_dump
from servanda.rl.dumps.soundness import alike, sides, told
from servanda.rl.dumps.steps import ENDS, Step, Trend, concentration, trend
from servanda.rl.dumps.window import Window
from servanda.rl.watch.contract import Asked, Terms, fixed, of_a_trainer, part_of, weighing_of
from servanda.rl.watch.first_last import plain, steps_of
from servanda.rl.watch.step import Seen
from servanda.runner.load import read


class _NotWhole(Exception):  # noqa: N818 - a step that is being written
    pass


class DumpSource:
    """The steps of a dump, each judged once it is whole.

    Raises:
        ContractError: no such format, preset or contract.
    """

    kind = "dump"

    def __init__(self, asked: Asked) -> None:
        if asked.preset is not None:
            preset.preset_of(asked.preset)
        self.asked = asked
        self.missing = self.left = ""
        self._own = None if asked.contract is None else of_a_trainer(asked.contract)
        self._terms: Terms | None = None
        self._format = ""
        self._judged: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._cut: dict[int, str] = {}
        self._first: list[Step] = []
        self._last: list[Step] = []
        self._window: Window | None = None
        self._trend: Trend | None = None
        self._sound: Soundness | None = None  # of the last step
        self._odd: dict[str, tuple[int, int]] = {}  # check -> odd ones of all, in all steps

    def look(self, *, final: bool) -> Iterator[Seen]:
        dump = self._opened()
        if dump is None:
            return
        self.missing, self._format = "", dump.format
        try:
            stamps = {step: _stamp(dump, step) for step in dump.steps}
        except OSError:
            return  # a file was moved while it was looked at
        before, self._before = self._before, stamps
        newest = max(stamps)
        due = [
            step
            for step, stamp in sorted(stamps.items())
            if stamp != self._judged.get(step)
            and (final or stamp == before.get(step) or (step < newest and step not in self._judged))
            and (step < newest or stamp != self._cut.get(step))
        ]
        if self._terms is None:
            self._terms = fixed(self.asked, self._own, dump, due)
        for step in due:
            try:
                seen = self._seen(dump, step, last=step == newest)
            except _NotWhole as cut:
                self._cut[step] = stamps[step]
                self.left = f"step {step} is not whole and is left alone: {cut}"
                continue
            self._judged[step] = stamps[step]
            if self.left.startswith(f"step {step} "):
                self.left = ""
            yield seen

    def _opened(self) -> Dump | None:
        """The dump; None where there is none yet."""
        path, asked = self.asked.path, self.asked
        try:
            return open_dump(path, asked.format, unsafe_pickles=asked.unsafe_pickles)
        except ContractError as error:
            names = FORMATS if asked.format is None else [asked.format]
            if asked.format is not None and asked.format not in FORMATS:
                raise
            # what is there is a dump, and it is not that nobody has begun to write
            if path.exists() and any(_sure(name, path) for name in names):
                raise
            self.missing = error.problems[0].message
        except OSError:
            pass  # a file was moved while the folder was listed: the next look will see
        return None

    def _seen(self, dump: Dump, step: int, *, last: bool) -> Seen:
        """Judge one step.

        Raises:
            _NotWhole: the last step of a dump, which may still be written.
        """
        again, part = step in self._judged, part_of(dump, step)
        command = f"servanda tools check-dump {quote(str(self.asked.path))}"
        sound, aged = Soundness(self._sound), False
        terms = self._terms
        weighing = None if terms is None else weighing_of(terms, self.asked.path)
        try:
            for block in blocks(c for c in part.read() if len(c)):
                aged = aged or "staleness" in block.per_token
                if weighing is not None:
                    sound.add(block)
                    weighing.add(block)
        except (EvidenceError, MeasurementError, OSError) as error:
            if last and (part.refused.truncated or not isinstance(error, EvidenceError)):
                raise _NotWhole(_first_line(error)) from None
            why = _first_line(error)
            return Seen(step, "error", why=why, command=f"{command} --steps {step}", again=again)
        assert terms is not None and weighing is not None  # a step that can be read fixes them
        if not again:
            self._sound = sound  # what this step has, a later one may not have again
        plan, evidence = weighing.evidence()
        if self._window is None:
            self._window = Window(terms.window)
        known = [*self._judged]
        number = known.index(step) + 1 if again else len(known) + 1
        found = (*sound.findings(), *sides(plan.contract, weighing.agreement))
        if not again:
            self._count(found, alike(weighing.agreement))
        findings = tuple(of_step(one, self._odd.get(one.check, (0, 0))) for one in found)
        lines = told(findings, part.refused, weighing.sequences)
        errors = [line.text for line in lines if line.level == "error"]
        drawn = weighing.before_filter(evidence)
        judged = self._window.judge(number, step, plan, evidence, drawn, weighing.atoms, errors)
        cells, atoms, together = judged.cells, judged.atoms, judged.together
        if not judged.errors:
            self._remember(weighing.steps[step])
        red = [c.slice for c in cells if c.enforced and c.outcome == "violated"]
        # drift that grows is a cause where it grew before this step; a jump is none
        before, self._trend = self._trend, self._grown()
        since = min((together.get(name, step) for name in red), default=step)
        command += f" --steps {step if since == step else f'{since}:{step}'}"
        command += " --mask masks" if any(name != WHOLE for name in red) else ""
        return Seen(
            step,
            judged.outcome,
            cells,
            weighing.trained,
            weighing.sequences,
            why=judged.errors[0] if judged.errors else "",
            cause=diagnosis.likely(weighing.cuts, red, atoms, before, self._held) if red else "",
            trend=self._trend,
            staleness=weighing.largest_staleness if aged else None,
            actions=actions_of(terms.contract, cells),
            command=command,
            again=again,
            together=together,
            needs_tokens=judged.needs_tokens,
        )

    def _count(self, findings: Sequence[Finding], alike: tuple[int, int]) -> None:
        """Add what is odd in one more step."""
        counts = {one.check: one.odd[:2] for one in findings if one.odd is not None}
        for name, (odd, whole) in {**counts, "sides": alike}.items():
            before = self._odd.get(name, (0, 0))
            self._odd[name] = before[0] + odd, before[1] + whole

    def _remember(self, step: Step) -> None:
        """Both ends of the run: a trend compares them."""
        for end in (self._first, self._last):
            for i, known in enumerate(end):
                if known.step == step.step:
                    end[i] = step
                    return
        if len(self._first) < ENDS:
            self._first.append(step)
        else:
            self._last = [*self._last, step][-ENDS:]

    @property
    def _held(self) -> float | None:
        return concentration(self._last)

    def _grown(self) -> Trend | None:
        return trend(self._first, self._last) if len(self._last) == ENDS else None

    def head(self) -> tuple[str, ...]:
        if self._terms is None:
            return ()
        terms = self._terms
        named = [rule.name for rule in terms.contract.slices]
        if self._own is not None:
            limits = f"contract {self.asked.contract}"
        else:
            limits = f"preset   {terms.preset}, {terms.why}   (servanda contract presets --show "
            limits += f"{terms.preset})"
        return (
            f"found    {FORMATS[self._format].framework} in {self.asked.path}",
            limits,
            f"slices   {', '.join(named) or 'none: too few tokens a step, or all alike'}",
            *(f"         {note}" for note in terms.left_out),
            f"each     step is judged alone, at confidence {terms.contract.confidence:g}"
            + (
                f"; a slice it does not decide, with the last {terms.window}"
                if terms.window > 1
                else ""
            ),
        )

    def kept(self) -> dict[str, Any]:
        terms = self._terms
        return {
            "format": self._format,
            "asked": [self.asked.format, self.asked.preset, _text(self.asked.contract)],
            "terms": None
            if terms is None
            else {
                "text": terms.text,
                "preset": terms.preset,
                "why": terms.why,
                "window": terms.window,
                "left_out": [*terms.left_out],
                "kinds": [[list(pair) for pair in kind] for kind in terms.kinds],
            },
            "judged": [[step, stamp] for step, stamp in self._judged.items()],
            "odd": self._odd,
            "digests": [] if self._sound is None else [*self._sound.steps.items()],
            "first": [plain(step) for step in self._first],
            "last": [plain(step) for step in self._last],
        }

    def resume(self, kept: Mapping[str, Any]) -> None:
        asked = [self.asked.format, self.asked.preset, _text(self.asked.contract)]
        if kept["asked"] != asked:
            raise ContractError(
                "the state was kept with another --as, --preset or --contract",
                hint="repeat the options of that watch, or name another --state-file",
            )
        self._format = kept["format"]
        if (terms := kept["terms"]) is not None:
            contract = read(terms["text"].encode(), "the kept contract", self.asked.path)
            kinds = tuple(tuple((n, v) for n, v in kind) for kind in terms["kinds"])
            self._terms = Terms(
                terms["text"],
                contract,
                terms["preset"],
                terms["why"],
                kinds,
                terms["window"],
                tuple(terms.get("left_out", ())),
            )
        self._judged = dict(kept["judged"])
        self._before = dict(self._judged)
        self._odd = {name: (odd, whole) for name, (odd, whole) in kept.get("odd", {}).items()}
        self._sound = Soundness()
        self._sound.steps.update(kept.get("digests", ()))
        self._first, self._last = map(steps_of, (kept["first"], kept["last"]))
        self._trend = self._grown()


def _sure(name: str, path: Path) -> bool:
    found = FORMATS[name].sniff(path if path.is_dir() else path.parent)
    return found is not None and found.sure


def _stamp(dump: Dump, step: int) -> str:
    """Of the files of a step: another one where any of them has changed."""
    digest = blake2b(digest_size=8)
    for file in dump.found.files:
        if file.step == step:
            about = file.path.stat()
            digest.update(repr((file.name, about.st_size, about.st_mtime_ns)).encode())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
