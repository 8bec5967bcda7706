# The JSON Schemas of contracts and of their tests, draft-07: what editors complete and check by.
#
# It says what the second pass of the parser says: keys, types, ranges, names.  What one part
# means for another is lint's, and a schema cannot say it.

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import TypeAdapter

from servanda.authoring.contract_test.model import ContractTest
from servanda.contract.clause import SECTIONS, printed_metric
from servanda.contract.finding import ALIASES
from servanda.contract.kernel_string import QUANTIZATIONS, dialect_names
from servanda.contract.model import API_VERSION, EXTERNAL, Contract
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.clauses.scope import OUTCOME_METRICS
from servanda.judgement.lint.sections import BARE, RUNTIME_METRICS, STATES, SUBJECTS, WITH_VALUE
from servanda.theory.divergence.base import DIVERGENCES

DRAFT = "http://json-schema.org/draft-07/schema#"
_FREE = {"^x-": True}  # keys that begin with x- are free everywhere
_SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_VALUES: Mapping[str, dict[str, Any]] = {
    "divert": {"enum": ["slice", "all"]},
    "page": {"type": "string", "minLength": 1},
}


def json_schema(engines: Collection[str], faults: Collection[str]) -> dict[str, Any]:
    """The schema, with the names that are registered as choices.

    Args:
        engines, faults: names that a kernel may use.
    """
    schema = _draft_07(TypeAdapter(Contract).json_schema())
    parts = schema["definitions"]
    kernel = parts["Kernel"]["properties"]
    kernel["engine"] |= {"enum": sorted({*engines, EXTERNAL})}
    kernel["quantization"] |= {"enum": [*QUANTIZATIONS, None]}
    kernel["dialect"] |= {"enum": [*dialect_names(), None]}
    fault = {"type": "object", "properties": dict.fromkeys(faults, True), "maxProperties": 1}
    kernel["fault"] |= {"anyOf": [{**fault, **_closed()}, {"type": "null"}]}
    metrics = {*DIVERGENCES.names(), *map(printed_metric, GUARDS), *RUNTIME_METRICS}
    metrics |= {*CHAIN, *OUTCOME_METRICS}
    parts["Clause"]["properties"]["metric"] |= {"enum": sorted(metrics)}
    escalation = parts["Escalation"]["properties"]
    escalation["when"] |= _when()
    escalation["do"]["items"] = _action()
    kernels = parts["Kernels"]
    for (*_, alias), stored in ALIASES.items():  # a required key: one of its names, not both
        kernels["properties"][str(alias)] = kernels["properties"][stored]
        kernels["required"] = [name for name in kernels["required"] if name != stored]
        one = {"oneOf": [{"required": [stored]}, {"required": [str(alias)]}]}
        kernels["allOf"] = [*kernels.get("allOf", []), one]
    return _titled("KernelContract", schema)


def schema_of_tests() -> dict[str, Any]:
    """The schema of contract tests; actions are those of contracts."""
    schema = _draft_07(TypeAdapter(ContractTest).json_schema())
    actions = schema["definitions"]["Expectation"]["properties"]["actions"]
    actions["anyOf"] = [{"type": "array", "items": _action()}, {"type": "null"}]
    return _titled("ContractTest", schema)


def schema_id(kind: str) -> str:
    """The `$id` of a schema: it follows the apiVersion, and no other version.

    It is a name, and nothing is fetched from it.

    >>> schema_id("KernelContract")
    'https://servanda.dev/schemas/v1alpha1/KernelContract.json'
    """
    group, _, version = API_VERSION.partition("/")
    return f"https://{group}/schemas/{version}/{kind}.json"


def _titled(title: str, schema: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in schema.items() if name != "title"}
    return {"$schema": DRAFT, "$id": schema_id(title), "title": title, **rest}


def _closed() -> dict[str, Any]:
    return {"additionalProperties": False, "patternProperties": _FREE}


def _draft_07(node: Any) -> Any:
    """pydantic's 2020-12 in the words of draft-07."""
    if isinstance(node, list):
        return [_draft_07(item) for item in node]
    if not isinstance(node, dict):
        return node
    new = {
        "definitions" if name == "$defs" else name: _draft_07(value)
        for name, value in node.items()
        if name not in ("discriminator", "default")
        # pydantic makes up titles from names; a property may be called title, too
        if name != "title" or not isinstance(value, str)
    }
    if "prefixItems" in new:
        new |= {"items": new.pop("prefixItems"), "additionalItems": False}
    if isinstance(new.get("$ref"), str):
        new["$ref"] = new["$ref"].replace("#/$defs/", "#/definitions/")
        if len(new) > 1:  # draft-07 reads nothing beside a $ref
            new = {"allOf": [{"$ref": new.pop("$ref")}], **new}
    if new.get("additionalProperties") is False:
        new |= _closed()
    if "default" in node and not isinstance(node["default"], dict | list):
        new["default"] = node["default"]
    return new


def _when() -> dict[str, Any]:
    state = {"enum": [*STATES]}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    compared = dict.fromkeys(("gte", "gt", "lte", "lt"), share)
    subjects = {
        "clause": {"type": "string"},
        "section": {"enum": [*SECTIONS]},
        "diverted_traffic": {"type": "object", "properties": compared, "minProperties": 1},
    }
    return {
        "type": "object",
        "properties": {**{name: subjects[name] for name in SUBJECTS}, "is": state, "is_not": state},
        **_closed(),
    }


def _action() -> dict[str, Any]:
    with_value = [
        {
            "type": "object",
            "properties": {name: _VALUES.get(name, _SHARE)},
            "required": [name],
            **_closed(),
        }
        for name in WITH_VALUE
    ]
    return {"anyOf": [{"enum": [*BARE]}, *with_value]}
