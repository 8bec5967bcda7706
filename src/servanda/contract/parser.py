# The contract language: text -> Contract, or every error at once, each with its place.
#
# Three passes: yaml_reader.read gives plain data and places, pydantic gives values, lint checks
# values against each other.  A value that the second pass rejects is replaced for the third, so
# that one reading finds all problems.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from servanda.contract.clause import TEXT
from servanda.contract.finding import Path
from servanda.contract.model import Contract
from servanda.errors import ContractError, Problem, Where
from servanda.registry import did_you_mean, quoted

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks

_Wrong = dict[Path, list[ErrorDetails]]
# checks values against each other: `lint.check` with the valid names
Rules = Callable[..., list[Problem]]

_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    # the lax numbers of Sampling
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
}
_RANGE = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_NOUNS = {
    "Envelope": "an envelope",
    "GroupAdvantage": "an advantage",
    "LabelSource": "a label",
    "Load": "a load",
    "NamedWorkload": "a workload",
    "Weights": "weights",
    "Escalation": "an escalation",
    "SliceRule": "a slice",
    "StageRule": "a stage",
    "WorkloadSampling": "sampling",
    "Relative": "a relative limit",
    "Kernels": "kernels",
    "Metadata": "metadata",
    "Observability": "observability",
    "Clause": "a clause",
    "Contract": "a contract",
    "Kernel": "a kernel",
}
_NEXT_MOVES = {
    "at_most": "a limit is a number, or {times: 1.1, of: stable}, or of: self_noise",
    "at_least": "a limit is a number",
    "slices": "name them, such as [all, domain]",
    "stages": "write a list, such as [offline, canary]",
    "match": "write {labels.domain: {in: [math]}}, or {context.entropy_nats: {gte: 3.0}}",
    "workload": "write {prompts: data/prompts.jsonl}",
    "workloads": "write {chat: {prompts: data/chat.jsonl}, code: {prompts: data/code.jsonl}}",
    "labels": "write {tenant: {from: api_key}}",
    "load": "write {concurrency: 8}",
    "advantage": "a number, or {group_size: 8}",
    "score_norm": "a number, or logit_space",
    "weighting": "naive, is, {tis: 2.0}, {mis: [0.5, 2.0]}, {icepop: [0.5, 2.0]} or {clip: 0.2}",
    "golden": "write {prompts: data/golden.jsonl}",
    "prompt_groups": "the first evaluation and the limit, such as [400, 6000]",
    "do": "write a list, such as [hold, {page: oncall}]",
}


@dataclass(frozen=True)
class Tongue:
    """A language in the style of contracts: its root model, and its words for messages.

    Args:
        nouns: name of a model -> its noun in messages; next_moves: key -> example of its form.
    """

    root: type[BaseModel]
    nouns: Mapping[str, str]
    next_moves: Mapping[str, str]


_KIND = "KernelContract"
_CONTRACTS = Tongue(Contract, _NOUNS, _NEXT_MOVES)

# placeholders for required keys, so that lint can check the rest of a broken contract
_STAND_INS: dict[str, Any] = {
    "id": "unnamed",
    "name": "unnamed",
    "metric": "tv",
    "prompts": "unnamed",
    "when": {},
    "do": ["hold"],
    "times": 1.0,
    "of": "self_noise",
}
_HARMLESS = ("apiVersion", "kind", "confidence", "claim")  # nothing else hangs on them


def parse(text: str, file: str, *, rules: Rules) -> tuple[Contract, Marks]:
    """The contract that a text states, and the place of each of its parts.

    Args:
        text: the whole text; the file is not read.
        file: its name, for messages.
        rules: checks values against each other.

    Raises:
        ContractError: all problems, in the order of the text.
    """
    from servanda.contract.yaml_reader import read  # ruamel.yaml, when a text is read

    data, marks, problems = read(text, file)
    kind = data.get("kind")
    # all of a document of another kind is wrong, and one problem says so
    if "kernels" not in data and kind != _KIND and ("kind" in data or "apiVersion" not in data):
        found = f"a {kind}, not a {_KIND}" if isinstance(kind, str) else f"no {_KIND}"
        hint = "give a .kernelcontract.yaml file; `servanda contract init` writes one"
        raise ContractError(f"this is {found}", where=marks.near(("kind",)), hint=hint)
    try:
        contract = _validated(data)
    except ValidationError as error:
        wrong = _grouped(error, data)
        problems += refused(error, data, marks, _CONTRACTS)
        if (rest := _mended(data, wrong)) is not None:
            broken = {_owner(path) for path in wrong}
            problems += rules(rest, marks, broken=broken)
    else:
        problems += rules(contract, marks)
        if not problems:
            return contract.placed(marks.near), marks
    raise ContractError.all(sorted(problems, key=_place))


