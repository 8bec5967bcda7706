# docs/explanation/related.md: each sentence about Servanda links to the page of what it names, and
# the names exist; each that denies something has a test that it is absent.

import re
from pathlib import Path

import pytest

from servanda.cli.commands import HINTS
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.lint.sections import RUNTIME_METRICS
from servanda.rl.sync_drill.diagnosis import CAUSES
from servanda.runner.relations.run import NAMES
from servanda.theory.divergence.base import DIVERGENCES
from tests.test_command_line import COMMANDS, options

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "related.md"
DENIES = re.compile(r"\b(no|not|never|cannot|only|lacks?|without|nor)\b", re.I)
MEASURES = {*DIVERGENCES, *GUARDS, *CHAIN, *RUNTIME_METRICS}
KNOWN = {*MEASURES, *CAUSES, *NAMES, *Contract.model_fields, *(f"servanda {c}" for c in COMMANDS)}
KNOWN |= {option for _, param in options() for option in param.opts}
HELPS = " ".join([*(c.help for c in COMMANDS.values()), *(p.help or "" for _, p in options())])
OF_KERNELS = {"logits", "logprob", "topk", "top1", "routes", "gates"} == {
    form for metric in DIVERGENCES.values() for form in metric.forms
}
# what the page denies -> whether Servanda has none
ABSENT = {
    "no metric of texts alone: each needs logprobs, logits or routes": OF_KERNELS,
    "no metric compares tokens with a reference's draw by the same seed": OF_KERNELS
    and not any("seed" in name for name in (*MEASURES, *NAMES)),
    "no command asks border inputs": not re.search("border|nearly tie", HELPS, re.I),
    "no command audits bills": not re.search(r"\bbill|invoice", HELPS, re.I),
    "Servanda needs logprobs of the server, or its tokens and a train kernel that scores them": (
        HINTS["heartbeat"].startswith("Servanda needs the logprobs of sampled tokens")
    ),
}


def sentences(text):
    """Those about Servanda: they name it, or stand in its column; cells are cut into sentences."""
    found = []
    for part in text.split("\n\n"):
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:1] == "|"]
        places = [(c, rows[0][i] == "Servanda") for row in rows[2:] for i, c in enumerate(row)]
        for place, own in places or [(" ".join(part.split()), False)]:
            cut = re.split(r"(?<=[.;]) ", place)
            found += [sentence for sentence in cut if own or "servanda" in sentence.lower()]
    return found


OURS = sentences(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("sentence", OURS)
def test_what_the_page_says_of_servanda_is_so(sentence):
    for name in re.findall(r"`([^`]+)`", sentence):
        assert name in KNOWN, name
    reasons = [absent for fragment, absent in ABSENT.items() if fragment in sentence]
    assert reasons or not DENIES.search(sentence), "a denial needs a test of absence"
    assert reasons or "](" in sentence, "what Servanda has needs a link"
    assert all(reasons), "Servanda has it"


def test_each_denial_with_a_test_is_on_the_page():
    assert all(any(fragment in sentence for sentence in OURS) for fragment in ABSENT)
    assert len(OURS) > 12
