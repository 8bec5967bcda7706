# Changes: what one version of a contract promises more or less than another.
#
# values: one change, and the two contracts as they are walked.  directions: what a move of one
# value means.  rules: which of them each field of the language follows.  walk: the walk itself.

from servanda.authoring.diff.compare import changes
from servanda.authoring.diff.difference import Difference
from servanda.authoring.diff.history import Listed, Shelf, Step, shelves
from servanda.authoring.diff.rules import RULES
from servanda.authoring.diff.values import BREAKING, KINDS, SIDES, Change, Kind, Side

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
