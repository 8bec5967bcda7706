# Escalation: one reading of rules, for the monitor and for the watch.

import pytest

from servanda.judgement.escalation import is_met, watched
from tests.rl.watch.made import cell


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"clause": "shown", "is": "violated"}, True),  # named, so enforced or not
        ({"section": "statistical", "is": "violated"}, False),  # its enforced ones hold
        ({"section": "statistical", "is_not": "holds"}, False),
        ({"section": "observability", "is_not": "holds"}, False),  # of no cell
        ({"clause": "absent", "is_not": "holds"}, False),
        ({"diverted_traffic": {"gte": 0.3}}, False),
    ],
)
def test_a_rule_is_met_by_the_clause_it_names_and_by_what_a_section_enforces(when, expected):
    shown = cell("violated", clause="shown", enforced=False)
    skipped = cell("not applicable", clause="absent", section="observability")
    cells = [cell(), shown, skipped]

    assert is_met(when, watched(when, cells)) == expected
