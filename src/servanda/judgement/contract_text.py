# A preset, two kernels and a corpus -> the text of a contract.
#
# Built as text, so that the comments with the reasons of limits are kept, and then parsed like any
# other contract.  Top-level blocks of a preset are replaced as a whole.

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from servanda.contract.clause import Claim, SliceRule
from servanda.contract.model import Kernel
from servanda.contract.workload import WorkloadSampling
from servanda.judgement.slices.rules import known

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "~", ".", "..")
_TV = re.compile(r"metric: tv, aggregate: mean, at_most: ([\d.]+)")
_SLICED = "slices: [depth]"
_WHOLE_AND_SLICED = "slices: [all, depth]"


@dataclass(frozen=True)
class Parts:
    """The parts that a preset leaves open.

    Args:
        prompts, golden: paths as written in the contract; golden_path: path by which infer scores
            the golden texts, None: the default.
        slices: besides the whole.
        sizes: promotion.offline.prompt_groups.
        round, samples: of the workload; None: the default.
        against_stable: whether the candidate is also compared with the stable kernel.
        no_golden: the reason if there are no numerical clauses.
        head: comment lines at the top.
        unrecorded: columns that an engine may not record and the contract does not require.
        bitwise: why equal bits are expected, as a comment; "" if they are not.
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
    unrecorded: tuple[str, ...] = ()
    bitwise: str = ""


def completed(preset: str, parts: Parts) -> str:
    """The text of a preset with its open parts filled in."""
    kernels = [f"  train: {_kernel(parts.train)}", f"  infer: {_kernel(parts.infer)}"]
    blocks = {
        "claim": [f"claim: {parts.claim}"],
        "kernels": ["kernels:", *kernels],
        "workload": _workload(parts),
        "slices": ["slices:", *map(_listed, parts.slices)] if parts.slices else [],
        "promotion": [
            "promotion:",
            f"  offline: {{prompt_groups: [{parts.sizes[0]}, {parts.sizes[1]}]}}",
        ],
    }
    if parts.stable is not None:
        blocks["kernels"].append(f"stable: {_kernel(parts.stable)}")
    if parts.bitwise:
        blocks["kernels"].append(f"bitwise: true    # {parts.bitwise}")
    if parts.golden is None:
        blocks["golden"] = []
        blocks["numerical"] = [f"# no numerical clauses: {parts.no_golden}"]
    else:
        path = f", path: {parts.golden_path}" if parts.golden_path else ""
        blocks["golden"] = [f"golden: {{prompts: {_text(parts.golden)}{path}}}"]
    lines = _filled(preset, parts.name, blocks)
    sliced = _sliced(lines, [rule.name for rule in parts.slices])
    if parts.stable is not None:
        sliced = _against_stable(sliced)
    for item in parts.unrecorded:
        sliced = [re.sub(rf"^(  record: .*?), {item}\b", r"\1", line) for line in sliced]
    # the first two lines of a preset explain presets
    return "\n".join([*(f"# {line}" for line in parts.head), *sliced[2:]]) + "\n"


def of_trainer(
    preset: str,
    *,
    name: str,
    titles: tuple[str, str],
    slices: Sequence[SliceRule],
    sizes: tuple[int, int],
    head: Sequence[str] = (),
    filtered: bool = False,
    bitwise: bool = False,
) -> str:
    """The text of a preset for tokens that come from a trainer.

    Args:
        titles: of the train and the infer kernel in reports.
        sizes: promotion.offline.prompt_groups.
        head: comment lines at the top.
        filtered: whether the source records removals by a filter, as a dump does.
        bitwise: whether both kernels compute the same bits.
    """
    blocks = {
        "kernels": [
            "kernels:",
            *(
                f"  {side}: {{engine: external, title: {_text(title)}}}"
                for side, title in zip(("train", "infer"), titles, strict=True)
            ),
            "weights: {changes: every_step}",
            *(["bitwise: true    # equal logprobs are expected, and show nothing"] * bitwise),
        ],
        "claim": ["claim: realised    # a gradient step uses these very tokens"],
        # no response is longer; slices are fixed before the tokens are read
        "workload": ["workload: {source: trainer, sampling: {max_new_tokens: 131072}}"],
        "slices": ["slices:", *map(_listed, slices)] if slices else [],
        "promotion": ["promotion:", f"  offline: {{prompt_groups: [{sizes[0]}, {sizes[1]}]}}"],
    }
    lines = _filled(preset, name, blocks)
    late = [rule.name for rule in slices if known(rule) == "outcome"]
    lines = _sliced(lines, [rule.name for rule in slices if rule.name not in late])
    if late:
        lines = _contributing(lines, late)
    fidelity = next(i for i, line in enumerate(lines) if "metric: sampler_fidelity" in line)
    lines[fidelity] = (
        "    # without ranks no one can test what the tokens were drawn from; shown instead:\n"
        "    # whether the weights train / infer can be those of two distributions\n"
        "    - {id: coherence, metric: weight_mean_check, mode: monitor}"
    )
    if filtered:
        lines[fidelity] += (
            "\n    # tokens that a filter of the trainer removed: a tenth; 60-71 % were seen"
            "\n    # (NeMo-RL#4243); a warning, for a filter may have other reasons than mismatch"
            "\n    - {id: kept, metric: kept_ratio, at_least: 0.9, severity: warning}"
        )
    return "\n".join([*(f"# {line}" for line in head), *lines[2:]]) + "\n"


def _listed(rule: SliceRule) -> str:
    return f"  - {slice_text(rule)}"


def slice_text(rule: SliceRule) -> str:
    """A slice as a contract has it, in one line."""
    if rule.match is None:
        at = "" if rule.at is None else f", at: [{', '.join(f'{edge:g}' for edge in rule.at)}]"
        default = SliceRule.model_fields["most"].default
        most = "" if rule.most == default else f", most: {rule.most}"
        return f"{{name: {_text(rule.name)}, split: {_text(rule.split or '')}{at}{most}}}"
    terms = ", ".join(
        f"{_text(name)}: {{{', '.join(f'{op}: {_value(v)}' for op, v in terms.items())}}}"
        for name, terms in rule.match.items()
    )
    return f"{{name: {_text(rule.name)}, match: {{{terms}}}}}"


def _filled(preset: str, name: str, blocks: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of a preset under another name, with whole top-level blocks replaced."""
    text = re.sub(r"(?m)^  name: .*$", f"  name: {_text(name)}", preset, count=1)
    replaced, inside = [], False
    for line in text.splitlines():
        top = bool(line) and not line[0].isspace()
        if top:
            key = line.split(":", 1)[0]
            inside = key in blocks
            if inside:
                replaced += blocks[key]
        if not line:
            inside = False
        if not inside:
            replaced.append(line)
    return [line for line in replaced if not line.startswith(("# placeholders:", "# compare adds"))]


