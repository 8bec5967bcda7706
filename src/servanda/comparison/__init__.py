# Comparing without a contract at hand: kernel strings, presets, reference packs.

from servanda.comparison.comparison import (
    CONTRACT,
    Asked,
    Comparison,
    compare,
    costed,
    plan_of,
    prepare,
)
from servanda.comparison.reference import Alone, alone, measure_pack
from servanda.comparison.sides import Sides, sides_of
from servanda.comparison.texts import plain_texts

__all__ = [
    "CONTRACT",
    "Alone",
    "Asked",
    "Comparison",
    "Sides",
    "alone",
    "compare",
    "costed",
    "measure_pack",
    "plain_texts",
    "plan_of",
    "prepare",
    "sides_of",
]
