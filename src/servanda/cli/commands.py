# The commands by name, each with its line of help: read without loading a command.

from __future__ import annotations

# what most people run; `servanda --help` lists these first
FIRST = {
    "check": "Judge a trainer's dump, or measure and judge the kernels of a contract.",
    "compare": "Compare B, the candidate, with A, which serves today.",
    "relations": "Self-consistency of one engine: batching, prefix cache, prefill, sampling.",
    "bisect": "Find the module or the setting that makes B differ from A.",
    "preflight": "Before a run: does every weight reach the engine?",
    "watch": "Follow a trainer's dump or a monitor's state; tell what changes.",
    "promote": "Take a build from offline to full, as far as its evidence allows.",
    "serve": "Serve users through a gateway that diverts failing slices.",
    "demo": "Check a kernel that keeps its contract, and one that breaks it on a slice.",
}
# group -> its line of help, and its commands
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "contract": (
        "Write, read and test contracts.",
        {
            "init": "Write a starter contract.",
            "lint": "Print every problem in contracts; nothing is measured.",
            "explain": "Explain a contract or a name in plain English.",
            "schema": "Print the JSON Schema of the contract, for editors.",
            "plan": "Show cells, sizes, cost and detectable effect sizes; nothing is measured.",
            "derive": "Write the contract that keeps a budget of reward drift or gradient bias.",
            "calibrate": "Print the smallest limits that kernels like those of RUN keep.",
            "presets": "List the presets of limits, for `compare` and for dumps, or print one.",
            "diff": "Compare two versions of a contract: which promises changed.",
            "test": "Test contracts: does each give the expected answer on given data?",
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
        "Inspect and pin the slices of `serve`; audit a traffic log.",
        {
            "status": "Show the state of each slice of a running gateway.",
            "pin": "Fix the kernel or mode of a slice for a limited time.",
            "audit": "Score a log of served requests; report what would be diverted.",
            "envoy": "Answer Envoy, which routes requests by the decisions of a leader.",
        },
    ),
    "tools": (
        "Parts of a check, and servers for trying one.",
        {
            "kld": "Compare a kernel with a base file of llama.cpp, or write one.",
            "measure": "Generate with one kernel and write a baseline file for later comparisons.",
            "report": "Render the verdict of RUN_DIR again, in any format.",
            "selftest": "Test the checks on your own server; takes a few minutes.",
            "serve-kernel": "Serve a kernel behind the OpenAI API, for demos and tests.",
            "weights": "Say what each tensor of a checkpoint holds of another's.",
        },
    ),
}
# a command whose module is not called as it is
MODULES = {
    (group, name): module
    for group, names, module in (
        ("contract", ("init", "schema", "presets"), "texts"),
        ("gateway", ("pin", "status"), "slice_routes"),
        ("promotion", ("status", "can-promote", "approve", "override", "rollback"), "promotion"),
    )
    for name in names
}

