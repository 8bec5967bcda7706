# The folder of a checkpoint: config.json, tokenizer.json and safetensors, and what they say.
#
# Nothing here needs torch, so that an engine without it reads the same folder, refuses it in
# the same words and gives its tensors the same digests.  A pickle is never opened.  Whatever
# is wrong with a folder is said with the file that is wrong and what to do about it.

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import DEFAULT, digest_of
from servanda.contract.kernel_string import hub_parts, is_hub_name
from servanda.engines.foreign_code import code_is_refused, is_allowed
from servanda.errors import MeasurementError, Where
from servanda.traces import json_fields

# Models of the Hugging Face Hub, in the cache that its own tools fill.
#
# Nothing is downloaded unless SERVANDA_HUB_DOWNLOAD=1 is set: a contract that someone else wrote
# must not fetch what it names.


DOWNLOAD = "SERVANDA_HUB_DOWNLOAD"
# what engines read of a repository; pickles, of which no engine reads any, are left out
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def cached_folder(model: str) -> Path:
    """The folder of a model's snapshot, whose name is the commit.

    Args:
        model: hf://ORGANISATION/NAME, or with @REVISION: a branch, a tag or a commit.

    Raises:
        MeasurementError: another form of name, no huggingface_hub, not in the cache, or the
            download failed.
    """
    parts = hub_parts(model)
    if parts is None:
        raise MeasurementError(
            f"{model!r} is no name of a model on the Hub",
            hint="write hf://ORGANISATION/NAME, or hf://ORGANISATION/NAME@REVISION",
        )
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise MeasurementError(
            f"{model!r} is read by huggingface_hub, which is not installed",
            hint="pip install huggingface_hub, or name the model's folder",
        ) from None
    repo, revision = parts
    download = os.environ.get(DOWNLOAD) == "1" and (
        not code_is_refused() or is_allowed(constants.ENDPOINT)
    )
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_files_only=not download, allow_patterns=[*_FILES]
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        command = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
        if download and not constants.HF_HUB_OFFLINE:
            reason = str(error).strip().splitlines()[0]
            raise MeasurementError(
                f"{model!r} could not be downloaded: {reason}",
                hint=f"try {command}, whose cache is read here",
            ) from error
        raise MeasurementError(
            f"{model!r} is not in the Hub's cache {constants.HF_HUB_CACHE}{_there(repo)}",
            hint=f"run {command}, or set {DOWNLOAD}=1 to let Servanda download it",
        ) from None
    return Path(folder)


def missing_hint(folder: Path) -> str:
    """What completes a snapshot of the cache that lacks files; "" for any other folder."""
    repo = repository_of(folder)
    command = f"hf download {repo} --revision {folder.name}"
    return f"the download is not complete: run {command}" if repo else ""


def repository_of(folder: Path) -> str:
    """The repository whose snapshot a folder is; "" for any other folder."""
    whole = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not whole.startswith("models--"):
        return ""
    return whole.removeprefix("models--").replace("--", "/", 1)


