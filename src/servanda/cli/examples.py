# Two calls of each command, for the end of its help.

from __future__ import annotations

import textwrap

import click

_WIDTH = 74
_MODEL = "transformers:models/tiny-lm"
_SIDES = f"{_MODEL}@float32 {_MODEL}@bfloat16"
# a command's words -> its arguments and options, as typed
EXAMPLES: dict[str, tuple[str, ...]] = {
    "check": (
        "my.kernelcontract.yaml --report report.html",
        "logs/rollouts --steps 10:20    # a trainer's dump",
    ),
    "compare": (
        _SIDES,
        "http://127.0.0.1:8000 http://127.0.0.1:8001 --prompts prompts.jsonl --plan",
    ),
    "relations": (
        "http://127.0.0.1:8000",
        f"{_MODEL}@float32,prefix_cache=16 --limit 1e-4 --only cache --only company",
    ),
    "bisect": (_SIDES, f"{_SIDES} --path decode --format html > bisect.html"),
    "preflight": ("my_drill.py:trainee", "--trl train.py --format json"),
    "watch": ("logs/rollouts", "runs/monitor.jsonl --every 30s"),
    "promote": ("my.kernelcontract.yaml", "my.kernelcontract.yaml --log served.jsonl --every 1m"),
    "serve": (
        "my.kernelcontract.yaml --infer-url http://127.0.0.1:8001 --stable-url "
        "http://127.0.0.1:8000",
        "my.kernelcontract.yaml --infer-url http://127.0.0.1:8001 --stable-url "
        "http://127.0.0.1:8000 --port 8080",
    ),
    "demo": ("--fault bf16_positions", "--files ."),
    "contract init": (
        "my.kernelcontract.yaml --model models/my-model",
        "- --engine openai_http --model my-model    # print it",
    ),
    "contract lint": ("my.kernelcontract.yaml", "contracts/*.kernelcontract.yaml --format json"),
    "contract explain": ("my.kernelcontract.yaml", "tv"),
    "contract schema": ("", "> kernelcontract.schema.json"),
    "contract plan": ("my.kernelcontract.yaml", "my.kernelcontract.yaml --no-probe"),
    "contract derive": (
        f"--train {_MODEL}@float32 --infer {_MODEL}@bfloat16 --prompts data/prompts.jsonl "
        "--max-new-tokens 64 --reward-drift 0.05 -o derived.kernelcontract.yaml",
        f"--train {_MODEL}@float32 --infer {_MODEL}@bfloat16 --prompts data/prompts.jsonl "
        "--max-new-tokens 64 --policy-gradient-bias 0.1 --advantage 1 --score-norm logit_space",
    ),
    "contract calibrate": (
        "runs/first --save-contract calibrated.yaml",
        "good-1.jsonl good-2.jsonl --save-reference good.reference.json",
    ),
    "contract presets": ("", "--show fp8"),
    "contract diff": ("old.yaml new.yaml", "old.yaml new.yaml --reader producer"),
    "contract list": ("contracts", "contracts --format json"),
    "contract test": ("tests/my.kerneltest.yaml", "tests --faults --fault bf16_positions"),
    "promotion status": ("--ledger runs/ledger.db", "--format json"),
    "promotion can-promote": (
        "my.kernelcontract.yaml --to canary",
        "my.kernelcontract.yaml --to full --format json",
    ),
    "promotion approve": (
        "my-run --reason 'reviewed by the team'",
        "my-run --reason 'reviewed by the team' --ledger runs/ledger.db",
    ),
    "promotion override": (
        "my-run --clause tv --ttl 24h --reason 'known issue'",
        "my-run --clause tv --slice long --ttl 24h --reason 'known issue'",
    ),
    "promotion rollback": (
        "my-run --reason 'incident 12'",
        "my-run --reason 'incident 12' --format json",
    ),
    "promotion ledger show": ("", "--format json"),
    "promotion ledger verify": ("", "--ledger runs/ledger.db --format json"),
    "promotion ledger export": ("", "-o ledger.jsonl"),
    "gateway status": ("", "--format json"),
    "gateway pin": (
        "all --to stable --ttl 1h --reason 'incident 12'",
        "all --release --reason 'incident 12 is over'",
    ),
    "gateway audit": (
        "my.kernelcontract.yaml --log served.jsonl",
        "my.kernelcontract.yaml --log served.jsonl --format json",
    ),
    "gateway envoy": (
        "--leader http://127.0.0.1:8081",
        "--leader http://127.0.0.1:8081 --grpc 0.0.0.0:9002 --http 0.0.0.0:9003",
    ),
    "tools measure": (
        f"{_MODEL}@float32 --golden data/golden.jsonl -o reference.pack",
        "my.kernelcontract.yaml --side infer -o infer.pack",
    ),
    "tools report": ("runs/first -o report.html", "runs/first --format markdown"),
    "tools kld": (
        f"{_MODEL}@bfloat16 --base base.kld",
        f"{_MODEL} --texts texts.jsonl --save-base base.kld --context 256",
    ),
    "tools weights": ("hf-before hf-after", "hf-before hf-after --format json"),
    "tools selftest": (
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000 --referee transformers:models/tiny-lm",
    ),
    "tools serve-kernel": (f"{_MODEL}@bfloat16", f"{_MODEL} --port 8001 --test-mode"),
}


def add_examples(command: click.Command, words: str) -> click.Command:
    """The command, with its examples at the end of its help; those of a group's commands, too."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            add_examples(part, f"{words} {name}")
    elif words in EXAMPLES and command.epilog is None:
        calls = [f"servanda {words} {example}".rstrip() for example in EXAMPLES[words]]
        command.epilog = "\n".join(["\b", "Examples:", *map(_in_lines, calls)])
    return command


def _in_lines(call: str) -> str:
    """A call that a shell reads, in lines of a terminal."""
    parts = textwrap.wrap(
        call,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(parts)
