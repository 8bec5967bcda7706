# Rewriting: replaces values in the text of a contract, with all other characters unchanged.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from servanda.contract.model import Place
from servanda.contract.yaml_reader import Source
from servanda.errors import ContractError

# kernels may use either key
_WORDS = {"train": ("train", "reference"), "infer": ("infer", "candidate")}
_NONE: Mapping[Place, str] = MappingProxyType({})
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")  # an anchor stands before its value


def rewritten(text: str, values: Mapping[Place, str], notes: Mapping[Place, str] = _NONE) -> str:
    """The text of a contract with some scalars replaced.

    Args:
        text: text of a valid contract.
        values: place -> new text, such as ("statistical", 0, "at_most") -> "0.02".
        notes: place -> comment, on a separate line above its value.

    Raises:
        ContractError: two places are one by an alias, with different values.
    """
    root = YAML(typ="safe", pure=True).compose(text)
    spans: dict[tuple[int, int], str] = {}
    above: dict[int, str] = {}  # where a line starts -> the lines that go before it
    for place, value in values.items():
        node = _node(root, place)
        start, end = node.start_mark.index, node.end_mark.index
        if match := _PROPERTIES.match(text, start, end):
            start = match.end()
        if place in notes and (start, end) not in spans:
            line = text.rfind("\n", 0, start) + 1
            # with the indentation and the line end of the next line
            old = text[line:].split("\n", 1)[0]
            indent = old[: len(old) - len(old.lstrip(" \t"))]
            note = f"{indent}# {notes[place]}" + ("\r\n" if old.endswith("\r") else "\n")
            above[line] = above.get(line, "") + note
        if spans.setdefault((start, end), value) != value:
            raise ContractError(
                f"one text stands for two limits through an alias, which are now "
                f"{spans[start, end]} and {value}",
                where=Source(text, "the contract").where(start),
                hint="write the number out in each clause",
            )
    edits = spans | {(line, line): comment for line, comment in above.items()}
    for (start, end), value in sorted(edits.items(), reverse=True):
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
