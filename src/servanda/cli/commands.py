# The commands by name, each with its line of help: read without loading a command.

from __future__ import annotations

# what most people run; `servanda --help` lists these first
FIRST = {
    "check": "Measure both kernels of a contract and judge every clause.",
    "compare": "Compare B, the candidate, with A, what serves today.",
    "preflight": "Before a run: does every weight reach the engine?",
    "watch": "Follow a trainer's dump or a monitor's state; tell what changes.",
    "promote": "Take a build from offline to full, as far as its evidence allows.",
    "serve": "Serve users by a contract: split, sample, score again, divert.",
    "demo": "See a kernel keep its contract, and one break it on a slice.",
}
# group -> its line of help, and its commands
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "contract": (
        "Write, read and test contracts.",
        {
            "init": "Write a starter contract.",
            "lint": "Print every problem of contracts; nothing is measured.",
            "explain": "Say in plain English what a contract or a name means.",
            "schema": "Print the JSON Schema of the contract, for editors.",
            "plan": "Show cells, sizes, cost and what CONTRACT is expected to decide; nothing is "
            "measured.",
            "derive": "Write the contract that keeps a budget of reward or gradient.",
            "calibrate": "Limits that a pair like the one of RUN_DIR keeps.",
            "presets": "List the presets of `compare` and `tools check-dump`, or print one.",
            "diff": "What one version of a contract promises more or less.",
            "list": "The contracts of a folder, version by version.",
            "test": "Test contracts: given such data, does each answer so?",
        },
    ),
    "promotion": (
        "Approve, override or roll back promotions; read their ledger.",
        {
            "status": "Show the state of promotions, and who serves.",
            "can-promote": "May this build be at a stage?  Answered from the ledger.",
            "approve": "Approve the next stage of a promotion that waits for it.",
            "override": "Temporarily waive one clause on one slice.",
            "rollback": "Return all traffic of a promotion to stable, now.",
            "ledger": "Show, verify or export the record of decisions.",
        },
    ),
    "gateway": (
        "Look at the slices of `serve`, and move them.",
        {
            "status": "How the slices of a running gateway stand, a row a slice.",
            "pin": "Say who serves a slice, for a while.",
            "audit": "What routing would have done with a log of served requests.",
        },
    ),
    "tools": (
        "Pieces of a check, and servers to try one on.",
        {
            "check-dump": "Judge the rollouts that a trainer dumped.",
            "measure": "Draw with one kernel and keep everything that a candidate needs to be held "
            "against it.",
            "report": "Render the verdict of RUN_DIR again, in any format.",
            "selftest": "Try a gate on a server of your own: a few minutes.",
            "serve-kernel": "Serve a kernel behind the OpenAI API, as vLLM does, for demos.",
        },
    ),
}
# a command whose module is not called as it is
MODULES = {
    ("gateway", "pin"): "slice_routes",
    ("gateway", "status"): "slice_routes",
    ("promotion", "approve"): "decisions",
    ("promotion", "override"): "decisions",
    ("promotion", "rollback"): "decisions",
}

# Spellings of 0.1.  They work for two releases, with a line on stderr that gives the new one.
OLD_NAMES = {"import": ("tools", "check-dump")} | {
    name: (group, name)
    for group, (_, names) in reversed(GROUPS.items())
    for name in names
    if name != "check-dump"
}
OLD_OPTIONS = {
    "calibrate": {"-o": "--save-contract", "--output": "--save-contract"},
    "diff": {"--side": "--reader"},
    "promote": {"--served": "--log"},
    "serve": {"--infer": "--infer-url", "--show": "--show-pool", "--stable": "--stable-url"},
    "watch": {"--state": "--state-file"},
    "can-promote": {"--infer": "--infer-digest", "--train": "--train-digest"},
    "compare": {"--save": "--save-contract"},
    "check-dump": {"--save": "--save-contract"},
}
# what people look for that is no command -> where it is
HINTS = {
    "bench": "in a clone of the repository: python -m benchmarks.theory",
    "export": "`servanda promotion ledger export`",
    "help": "`servanda --help`, `servanda GROUP --help`, `servanda COMMAND --help`",
    "verify": "`servanda promotion ledger verify`",
    "version": "`servanda --version`",
}
