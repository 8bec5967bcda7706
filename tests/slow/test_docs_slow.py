# The slow transcripts of the documents, on real kernels: a page's commands in its order, in one
# folder, and what they print held against what it shows.

import shutil
import subprocess
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
            ours = [sys.executable, "-m", "servanda", *command.words[1:]]
            done = subprocess.run(
                ours if command.ours else command.words,
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            assert done.returncode == command.expected_code, done.stdout + done.stderr
            if command.shown:
                # progress goes to the error stream of slow commands, messages to that of quick ones
                printed = done.stdout if command.slow else done.stdout + done.stderr
                lines = printed.split("\n")
                missing = transcripts.differing(command.shown, lines, measured=True)
                if missing is not None:
                    pytest.fail(
                        f"$ {command.line}\nnot as the page has it:\n{missing}\n\n"
                        f"it printed:\n{printed}",
                        pytrace=False,
                    )
