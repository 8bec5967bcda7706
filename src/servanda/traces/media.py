# Images, video and sound beside a text, by the names that trainers and servers give them.
#
# Nothing here reads them: token ids hold a placeholder for an image, and not what it shows.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