# a command's words -> what its exit codes say, where it is not what those of any say; "": of all
_WRONG = "the call or a file is wrong"
_DECIDES = f"0 done and delivered; 2 {_WRONG}; 4 refused, not delivered, or no usable ledger"
_LISTENS = f"0 it was stopped; 2 {_WRONG}; 4 it could not start"
CODES = {
    "": (
        f"0 holds, or done; 1 violated, or the answer is no; 2 {_WRONG}; 3 inconclusive: not "
        "enough evidence yet; 4 measuring failed, or was refused; 130 interrupted, and "
        "the same command goes on"
    ),
    "check": f"0 holds; 1 violated; 2 {_WRONG}; 3 inconclusive; 4 measuring failed",
    "compare": (
        f"0 holds; 1 violated, or the API layers differ; 2 {_WRONG}; 3 inconclusive; 4 measuring "
        "failed"
    ),
    "relations": (
        f"0 every relation that can be tested holds; 1 one is violated; 2 {_WRONG}; 3 one is "
        "undecided, or none can be tested; 4 the kernel failed"
    ),
    "bisect": (
        f"0 no difference beyond the noise; 1 found; 2 {_WRONG}; 3 found, with settings that may "
        "be needless; 4 measuring failed"
    ),
    "preflight": (
        "0 every group is synced; 1 a group does not reach the engine, or the engine is not as "
        f"before; 2 {_WRONG}; 3 a group could not be judged; 4 scoring or syncing failed"
    ),
    "watch": f"0 holds; 1 violated; 2 {_WRONG}; 3 inconclusive; 4 the data cannot be judged",
    "promote": (
        f"0 completed, or --until reached; 1 rolled back; 2 {_WRONG}; 3 still running: it waits "
        "for evidence, hold time or an approval; 4 measuring failed, the evidence expired, or "
        "another promoter is active"
    ),
    "serve": _LISTENS,
    "demo": (
        "0 as expected, or with --fault: holds; 1 not as expected, or with --fault: violated; 2 "
        f"{_WRONG}; 3 with --fault: inconclusive; 4 measuring failed, or was refused"
    ),
    "contract lint": "0 no problem; 2 a problem, or the call is wrong; 4 it failed",
    "contract diff": f"0 nothing breaks; 1 something breaks; 2 {_WRONG}; 4 it failed",
    "contract test": (
        f"0 every case passes; 1 a case fails, or with --faults a contract; 2 {_WRONG}; 3 with "
        "--faults: the time was over before the answer; 4 with --faults: measuring failed"
    ),
    "promotion can-promote": (
        f"0 yes; 1 no, it was rolled back; 2 {_WRONG}; 3 no, there is no evidence for it; 4 the "
        "ledger cannot be read, or several builds match"
    ),
    "promotion approve": _DECIDES,
    "promotion override": _DECIDES,
    "promotion rollback": _DECIDES,
    "promotion ledger verify": (
        f"0 sound; 1 an entry was changed, or does not follow; 2 {_WRONG}; 4 it failed"
    ),
    "gateway status": f"0 it responded; 2 {_WRONG}; 4 it cannot be reached",
    "gateway pin": f"0 done; 2 {_WRONG}; 4 it was refused, or the leader cannot be reached",
    "gateway audit": (
        f"0 every slice is within its limits; 1 a slice exceeds its limit; 2 {_WRONG}; 3 a slice "
        "is not decided, or nothing was scored; 4 the log, an engine or the state failed"
    ),
    "gateway envoy": _LISTENS,
    "tools selftest": (
        f"0 all as expected; 1 the server breaks its agreement with itself; 2 {_WRONG}; 3 "
        "something was not decided, or not detected at this size; 4 measuring failed"
    ),
    "tools serve-kernel": _LISTENS,
    "tools weights": (
        "0 the weights of B are those of A up to rounding; 1 a tensor or config.json differs; 2 "
        f"{_WRONG}; 4 a folder cannot be read"
    ),
}


def exit_codes(words: str) -> str:
    """The sentence of a command's help: a code, what it says, and a semicolon between two."""
    return f"Exit codes: {CODES.get(words, f'0 done; 2 {_WRONG}; 4 it failed')}."


# a word that is no command -> the command, or the program, that does the same
HINTS = {
    "check-dump": "`servanda check DUMP` has its options",
    "import": "`servanda check DUMP`",
    "heartbeat": "Servanda needs the logprobs of sampled tokens: `servanda compare URL_A URL_B`; "
    "for texts alone, use a test that needs only text",
    "history": "keep the verdict.json of each run, or log its values to a tracker; `servanda tools "
    "report RUN_DIR` renders one run",
    "list": "`servanda contract lint FILE...`, or `servanda contract diff OLD NEW`",
    "packs": "a baseline file is one file: store it with huggingface_hub, oras or any object "
    "store, and sign it with `ssh-keygen -Y sign`",
    "upgrade": "a ledger has one schema: start a new ledger where one is refused",
    "status": "`servanda promotion status`, `servanda gateway status`",
    "bench": "in a clone of the repository: python -m benchmarks.theory",
    "export": "`servanda promotion ledger export`",
    "help": "`servanda --help`, `servanda GROUP --help`, `servanda COMMAND --help`",
    "verify": "`servanda promotion ledger verify`",
    "version": "`servanda --version`",
}
# an option that a command no longer has -> what does the same
_BUILDS = "use `git bisect run`, as docs/how-to/bisect.md shows"
_COMPARED = "call `servanda compare` with it in the command of --run"
_FAULTS = "--faults injects the catalogue; `servanda contract plan` shows what limits can detect"
_GUIDE = "`servanda contract presets --show nemo-grpo` has the limit of NeMo-RL's guide"
GONE: dict[tuple[str, str], str] = {
    **{("bisect", option): _BUILDS for option in ("--builds", "--git", "--repository")},
    **{("bisect", option): _COMPARED for option in ("--preset", "--bitwise")},
    **{("test", option): _FAULTS for option in ("--mutate", "--only", "--at-least")},
    ("init", "--checks"): _GUIDE,
}
