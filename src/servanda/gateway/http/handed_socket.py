# A listening socket that a service manager keeps open, by the protocol of systemd's socket
# activation (sd_listen_fds): it outlives the gateway, so that connections wait during a restart.

from __future__ import annotations

import os
import socket

from servanda.errors import MeasurementError

_FIRST = 3  # the file descriptor of the first socket
_HINT = "give the .socket unit one ListenStream= with a TCP port"


def handed_socket() -> socket.socket | None:
    """The socket that was handed to this process; None if there is none.

    The environment variables about it are removed, so that child processes do not take it.

    Raises:
        MeasurementError: there are several, or it is not a listening TCP socket.
    """
    given = {name: os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID")}
    os.environ.pop("LISTEN_FDNAMES", None)
    if not given["LISTEN_FDS"] or given["LISTEN_PID"] != str(os.getpid()):
        return None
    if given["LISTEN_FDS"] != "1":
        raise MeasurementError(
            f"{given['LISTEN_FDS']} sockets were handed over (LISTEN_FDS), and a gateway has one",
            hint=_HINT,
        )
    try:
        handed = socket.socket(fileno=_FIRST)
    except OSError as error:
        raise MeasurementError(
            f"the socket that was handed over (LISTEN_FDS) cannot be used: {error.strerror}",
            hint=_HINT,
        ) from None
    is_tcp = handed.family in (socket.AF_INET, socket.AF_INET6)
    if not (is_tcp and handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        handed.close()
        raise MeasurementError(
            "the socket that was handed over (LISTEN_FDS) is no listening TCP socket", hint=_HINT
        )
    handed.set_inheritable(False)
    return handed
