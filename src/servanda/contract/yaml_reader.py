# A YAML text as plain data, and the place of every part of it.
#
# Scalars are read by the core schema of YAML 1.2: 1e-3 is a number, on and yes are text.
# Lines end at LF, CR LF or CR; lines and columns count characters from 1, a byte order
# mark is not counted.  A value that is reached through an alias has the place of its anchor, which
# contains its text.

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import Reader
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from servanda.contract.finding import Path, stored_key
from servanda.errors import ContractError, Problem, Where

MAX_DEPTH = 64
MAX_VALUES = 100_000  # after aliases are followed; a contract of 2,000 clauses has 30,000
MAX_DIGITS = 300  # a longer whole number is no float
MAX_LINE = 200  # most characters of the text in an error

_LINE_END = re.compile(r"\r\n|\n|\r")
_NOT_TEXT = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_VALUE = re.compile("[\0\ud800-\udfff]")
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)"
)

_INDENT = "check the indentation and the quotes"
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"

# the parser's messages, and their meaning for an author of a contract
_PLAIN_WORDS: tuple[tuple[str, str, str], ...] = (
    (r"found character '\\t'", "a tab cannot stand here", "use spaces"),
    (r"found character '(.)' that", "a value cannot begin with '{0}'", "put it in quotes"),
    (
        r"mapping values are not allowed",
        "a ':' is not expected here",
        "put a text that holds ': ' in quotes; or the line before lacks its ':'",
    ),
    (r"sequence entries are not", "a list item is not expected here", "begin it in a new line"),
    (r"found undefined alias '(.*)'", "no anchor is named '{0}'", "write &{0} before its value"),
    (r"found undefined tag handle", "a contract has no tags", "remove the tag"),
    (r"could not find expected ':'", "this line has no ':'", "write key: value, or - item"),
    (r"expected ',' or '(.)'", "a ',' or '{0}' is missing here", "it was opened in {1}"),
    (r"found unexpected end of stream", "this text is never closed", "close the quote"),
    (r"expected <block end>", "this does not fit the block that began in {1}", _INDENT),
    (r"expected '<document start>'", "this does not fit the block before it", _INDENT),
    (r"expected the node content", "a value is wanted here", "write one, or remove this"),
    (_TOO_DEEP, f"the text is {_TOO_DEEP}", "a contract needs about eight"),
    (r"found another document", "a file holds one contract; here a second begins", "split it"),
)


class Source:
    """A text and its name; turns offsets into places."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text.removeprefix("\ufeff")
        self.file = file
        self._starts = [0, *(end.end() for end in _LINE_END.finditer(self.text))]

    def line(self, offset: int) -> int:
        """The number of the line that holds an offset of a value."""
        return bisect.bisect_right(self._starts, offset)

    def where(self, offset: int) -> Where:
        """The place of an offset; one past the end is the end of the last line."""
        if offset >= len(self.text):
            offset = len(self.text.rstrip("\r\n"))
        line = self.line(offset)
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        column = min(offset, len(self.text[start:end].rstrip("\r\n")) + start) - start + 1
        # the caret counts columns, so a long line may lose its end but not its beginning
        shown = self.text[start : min(end, start + MAX_LINE)].rstrip("\r\n")
        if end - start > MAX_LINE:
            shown = f"{shown}…" if column <= MAX_LINE else ""
        if not shown.isprintable():
            shown = "".join(c if c.isprintable() else " " for c in shown)
        return Where(self.file, line, column, shown)

    def refuse(self, offset: int, message: str, hint: str = "") -> NoReturn:
        raise ContractError(message, where=self.where(offset), hint=hint)


class Marks(Mapping[Path, Where]):
    """Path of a value, such as ("statistical", 0, "metric") -> its place.

    `key` gives the place of the key instead; `near` that of the value or, where it is not
    in the text, of the nearest part around it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._values: dict[Path, int] = {}
        self._keys: dict[Path, int] = {}

    def note(self, path: Path, value: int, key: int | None = None) -> None:
        self._values[path] = value
        if key is not None:
            self._keys[path] = key

    def __getitem__(self, path: Path) -> Where:
        return self.source.where(self._values[path])

    def __iter__(self) -> Iterator[Path]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def key(self, path: Path) -> Where:
        return self.source.where(self._keys[path]) if path in self._keys else self.near(path)

    def near(self, path: Path) -> Where:
        while path and path not in self._values:
            path = path[:-1]
        return self[path]


class _NoGuesses(VersionedResolver):
    """Records whether a scalar is plain or quoted; its meaning is decided below."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Tag:
        plain = kind is ScalarNode and implicit[0]
        return Tag(suffix="plain" if plain else "quoted" if kind is ScalarNode else "collection")


class _Remembering(Reader):
    """Records the reading position, for errors without a place."""

    reached = 0

    def reset_reader(self) -> None:
        self.reached = max(self.reached, getattr(self, "index", 0))
        super().reset_reader()


class _Shallow(Composer):
    """Refuses deep nesting before Python does."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.warn_double_anchors = False  # YAML allows it: the later one counts
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, _TOO_DEEP, self.parser.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read(
    text: str, file: str, *, noun: str = "contract", listed: bool = False
) -> tuple[Any, Marks, list[Problem]]:
    """Plain data, places, and problems that do not stop the reading.

    Args:
        noun: name of the text in messages; listed: whether it is a list instead of a mapping.

    Raises:
        ContractError: unreadable: syntax errors, more than one document, endless aliases.
    """
    source = Source(text, file)
    odd = _NOT_TEXT.search(source.text)
    if odd and "\udc80" <= odd[0] <= "\udcff":
        message = f"byte 0x{ord(odd[0]) - 0xDC00:02x} is not UTF-8"
        source.refuse(odd.start(), message, "save as UTF-8")
    if odd:
        source.refuse(odd.start(), f"character U+{ord(odd[0]):04X} cannot stand here", "remove it")
    node = _compose(source)
    if node is None or (isinstance(node, ScalarNode) and node.value == ""):
        source.refuse(0, f"the {noun} is empty", "begin with apiVersion: and kind:")
    if not isinstance(node, SequenceNode if listed else MappingNode):
        found = "a list" if isinstance(node, SequenceNode) else "text"
        message = f"a {noun} is a mapping, found {found}"
        source.refuse(node.start_mark.index, message, "begin with apiVersion: and kind:")
    reading = _Reading(source, noun)
    return reading.value(node, (), node.start_mark.index), reading.marks, reading.problems


