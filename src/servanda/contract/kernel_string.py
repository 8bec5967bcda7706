# Kernel strings: a kernel in one word, for the command line.
#
#   transformers:models/tiny-lm@bfloat16+int8_weight_only,attention=sdpa,batch_size=16
#   transformers:hf://org/name@revision@bfloat16
#   table:p.json
#   reference.pack
#   http://127.0.0.1:8000,dialect=vllm,logprobs=processed
#
#   kernel   = engine ":" model ["@" dtype ["+" quantization]] {"," key "=" value}
#            | url {"," key "=" value}, of engine openai_http
#            | engine of an installed package {"," key "=" value}, where it needs no model
#            | a path that ends in ".pack"
#   key      = attention | device | batch_size | prefill_chunk | prefix_cache | kv_cache
#            | head_dtype | adapter | path | title | weights_from | python | fault | "option." NAME
#            | served | dialect | logprobs | timeout_s | key_env, of a url
#   fault    = name [":" value], the value as JSON; without one it is true
#   option   = an argument of the engine itself, as JSON, such as option.async_scheduling=true
#
# A model or a value in double quotes is read as a JSON text, so that it may hold any of
# the marks above.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any, get_args

from pydantic import ValidationError

from servanda.contract.fields import VARIABLE
from servanda.contract.model import Kernel
from servanda.errors import ContractError, Where
from servanda.registry import Registry, did_you_mean

# Models on the Hugging Face Hub: hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION.

HUB = "hf://"
_NAME = re.compile(r"hf://(?!.*\.\.)(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[^\s@\\]*))?")


def is_hub_name(model: str | None) -> bool:
    """Whether a model is named on the Hub, and not by a path."""
    return model is not None and model.startswith(HUB)


def hub_parts(model: str) -> tuple[str, str | None] | None:
    """Repository and revision of a name; None if it is not written so.

    >>> hub_parts("hf://org/name@main"), hub_parts("hf://org/name"), hub_parts("hf://name")
    (('org/name', 'main'), ('org/name', None), None)
    """
    match = _NAME.fullmatch(model)
    return (match["repo"], match["revision"]) if match else None


def moved_path(move: Callable[[str], str], model: str) -> str:
    """A path that is moved; a name of the Hub stays."""
    return model if is_hub_name(model) else move(model)


BUILTIN_DIALECTS = ("vllm", "sglang", "llamacpp", "lmdeploy", "plain")
DIALECTS: Registry[Any] = Registry("dialect", plugins="servanda.dialects")
DIALECTS.reserve(*BUILTIN_DIALECTS)


def dialect_names() -> tuple[str, ...]:
    """Every name, with those of installed packages, which are not imported."""
    return tuple(dict.fromkeys((*BUILTIN_DIALECTS, *DIALECTS.names())))


def is_dialect(name: str) -> bool:
    """Whether there is such a dialect; packages are asked for a name that is not built in."""
    return name in BUILTIN_DIALECTS or name in DIALECTS


def dialect_hint(name: str) -> str:
    """The nearest name, or all of them."""
    return did_you_mean(name, dialect_names())


