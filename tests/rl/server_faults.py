# Faults of a server that takes over weights, and what a preflight test calls them.
#
# tests/rl/weight_server.py makes them; a name here is all that it is told.

from typing import NamedTuple


class ServerFault(NamedTuple):
    """A fault, and what has to come of it.

    Args:
        how: the fault in words.
        causes: the causes that may be named; "" stands for none, which is right without a fault.
        error: part of the error that ends the test instead.
        hint: part of that error's hint.
    """

    how: str
    causes: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""


SERVER_FAULTS = {
    "none": ServerFault("takes over every tensor", ("",)),
    "ignores": ServerFault("answers with success, and keeps its weights", ("never_synced",)),
    "version_only": ServerFault("raises its version, and keeps its weights", ("version_only",)),
    "keeps_head": ServerFault("its head is a copy that stays", ("tied_head_stale",)),
    "stops": ServerFault("takes over four updates, and no later one", ("stopped",)),
    "late": ServerFault("loads the checkpoint of the update before", ("late",)),
    "every_other": ServerFault("drops every second update", ("dropped",)),
    "scaled": ServerFault("multiplies the output of an MLP by 1.5", ("scaled",)),
    "float8": ServerFault("rounds every matrix to float8", ("wrong_cast",)),
    "stale_prefixes": ServerFault("generates from prefixes of the old weights", ("stale_cache",)),
    "half_of_the_shards": ServerFault(
        "reads the first half of the checkpoint's files", ("deaf", "unfaithful")
    ),
    "error_body": ServerFault(
        "answers with status 200 and an error",
        error="answered with status 200, and reports an error",
        hint="the server must see the folder",
    ),
    "status_500": ServerFault(
        "answers the second update with status 500",
        error="answered with status 500",
        hint="the server's log has the reason",
    ),
    "hangs": ServerFault(
        "never answers the second update",
        error="did not answer within",
        hint="server's log",
    ),
    "no_prompt_logprobs": ServerFault(
        "scores no prompt",
        error="logprobs is missing",
        hint="not one of the declared dialect",
    ),
}
