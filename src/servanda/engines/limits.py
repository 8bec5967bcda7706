# Sequences that a model cannot run, refused by name and size before anything runs.

from __future__ import annotations

from servanda.contract.identity import Description
from servanda.errors import MeasurementError
from servanda.traces.trace import Batch


def refuse_misfits(batch: Batch, model: Description) -> None:
    """Let a batch pass whose sequences all fit the model, as far as its sizes are known.

    Raises:
        MeasurementError: an empty prompt, an id that the model does not have, a continuation
            wider than the batch, or a sequence longer than the model's context.
    """
    context, size = model.context, model.vocab_size
    continuations = batch.continuations or ((),) * len(batch)
    for sequence, prompt, given in zip(batch.sequence_S, batch.prompts, continuations, strict=True):
        odd = [token for token in (*prompt, *given) if token < 0 or token >= (size or token + 1)]
        if not prompt:
            found = "has an empty prompt"
            hint = "give its first token as the prompt"
        elif odd:
            end = f"end at {size - 1}" if size else "begin at 0"
            found = f"has the token id {odd[0]}, and the model's ids {end}"
            hint = "encode prompts with the tokenizer of this model"
        elif len(given) > batch.width:
            found = f"has {len(given)} tokens to score in a batch of width {batch.width}"
            hint = "the width of a batch is its longest continuation, or more"
        elif context is not None and len(prompt) + batch.width > context:
            found = (
                f"needs {len(prompt) + batch.width} tokens ({len(prompt)} of prompt and "
                f"{batch.width} new), and the model's context is {context}"
            )
            hint = "shorten the prompt, or lower max_new_tokens"
        else:
            continue
        raise MeasurementError(f"sequence {sequence} {found}", hint=hint)
