# `servanda promotion can-promote`: may this build be at a stage?  Yes or no, by the exit code.

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from servanda.cli.input import contract_at
from servanda.cli.options import FILE_OR_DASH, shared
from servanda.cli.promotion_options import opened
from servanda.cli.stdout import show, show_json
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import can_promote as answer_of


@click.command("can-promote")
@click.argument("contract", type=FILE_OR_DASH)
@click.option("--to", required=True, metavar="STAGE", help="offline, shadow, canary or full.")
@click.option(
    "--infer-digest",
    "infer",
    default="",
    help="Digest of the infer kernel, or its first digits: which build.",
)
@click.option(
    "--train-digest", "train", default="", help="Digest of the train kernel, or its first digits."
)
@shared("--ledger", "--format", "--no-code")
def can_promote(contract: Path, to: str, infer: str, train: str, where: str, format_: str) -> None:
    """Say whether the ledger allows the build of CONTRACT at a stage.

    Nothing is measured.  The answer is yes if a promotion with exactly this contract has reached
    the stage and has not ended, halted or expired.
    """
    build = contract_at(contract)
    with opened(where, reading=True) as ledger:
        answer = answer_of(ledger, build, to, now=time.time(), infer=infer, train=train)
        if format_ == "json":
            history = answer.history
            run = report.data(history, now=time.time()) if history is not None else None
            show_json({"yes": answer.yes, "why": answer.why, "run": run})
        else:
            show(str(answer))
    sys.exit(answer.exit_code)
