# Writes the tables of docs/reference/ that come from the registries: python scripts/reference.py
#
# A test holds the pages in step with the code.

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
from pydantic import BaseModel

from servanda.authoring.diff.difference import RULES
from servanda.authoring.diff.directions import Part
from servanda.cli.commands import FIRST, GROUPS, exit_codes
from servanda.cli.main import EXAMPLES, main
from servanda.contract.actions import ACTIONS
from servanda.contract.clause import printed_metric
from servanda.contract.model import Contract
from servanda.contract.presets import PRESETS, preset_text, title
from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.lint.sections import RUNTIME_METRICS
from servanda.judgement.slices.rules import FIELDS, LABEL, OPERATORS
from servanda.report.explain.contract import of_guard, of_metric
from servanda.runner import load
from servanda.theory.divergence.base import DIVERGENCES

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_HEAD = "<!-- written by scripts/reference.py -->\n"
_KNOWN = {
    "request": "before the request",
    "context": "before the token",
    "outcome": "after the token",
}
_DOORS = {"rl": "a trainer", "gateway": "a gateway", "promotion": "a promotion"}


def _table(*rows: tuple[str, ...]) -> str:
    head, *rest = rows
    lines = [head, tuple("---" for _ in head), *rest]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )


def metrics() -> str:
    """The page of metrics and validity checks."""
    rows = [("metric", "unit", "maximum", "numerical", "statistical", "definition")]
    for name, metric in DIVERGENCES.items():
        sampled = metric.sampled_form is not None
        mean = "mean, pN" if metric.bounded else "pN; mean with `clip`"
        rows.append(
            (
                f"`{name}`",
                metric.unit,
                f"{metric.span[1]:g}" if metric.bounded else "",
                "✓" if "logits" in metric.forms else "",
                mean if sampled else "",
                of_metric(name),
            )
        )
    runtime = [("metric", "unit", "limit", "takes", "definition")]
    for name, metric in RUNTIME_METRICS.items():
        takes = ["`aggregate`"] * metric.aggregate + ["`load`"] * metric.load
        limit = f"`{metric.limit}: {metric.example}`"
        runtime.append((f"`{name}`", metric.unit, limit, ", ".join(takes), metric.meaning))
    chain = [("metric", "definition", "example")]
    chain += [(f"`{name}`", m.meaning, f"`{m.example}`") for name, m in CHAIN.items()]
    checks = [("check", "in verdicts and logs", "requirement")]
    for name in GUARDS:
        printed = printed_metric(name)
        stored = f"`{name}`" if printed != name else ""
        checks.append((f"`{printed}`", stored, of_guard(name)))
    return (
        f"{_HEAD}# Metrics and validity checks\n\n"
        "`servanda contract explain NAME` prints more about each. Other projects have [other names "
        "for some of\nthem](metric_names.md).\n\n"
        "## Tokens\n\n"
        f"{_table(*rows)}\n\n"
        "pN with `at_most: L` promises that at most (100 − N) % of the tokens exceed L.\n\n"
        "## Rewards and gradients\n\n"
        "Write these under `statistical`. Their meaning depends on `reward:` and `gradient:`.\n\n"
        f"{_table(*chain)}\n\n"
        "## Time, speed and batching\n\nWrite these under `runtime.clauses`.\n\n"
        f"{_table(*runtime)}\n\n"
        "## Validity checks\n\n"
        "Write these under `observability.clauses`. A validity check is a precondition: where it "
        "fails, the\nstatistical clauses are inconclusive. Verdicts and logs have another name for "
        "three of them.\n\n"
        f"{_table(*checks)}\n"
    )


