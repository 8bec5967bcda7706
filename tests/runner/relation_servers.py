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
def served(options="", max_batch=4, wait_s=0.02):
    """The URL of a server of the model in float32."""
    text = f"transformers:{checkpoint()}@float32,batch_size={max_batch}{options}"
    engine = open_engine(parse_kernel(text, engines=engine_names()))
    with live(engine, wait_s=wait_s, max_batch=max_batch) as (client, _):
        yield str(client.base_url).rstrip("/")
