# The JSON Schema: draft-07, and of one mind with the parser's second pass.

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator
from pydantic import ValidationError
from referencing import Registry, Resource

from servanda.authoring.schema import DRAFT, json_schema, schema_of_tests
from servanda.authoring.template import starter
from servanda.contract.model import API_VERSION, Contract
from servanda.contract.yaml_reader import read
from servanda.engines import engine_names
from servanda.engines.faults import FAULTS
from tests.contract.test_language import EXAMPLE
from tests.contract.test_messages import GOOD
from tests.contract.test_whole_language import TRAINER, WHOLE

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEMA = json_schema(engine_names(), [*FAULTS])
VALIDATOR = Draft7Validator(SCHEMA)
KINDS = ("KernelContract", "ContractTest")
TEXTS = {
    **{path.name: path.read_text() for path in sorted(EXAMPLES.rglob("*.kernelcontract.yaml"))},
    "the design's": EXAMPLE,
    "the messages'": GOOD,
    "the whole": WHOLE,
    "a trainer's": TRAINER,
    "the starter": starter("x.yaml", "x", "transformers", "m"),
}


def plain(text: str):
    """The data of a text as an editor sees it: synonyms and x- keys as they are written."""
    return json.loads(json.dumps(read(text, "x.yaml")[0]))


def parses(data) -> bool:
    try:
        Contract.model_validate(data)
    except ValidationError:
        return False
    return True


def test_it_is_a_schema_of_draft_07_without_a_word_that_it_lacks_and_knows_the_dialects():
    Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == DRAFT
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    text = json.dumps(SCHEMA)
    for word in ("$defs", "prefixItems", "unevaluatedProperties", "discriminator"):
        assert f'"{word}"' not in text
    kernel = SCHEMA["definitions"]["Kernel"]["properties"]["dialect"]
    assert kernel["enum"] == ["vllm", "sglang", "llamacpp", "lmdeploy", "plain", None]


def test_its_id_follows_the_api_version_and_other_schemas_may_refer_to_it():
    """A schema of a whole file of settings, which has a contract as its part."""
    tests = schema_of_tests()
    ids = [schema["$id"] for schema in (SCHEMA, tests)]
    assert ids == [f"https://servanda.dev/schemas/v1alpha1/{k}.json" for k in KINDS]
    assert API_VERSION == "servanda.dev/v1alpha1"
    registry = Registry().with_resources(
        [(one["$id"], Resource.from_contents(one)) for one in (SCHEMA, tests)]
    )
    settings = {"$schema": DRAFT, "properties": {"gate": {"$ref": SCHEMA["$id"]}}}
    validator = Draft7Validator(settings, registry=registry)
    contract = plain(GOOD)
    assert validator.is_valid({"gate": contract})
    broken = {**contract, "apiVersion": "servanda.dev/v2"}
    (error,) = validator.iter_errors({"gate": broken})
    assert error.message == "'servanda.dev/v1alpha1' was expected"


@pytest.mark.parametrize("name", [*TEXTS])
def test_what_the_parser_reads_the_schema_accepts(name):
    assert parses(plain(TEXTS[name]))
    assert [error.message for error in VALIDATOR.iter_errors(plain(TEXTS[name]))] == []


def test_x_keys_and_the_other_two_words_are_accepted():
    data = plain(TRAINER) | {"x-note": 1}
    data["kernels"] = {
        "reference": data["kernels"]["train"] | {"x-a": []},
        "candidate": data["kernels"]["infer"],
    }
    assert VALIDATOR.is_valid(data)
    data["kernels"]["train"] = data["kernels"]["reference"]
    assert not VALIDATOR.is_valid(data)


