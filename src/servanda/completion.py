# A preset, two kernels and a corpus -> the text of a contract, for keeping.
#
# It is made as text, so that the comments which give a limit its reason survive, and is then
# read like any other contract.  A preset's top-level blocks are replaced whole.

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from servanda.contract import Claim, Contract, Kernel, SliceRule, WorkloadSampling
from servanda.corpus import Corpus
from servanda.slices import LABEL
from servanda.stats import units_at_best

_MOST = 8  # values of a label that become slices
_AMPLE = 1.5  # times the units that identical kernels would need
_EDGES = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)  # of prompt_tokens
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "~", ".", "..")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SLICED = "slices: [depth]"
_WHOLE_AND_SLICED = "slices: [all, depth]"


@dataclass(frozen=True)
class Parts:
    """What a preset leaves open.

    Args:
        prompts, golden: paths as the contract is to name them; golden_path: how infer scores
            the golden texts, None: as it is by default.
        slices: besides the whole.
        sizes: promotion.offline.sequences.
        round, samples: of the workload; None: as it is by default.
        against_stable: whether the candidate is also held against the stable kernel.
        no_golden: why there are no numerical clauses, where there are none.
        head: lines of comment before everything.
    """

    name: str
    train: Kernel
    infer: Kernel
    prompts: str
    sampling: WorkloadSampling
    sizes: tuple[int, int]
    slices: tuple[SliceRule, ...] = ()
    claim: Claim = "population"
    stable: Kernel | None = None
    golden: str | None = None
    golden_path: str | None = None
    round: int | None = None
    samples: int | None = None
    no_golden: str = "no golden texts were given"
    head: tuple[str, ...] = field(default=())


def completed(preset: str, parts: Parts) -> str:
    """The text of a preset with its open parts filled in."""
    kernels = [f"  train: {_kernel(parts.train)}", f"  infer: {_kernel(parts.infer)}"]
    blocks = {
        "claim": [f"claim: {parts.claim}"],
        "kernels": ["kernels:", *kernels],
        "workload": _workload(parts),
        "slices": ["slices:", *map(_slice, parts.slices)] if parts.slices else [],
        "promotion": [
            "promotion:",
            f"  offline: {{sequences: [{parts.sizes[0]}, {parts.sizes[1]}]}}",
        ],
    }
    if parts.stable is not None:
        blocks["kernels"].append(f"stable: {_kernel(parts.stable)}")
    if parts.golden is None:
        blocks["golden"] = []
        blocks["numerical"] = [f"# no numerical clauses: {parts.no_golden}"]
    else:
        path = f", path: {parts.golden_path}" if parts.golden_path else ""
        blocks["golden"] = [f"golden: {{prompts: {_text(parts.golden)}{path}}}"]
    text = re.sub(r"(?m)^  name: .*$", f"  name: {_text(parts.name)}", preset, count=1)
    lines = [line for line in _replaced(text.splitlines(), blocks) if not _placeholder(line)]
    sliced = _sliced(lines, [rule.name for rule in parts.slices])
    if parts.stable is not None:
        sliced = _against_stable(sliced)
    # the first two lines of a preset say what a preset is
    return "\n".join([*(f"# {line}" for line in parts.head), *sliced[2:]]) + "\n"