def _validated(data: Mapping[str, Any]) -> Contract:
    """The contract of a text; plain data may also have the names of Python and of verdicts."""
    return Contract.model_validate(data, by_alias=True, by_name=False, context=TEXT)


def refused(
    error: ValidationError, data: Mapping[str, Any], marks: Marks, tongue: Tongue
) -> list[Problem]:
    """pydantic's errors for a text, each with its place, in plain words."""
    wrong = _grouped(error, data)
    problems = {path: _problem(path, errors, data, marks, tongue) for path, errors in wrong.items()}
    misspelt = _misspelt(wrong, tongue)
    return [problem for path, problem in problems.items() if path not in misspelt]


def _place(problem: Problem) -> tuple[int, int]:
    return (problem.where.line, problem.where.column) if problem.where else (0, 0)


def _grouped(error: ValidationError, data: Mapping[str, Any]) -> _Wrong:
    """Path in the data -> pydantic's errors; a union has one per branch."""
    wrong: _Wrong = {}
    for details in error.errors(include_url=False):
        path: Path = ()
        node: Any = data
        last = details["loc"][-1] if details["loc"] else ""
        if details["type"] == "too_short" and details["input"]:
            continue  # items were refused, and each has said so
        for name in details["loc"]:  # one that is not inside is a branch of a union
            inside = range(len(node)) if isinstance(node, list) else node
            if isinstance(inside, range | dict) and name in inside:
                path, node = (*path, name), _at(node, (name,))
        # a list that is too short lacks an item, but the list is what is wrong
        if details["type"] == "missing" and isinstance(last, str):
            path = (*path, last)
        wrong.setdefault(path, []).append(details)
    return wrong


def _problem(
    path: Path, errors: list[ErrorDetails], data: Mapping[str, Any], marks: Marks, tongue: Tongue
) -> Problem:
    details = errors[0]
    kind, found = details["type"], details["input"]
    context = details.get("ctx", {})
    whole = f"the {tongue.nouns[tongue.root.__name__].partition(' ')[2]}"
    at = next((i for i in range(len(path), 0, -1) if isinstance(path[i - 1], str)), 0)
    name = str(path[at - 1]) if at else whole
    where = marks.near(path)
    if "at" in context:  # a value that is a language of its own says where it is wrong
        return Problem(details["msg"], _inside(where, context["at"]), context["hint"])
    if kind == "extra_forbidden":
        noun, keys = _keys(path[:-1], tongue)
        message = f"{noun} has no key {quoted(name)}"
        return Problem(message, marks.key(path), _meant(name, keys)[1])
    if kind == "missing" and path[-1:] == details["loc"][-1:]:
        noun, _ = _keys(path[:-1], tongue)
        return Problem(f"{noun} needs the key {name!r}", where, f"add {name}: ...")
    hint = tongue.next_moves.get(name, "")
    if kind in _WANTED:
        wanted = " or ".join(dict.fromkeys(_WANTED.get(e["type"], "") for e in errors))
        hint = hint if path and at == len(path) else ""
        if len(path) == 2 and path[0] in ("labels", "workloads"):
            hint = tongue.next_moves[str(path[0])]
        message = f"{wanted} is wanted, found {_value_words(found)}"
        return Problem(message, where, hint or _retyped(wanted, found))
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        hint = did_you_mean(found, choices) if isinstance(found, str) else ""
        verb = "be" if at == len(path) else "hold"
        message = f"{name} cannot {verb} {_value_words(found).removeprefix('the text ')}"
        return Problem(message, where, hint or f"known: {', '.join(sorted(choices))}")
    if kind in _RANGE:
        words, bound = _RANGE[kind]
        message = f"{name} must be {words} {context[bound]:g}, found {quoted(found)}"
        return Problem(message, where, hint)
    if kind in ("missing", "too_long", "too_short"):
        last = max((e["loc"][-1] for e in errors if isinstance(e["loc"][-1], int)), default=0)
        size = context.get("max_length") or context.get("min_length") or last + 1
        count = len(_at(data, path))
        message = f"a list of {size} is wanted, found one of {count}"
        return Problem(message, where, hint)
    if kind in ("string_pattern_mismatch", "string_too_long"):
        message = f"{quoted(str(found))} cannot be a name"
        hint = "a name has letters, digits, '.', '_' and '-', begins with one of the first two, "
        return Problem(message, where, f"{hint}and has at most 80 characters")
    message = details["msg"].removeprefix("Value error, ")
    if kind == "finite_number":
        message = "a finite number is wanted"
    return Problem(f"{message}; found {_value_words(found)}", where, hint)


