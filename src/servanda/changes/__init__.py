# Changes: what one version of a contract promises more or less than another.
#
# values: one change, and the two contracts as they are walked.  directions: what a move of one
# value means.  rules: which of them each field of the language follows.  walk: the walk itself.

from servanda.changes.difference import Difference
from servanda.changes.listing import Listed, Shelf, Step, shelves
from servanda.changes.rules import RULES
from servanda.changes.values import BREAKING, KINDS, SIDES, Change, Kind, Side
from servanda.changes.walk import changes

__all__ = [
    "BREAKING",
    "KINDS",
    "RULES",
    "SIDES",
    "Change",
    "Difference",
    "Kind",
    "Listed",
    "Shelf",
    "Side",
    "Step",
    "changes",
    "shelves",
]
