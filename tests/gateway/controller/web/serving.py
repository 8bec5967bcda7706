# The listener on a real socket, in a thread, and anyone who asks it.

import contextlib
import threading

import httpx2
import uvicorn

from servanda.gateway.controller.web.app import Limits, app
from servanda.gateway.http.api_keys import ROLES, Keys
from servanda.gateway.http.listener import BoundedProtocol, bind

WAIT_S = 60  # for what comes at once, unless the test is red
KEY = {role: f"{role}-key-0123456789abcdef" for role in ROLES}
KEYS = Keys(*((f"a-{role}", role, key) for role, key in KEY.items()))


def bearer(role):
    return {"authorization": f"Bearer {KEY[role]}"}


@contextlib.contextmanager
def live(leader, keys=KEYS, **limits):
    """A client of a leader's listener; it has no key of its own."""
    config = uvicorn.Config(
        app(leader, keys, Limits(**limits)),
        http=BoundedProtocol,  # as `servanda serve` has it
        lifespan="on",
        log_level="critical",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    ready = threading.Event()

    class AnnouncingServer(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            ready.set()

    with bind("127.0.0.1", 0, "--admin") as taken:
        running = AnnouncingServer(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
                yield client
        finally:
            running.should_exit = True
            thread.join()