def _inside(where: Where, at: int) -> Where:
    """The place of a character of a text of one line, which may stand in quotes."""
    column = where.column + at + (where.text[where.column - 1 :][:1] in ("'", '"'))
    return replace(where, column=column) if column <= len(where.text) else where


def _misspelt(wrong: _Wrong, tongue: Tongue) -> set[Path]:
    """Keys that are missing only because another is misspelt: that is one mistake."""
    unknown = [path for path, errors in wrong.items() if errors[0]["type"] == "extra_forbidden"]
    meant = {
        (*path[:-1], _meant(str(path[-1]), _keys(path[:-1], tongue)[1])[0]) for path in unknown
    }
    return {path for path, errors in wrong.items() if errors[0]["type"] == "missing"} & meant


def _meant(name: str, keys: list[str]) -> tuple[str, str]:
    """The key that an unknown one was meant to be, or "", and a hint that says so.

    >>> _meant("metric:tv", ["id", "metric"])
    ('metric', 'write metric: tv')
    """
    unspaced = re.fullmatch(r"(\w+)[: ](\S.{0,40})", name)
    if unspaced and unspaced[1] in keys:
        return unspaced[1], f"write {unspaced[1]}: {unspaced[2]}"
    hint = did_you_mean(name, keys)
    near = re.fullmatch(r"did you mean '(.*)'\?", hint)
    return (near[1] if near else ""), hint


def _keys(path: Path, tongue: Tongue) -> tuple[str, list[str]]:
    """The noun of the mapping at a path, and its valid keys."""
    model = tongue.root
    for name in path:
        if isinstance(name, str) and name in model.model_fields:
            model = next(_models(model.model_fields[name].annotation), model)
    noun = tongue.nouns.get(model.__name__, model.__name__.lower())
    return noun, [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _at(data: Any, path: Path) -> Any:
    for name in path:
        data = data[name]
    return data


def _value_words(value: object) -> str:
    """A value in words.

    >>> _value_words("abc"), _value_words(None), _value_words(True), _value_words(3)
    ("the text 'abc'", 'nothing', 'true', 'the number 3')
    """
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {quoted(value)}"
    if value is None:
        return "nothing"
    return "a mapping" if isinstance(value, Mapping) else "a list"


def _retyped(wanted: str, found: object) -> str:
    """The hint if only the notation is wrong."""
    if "text" in wanted and isinstance(found, int | float):
        return "put it in quotes"
    if wanted == "true or false" and isinstance(found, str):
        return "write true or false, without quotes"
    if "number" in wanted and isinstance(found, str) and re.fullmatch(r"[-+.\deE]+", found):
        return "write it without quotes" if wanted == "a number" else "write it as 1, 2, 3, ..."
    return ""


def _owner(path: Path) -> Path:
    """The mapping that holds a wrong value."""
    while path and not isinstance(path[-1], str):
        path = path[:-1]
    return path[:-1]


def _mended(data: dict[str, Any], wrong: Iterable[Path]) -> Contract | None:
    """The contract without its wrong values; None if too much depends on one of them."""
    for path in wrong:
        owner = _owner(path)
        name = path[len(owner)] if path else ""
        if not owner and name not in _HARMLESS:
            return None
        try:
            mapping = _at(data, owner)
        except KeyError:
            return None
        mapping.pop(name, None)
        if name in ("apiVersion", "kind"):
            mapping[name] = get_args(Contract.model_fields[name].annotation)[0]
        elif name in _STAND_INS:
            mapping[name] = _STAND_INS[name]
    try:
        return _validated(data)
    except ValidationError:
        return None