QUANTIZATIONS = (
    *("int8_weight_only", "int8_dynamic", "w8a8", "int4_g32", "w4a16_g128"),
    *("fp8_weight_only", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_e5m2_channel"),
    *("mxfp8", "mxfp4_weight_only", "nvfp4", "nvfp4_weight_only"),
    *("q8_0", "q4_0", "q4_1", "q4_k_m"),  # of GGUF
)


def quantization_hint(name: str) -> str:
    """Names are exact: two that begin alike are two kernels."""
    alike = [q for q in QUANTIZATIONS if name and q.startswith(name)]
    if len(alike) > 1:
        return f"which one: {' or '.join(alike)}? They are different kernels"
    return did_you_mean(name, QUANTIZATIONS)


PACK = ".pack"
DTYPES: tuple[str, ...] = get_args(Kernel.model_fields["dtype"].annotation)
KEYS = (
    *("attention", "device", "batch_size", "prefill_chunk", "prefix_cache", "kv_cache"),
    *("head_dtype", "adapter", "path", "title", "weights_from", "python", "fault"),
)
SERVER_KEYS = (
    *("dialect", "logprobs", "served", "timeout_s", "key_env"),
    *("batch_size", "path", "title", "weights_from"),
)
SERVER = "openai_http"
OPTION = "option."
NEED_A_MODEL = (
    *("transformers", "onnxruntime", "vllm", "llamacpp", "table", "recorded", "pack", SERVER),
    "external",  # and a trainer's kernel is not run here
)
_EXAMPLE = "such as transformers:models/tiny-lm@bfloat16, http://HOST:PORT, or reference.pack"
_URL = re.compile(r"https?://[^/,\s]+(/[^,\s?#]*)?")
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[^",]*')
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention": get_args(Kernel.model_fields["attention"].annotation),
    "head_dtype": ("float32", "bfloat16", "float16"),
    "path": ("prefill", "decode"),
    "logprobs": ("raw", "processed"),
}


def parse_kernel(text: str, *, engines: Collection[str], name: str = "kernel") -> Kernel:
    """The kernel that a string names; files are not examined.

    Args:
        engines: names that a kernel may use.
        name: name of the string in messages, such as "A".

    Raises:
        ContractError: the problem, with a caret under its place in the string.

    >>> parse_kernel("table:p.json,batch_size=4", engines=["table"]).batch_size
    4
    """
    return _Reader(text, name, engines).kernel()


class _Reader:
    """A string with a position."""

    def __init__(self, text: str, name: str, engines: Collection[str]) -> None:
        self.text, self.name, self.engines = text, name, engines

    def wrong(self, at: int, message: str, hint: str) -> ContractError:
        return ContractError(message, where=Where(self.name, 1, at + 1, self.text), hint=hint)

    def kernel(self) -> Kernel:
        text = self.text
        if not text.strip():
            raise self.wrong(0, "an empty text names no kernel", f"name one, {_EXAMPLE}")
        if re.search(r"@sha256:[0-9a-f]{64}$", text):
            raise self.wrong(
                0,
                "an address in a registry names no kernel",
                "download the baseline file, and give its path, such as reference.pack",
            )
        if re.match(r"https?://", text):
            return self._server()
        if text.endswith(PACK) and text.split(":", 1)[0] not in self.engines:
            return Kernel(engine="pack", model=text)  # type: ignore[call-arg]
        engine, colon, _ = text.partition(":")
        alone = re.match(r"[^,:]*", text)
        if alone is not None and alone[0] in self.engines and alone[0] not in NEED_A_MODEL:
            at = alone.end()
            if text[at : at + 1] in ("", ","):
                return self._made(at, {"engine": alone[0]}, {"engine": 0}, KEYS)
        if not colon:
            raise self.wrong(
                len(text),
                "a kernel is ENGINE:MODEL, and there is no colon",
                f"did you mean '{text}:MODEL'?"
                if text in self.engines
                else f"did you mean 'transformers:{text}'?",
            )
        if engine not in self.engines:
            address = re.match(r"[\w.-]+:[0-9]{2,5}(?![0-9])", text)  # HOST:PORT
            hint = f"did you mean 'http://{text}'?" if address else ""
            hint = hint or did_you_mean(engine, self.engines)
            raise self.wrong(0, f"no engine is named {engine!r}", hint)
        return self._options(engine, colon_at=len(engine))

    def _options(self, engine: str, colon_at: int) -> Kernel:
        at = colon_at + 1
        fields: dict[str, Any] = {"engine": engine}
        places: dict[str, int] = {"engine": 0, "model": at}
        model, at = self._word(at)
        if not self.text.startswith('"', places["model"]) and "@" in model:
            name, _, rounding = model.rpartition("@")
            # of a name on the Hub the first @ is that of its revision, unless a dtype follows
            if not is_hub_name(model) or rounding.partition("+")[0] in DTYPES or "@" in name:
                model = name
                self._rounding(rounding, places["model"] + len(model) + 1, fields, places)
        elif self.text.startswith("@", at):
            start = at + 1
            rounding, at = self._word(start)
            self._rounding(rounding, start, fields, places)
        if not model:
            raise self.wrong(colon_at + 1, "the kernel names no model", f"write one, {_EXAMPLE}")
        fields["model"] = model
        return self._made(at, fields, places, KEYS)

    def _server(self) -> Kernel:
        """The kernel behind a url."""
        match = _URL.match(self.text)
        end = match.end() if match else 0
        if match is None or self.text[end : end + 1] not in ("", ","):
            hint = "write http://HOST:PORT, and options after a comma"
            raise self.wrong(end, "this is not the address of a server", hint)
        fields: dict[str, Any] = {"engine": SERVER, "url": match[0]}
        return self._made(end, fields, {"engine": 0, "url": 0}, SERVER_KEYS)

    def _made(
        self, at: int, fields: dict[str, Any], places: dict[str, int], keys: Sequence[str]
    ) -> Kernel:
        """The kernel, with the options from `at` on."""
        while at < len(self.text):
            if self.text[at] != ",":
                raise self.wrong(at, "a comma is wanted here", "write ,key=value after the model")
            at = self._option(at + 1, fields, places, keys)
        try:
            return Kernel(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = places.get(str(first["loc"][0]), 0)
            message = first["msg"].removeprefix("Value error, ")
            raise self.wrong(place, f"{first['loc'][0]}: {message}", _EXAMPLE) from None

    def _word(self, at: int) -> tuple[str, int]:
        """The text up to the next comma, or one in quotes; and where it ends."""
        match = _WORD.match(self.text, at)
        assert match is not None  # the pattern matches nothing, too
        word = match[0]
        if word.startswith('"'):
            try:
                return str(json.loads(word)), match.end()
            except ValueError:
                hint = 'write it as JSON does: "a \\"quoted\\" text"'
                raise self.wrong(at, f"{word} is no JSON text", hint) from None
        if self.text[match.end() : match.end() + 1] == '"':
            quote = match.end()
            hint = "put the whole value in quotes, and close them"
            raise self.wrong(quote, "a quote inside a value, or one that is not closed", hint)
        return word, match.end()

    def _rounding(self, text: str, at: int, fields: dict[str, Any], places: dict[str, int]) -> None:
        dtype, plus, quantization = text.partition("+")
        if dtype not in DTYPES:
            hint = did_you_mean(dtype, DTYPES)
            if dtype in QUANTIZATIONS:
                hint = f"a dtype comes first: @bfloat16+{dtype}"
            raise self.wrong(at, f"no dtype is named {dtype!r}", hint)
        fields["dtype"], places["dtype"] = dtype, at
        if plus:
            if quantization not in QUANTIZATIONS:
                message = f"no quantization is named {quantization!r}"
                raise self.wrong(at + len(dtype) + 1, message, quantization_hint(quantization))
            fields["quantization"] = quantization

    def _option(
        self, at: int, fields: dict[str, Any], places: dict[str, int], keys: Sequence[str]
    ) -> int:
        """One key=value from `at` on; where it ends."""
        key = self.text[at:].split("=", 1)[0].split(",", 1)[0]
        equals = at + len(key)
        option = key.removeprefix(OPTION) if keys is KEYS and key.startswith(OPTION) else ""
        if key not in keys and not option:
            whose = "a url" if keys is SERVER_KEYS else "a kernel string"
            hint = did_you_mean(key, keys)
            if keys is SERVER_KEYS and key in ("model", "dtype", *KEYS):
                hint = "a server runs as it was started: remove it; "
                hint += "`served` names one of its models"
            raise self.wrong(at, f"{whose} has no key {key!r}", hint)
        if not self.text.startswith("=", equals):
            raise self.wrong(equals, f"{key} has no value", f"write {key}=...")
        if key in fields or key in places:
            raise self.wrong(at, f"{key} is there twice", "remove one")
        places[key] = start = equals + 1
        if key == "fault":
            fields[key], end = self._fault(start)
            return end
        if option and self.text.startswith("{", start):
            value, end = self._mapping(start)
            fields.setdefault("options", {})[option] = value
            return end
        value, end = self._word(start)
        if option:
            fields.setdefault("options", {})[option] = _json(value)
            return end
        if key in _CHOICES and value not in _CHOICES[key]:
            hint = f"one of {', '.join(_CHOICES[key])}"
            raise self.wrong(start, f"{key} cannot be {value!r}", hint)
        if key == "dialect" and not is_dialect(value):
            raise self.wrong(start, f"no dialect is named {value!r}", dialect_hint(value))
        if key in ("batch_size", "prefill_chunk", "prefix_cache"):
            if not re.fullmatch(r"[0-9]{1,6}", value):
                raise self.wrong(start, f"{key} is a whole number, not {value!r}", "write 32")
            fields[key] = int(value)
        elif key == "timeout_s":
            if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", value):
                raise self.wrong(start, f"{key} is a number of seconds, not {value!r}", "write 600")
            fields[key] = float(value)
        elif key == "key_env" and VARIABLE.fullmatch(value) is None:
            raise ContractError(  # without the text: it may hold a key
                f"{self.name}: key_env is no name of a variable",
                hint="write key_env=INFER_KEY; the key itself is in the variable of that name",
            )
        else:
            fields[key] = value
        return end

    def _mapping(self, at: int) -> tuple[Any, int]:
        """A JSON mapping, commas and all; and where it ends."""
        try:
            return json.JSONDecoder().raw_decode(self.text, at)
        except ValueError:
            hint = 'write it as JSON does: {"method": "ngram", "num_speculative_tokens": 4}'
            raise self.wrong(at, "this is no JSON mapping", hint) from None

    def _fault(self, at: int) -> tuple[dict[str, Any], int]:
        name = re.split(r"[:,]", self.text[at:], maxsplit=1)[0]
        end = at + len(name)
        if not self.text.startswith(":", end):
            return {name: True}, end
        value, end = self._word(end + 1)
        return {name: _json(value)}, end


def _json(text: str) -> Any:
    """A value as JSON, or the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def shown(kernel: Kernel) -> str:
    """A kernel in a line of output: its title, its pack, or its string."""
    if kernel.title:
        return kernel.title
    if kernel.engine == "pack":
        return f"reference pack {PurePath(kernel.model or '').name}"
    return str(kernel)


# Kernels written as strings: the inverse of `parse_kernel`.


def kernel_string(kernel: Kernel) -> str:
    """The string of a kernel: `parse_kernel` gives the same kernel back.

    Raises:
        ContractError: the kernel has a sampling of its own, or no model.
    """
    if kernel.url is not None and kernel.sampling is None and kernel.engine == SERVER:
        plain = Kernel(engine=SERVER, url=kernel.url)  # type: ignore[call-arg]
        return kernel.url + _keys(kernel, plain, SERVER_KEYS)
    if kernel.sampling is not None or (kernel.model is None and kernel.engine in NEED_A_MODEL):
        what = "a sampling of its own" if kernel.sampling is not None else "no model"
        raise ContractError(
            f"a kernel with {what} has no kernel string", hint="write a contract for it"
        )
    if kernel.model is None:
        return kernel.engine + _keys(kernel, Kernel(engine=kernel.engine), KEYS)  # type: ignore[call-arg]
    plain = Kernel(engine=kernel.engine, model=kernel.model)  # type: ignore[call-arg]
    if kernel.engine == "pack" and kernel == plain and kernel.model.endswith(PACK):
        return kernel.model
    text = f"{kernel.engine}:{_written(kernel.model, marks=',@')}"
    if kernel.engine not in ("table", "pack") or kernel.dtype != plain.dtype or kernel.quantization:
        text += f"@{kernel.dtype}" + (f"+{kernel.quantization}" if kernel.quantization else "")
    return text + _keys(kernel, plain, KEYS)


def _keys(kernel: Kernel, plain: Kernel, keys: Sequence[str]) -> str:
    """The keys by which a kernel differs from the plain one."""
    text = ""
    for key in keys:
        value = getattr(kernel, key)
        if value == getattr(plain, key):
            continue
        if key == "fault":
            for fault, setting in value.items():
                text += f",fault={fault}"
                if setting is not True:
                    text += f":{_written(json.dumps(setting))}"
        else:
            text += f",{key}={_written(str(value))}"
    for option, value in (kernel.options or {}).items():
        text += f",{OPTION}{option}={_written(json.dumps(value))}"
    return text


def _written(value: str, marks: str = ",") -> str:
    """A value as it is, or as a JSON text where it holds a mark of the grammar."""
    plain = value and not any(c in value for c in '"' + marks) and value.isprintable()
    return value if plain and value == value.strip() else json.dumps(value)