def _sliced(lines: Sequence[str], names: Sequence[str]) -> list[str]:
    """Lines whose clauses name the existing slices."""
    both, only = (f"slices: [{', '.join(some)}]" for some in (["all", *names], names))
    sliced = lines if names else [line for line in lines if _SLICED not in line]
    return [line.replace(_WHOLE_AND_SLICED, both).replace(_SLICED, only) for line in sliced]


def _against_stable(lines: list[str]) -> list[str]:
    clause = (
        "{id: against-today, metric: tv, aggregate: mean, at_most: {times: 1.0, of: stable}, "
        "mode: monitor, slices: [all]}"
    )
    comment = (
        "  # is the candidate as near to the reference scorer as today's kernel?  Not enforced"
    )
    return _inserted(lines, comment, clause)


def _inserted(lines: list[str], comment: str, clause: str) -> list[str]:
    at = lines.index("statistical:") + 1
    return [*lines[:at], comment, f"  - {clause}", *lines[at:]]


def _contributing(lines: list[str], names: Sequence[str]) -> list[str]:
    """Lines with the contributions of slices of outcomes to the divergence, in monitor mode."""
    limit = next(match[1] for match in map(_TV.search, lines) if match)
    comment = "  # what these tokens add to the TV of all; known after the token, so not enforced"
    clause = (
        f"{{id: adds, metric: tv_contribution, aggregate: mean, clip: 1.0, at_most: {limit}, "
        f"mode: monitor, slices: [{', '.join(names)}]}}"
    )
    return _inserted(lines, comment, clause)


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
    """A kernel as a flow mapping: the fields that decide its numbers, if not the default."""
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


def _value(value: object) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    """A text as YAML: unquoted if it can only be parsed as this text."""
    bare = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return value if bare else json.dumps(value, ensure_ascii=False)
