# Texts of tokens: of single ones, of whole answers, and of answers as they grow.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servanda.contract.identity import Description

_UNFINISHED = "�"  # a token may end within a character: its other bytes are to come


class Detokenizer:
    """What token ids read as; an engine that cannot decode has no texts."""

    def __init__(self, engine: Any, description: Description) -> None:
        self._engine, self._decodes = engine, description.decodes
        self._known: dict[int, str] = {}

    def text(self, tokens: Sequence[int]) -> str:
        return self._engine.decode([list(tokens)])[0] if self._decodes and tokens else ""

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token on its own; "" where the engine cannot decode."""
        new = [i for i in dict.fromkeys(ids) if i not in self._known and i >= 0]
        if new and self._decodes:
            texts = self._engine.decode([[i] for i in new])
            self._known.update(zip(new, texts, strict=True))
        return [self._known.get(i, "") for i in ids]


class StreamDetokenizer:
    """An answer as it grows: what each token adds to the text.

    Few tokens are decoded at a time: those of the last piece and the new ones, for what a token
    reads as hangs on what is before it.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._tokens: list[int] = []
        self._from, self._emitted = 0, 0  # the last piece is tokens[from:emitted]

    def after(self, tokens: Sequence[int]) -> str:
        """What more is said with these tokens; "" while a character is unfinished."""
        self._tokens += tokens
        text = self._detokenizer.text(self._tokens[self._from :])
        return "" if text.endswith(_UNFINISHED) else self._emit(text)

    def rest(self) -> str:
        """What is left at the end, finished or not."""
        return self._emit(self._detokenizer.text(self._tokens[self._from :]))

    def _emit(self, text: str) -> str:
        before = self._detokenizer.text(self._tokens[self._from : self._emitted])
        if self._emitted < len(self._tokens):
            self._from, self._emitted = self._emitted, len(self._tokens)
        return text[len(before) :]
