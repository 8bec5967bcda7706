# Rewriting: other values in the text of a contract, and every other character as it was.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from servanda.contract import Place
from servanda.errors import ContractError, Where

# kernels may stand under either word
_WORDS = {"train": ("train", "reference"), "infer": ("infer", "candidate")}
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")  # an anchor stands before its value


def rewritten(text: str, values: Mapping[Place, str]) -> str:
    """The text of a contract with some of its scalars written anew.

    Args:
        text: of a contract that was read without a problem.
        values: place -> how it is written, such as ("statistical", 0, "at_most") -> "0.02".

    Raises:
        ContractError: two of the places are one through an alias, and want different values.
    """
    root = YAML(typ="safe", pure=True).compose(text)
    spans: dict[tuple[int, int], str] = {}
    for place, value in values.items():
        node = _node(root, place)
        start, end = node.start_mark.index, node.end_mark.index
        if match := _PROPERTIES.match(text, start, end):
            start = match.end()
        if spans.setdefault((start, end), value) != value:
            raise ContractError(
                f"one text stands for two limits through an alias, which are now "
                f"{spans[start, end]} and {value}",
                where=_where(text, start),
                hint="write the number out in each clause",
            )
    for (start, end), value in sorted(spans.items(), reverse=True):
        text = f"{text[:start]}{value}{text[end:]}"
    return text


def _node(node: Node, place: Sequence[str | int]) -> Node:
    for part in place:
        if isinstance(node, SequenceNode):
            node = node.value[part]
            continue
        assert isinstance(node, MappingNode)
        words = _WORDS.get(str(part), (part,))
        node = next(value for key, value in node.value if key.value in words)
    assert isinstance(node, ScalarNode)
    return node


def _where(text: str, offset: int) -> Where:
    before = text[:offset].split("\n")
    return Where(
        "the contract", len(before), len(before[-1]) + 1, text.split("\n")[len(before) - 1]
    )
