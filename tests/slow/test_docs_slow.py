# The slow transcripts of the documents, on real kernels: a page's commands in its order, in one
# folder, and what they print held against what it shows.

import shutil
import sys

import pytest

from tests import transcripts
from tests.test_docs import PAGES, ROOT


def slow(page):
    return any(transcripts.is_slow(block) for block in transcripts.transcripts(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if slow(page)], ids=lambda p: p.name)
def test_slow_commands_print_what_the_page_shows(page, tmp_path):
    for name in ("examples", "models", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for block in transcripts.transcripts(page):
        for command in block:
            ours = [sys.executable, "-m", "servanda"]
            problem = transcripts.problem(command, tmp_path, ours, measured=True)
            assert problem is None, problem
