# Servers on sockets: two, before and after an upgrade, and one that takes over weights.

import contextlib
import json

import numpy as np

from servanda.engines.table import TableEngine
from tests.engines.serving import live, table_engine
from tests.field.rows import servanda

WORDS = [*"abcdefghijklmnopqrstuvwx", "<eos>"]
ZIPF = 1 / np.arange(1, 26)


def rows(spread):
    moved = ZIPF * np.exp(spread * np.random.default_rng(2).standard_normal(25))
    return {"": (moved / moved.sum()).tolist()}


class Served(TableEngine):
    """Encodes any text, and has a chat template that begins with one BOS."""

    bos, spread = "<bos>", 0.01

    def encode(self, texts):
        return [[ord(letter) % 24 for letter in text] for text in texts]

    def render(self, messages, tools=None):
        said = "".join(f"{m['role']}:{m['content']};" for m in messages)
        return self.bos + (json.dumps(tools) if tools else "") + said


class DoubledBos(Served):
    bos = "<bos><bos>"


class Upgraded(Served):
    spread = 0.2


def compared(folder, old, new):
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([0, 1], [1])))
    with contextlib.ExitStack() as stack:
        urls = []
        for name, kind in (("A", old), ("B", new)):
            (folder / name).mkdir()
            spread = kind.spread if name == "B" else 0.0
            engine = table_engine(folder / name, rows(spread), WORDS, cls=kind)
            client, _ = stack.enter_context(live(engine))
            urls.append(str(client.base_url).rstrip("/"))
        options = ("--prompts", prompts, "--run-dir", folder / "run", "--max-new-tokens", 4)
        return servanda("compare", *urls, *options, "--quiet")


def reloaded(folder, form, fault):
    """`servanda preflight --checkpoint DIR --url URL` on a server with a fault."""
    from tests.rl.served_weights import begun, saved, serving, small_model

    model = saved(small_model(), folder / "model")
    with serving(model, form) as (url,):
        begun(url, fault)
        return servanda("preflight", "--checkpoint", model, "--url", url, "--quiet")