def fields() -> str:
    """The page of slice fields, operators and actions."""
    rows = [("field", "known", "values", "meaning")]
    rows.append((f"`{LABEL}<name>`", _KNOWN["request"], "texts", "a label of the prompt"))
    for name, field in FIELDS.items():
        values = ", ".join(field.values) if field.values else "numbers"
        rows.append((f"`{name}`", _KNOWN[field.known], values, field.meaning))
    actions = [("action", "taken by", "effect")]
    for name, action in ACTIONS.items():
        written = f"`{{{name}: {action.example}}}`" if action.example else f"`{name}`"
        actions.append((written, ", ".join(map(_DOORS.__getitem__, action.doors)), action.summary))
    operators = ", ".join(f"`{name}`" for name in OPERATORS)
    return (
        f"{_HEAD}# Slice fields and actions\n\n"
        f"{_table(*rows)}\n\n"
        "Fields that are known before the request can route it. On a slice that is known only "
        "after the token,\nonly `mass_gap` and `tv_contribution` are defined.\n\n"
        f"Operators of `match`: {operators}. Texts take `in` and `exists`. Each number can be "
        "taken modulo a block size: `{request.prompt_tokens % 64: {in: [1]}}`.\n\n"
        "## Actions of an escalation\n\n"
        f"{_table(*actions)}\n"
    )


def codes_of(text: str) -> dict[str, str]:
    """The exit codes that a help states, and what each says there."""
    _, _, stated = " ".join(text.split()).partition("Exit codes: ")
    return dict(re.findall(r"(\d+) (.*?)(?:; (?=\d)|\.(?= |$).*)", stated))


def _exit_codes() -> str:
    """A row for all commands, and one for each."""
    columns = ("0", "1", "2", "3", "4")
    rows = [("command", *columns)]
    for words in ("", *EXAMPLES):
        codes = codes_of(exit_codes(words))
        name = f"`{words}`" if words else "**in general**"
        rows.append((name, *(codes.get(code, "") for code in columns)))
    return _table(*rows)


def _command(parent: click.Context, command: click.Command | None) -> str:
    """The help of a command, and of the commands in it."""
    assert command is not None
    context = click.Context(command, info_name=command.name, parent=parent, terminal_width=100)
    path = context.command_path.removeprefix("servanda ")
    parts = [f"### {path}\n\n```text\n{command.get_help(context)}\n```\n"]
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        within = click.Context(part, info_name=part.name, parent=context, terminal_width=100)
        parts.append(f"```text\n{part.get_help(within)}\n```\n")
    return "\n".join(parts)


def cli() -> str:
    """The page of verbs, options and exit codes, from click's own help."""
    parts = [
        f"{_HEAD}# The command line\n",
        "Defaults of options may be in [environment variables](environment.md).\n",
        f"## Exit codes\n\n{_exit_codes()}\n",
        "An error of Servanda itself, and a package that is not installed, end every command with "
        "4. Code 130 means\ninterrupted: the same command goes on.\n",
    ]
    parts.append(
        "## Shell completion\n\n"
        "One line in the file that your shell reads at its start completes commands, options and "
        "files:\n\n"
        "```sh\n"
        'eval "$(_SERVANDA_COMPLETE=bash_source servanda)"     # ~/.bashrc\n'
        'eval "$(_SERVANDA_COMPLETE=zsh_source servanda)"      # ~/.zshrc\n'
        "_SERVANDA_COMPLETE=fish_source servanda | source      # ~/.config/fish/config.fish\n"
        "```\n"
    )
    root = click.Context(main, info_name="servanda", **main.context_settings)
    parts.append("## The first page\n")
    parts += [_command(root, main.get_command(root, name)) for name in FIRST]
    for name in GROUPS:
        group = main.get_command(root, name)
        assert isinstance(group, click.Group)
        within = click.Context(group, info_name=name, parent=root, **group.context_settings)
        parts.append(f"## servanda {name}\n")
        parts += [
            _command(within, group.get_command(within, part))
            for part in group.list_commands(within)
        ]
    return "\n".join(parts)