def _there(repo: str) -> str:
    """What the cache has of a repository."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"))
    refs = place / "refs"
    names = sorted(p.relative_to(refs).as_posix() for p in refs.rglob("*") if p.is_file())
    commits = sorted(p.name for p in (place / "snapshots").glob("*"))
    if not commits:
        return ""
    return f", which has of it {', '.join([*names, *(commit[:12] for commit in commits)])}"


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SAVED_ANEW = "copy the folder again, or write it anew with save_pretrained"


def checkpoint_folder(model: str | None) -> Path:
    """The folder of a model, which has all the files that an engine reads.

    Args:
        model: a folder, or a name of the Hub (hf://) that its cache has.

    Raises:
        MeasurementError: no folder, or a file is not in it.
    """
    if not model:
        raise MeasurementError(
            "the kernel names no model",
            hint="add model: path/to/folder, a folder with config.json and model.safetensors",
        )
    folder = cached_folder(model) if is_hub_name(model) else Path(model)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise MeasurementError(
            f"the model folder {str(folder)!r} {state}",
            hint=_nearest(folder)
            or "name a folder, or a model of the Hub as hf://ORGANISATION/NAME",
        )
    refuse_bare(folder)
    weight_files(folder)
    return folder


def model_file(model: str | None, suffix: str, reads: str, made: str) -> Path:
    """The file of a model in an engine's own format: the file itself, or the one in its folder.

    Args:
        model: a file, a folder, or a name of the Hub (hf://) that its cache has.
        suffix: of such files, as ".gguf".
        reads: what the engine reads, in words; made: the next move where a folder has none.

    Raises:
        MeasurementError: there is no such file, or a folder has several.
    """
    if not model:
        raise MeasurementError("the kernel names no model", hint=f"add model: FILE{suffix}")
    path = cached_folder(model) if is_hub_name(model) else Path(model)
    if path.is_file():
        return path
    if not path.is_dir():
        raise MeasurementError(
            f"the model {str(path)!r} does not exist",
            hint=_nearest(path) or f"name a {suffix} file, or a folder that holds one",
        )
    found = sorted(path.glob(f"*{suffix}")) or sorted(path.glob(f"*/*{suffix}"))
    plain = [file for file in found if file.name == f"model{suffix}"]  # beside its variants
    if not found:
        raise MeasurementError(
            f"{reads}, and {str(path)!r} holds none", hint=missing_hint(path) or made
        )
    if len(found) > 1 and len(plain) != 1:
        names = ", ".join(str(file.relative_to(path)) for file in found)
        raise MeasurementError(
            f"{str(path)!r} holds several {suffix} files: {names}", hint="name one of them"
        )
    return (plain or found)[0]


def refuse_bare(folder: Path) -> None:
    """Let a folder pass that has the rules of its model and of its tokens.

    Raises:
        MeasurementError: it lacks config.json or tokenizer.json.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise MeasurementError(
                f"the model folder {str(folder)!r} has no {name}",
                hint=missing_hint(folder)
                or "save model and tokenizer into this folder with save_pretrained",
            )


def converted_from(model: str | None, stated: str, declared: str | None) -> str:
    """The digest of the weights that a file was made from; "" if it is unknown.

    Args:
        stated: by the file itself; declared: by the contract (`weights_from`).

    Raises:
        MeasurementError: they contradict each other.
    """
    if stated and declared and stated != declared:
        raise MeasurementError(
            f"{model!r} was made from weights {stated[:8]}, and weights_from says {declared[:8]}",
            hint="leave weights_from out, or name the file of those weights",
        )
    return stated or declared or ""


def _nearest(folder: Path) -> str:
    """What lies beside the missing file or folder, and has a name that is close to its own."""
    beside = sorted(p.name for p in folder.parent.glob("*" if folder.suffix else "*/"))
    near = difflib.get_close_matches(folder.name, beside, n=1)
    return f"did you mean {str(folder.parent / near[0])!r}?" if near else ""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint.

    Raises:
        MeasurementError: a file is missing, or engines would read different tensors from the
            folder, since its index and its files disagree or it has two forms of the checkpoint.
    """
    names, places = [WEIGHTS], None
    if (folder / INDEX).is_file():
        with reading(folder / INDEX):
            places = read_json(folder / INDEX)["weight_map"]
            names = sorted(set(places.values()))
            odd = (n for n in names if {"..", "/"} & {*Path(n).parts} or "\\" in n)
            if (name := next(odd, None)) is not None:
                raise ValueError(f"{name!r} is no file of this folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        other = sorted(p.name for p in folder.glob("*.bin"))
        pickled = f"{other[0]} is a pickle and is not read: save it as safetensors" if other else ""
        raise MeasurementError(
            f"the model folder {str(folder)!r} has no {', '.join(missing)}",
            hint=pickled or missing_hint(folder) or SAVED_ANEW,
        )
    if places is not None:
        _one_reading(folder, places)
    return [folder / name for name in names]


def _one_reading(folder: Path, places: Mapping[str, str]) -> None:
    """Some engines follow the index, others read every tensor of every file: both must agree."""
    # Transformers prefers the single file, vLLM the index
    files = set(places.values())
    if WEIGHTS not in files and (folder / WEIGHTS).is_file():
        raise MeasurementError(
            f"the model folder {str(folder)!r} has two checkpoints: {WEIGHTS}, and the files of "
            f"{INDEX}; engines differ in which they read",
            hint="delete the one that is not meant",
        )
    stored = {(name, file) for file in files for name in tensor_header(folder / file)[0]}
    for name, file in sorted(stored ^ set(places.items())):
        if (name, file) not in stored:
            said = f"{str(folder / INDEX)!r} places the tensor {name!r} in {file}, which lacks it"
        else:
            place = f"places in {places[name]}" if name in places else "does not name"
            said = f"{str(folder / file)!r} has the tensor {name!r}, which {INDEX} {place}"
        raise MeasurementError(said, hint=SAVED_ANEW)


def tensor_header(file: Path) -> tuple[dict[str, Any], int]:
    """Of a safetensors file: name -> dtype, shape and place of each tensor, and where they begin.

    Raises:
        MeasurementError: the file is no safetensors, or ends early.
    """
    with reading(file), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= file.stat().st_size else b""
        if len(text) < length:
            raise ValueError("the header of safetensors is not whole")
        header = json.loads(text)
        header.pop("__metadata__", None)
    return header, 8 + length


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; a syntax error is shown at its line."""
    with reading(file):
        text = file.read_text(encoding="utf-8")
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            line = text.splitlines()[error.lineno - 1 : error.lineno]
            raise MeasurementError(
                f"this is not JSON: {error.msg}",
                where=Where(
                    str(file), error.lineno, error.colno, "".join(map(json_fields.words, line))
                ),
                hint=SAVED_ANEW,
            ) from None
        if not isinstance(value, dict):
            raise MeasurementError(f"{str(file)!r} holds no JSON object", hint=SAVED_ANEW)
    return value


@contextmanager
def reading(file: Path, hint: str = SAVED_ANEW) -> Iterator[None]:
    """Whatever a library says about a file, said with the file's name and a next step."""
    try:
        yield
    except MeasurementError:
        raise
    except Exception as error:  # the readers raise anything, bare Exception included
        reason = (not json_fields.hides_data() and str(error).strip()) or type(error).__name__
        raise MeasurementError(
            f"{str(file)!r} cannot be read: {reason.splitlines()[0]}", hint=hint
        ) from error


def end_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json first, then config.json."""
    file = folder / "generation_config.json"
    eos = read_json(file).get("eos_token_id") if file.is_file() else None
    eos = config.get("eos_token_id") if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


# of a config.json, what changes no number: who wrote it, and how the weights lie on disk
_NO_NUMBER = (
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path"),
    *("architectures", "auto_map", "use_cache", "initializer_range", "_attn_implementation"),
)


def config_values(config: Mapping[str, Any], place: str = "") -> dict[str, str]:
    """What a config.json says that may change a number, by dotted keys, as JSON.

    >>> config_values({"rope_parameters": {"rope_theta": 1e4}, "dtype": "bfloat16"})
    {'rope_parameters.rope_theta': '10000.0'}
    """
    values: dict[str, str] = {}
    for key, value in config.items():
        if key in _NO_NUMBER:
            continue
        if isinstance(value, Mapping):
            values |= config_values(value, f"{place}{key}.")
        else:
            values[f"{place}{key}"] = json.dumps(value)
    return values


# of a generation_config.json, what a server takes for a request that names nothing else
_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "bad_words_ids"),
)


def sampling_defaults(folder: Path) -> dict[str, str]:
    """What generation_config.json makes of a request that names no sampling, for the fingerprint.

    Servanda's own requests name every parameter; those of other clients of the same server may
    not, and are then answered with these defaults.
    """
    file = folder / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    return {f"{DEFAULT}{key}": json.dumps(config[key]) for key in _DEFAULTS if key in config}


def facts(folder: Path) -> dict[str, str]:
    """For the fingerprint: the commit of a snapshot of the Hub, and the sampling defaults."""
    commit = {"revision": folder.name} if repository_of(folder) else {}
    return commit | sampling_defaults(folder)


def file_digest(file: Path) -> str:
    """Of a file's bytes, 16 bytes in hex."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as data:
        while piece := data.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def values_digest(values: NDArray[np.floating], shape: Sequence[int]) -> str:
    """Of a tensor's shape and of its values as little-endian float32, 16 bytes in hex."""
    values = np.ascontiguousarray(values, dtype="<f4")
    digest = hashlib.blake2b(json.dumps(list(shape)).encode(), digest_size=16)
    digest.update(values.reshape(-1).view("u1").data)
    return digest.hexdigest()


def token_digest(ids: Mapping[str, int], tokenizer_json: Mapping[str, Any]) -> str:
    """Of the vocabulary, id by id, and of every other rule of tokenizer.json."""
    rules = {key: value for key, value in tokenizer_json.items() if key != "model"}
    model = tokenizer_json.get("model") or {}
    rules["model"] = {key: value for key, value in model.items() if key != "vocab"}
    return digest_of([sorted((i, token) for token, i in ids.items()), rules])
