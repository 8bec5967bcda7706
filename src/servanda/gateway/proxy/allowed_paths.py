# Allowed paths: the requests under /v1, other than completions, that are forwarded to stable.
#
# They are sent with the operator's key, and servers have more than inference under /v1: vLLM loads
# and unloads adapters there, others list files and jobs of all users.  So a path that is not listed
# is refused.

from __future__ import annotations

import re

from servanda.errors import ContractError
from servanda.gateway.http.error_replies import ErrorReply

# stateless inference and read-only paths.  Not included, though OpenAI has them: files, batches,
# fine-tuning and stored chats, which belong to the upstream's key and so to all clients; and paths
# that delete or cancel.
OPEN = (
    "GET /v1/models",
    "GET /v1/models/*",
    "POST /v1/responses",
    "GET /v1/responses/*",  # a response by its id, which cannot be guessed
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/reranking",
    "POST /v1/score",
    "POST /v1/classify",
    "POST /v1/moderations",
    "POST /v1/tokenize",
    "POST /v1/detokenize",
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "POST /v1/audio/speech",
    "POST /v1/images/generations",
    "POST /v1/images/edits",
)
# of the controller, which has a separate listener
_LEADERS = re.compile(r"/v1/(follow|status|route|admin)(/|$)")
# a path that some servers normalise to another one
_ODD_RAW = re.compile(r"[^\x21-\x7e]|[\\?#;]|%(?![0-9a-fA-F]{2})")
_ODD_PATH = re.compile(r"//|/\.{1,2}(/|$)|[\x00-\x1f\x7f\\%?#;\ufffd]")
_RULE = re.compile(r"(?:([A-Z]+) )?(/v1(?=/)(?:/[\w.\-~:@]+)*(?:/\*)?)", re.ASCII)
_SHOWN = 200  # characters of a path in a message


class AllowedPaths:
    """The paths that clients may use.

    Args:
        more: in addition to `OPEN`: `[METHOD ]PATH`, every method where none is named; a `/*` at
            the end stands for all that lies below.

    Raises:
        ContractError: one of them is not a path.
    """

    def __init__(self, *more: str) -> None:
        self._exact: dict[str, set[str]] = {}
        self._below: list[tuple[str, str]] = []  # (beginning of a path, method)
        for rule in (*OPEN, *more):
            match = _RULE.fullmatch(rule)
            if match is None or _ODD_PATH.search(match[2]) or _LEADERS.match(match[2]):
                raise ContractError(
                    f"--allow is {rule!r}",
                    hint="write a path of users' own, such as /v1/files, /v1/files/* for all that "
                    "lies below, or 'GET /v1/files' for one method",
                )
            method, path = match[1] or "*", match[2]
            if path.endswith("*"):
                self._below.append((path[:-1], method))
            else:
                self._exact.setdefault(path, set()).add(method)

    def methods(self, path: str) -> set[str]:
        """The methods allowed on a path, `*` for all; empty if the path is closed.

        Args:
            path: decoded.
        """
        below = {
            method
            for start, method in self._below
            if path.startswith(start) and len(path) > len(start) and not path.endswith("/")
        }
        return below | self._exact.get(path, set())

    def check(self, method: str, path: str, raw_path: bytes) -> None:
        """Check that a request may be forwarded.

        Args:
            path: decoded once, as the upstream does; raw_path: as received, without its query.

        Raises:
            ErrorReply: no such path, or it is closed.
        """
        odd = _ODD_PATH.search(path) or _ODD_RAW.search(raw_path.decode("latin-1"))
        if odd or not path.startswith("/v1/") or _LEADERS.match(path):
            raise ErrorReply(404, "there is no such path: ask under /v1", "not_found")
        known = self.methods(path)
        if not known:
            shown = path[:_SHOWN]
            raise ErrorReply(
                403,
                f"{shown} is not open to clients of this gateway; if it should be, its operator "
                f"starts it with --allow {shown}",
                "path_not_allowed",
            )
        if not {"*", "GET" if method == "HEAD" else method} & known:
            raise ErrorReply(405, f"{path[:_SHOWN]} takes {' or '.join(sorted(known))}", "method")
