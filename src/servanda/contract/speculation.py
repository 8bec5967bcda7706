# The option speculative_config of a kernel, in the words of vLLM.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from servanda.contract.fields import Value, Whole
from servanda.errors import MeasurementError

OPTION = "speculative_config"
SPECULATES = ("llamacpp", "table", "transformers", "vllm")  # engines that have the option
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'


class SpeculativeConfig(Value):
    """How drafts are made, of the engines that draw here; vLLM reads its own.

    Args:
        prompt_lookup_min, prompt_lookup_max: tokens at the end of the text that are looked up
            earlier in it, of ngram.
        model: the draft's folder or file, of draft_model; dtype: its precision, by default that of
            the kernel; quantization: by default none.
        draft_sample_method: greedy: its most likely token, of which it counts as certain;
            probabilistic: drawn by its probabilities.
    """

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: Whole = Field(ge=1, le=64)
    prompt_lookup_min: Whole = Field(1, ge=1, le=64)
    prompt_lookup_max: Whole = Field(3, ge=1, le=64)
    model: str | None = None
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    quantization: str | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"


def speculation_of(options: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """The option, if there is one.

    Raises:
        MeasurementError: it is not as `SpeculativeConfig` has it.
    """
    given = (options or {}).get(OPTION)
    if given is None:
        return None
    try:
        config = SpeculativeConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join([OPTION, *map(str, first["loc"])])
        raise MeasurementError(
            f"{at}: {first['msg'].removeprefix('Value error, ')}, found {first['input']!r}",
            hint=f"write {OPTION}: {_EXAMPLE}",
        ) from None
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise MeasurementError(
            f"{OPTION}: prompt_lookup_min is {config.prompt_lookup_min}, and prompt_lookup_max is "
            f"{config.prompt_lookup_max}",
            hint="let the minimum be the smaller",
        )
    if (config.method == "draft_model") != (config.model is not None):
        found = f"model {config.model!r}" if config.model is not None else "no model"
        raise MeasurementError(
            f"{OPTION}: method {config.method} and {found}",
            hint="a draft_model has `model: FOLDER`, and ngram has none",
        )
    return config


def draft_of(options: Mapping[str, Any] | None) -> str | None:
    """The folder or file of the draft model, if the option names one."""
    config = (options or {}).get(OPTION)
    model = config.get("model") if isinstance(config, Mapping) else None
    return model if isinstance(model, str) else None


def moved_options(
    options: Mapping[str, Any] | None, move: Callable[[str], str]
) -> dict[str, Any] | None:
    """The options of a kernel, with the place of its draft model moved."""
    place = draft_of(options)
    if options is None or place is None:
        return None if options is None else dict(options)
    return {**options, OPTION: {**options[OPTION], "model": move(place)}}


def brief(value: Any) -> Any:
    """An option in a line of output: how drafts are made, and how many tokens they have.

    >>> brief({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    'ngram of 3'
    """
    if not isinstance(value, Mapping) or "method" not in value:
        return value
    return f"{value['method']} of {value.get('num_speculative_tokens', '?')}"