def of_trainer(
    preset: str,
    *,
    name: str,
    titles: tuple[str, str],
    slices: Sequence[SliceRule],
    sizes: tuple[int, int],
    head: Sequence[str] = (),
) -> str:
    """The text of a preset for tokens that come from a trainer.

    Args:
        titles: what reports call the train and the infer kernel.
        sizes: promotion.offline.sequences.
        head: lines of comment before everything.
    """
    blocks = {
        "kernels": [
            "kernels:",
            *(
                f"  {side}: {{engine: external, title: {_text(title)}}}"
                for side, title in zip(("train", "infer"), titles, strict=True)
            ),
            "weights: {changes: every_step}",
        ],
        "claim": ["claim: realised    # a gradient step uses these very tokens"],
        # no answer is longer: what its tokens can be sliced by is fixed before they are read
        "workload": ["workload: {source: trainer, sampling: {max_new_tokens: 131072}}"],
        "slices": ["slices:", *map(_matched, slices)] if slices else [],
        "promotion": ["promotion:", f"  offline: {{sequences: [{sizes[0]}, {sizes[1]}]}}"],
    }
    text = re.sub(r"(?m)^  name: .*$", f"  name: {_text(name)}", preset, count=1)
    lines = [line for line in _replaced(text.splitlines(), blocks) if not _placeholder(line)]
    lines = _sliced(lines, [rule.name for rule in slices])
    fidelity = next(i for i, line in enumerate(lines) if "metric: sampler_fidelity" in line)
    lines[fidelity] = (
        "    # without ranks nobody can test what the tokens were drawn from; shown instead:\n"
        "    # whether the weights train / infer can be those of two distributions\n"
        "    - {id: coherence, metric: coherence, mode: monitor}"
    )
    return "\n".join([*(f"# {line}" for line in head), *lines[2:]]) + "\n"


def _matched(rule: SliceRule) -> str:
    if rule.match is None:
        return _slice(rule)
    terms = ", ".join(
        f"{name}: {{{', '.join(f'{op}: {_value(v)}' for op, v in terms.items())}}}"
        for name, terms in rule.match.items()
    )
    return f"  - {{name: {_text(rule.name)}, match: {{{terms}}}}}"


def _placeholder(line: str) -> bool:
    return line.startswith(("# placeholders:", "# compare adds"))


