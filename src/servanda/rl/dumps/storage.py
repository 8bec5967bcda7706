# Where a dump lies: in a folder, or in a bucket that a URL names.
#
# A RemotePath has the part of pathlib's interface that readers of dumps use; a local path stays a
# Path.  The object store is asked through pyarrow.fs.  A path is two texts, so it can be pickled.

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from servanda.errors import ContractError, MeasurementError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BUFFER = 1 << 20  # bytes: a line has some 100 KB
_SERVERS = ("http://", "https://")
_HINT = "known: s3://BUCKET/KEY, gs://BUCKET/KEY, abfs://CONTAINER@ACCOUNT/PATH, hdfs://HOST/PATH"


class Stat(NamedTuple):
    """Of an object: st_size in bytes, st_mtime_ns since 1970."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemotePath:
    """An object or a prefix in an object store.

    Every method that asks the store raises OSError if it does not answer or refuses, and
    ContractError if no file system knows the URL.

    Args:
        url: URL of the dump, which has the options of the store.
        path: bucket and path of the object, as in a URL.
        known: its size and time, if a listing has returned them.
        listed: its objects, once they were listed; a new RemotePath lists them again.
    """

    url: str
    path: str
    known: Stat | None = field(default=None, compare=False)
    listed: dict[str, Stat] = field(default_factory=dict, compare=False, repr=False)

    @property
    def _store(self) -> Any:
        return _opened(self.url)[0]

    @property
    def key(self) -> str:
        """The path as the file system names it: without a host, for example."""
        root, key = _path(self.url), _opened(self.url)[1].rstrip("/")
        below = len(self.path) - len(root)  # negative above the folder of the URL
        return key + self.path[len(root) :] if below >= 0 else key[:below]

    def _but(self, path: str, known: Stat | None = None) -> RemotePath:
        return RemotePath(self.url, path, known)

    def __str__(self) -> str:
        """The URL of the object, without the keys that a URL may hold."""
        parts = urlsplit(self.url)
        options = (part for part in parts.query.split("&") if "secret" not in part.lower())
        query = "&".join(option for option in options if option)
        return f"{parts.scheme}://{self.path}{'?' if query else ''}{query}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> RemotePath:
        return self._but(str(PurePosixPath(self.path).parent))

    def __truediv__(self, name: str) -> RemotePath:
        return self._but(f"{self.path}/{name}")

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        return PurePosixPath(self.path).relative_to(folder.path)

    def resolve(self) -> RemotePath:
        return self

    def is_file(self) -> bool:
        return self.known is not None or self._info().is_file

    def is_dir(self) -> bool:
        from pyarrow.fs import FileType

        return self.known is None and self._info().type == FileType.Directory

    def exists(self) -> bool:
        from pyarrow.fs import FileType

        return self.known is not None or self._info().type != FileType.NotFound

    def _info(self) -> Any:
        return self._store.get_file_info([self.key])[0]

    def stat(self) -> Stat:
        return self.known or _stat(self._info())

    def rglob(self, pattern: str) -> Iterator[RemotePath]:
        """All objects below whose names match a pattern of fnmatch."""
        for below, known in self._list().items():
            if fnmatchcase(PurePosixPath(below).name, pattern):
                yield self._but(f"{self.path}/{below}", known)

    def iterdir(self) -> Iterator[RemotePath]:
        """The objects and folders below."""
        return (self / name for name in dict.fromkeys(b.partition("/")[0] for b in self._list()))

    def _list(self) -> dict[str, Stat]:
        from pyarrow.fs import FileSelector

        if not self.listed:
            key = self.key
            found = self._store.get_file_info(
                FileSelector(key, recursive=True, allow_not_found=True)
            )
            self.listed.update(
                {info.path[len(key) :].strip("/"): _stat(info) for info in found if info.is_file}
            )
        return self.listed

    def open(self) -> BinaryIO:
        """The bytes of the object, in their order."""
        stream = self._store.open_input_stream(self.key, compression=None)
        return cast(BinaryIO, io.BufferedReader(stream, _BUFFER))

    def random_access(self) -> Any:
        """The object as a file of pyarrow, of which only the parts that are read are fetched."""
        return self._store.open_input_file(self.key)


Place = Path | RemotePath


def _stat(info: Any) -> Stat:
    return Stat(info.size or 0, info.mtime_ns or 0)


@lru_cache(maxsize=8)
def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    from pyarrow.fs import FileSystem

    try:
        return FileSystem.from_uri(url)
    except (ValueError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
        what = f"{urlsplit(url).scheme}://{_path(url)}"
        why = str(error).replace(url, what)  # a URL may hold keys
        raise ContractError(f"{what} cannot be opened: {why}", hint=_HINT) from None


def _path(url: str) -> str:
    """Bucket and path of a URL, without a password."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return unquote((host if ":" in user else parts.netloc) + parts.path).rstrip("/")


def place(text: str | Place) -> Place:
    """A path, or the URL of an object store; one that is given again is listed again.

    A URL of HTTP is that of a server: it stays a path, and is refused where a file is needed.
    """
    if isinstance(text, RemotePath):
        return RemotePath(text.url, text.path)
    if isinstance(text, Path) or not _URL.match(text) or text.startswith(_SERVERS):
        return Path(text)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return RemotePath(text, _path(text))


@contextmanager
def answering(path: Place) -> Iterator[None]:
    """What an object store refuses within the block, as an error with the next move.

    Raises:
        MeasurementError: the store does not answer, or refuses.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(path, RemotePath):
            raise
        raise MeasurementError(
            f"{path} cannot be read: {error}",
            hint="see its credentials (of S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE), its region and its endpoint: docs/how-to/check_a_dump.md",
        ) from None


def opened(path: Place) -> BinaryIO:
    """The bytes of a file, in their order."""
    return path.open() if isinstance(path, RemotePath) else open(path, "rb", _BUFFER)


@contextmanager
def seekable(path: Place) -> Iterator[Any]:
    """A file for pyarrow or zipfile: its path, or a file that fetches the parts that are read."""
    if isinstance(path, RemotePath):
        with path.random_access() as file:
            yield file
    else:
        yield path


@contextmanager
def local(path: Place) -> Iterator[Path]:
    """A file on this machine; of an object, a copy that exists within the block."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder, path.open() as stream:
        copy = Path(folder) / path.name
        with open(copy, "wb") as file:
            while data := stream.read(_BUFFER):
                file.write(data)
        yield copy
