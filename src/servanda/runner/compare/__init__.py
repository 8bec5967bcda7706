# Comparing without a contract at hand: kernel strings, presets, reference packs.

from servanda.runner.compare.contract import (
    CONTRACT,
    Asked,
    Comparison,
    compare,
    costed,
    plan_of,
    prepare,
)
from servanda.runner.compare.prompts import plain_texts
from servanda.runner.compare.reference import Alone, alone, measure_pack
from servanda.runner.compare.sides import Sides, sides_of

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
