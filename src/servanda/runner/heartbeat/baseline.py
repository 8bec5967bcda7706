# The reference of a heartbeat: requests, and the distribution of their answers.
#
# A kernel gives exact probabilities of the first text, and scores whole answers later.  An endpoint
# gives draws, and answers to seeds.

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from servanda.contract.identity import digest_of
from servanda.engines.cache import whole_file
from servanda.errors import MeasurementError

FORMAT = 1
_KIND = "reference of a heartbeat"
_ANEW = "make it anew: servanda tools heartbeat KERNEL_OR_URL --record FILE"
UNFINISHED = "�"  # what remains of a character that a token cut in two


@dataclass(frozen=True)
class Border:
    """A prompt after which several first texts are likely.

    Args:
        classes: the texts, stripped; any other text is one class more.
        p: their exact probabilities and that of any other, or (); draws: their counts, or ().
    """

    prompt: str
    classes: tuple[str, ...]
    p: tuple[float, ...] = ()
    draws: tuple[int, ...] = ()

    def answer(self, text: str) -> int:
        """The class of a text."""
        piece = plain(text)
        return self.classes.index(piece) if piece in self.classes else len(self.classes)


@dataclass(frozen=True)
class Replay:
    """A seeded request; `answer` is what it gave first, and `equal` whether it did so again."""

    prompt: str
    seed: int
    answer: str
    equal: bool


@dataclass(frozen=True)
class Baseline:
    """What a heartbeat holds an endpoint to.

    Args:
        source: kernel string or URL that it was made from; exact: by a kernel.
        served: name of the model in each request; "" of a kernel.
        temperature, top_p: of whole answers; border_temperature: of first tokens.
        width: new tokens of an answer; draws: of the kernel, for each answer that is ranked.
        prompts: of whole answers.
    """

    source: str
    exact: bool
    served: str
    chat: bool
    temperature: float
    top_p: float
    border_temperature: float
    width: int
    draws: int
    prompts: tuple[str, ...]
    borders: tuple[Border, ...]
    replays: tuple[Replay, ...] = ()

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            MeasurementError: it cannot be written.
        """
        told = {
            "servanda": _KIND,
            "format": FORMAT,
            "digest": self.digest,
            "baseline": asdict(self),
        }
        with whole_file(path, "name another file with --record") as made:
            made.write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")


def plain(text: str) -> str:
    """A text without blanks around it, in which engines differ, and without half a character."""
    return text.strip().rstrip(UNFINISHED).strip()


def read_baseline(path: Path) -> Baseline:
    """A reference from its file.

    Raises:
        MeasurementError: no such file, another kind, a newer version, or changed by hand.
    """
    if not path.exists():
        raise MeasurementError(f"there is no {_KIND} {path}", hint=_ANEW)
    told = read_json(path, _KIND, FORMAT, _ANEW)
    try:
        found = msgspec.convert(told["baseline"], Baseline)
    except (KeyError, msgspec.ValidationError) as error:
        raise MeasurementError(f"{path} is no {_KIND}: {error}", hint=_ANEW) from None
    if found.digest != told.get("digest"):
        raise MeasurementError(f"{path} is not what its digest says: it was changed", hint=_ANEW)
    return found


def read_json(path: Path, kind: str, newest: int, anew: str) -> dict[str, Any]:
    """The JSON of a file of ours.

    Raises:
        MeasurementError: it cannot be read, is another kind of file, or of a newer version.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{path} cannot be read: {error}", hint=anew) from None
    if not isinstance(told, dict) or told.get("servanda") != kind:
        raise MeasurementError(f"{path} is no {kind}", hint=anew)
    if not isinstance(told.get("format"), int) or told["format"] > newest:
        raise MeasurementError(
            f"{path} has format {told.get('format')}, and this version reads up to {newest}",
            hint="upgrade servanda, or make the file anew with this version",
        )
    return told
