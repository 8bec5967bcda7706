# Throw-away models for kernels that are loaded in parts, and one kernel against another.

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

VOCABULARY, WIDTH = 61, 6
PLAIN = Sampling()
FILTERED = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)


def save_model(folder, kind="Llama", **config):
    """A random model, of whose sizes few divide by a number of ranks."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 48,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    } | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = getattr(transformers, f"{kind}Config")(**config)
        model = getattr(transformers, f"{kind}ForCausalLM")(made)
    transformers.utils.logging.disable_progress_bar()  # the reports of pytest are kept clean
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def kernel(folder, options=None, **keys):
    keys = {"model": str(folder), "batch_size": 4, "dtype": "float64"} | keys
    return Kernel(engine="transformers", options=options, **keys)


def launched(n=6, size=VOCABULARY):
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(2, size, 1 + 3 * i % 11).tolist()) for i in range(n))
    return Batch(tuple(range(10, 10 + n)), prompts, WIDTH)


def given(batch):
    """The batch with tokens to score, of which only the last sequence has as many as fit."""
    rows = [tuple(range(2, 3 + row)) for row in range(len(batch))]
    return Batch(batch.sequence_S, batch.prompts, batch.width, tuple(rows))


def everything(engine, batch):
    """Traces by name, and logits [N, V] by path, of every verb of an engine."""
    drawn = engine.generate(batch, PLAIN, 3)
    given = Batch(batch.sequence_S, batch.prompts, batch.width, drawn.continuations)
    traces = {"drawn": drawn, "filtered": engine.generate(batch, FILTERED, 3)}
    for path in ("prefill", "decode"):
        for name, sampling in (("plain", PLAIN), ("filtered", FILTERED)):
            traces[f"{path} {name}"] = engine.score(given, sampling, path)
    logits = {p: np.concatenate([*engine.logits(given, p)]) for p in ("prefill", "decode")}
    return traces, logits


def assert_alike(found, expected, error):
    """Equal to rounding: tokens exactly, numbers within `error`."""
    for name, trace in expected[0].items():
        other = found[0][name]
        assert other.continuations == trace.continuations, name
        assert other.columns.keys() == trace.columns.keys(), name
        for column, value_N in trace.columns.items():
            np.testing.assert_allclose(
                other.columns[column], value_N, rtol=error, atol=error, err_msg=f"{name} {column}"
            )
    for path, logits_NV in expected[1].items():
        np.testing.assert_allclose(found[1][path], logits_NV, rtol=error, atol=error)


def in_one_process(folder, batch, **keys):
    """Everything of the plain engine, and its description."""
    engine = open_engine(kernel(folder, **keys))
    return everything(engine, batch), engine.describe()