def presets() -> str:
    """The page of presets: what each is for, and every limit in it."""
    parts = [
        f"{_HEAD}# Presets\n",
        "Contracts whose limits have a source, for `servanda compare A B --preset NAME`. `servanda "
        "contract presets\n--show NAME` prints one with the reason for each limit. `compare` fills "
        "in your kernels, your prompts and the\nsplits of your labels. The presets of "
        "reinforcement learning also judge dumps (`servanda check DIR`).\n",
    ]
    for kind in dict.fromkeys(PRESETS.values()):
        parts.append(f"## {kind.capitalize()}\n")
        for name in (name for name, of in PRESETS.items() if of == kind):
            contract = load.contract_of(preset_text(name), name)
            rows = [("clause", "promise", "limit", "slices", "enforced")]
            for clause in (*contract.numerical, *contract.statistical):
                limit = clause.at_most if clause.at_most is not None else clause.at_least
                clip = f", clip {clause.clip:g}" if clause.clip is not None else ""
                monitored = clause.mode != "enforce" or clause.severity == "warning"
                rows.append(
                    (
                        f"`{clause.id}`",
                        f"{clause.aggregate} `{clause.metric}`{clip}",
                        f"{limit:g}" if isinstance(limit, float) else str(limit),
                        ", ".join(clause.slices or ()) or "every one",
                        "shown only" if monitored else "yes",
                    )
                )
            parts.append(
                f"### {name}\n\n{title(name)} Claim `{contract.claim}`.\n\n{_table(*rows)}\n"
            )
    return "\n".join(parts)


def sync_faults() -> str:
    """The page of what a weight sync may leave out."""
    rows = [("fault", "takes", "value", "what goes wrong", "met in the field")]
    rows += [
        (f"`{name}`", str(entry.takes), f"`{json.dumps(entry.default)}`", entry.summary, entry.seen)
        for name, entry in SYNC_FAULTS.items()
    ]
    return (
        f"{_HEAD}# The faults of a weight sync\n\n"
        "Each breaks the weight sync that a trainer runs after an update, and no kernel: at equal "
        "weights no metric\nshows "
        "it. [The preflight test](../how-to/preflight.md) detects and names each.\n"
        "`SYNC_FAULTS[NAME].inject(WeightSync, VALUE)` of `servanda.engines.faults.sync`\n"
        "creates one.\n\n"
        f"{_table(*rows)}\n"
    )


def changes() -> str:
    """The page of what a change of each key of a contract is."""
    parts = [
        f"{_HEAD}# How a change of a contract is classified\n",
        "How `diff` and `list` [classify a change](../how-to/contract_versions.md) of each key. A "
        "change that tightens in one\ndirection loosens in the other, and a part that is added in "
        "one direction is removed in the other. *Retargeted* means another\npromise: neither "
        "version implies the other. In a row of words `a < b` the tighter word comes last; a "
        "change between two\nwords joined by `=` is *retargeted*. Parts with keys of their own are "
        "compared key by key.\n",
    ]
    for model, places in _places(Contract).items():
        rows = [("key", "change", "reason")]
        for name, rule in RULES[model].items():
            scalar = getattr(rule, "scalar", None)
            if isinstance(rule, Part) and not rule.why and scalar is None:
                continue  # it is always there
            says = "added, removed" if isinstance(rule, Part) and scalar is None else rule.says
            key = model.model_fields[name].alias or name
            rows.append((f"`{key}`", says, rule.why or (scalar.why if scalar else "")))
        if rows[1:]:
            title = ", ".join(f"`{place}`" for place in places)
            parts.append(f"## {title or 'The contract'}\n\n{_table(*rows)}\n")
    return "\n".join(parts)


def _places(model: type[BaseModel]) -> dict[type[BaseModel], list[str]]:
    """Every model of the language, and the keys that lead to it from the one above."""
    found: dict[type[BaseModel], list[str]] = {model: []}
    for holder in iter(waiting := [model]):
        for name, field in holder.model_fields.items():
            for part in _models(field.annotation):
                if part not in found:
                    found[part] = []
                    waiting.append(part)
                above = found[holder][:1] if holder is not model else []
                found[part].append(".".join([*above, field.alias or name]))
    return found


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


PAGES = {
    "changes.md": changes,
    "cli.md": cli,
    "fields.md": fields,
    "metrics.md": metrics,
    "presets.md": presets,
    "sync_faults.md": sync_faults,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