def _replaced(lines: Sequence[str], blocks: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines with whole top-level blocks replaced."""
    found, inside = [], False
    for line in lines:
        top = bool(line) and not line[0].isspace()
        if top:
            key = line.split(":", 1)[0]
            inside = key in blocks
            if inside:
                found += blocks[key]
        if not line:
            inside = False
        if not inside:
            found.append(line)
    return found


def _sliced(lines: Sequence[str], names: Sequence[str]) -> list[str]:
    """Lines whose clauses on slices name those that there are."""
    both, only = (f"slices: [{', '.join(some)}]" for some in (["all", *names], names))
    kept = lines if names else [line for line in lines if _SLICED not in line]
    return [line.replace(_WHOLE_AND_SLICED, both).replace(_SLICED, only) for line in kept]


def _against_stable(lines: Sequence[str]) -> list[str]:
    at = [*lines].index("statistical:") + 1
    clause = (
        "{id: against-today, metric: tv, aggregate: mean, at_most: {times: 1.0, of: stable}, "
        "mode: monitor, slices: [all]}"
    )
    told = "  # is the candidate as near to the referee as today's kernel is?  Shown, not enforced"
    return [*lines[:at], told, f"  - {clause}", *lines[at:]]


def _workload(parts: Parts) -> list[str]:
    sampling = ", ".join(
        f"{name}: {json.dumps(value)}"
        for name, value in parts.sampling.model_dump().items()
        if value is not None
    )
    lines = ["workload:", f"  prompts: {_text(parts.prompts)}"]
    lines += [f"  round: {parts.round}"] if parts.round else []
    lines += [f"  samples: {parts.samples}"] if parts.samples else []
    return [*lines, f"  sampling: {{{sampling}}}"]


def _kernel(kernel: Kernel) -> str:
    """A kernel as a flow mapping: what decides its numbers, and what is not the default."""
    plain = Kernel(engine=kernel.engine)  # type: ignore[call-arg]
    always = ("engine", "model")
    if kernel.engine not in ("table", "pack") and kernel.url is None:
        always += ("dtype", "attention")
    items = [
        f"{name}: {_value(value)}"
        for name, value in kernel.model_dump(mode="json").items()
        if value is not None and (name in always or value != getattr(plain, name))
    ]
    return "{" + ", ".join(items) + "}"


def _slice(rule: SliceRule) -> str:
    at = "" if rule.at is None else f", at: [{', '.join(f'{edge:g}' for edge in rule.at)}]"
    return f"  - {{name: {_text(rule.name)}, split: {_text(rule.split or '')}{at}}}"


def _value(value: object) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    """A text as YAML: bare where nothing in it could be read as something else."""
    bare = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return value if bare else json.dumps(value, ensure_ascii=False)


def starting_slices(
    corpus: Corpus,
    lengths: Sequence[int],
    *,
    width: int,
    groups: int,
    limit: float,
    contract: Contract,
) -> tuple[tuple[SliceRule, ...], tuple[str, ...]]:
    """Slices that a run of this size can judge, and what was left out and why.

    Args:
        lengths: tokens of each prompt.
        width: new tokens of a sequence.
        groups: prompt groups of the whole run.
        limit: of a slice, as the mean of x.
        contract: whose claim and confidence decide how many units a slice needs.
    """
    needed = units_at_best(limit, 1 - contract.confidence)
    if needed is None:
        return (), ("no slice: a limit of 0 cannot be shown",)
    # tokens are the units of a realised claim
    each = width if contract.claim == "realised" else 1
    room = _Room(corpus, groups * each, _AMPLE * needed)
    rules: list[SliceRule] = []
    notes: list[str] = []
    for label in sorted({name for prompt in corpus.prompts for name in prompt.labels}):
        counts = corpus.label_values(label)
        if len(counts) < 2:
            continue
        if len(counts) > _MOST:
            notes.append(f"label {label!r} has {len(counts):,} values, more than {_MOST}")
        elif not _NAME.fullmatch(label) or label in ("all", "depth", "prompt_tokens"):
            notes.append(f"label {label!r} is no name for a slice")
        else:
            field = f"{LABEL}{label}"
            units = {value: room.labelled(label, value) for value in counts}
            rare = min(units, key=lambda v: units[v])
            if units[rare] < room.needed:
                notes.append(
                    f"label {label!r}: its value {rare!r} would have {units[rare]:,.0f} of the "
                    f"{room.needed:,.0f} units that its limit needs"
                )
            else:
                rules.append(_rule(label, field))
    edges = _edges(room, lengths)
    if edges:
        rules.append(_rule("prompt_tokens", "request.prompt_tokens", edges))
    if width >= 6:
        thirds = (float(width // 3), float(2 * width // 3))
        rules.append(_rule("depth", "context.position", thirds))
    return tuple(rules), tuple(f"not sliced: {note}" for note in notes)


def _rule(name: str, split: str, at: tuple[float, ...] | None = None) -> SliceRule:
    return SliceRule(name=name, split=split, at=at)  # type: ignore[call-arg]


@dataclass(frozen=True)
class _Room:
    corpus: Corpus
    whole: int  # units of the whole run
    needed: float  # units that a slice needs

    def units(self, met: Callable[[int], bool]) -> float:
        """Units of the groups of which some row is met."""
        groups = self.corpus.groups
        return self.whole * sum(any(map(met, group)) for group in groups) / len(groups)

    def labelled(self, label: str, value: str) -> float:
        prompts = self.corpus.prompts
        return self.units(lambda row: prompts[row].labels.get(label) == value)


def _edges(room: _Room, lengths: Sequence[int]) -> tuple[float, ...]:
    """Edges that leave every bucket of prompt lengths enough units; none for like lengths."""
    if max(lengths) < 4 * min(lengths):
        return ()
    edges = [0.0]
    for edge in (edge for edge in _EDGES if edge <= max(lengths)):
        below = room.units(partial(_within, lengths, edges[-1], edge))
        above = room.units(partial(_within, lengths, edge, math.inf))
        if min(below, above) >= room.needed:
            edges.append(edge)
    return tuple(edges[1:])


def _within(lengths: Sequence[int], low: float, high: float, row: int) -> bool:
    return low <= lengths[row] < high