MUTATIONS = [
    (("confidence",), "0.95"),
    (("confidence",), 1.5),
    (("confidence",), None),
    (("metadata", "name"), "a b"),
    (("metadata", "version"), 1),
    (("metadata", "nam"), "x"),
    (("kernels", "infer", "dtype"), "fp8"),
    (("kernels", "infer", "batch_size"), 0),
    (("kernels", "infer", "batch_size"), 1.5),
    (("kernels", "infer", "batch_size"), True),
    (("kernels", "train", "mask"), "none"),
    (("workloads", "chat", "samples"), "2"),
    (("workloads",), {}),
    (("workloads",), []),
    (("weights", "changes"), "always"),
    (("labels", "tenant"), {"form": "api_key"}),
    (("labels", "tenant"), {}),
    (("slices", 1, "at"), [8, "16"]),
    (("slices", 0, "most"), 0),
    (("reward", "range"), [0]),
    (("reward", "range"), [0, 1, 2]),
    (("gradient", "advantage"), {"group_size": 1}),
    (("gradient", "weighting"), "nothing"),
    (("gradient", "weighting"), {"tis": 0.5}),
    (("statistical", 0, "aggregate"), "median"),
    (("statistical", 0, "at_most"), "0.02"),
    (("statistical", 0, "at_most"), {"times": 0, "of": "stable"}),
    (("statistical", 0, "at_most"), {"times": 2}),
    (("statistical", 0, "stages"), ["online"]),
    (("statistical", 0, "slices"), 5),
    (("statistical", 0, "severity"), "fatal"),
    (("statistical", 0, "over"), 5),
    (("statistical", 0, "over"), "5 minutes"),
    (("statistical", 0, "load"), {}),
    (("runtime", "envelope", "outside"), "drop"),
    (("escalation", 0, "do"), []),
    (("escalation", 0, "do"), "hold"),
    (("routing", "dwell"), 15),
    (("promotion", "offline", "prompt_groups"), [1]),
    (("promotion", "shadow", "share"), 0),
    (("promotion", "online"), {}),
    (("apiVersion",), "v1"),
    (("kind",), "Contract"),
    *(((key,), ...) for key in ("apiVersion", "kind", "metadata", "kernels")),  # missing
]


def edited(path, value):
    """The whole contract with another value at a path, or without it."""
    data = owner = plain(WHOLE)
    *owners, last = path
    for name in owners:
        owner = owner[name]
    if value is ...:
        del owner[last]
    else:
        owner[last] = value
    return data


@pytest.mark.parametrize(("path", "value"), MUTATIONS, ids=str)
def test_what_the_schema_refuses_the_parser_refuses_too(path, value):
    data = edited(path, value)

    assert not VALIDATOR.is_valid(data)
    assert not parses(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kernels", "infer", "engine"), "vlm"),
        (("kernels", "infer", "quantization"), "int8"),
        (("kernels", "infer", "fault"), {"none": 1}),
        (("statistical", 0, "metric"), "k33"),
        (("escalation", 0, "do"), ["holt"]),
        (("escalation", 0, "when"), {"claus": "tv"}),
    ],
    ids=str,
)
def test_names_of_the_registries_are_choices(path, value):
    assert not VALIDATOR.is_valid(edited(path, value))


def test_editors_show_what_a_key_means():
    clause = SCHEMA["definitions"]["Clause"]
    assert clause["description"].startswith("One promise")
    assert all("description" in prop or "$ref" in prop for prop in clause["properties"].values())


# Values for every key of the language, most of them right: what the schema then accepts, the
# parser's second pass accepts too.

# no 1.0: to draft-07 it is a whole number, to the contract it is not
_numbers = st.sampled_from([0, 0.5, 1, 2, 0.02, -1, 100, 10**6])
_scalars = st.one_of(
    _numbers,
    st.booleans(),
    st.none(),
    st.sampled_from(
        ["", "all", "tv", "mean", "p99", "15m", "1.5h", "stable", "x", "a b", "offline"]
    ),
)
_anything = st.one_of(
    _scalars,
    st.lists(_scalars, max_size=3),
    st.dictionaries(st.sampled_from(["times", "of", "gte", "prompts", "x-a", "name"]), _scalars),
)


def _leaves(data, path=()):
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from _leaves(value, (*path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield (*path, i)
            yield from _leaves(value, (*path, i))


_SPOTS = [path for path in _leaves(plain(WHOLE)) if path[:2] != ("metadata", "annotations")]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(_SPOTS), _anything), min_size=1, max_size=3))
def test_what_the_schema_accepts_the_parser_accepts(edits):
    data = plain(WHOLE)
    for (*owners, last), value in edits:
        owner = data
        try:
            for name in owners:
                owner = owner[name]
            owner[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # an edit before this one took its place away
    without_x = read(json.dumps(data), "x.yaml")[0]

    if VALIDATOR.is_valid(data):
        assert parses(without_x)
