# A clock that a test puts forward: a timeout ends when the test decides, however busy the machine.

import asyncio
import threading

WAIT_S = 60  # for what comes at once, unless the test is red
HOUR_S, NEVER_S = 3600.0, 1e9  # a timeout that a test ends by `skip`, and one that it never ends


def eventually(condition):
    """Wait for what comes at once, unless the test is red."""
    never, turns = threading.Event(), WAIT_S * 1000
    while not condition():
        never.wait(0.001)
        turns -= 1
        assert turns, "it never came"


class Skipping(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward from another thread."""

    _ahead_s = 0.0

    def time(self):
        return super().time() + self._ahead_s

    def skip(self, seconds, when):
        """Put the clock forward in the moment in which a condition is true.

        The condition is looked at between two steps of the loop, so that it cannot change before
        the clock does.
        """
        done = threading.Event()

        def forward():
            if not done.is_set() and when():
                self._ahead_s += seconds
                done.set()

        def turn():
            self.call_soon_threadsafe(forward)
            return done.wait(0.001)

        eventually(turn)

    @property
    def connections(self):
        """The server's side of every connection."""
        return self._server.server_state.connections

    def serve(self, server, taken):
        """Run a server of uvicorn at a socket until it ends."""
        self._server = server
        try:
            self.run_until_complete(server.serve(sockets=[taken]))
        finally:
            self.close()
