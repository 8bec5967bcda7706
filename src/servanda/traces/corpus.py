# Prompts and golden texts: JSON lines, read with their place.

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from servanda.errors import ContractError, Where
from servanda.traces.json_fields import LineError, check_keys, ids_of, parse_line, read_lines, words

_KEYS = (
    "a line has 'prompt' (text) or 'token_ids', and may have 'labels', 'group', 'answer', "
    "and keys that begin with x-"
)
_KNOWN = ("prompt", "messages", "token_ids", "labels", "group", "answer")


@dataclass(frozen=True)
class Prompt:
    """One line of a corpus; a golden text is a prompt that is scored itself."""

    line: int
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    group: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Corpus:
    """A file of prompts; `text` is all of it."""

    file: str
    prompts: tuple[Prompt, ...]
    digest: str
    text: str = field(default="", compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each prompt group, in file order; a prompt without a group is its own."""
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            name = f"g{prompt.group}" if prompt.group is not None else f"#{row}"
            rows.setdefault(name, []).append(row)
        return tuple(tuple(r) for r in rows.values())

    def given(self, row: int) -> dict[str, Any]:
        """A line as it was written, all its keys; a new object each time."""
        return json.loads(self._lines[self.prompts[row].line - 1])

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    def label_values(self, label: str) -> Counter[str]:
        return Counter(p.labels[label] for p in self.prompts if label in p.labels)

    @classmethod
    def parse(cls, text: str, file: str) -> Corpus:
        """All lines of a file.

        Raises:
            ContractError: no prompt, or invalid lines, each with its place.
        """
        prompts = read_lines(text, file, _prompt, _KEYS, ContractError)
        if not prompts:
            raise ContractError(f"{file}: there is no prompt in this file", hint=_KEYS)
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
        return cls(file, tuple(prompts), digest, text)


def joined(texts: Sequence[tuple[int, ...]], first: int, length: int) -> tuple[int, ...]:
    """`length` tokens of concatenated texts from `first` on, continuing at the beginning if needed.

    >>> joined([(1, 2), (3,)], 1, 4)
    (3, 1, 2, 3)
    """
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += texts[first % len(texts)]
        first += 1
    return tuple(tokens[:length])


def _prompt(line: str, where: Where) -> Prompt:
    data = parse_line(line, "prompt", nan=True)
    found = media(data) or [part_of(data.get("messages")) or part_besides_text(data.get("prompt"))]
    if found[0]:
        raise LineError(
            f"{words(repr(found[0]))}: {NOT_READ}", "leave out the prompts that have them"
        )
    check_keys(data, "a line", _KNOWN)
    text, ids = data.get("prompt"), data.get("token_ids")
    if "messages" in data:
        raise LineError("'messages' need a chat template: render them to 'prompt' first")
    if (text is None) == (ids is None):
        raise LineError("a line has either 'prompt' or 'token_ids'")
    if text is not None and (not isinstance(text, str) or not text):
        raise LineError("'prompt' is a text of at least one character")
    labels = data.get("labels", {})
    if not isinstance(labels, dict):
        raise LineError("'labels' is an object of texts")
    group, answer = data.get("group"), data.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise LineError("'answer' is a text or a number")
    return Prompt(
        line=where.line,
        text=text or "",
        token_ids=ids_of(ids, "'token_ids'") if ids is not None else None,
        labels={str(k): str(v) for k, v in labels.items() if v is not None},
        group=str(group) if group is not None else None,
        answer=str(answer) if answer is not None else None,
    )


# Images, video and sound beside a text, by the names that trainers and servers give them.
#
# Nothing here reads them: token ids hold a placeholder for an image, and not what it shows.

_KINDS = ("image", "video", "audio")
# beside those that begin with a kind, such as images, image_url, image_grid_thw, video_grid_thw
_NAMES = (
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask", "input_features"),
    *("multi_modal_data", "multi_modal_inputs", "multimodal_inputs", "multimodal_train_inputs"),
    *("multi_modal_uuids", "mm_processor_kwargs", "mm_token_type_ids"),
)
NOT_READ = (
    "images, video and sound are not read: a prompt is text or token ids here, and neither holds "
    "what an image shows"
)


def is_medium(name: str) -> bool:
    """Whether a key, a column or a type of content names images, video or sound.

    >>> [is_medium(name) for name in ("images", "input_audio", "pixel_values", "prompt")]
    [True, True, True, False]
    """
    return name.removeprefix("input_").startswith(_KINDS) or name in _NAMES


def media(names: Iterable[str]) -> list[str]:
    """Those of the names that are images, video or sound."""
    return [name for name in names if is_medium(name)]


def part_besides_text(content: Any) -> str:
    """The type of the first part of a message's content that is no text; "" if there is none."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text"):
            return str(kind)
        if isinstance(part, Mapping) and (found := media(map(str, part))):
            return found[0]
    return ""


def part_of(messages: Any) -> str:
    """The same of a chat: of the first message that has such a part."""
    if not isinstance(messages, list):
        return ""
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    return next(filter(None, map(part_besides_text, contents)), "")
