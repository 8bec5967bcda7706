# The documents and the messages are in plain words: the check of scripts/prose.py, and its parts.

import pytest
from scripts import prose


def test_the_documents_and_messages_pass_the_check(capsys):
    assert prose.main([]) == 0, capsys.readouterr().out


def test_ratios_are_of_words_outside_code():
    text = "You see what\n```sh\nwhat what you\n```\nin `what` [it](what.md) <!-- what --> is."

    assert prose.ratios([text]) == (pytest.approx(1000 / 6), pytest.approx(1000 / 6))


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("A guard rings at step 3.", "guard rings"),
        ("What changes is told once.", "told once"),
        ("The evidence has a quarter of its price.", "quarter of its price"),
        ("It would be dear to get.", "dear to"),
        ("Tokens that the prompts bring forth", "bring forth"),
    ],
)
def test_a_phrase_of_the_list_is_found_with_its_line(text, phrase):
    assert [found[:2] for found in prose.phrases(f"# Title\n\n{text}")] == [(3, phrase)]


def test_a_word_inside_another_or_in_code_is_not_found():
    text = "The legend of a legacy table, `nobody`, and\n\n```sh\nservanda pin whoever\n```"

    assert list(prose.phrases(text)) == []


def test_of_code_the_sentences_are_read_and_names_are_not():
    code = (
        'KEYS = ("nobody", "leg")\n\nTEXT = """It is\nnobody\'s leg."""\nERROR = f"nobody {KEYS}"\n'
    )

    found = [(line, phrase) for line, phrase, _ in prose.strings(code)]
    assert found == [(4, "nobody"), (5, "nobody")]


def test_of_docstrings_the_public_ones_and_the_head_are_read():
    code = (
        "# What nobody reads.\n#\n# Told again.\n\n\n"
        'def shown(a):\n    """A row.\n\n    Args:\n        a: of the next look; launched: n.\n\n'
        '    >>> print(\'nobody\')\n    nobody\n    """\n\n\n'
        'def _hidden():\n    """As nobody reads."""\n\n\nTEXT = """nobody"""\n'
    )

    found = sorted((line, phrase) for line, phrase, _ in prose.of_docstrings(code))
    assert found == [(1, "nobody"), (3, "Told"), (10, "next look")]


def test_the_packages_in_plain_words_stay_so():
    assert set(prose.in_plain()) == set(prose.PLAIN)
    assert max(prose.in_plain().values()) <= prose.MOST_WHAT


# The sentences and labels that readers stumbled over, by a piece that no other sentence has.
STUMBLED = (
    "no longer hears some of them",
    "nothing that *looks* can see it",
    "with evidence: what stays within them",
    "what changes is told once",
    "told again from its own evidence",
    "a guard speaks in every phase",
    "the way back is earned",
    "a quarter of its price",
    "it was away for",
    "and this one moved none",
    "what was done to it",
    "bring forth",
    "Red needs to lie beyond",
    "may be called violated for its share",
    "each end at 0.975, valid at every look",
    "claim population: of tokens",
    "so it is not its noise",
    "as large as on the shipped",
    "each number as the weakest thing on its path",
    "to leave / ",
    "are not suspect",
    "have paid the price of coming back",
    "Where the whole traffic goes, every slice",
    "Numbers are odds",
    "A false divert is dear",
    "Each row may what the row above it may",
    "after a few in a row infer rests",
    "For that it pays again and again",
    "So losses make no false alarm",
    "It is the cheaper price",
    "is no word against the kernel",
    "What was weighed stays what it was",
    "A row that is none stops the call",
    "as unlikely as a false leave",
    "a re-roll that nothing pays for",
    "so each pays for all",
    "is shown too seldom",
    "which truths a run of this size decides",
    "later turns begin as the rest goes on",
    "Of it, that the kernels may use",
    "Let a cell of RUN not count",
    "two senses look at the same tokens",
    "a run that goes to and fro",
    "for neither of the two",
    "This is the door to certificates",
    "whoever shares the batch",
    "met nobody",
    "The faults, and what says so",
    "thresholds that ring",
    "and what says so",
    "at the edges: less, or 0",
    "one mark a seed",
    "watched no step",
    "name the place of one, or begin one there",
    "does not say what to drill",
    "hint: close it",
)


def test_no_sentence_is_left_that_readers_stumbled_over():
    texts = {page: " ".join(page.read_text(encoding="utf-8").split()) for page in prose.pages()}

    left = [
        (str(page.relative_to(prose.ROOT)), piece)
        for page, text in texts.items()
        for piece in STUMBLED
        if piece in text
    ]
    assert left == []