def _compose(source: Source) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Reader, yaml.Composer = _NoGuesses, _Remembering, _Shallow
    try:
        return yaml.compose(source.text)
    except MarkedYAMLError as error:
        raise _in_plain_words(error, source) from None
    except Exception as error:  # slips of the scanner, as on "\UFFFFFFFF"
        source.refuse(
            yaml.reader.reached,
            f"the YAML cannot be read here: {error}",
            "look for an escape that is no character",
        )


def _in_plain_words(error: MarkedYAMLError, source: Source) -> ContractError:
    found = error.problem or error.context or "not YAML"
    at = error.problem_mark or error.context_mark
    begun = error.context_mark
    # an unclosed part is found at the end of the text; report its beginning
    unclosed = "<stream end>" in found and found.startswith("expected ','")
    if begun is not None and (unclosed or "end of stream" in found or "expected ':'" in found):
        at = begun
    where = source.where(at.index if at is not None else 0)
    line = source.where(begun.index).line if begun is not None else where.line
    message, hint = f"the YAML cannot be read: {found}", ""
    if unclosed:
        message, hint = f"this '{source.text[begun.index]}' is never closed", "close it"  # type: ignore[union-attr]
    else:
        for pattern, plain, next_move in _PLAIN_WORDS:
            if match := re.search(pattern, found, re.DOTALL):
                words = ((*match.groups(), "")[0], f"line {line}")
                message, hint = plain.format(*words), next_move.format(*words)
                break
    return ContractError(message, where=where, hint=hint)


class _Reading:
    """One walk over the nodes: data, places, and problems that do not end the walk."""

    def __init__(self, source: Source, noun: str) -> None:
        self.source, self.noun = source, noun
        self.marks = Marks(source)
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: Node, path: Path, offset: int, key: int | None = None) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            self.source.refuse(
                offset,
                f"the {self.noun} has more than {MAX_VALUES} values",
                "look for aliases that repeat one another",
            )
        if id(node) in self._open:
            self.source.refuse(offset, "this value holds itself", "an alias may not lead back")
        self.marks.note(path, offset, key)
        tag = str(node.tag)
        if tag not in ("plain", "quoted", "collection"):
            self._add_problem(
                offset,
                f"a {self.noun} has no tags, found {tag.replace('tag:yaml.org,2002:', '!!')}",
                "remove the tag; a value in quotes is text",
            )
        if isinstance(node, ScalarNode):
            return self._scalar(node, offset, plain=tag == "plain")
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [
                    self.value(item, (*path, i), item.start_mark.index)
                    for i, item in enumerate(node.value)
                ]
            return self._mapping(node, path)
        finally:
            self._open.remove(id(node))

    def _mapping(self, node: Node, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        first: dict[str, tuple[str, int]] = {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.index
            written = self._key(key_node, at)
            if written is None:
                continue
            name = str(stored_key((*path, written)))
            # an empty value is given the place of its key: its own may be lines away
            empty = isinstance(value_node, ScalarNode) and str(value_node.tag) == "plain"
            empty = empty and value_node.value == ""
            spot = at if empty else value_node.start_mark.index
            if name in first:
                before, line = first[name]
                message = f"{before!r} and {written!r} are two words for one key"
                if before == written:
                    message = f"the key {written!r} is given twice; first in line {line}"
                self._add_problem(at, message, "keep one of them")
                continue
            first[name] = (written, self.source.line(at))
            value = self.value(value_node, (*path, name), spot, at)
            if not name.startswith("x-") or path[:2] == ("metadata", "annotations"):
                data[name] = value
        return data

    def _key(self, node: Node, at: int) -> str | None:
        if isinstance(node, ScalarNode) and str(node.tag) == "plain" and node.value == "<<":
            self.source.refuse(at, "YAML 1.2 has no merge key '<<'", "write the keys out")
        plain = str(node.tag) == "plain"
        key = self._scalar(node, at, plain=plain) if isinstance(node, ScalarNode) else node
        if isinstance(key, str):
            return key
        hint = "put it in quotes" if isinstance(node, ScalarNode) else "use a name"
        self._add_problem(at, "a key is text", hint)
        return None

    def _scalar(self, node: Node, offset: int, *, plain: bool) -> Any:
        text: str = node.value
        if odd := _NOT_VALUE.search(text):
            message = f"this text holds character U+{ord(odd[0]):04X}"
            self._add_problem(offset, message, "remove the escape")
            return _NOT_VALUE.sub("?", text)
        if not plain or (len(text) > MAX_DIGITS and not _INT.fullmatch(text)):
            return text
        if _NULL.fullmatch(text):
            return None
        if match := _BOOL.fullmatch(text):
            return match[1] is not None
        if _INT.fullmatch(text):
            if len(text) > MAX_DIGITS:
                message = f"a number of {len(text)} digits is too long"
                self._add_problem(offset, message, "shorten it")
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.fullmatch(text):
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return text

    def _add_problem(self, offset: int, message: str, hint: str) -> None:
        self.problems.append(Problem(message, self.source.where(offset), hint))
