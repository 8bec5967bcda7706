# Versions: their order, and the required version after a change.

from __future__ import annotations

import re

_VERSION = re.compile(
    r"v?(?P<numbers>\d{1,9}(?:\.\d{1,9})*)(?:-(?P<pre>[0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?"
)

Key = tuple[object, ...]


def order(version: str) -> Key:
    """The sort key of versions; other texts come last, in alphabetical order.

    Numbers are compared as numbers, and a pre-release comes before its release; build metadata
    after a + is ignored.

    >>> sorted(["1.10.0", "draft", "1.2.0", "1.10.0-rc.2", "1.10.0-rc.10"], key=order)
    ['1.2.0', '1.10.0-rc.2', '1.10.0-rc.10', '1.10.0', 'draft']

    Source:
        Semantic Versioning 2.0.0, item 11.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        return (1, version)
    parts = (match["pre"] or "").split(".")
    # a number comes before a text, and none after both
    pre = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if match["pre"])
    return (0, _numbers(match["numbers"]), pre == (), pre)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [int(part) for part in text.split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def advice(old: str, new: str) -> str:
    """The advice for a version that does not announce a breaking change; "" if it does.

    The first number must increase; before 1.0.0, the second may instead.  The promises of a
    pre-release may change until its release.

    >>> advice("1.4.2", "1.5.0")
    'metadata.version went from 1.4.2 to 1.5.0; a change that breaks wants 2.0.0'
    >>> advice("1.4.2", "2.0.0"), advice("0.3.0", "0.4.0")
    ('', '')
    """
    before, after = (_VERSION.fullmatch(version) for version in (old, new))
    if before is None or after is None:
        wrong = old if before is None else new
        return f"metadata.version {wrong!r} is no version such as 1.0.0, so it cannot say that"
    (major, minor), (major_after, minor_after) = (
        ([*map(int, match["numbers"].split(".")), 0])[:2] for match in (before, after)
    )
    if before["pre"] or major_after > major or (major == major_after == 0 and minor_after > minor):
        return ""
    wanted = f"{major + 1}.0.0" if major else f"0.{minor + 1}.0"
    went = f"stayed {old}" if old == new else f"went from {old} to {new}"
    return f"metadata.version {went}; a change that breaks wants {wanted}"
