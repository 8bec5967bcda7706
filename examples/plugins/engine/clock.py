# The engine `clock` of docs/how-to/write_an_engine.md, as a package.

import numpy as np

from servanda.contract.identity import Description, digest_of
from servanda.engines.base import ENGINES
from servanda.errors import MeasurementError
from servanda.theory.sampling import draw, observe, processed_logprobs, uniforms
from servanda.traces.trace import Trace

WORDS = ["tick", "tock", "boom", "<end>"]
LOGITS = np.log([[0.1, 0.6, 0.2, 0.1], [0.6, 0.1, 0.2, 0.1], [0.3, 0.2, 0.1, 0.4], [0.25] * 4])


@ENGINES.register("clock")
class Clock:
    """The next word depends on the last one."""

    def __init__(self, kernel=None):
        self.batch_size = kernel.batch_size if kernel else 1

    def describe(self):
        return Description(
            fingerprint={"engine": "clock", "version": "1"},
            tensors={"rows": digest_of(LOGITS.tolist())},
            tokens=digest_of(WORDS),
            vocab_size=len(WORDS),
            eos=(3,),
        )

    def encode(self, texts):
        return [[WORDS.index(word) for word in text.split()] for text in texts]

    def decode(self, ids):
        return [" ".join(WORDS[i] for i in tokens) for tokens in ids]

    def vocabulary(self):
        return WORDS

    def generate(self, batch, sampling, seed):
        self.refuse_misfits(batch)
        answers = []
        for sequence, prompt in zip(batch.sequence_S, batch.prompts):
            text = list(prompt)
            for noise in uniforms(seed, "draw", sequence, batch.width):
                logp = processed_logprobs(LOGITS[text[-1:]], sampling)
                text += draw(logp, np.array([noise])).tolist()
                if text[-1] == 3:
                    break
            answers.append(text[len(prompt) :])
        return self.trace(batch, answers, sampling, "decode")

    def score(self, batch, sampling, path):
        self.refuse_misfits(batch)
        return self.trace(batch, batch.continuations, sampling, path)

    def logits(self, batch, path):
        self.refuse_misfits(batch)
        yield self.rows(batch, batch.continuations)

    def close(self):
        pass

    def rows(self, batch, answers):
        """The logits before each token, sequence after sequence, [N, V]."""
        texts = [[*p, *a] for p, a in zip(batch.prompts, answers)]
        return LOGITS[[i for t, a in zip(texts, answers) for i in t[-len(a) - 1 : -1]]]

    def trace(self, batch, answers, sampling, path):
        token_N = np.array([token for answer in answers for token in answer], dtype=np.int64)
        return Trace(
            sequence_S=np.array(batch.sequence_S),
            length_S=np.array([len(answer) for answer in answers]),
            lost_S=np.zeros(len(batch), dtype=bool),
            prompt_tokens_S=np.array([len(prompt) for prompt in batch.prompts]),
            token_N=token_N,
            columns=observe(self.rows(batch, answers), token_N, sampling),
            about={
                "path": path,
                "sampling": sampling.model_dump_json(),
                "batch_size": str(self.batch_size),
            },
        )

    def refuse_misfits(self, batch):
        for sequence, prompt in zip(batch.sequence_S, batch.prompts):
            if not prompt or not all(0 <= i < len(WORDS) for i in prompt):
                raise MeasurementError(f"sequence {sequence} has a prompt that no clock knows")
