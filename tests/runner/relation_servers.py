# Real servers of a small model, with a prefix cache and with faults, for tests of relations.

import contextlib
import functools
import json
import tempfile
from pathlib import Path

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names, open_engine
from tests.engines.checkpoints import TOKENIZER
from tests.engines.serving import live

TEXTS = [*range(1, 90), *range(89, 0, -3), *range(5, 90, 4)]


@functools.cache
def checkpoint():
    """A model of two layers whose logprobs depend on its whole context."""
    from tests.rl.served_weights import saved, small_model

    folder = Path(tempfile.mkdtemp(prefix="relations-"))
    saved(small_model(), folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    lines = (TEXTS[i : i + 20] for i in range(0, len(TEXTS), 20))
    prompts = "".join(json.dumps({"token_ids": ids}) + "\n" for ids in lines)
    (folder / "prompts.jsonl").write_text(prompts)
    return folder


@contextlib.contextmanager
def served(options="", max_batch=4, wait_s=0.02, test_mode=False):
    """The URL of a server of the model in float32."""
    text = f"transformers:{checkpoint()}@float32,batch_size={max_batch}{options}"
    kernel = parse_kernel(text, engines=engine_names())

    def faulty(fault):
        return open_engine(kernel.model_copy(update={"fault": fault}))

    how = {"wait_s": wait_s, "max_batch": max_batch, "test_mode": test_mode, "faulty": faulty}
    with live(open_engine(kernel), **how) as (client, _):
        yield str(client.base_url).rstrip("/")


def related(options, fault, names, wait_s=0.0, between=0, bitwise=False):
    """`servanda relations URL`, of some relations, as a row of the field's bugs."""
    from tests.field.rows import servanda

    keys = "".join(f",{key}" for key in (options, f"fault={fault}" if fault else "") if key)
    only = [word for name in names for word in ("--only", name)]
    between = ("--between", between) if between else ()
    how = ("--prompts", checkpoint() / "prompts.jsonl", "--quiet")
    how += ("--equal-bits",) if bitwise else ()
    small = ("--longest", 17, "--requests", 2, "--max-new-tokens", 2)
    with served(keys, wait_s=wait_s) as url:
        return servanda("relations", f"{url},batch_size=2", *only, *how, *small, *between)
