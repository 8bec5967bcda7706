# Answering: one request for a completion, from its body to the last byte of its reply.
#
# Everything that concerns evidence is decided before anything is sent: the pool, whether it is
# sampled, what it is asked for.  What the answer is like changes none of it.  A reply that has
# begun is of one pool to its end.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter

from servanda.gateway.http import headers as named
from servanda.gateway.http.error_replies import Header, Refused
from servanda.gateway.proxy.counters import add
from servanda.gateway.proxy.exchange import Exchange, is_packed, is_stream, passed
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.launch_log import Row
from servanda.gateway.proxy.logprob_capture import Capture
from servanda.gateway.proxy.logprob_request import NOT_TO_ITS_TASTE, Wish, allowed
from servanda.gateway.proxy.mirror import Mirror
from servanda.gateway.proxy.request import Asked
from servanda.gateway.proxy.upstreams import (
    BROKEN,
    ClientError,
    Failed,
    Response,
    Server,
    beginning,
    read,
)
from servanda.gateway.routing.model import Decision, Known, Pool

_WAITS = ("reply", "part", "total")  # that a pool lets end
_TURN = 8 << 10  # bytes of a stream that are taken apart before others have their turn
# of a client's headers, what a sampled request says otherwise
_OF_ITS_OWN = frozenset(("accept-encoding", *named.OF_A_BODY))
_REFUSED: Mapping[str, Callable[[str], Refused]] = {
    "connect": lambda pool: Refused(502, f"{pool} cannot be reached; try again", "no_upstream", 1),
    "broken": lambda pool: Refused(502, f"{pool} broke its reply off; try again", "broken", 1),
    "timeout": lambda pool: Refused(504, f"{pool} did not answer in time; ask for less", "timeout"),
    "5xx": lambda pool: Refused(502, f"{pool} fails; try again", "upstream_fails", 1),
}


class Answering:
    """Requests of /v1/completions and /v1/chat/completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._mirror = gateway, Mirror(gateway)

    async def __call__(self, x: Exchange, path: str) -> None:
        gateway = self._gateway
        asked = Asked(await x.body(), chat=path == "/v1/chat/completions")
        x.patience.listen(x.receive)
        session = x.head.session
        request = gateway.number()
        if gateway.router.counts_tokens:
            x.pause()
        known = await gateway.known(asked, request, x.holder, session, path)
        if gateway.router.counts_tokens:
            x.resume()
        decision = gateway.router.decide(known, now=gateway.now())
        counts = gateway.counts
        counts.decided(decision)
        key = gateway.whose(asked, x.holder, session, x.address) if decision.sampled else ""
        one = _One(gateway, x, path, asked, decision, known, key)
        try:
            if decision.pool is None:
                raise _outside(gateway, known)
            pool = gateway.enter(decision.pool, x.client)
            if pool != decision.pool:
                add(counts.failovers, "breaker")
            if session:
                gateway.sessions.put(known.sticky, pool)
            if decision.mirrored and self._readable(asked):
                self._mirror(asked, path, decision, known, key, x.client)
            try:
                await one.by(pool)
            except _Again as again:
                add(counts.failovers, again.why)
                await self._again(one, x, known)
        finally:
            counts.overhead.add(x.busy_s)
            counts.replied(decision, one.pool, x.first_s)

    async def _again(self, one: _One, x: Exchange, known: Known) -> None:
        """Have stable answer what infer did not."""
        try:
            pool = self._gateway.enter("stable", x.client)
            if x.head.session:
                self._gateway.sessions.put(known.sticky, pool)
            await one.by(pool)
        finally:
            one.compared(well=False)

    def _readable(self, asked: Asked) -> bool:
        """Whether a body is small enough to be taken apart beside its answer."""
        readable = len(asked.body) <= self._gateway.config.limits.read_bytes
        self._gateway.counts.mirror_dropped += not readable
        return readable


class _Again(Exception):  # noqa: N818 - what is to be done
    """Infer gave no reply, and stable may be asked; `why` is what `Failed` says."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _One:
    """One request, with what was decided of it."""

    def __init__(
        self,
        gateway: Gateway,
        x: Exchange,
        path: str,
        asked: Asked,
        decision: Decision,
        known: Known,
        key: str,
    ) -> None:
        self._gateway, self._x, self._asked, self._decision = gateway, x, asked, decision
        self._known, self._key = known, key
        query = x.scope["query_string"]
        self._path = f"{path}?{query.decode('latin-1')}" if query else path
        self._capture: Capture | None = None
        self.pool: Pool | None = None  # whose reply the client gets; None as long as it gets none
        self._doubt = ""  # why infer gave no reply, until stable was asked the same

    async def by(self, pool: Pool) -> None:
        """Have it answered by a pool.

        Raises:
            _Again: nothing came of infer, and nothing was sent to the client.
            Refused: the same of the only pool, or the last one.
        """
        gateway, counts = self._gateway, self._gateway.counts
        server = gateway.servers[pool]
        wish, row = self._launched() if pool == "infer" else (None, None)
        self._lost = "cancelled"
        counts.begun(pool)
        try:
            await self._replied(server, pool, wish)
        except Failed as failed:
            self._lost = failed.why
            counts.answered(pool, failed.why)
            await self._without(server, failed.why)
        except asyncio.CancelledError:
            await self._ended(server, pool)
        finally:
            counts.ended(pool)
            if pool == "infer":
                gateway.launches.move(self._decision.slices, -1)
            if row is not None:
                self._close(row)

    def _launched(self) -> tuple[Wish | None, Row | None]:
        gateway, decision = self._gateway, self._decision
        due = decision.sampled and not decision.mirrored
        wish = gateway.wish(self._asked) if due else None
        row = gateway.launch(decision, self._known, self._key, wish)
        gateway.launches.move(decision.slices, 1)
        return wish, row

    async def _replied(self, server: Server, pool: Pool, wish: Wish | None) -> None:
        response = await self._sent(server, wish.body if wish else self._asked.body, wish)
        if wish is not None and (response.status in NOT_TO_ITS_TASTE or is_packed(response)):
            # perhaps it is what was added: the client's request is sent as it was
            add(self._gateway.counts.reflexes, "refused sample")
            self._lost, wish = "packed" if is_packed(response) else "refused", None
            said = await self._read(response)
            response = await self._sent(server, self._asked.body, None)
            if response.status == 200:  # else it may be the client's own words that it says
                server.best = allowed(said, server.best)
        if wish is not None and response.status != 200:
            self._lost, wish = f"status {response.status}", None
        try:
            self._met(server, pool, response)
            self.pool = pool
            if response.status not in BROKEN:
                self.compared(well=True)
            if wish is not None and (response.content_length or 0) <= self._x.limits.reply_bytes:
                await self._captured(server, response, wish)
            else:
                if wish is not None:
                    self._lost = "overlong"
                headers = self._shown(named.returned(response.raw_headers), pool)
                await passed(self._x, response, headers, server.about)
        finally:
            response.close()
        if response.status not in BROKEN:
            server.breaker.well(self._x.client)
        self._gateway.counts.answered(pool, f"{response.status // 100}xx")

    async def _sent(self, server: Server, body: bytes, wish: Wish | None) -> Response:
        x, about = self._x, server.about
        headers = named.sent(x.headers, about.key, keeps=not x.holder)
        if wish is not None:
            headers = [(name, value) for name, value in headers if name not in _OF_ITS_OWN]
            headers.append(("accept-encoding", "identity"))
        x.patience.wait_for("reply", about.first_byte_s)
        x.pause()
        x.sent = perf_counter()
        response = await server.send("POST", self._path, headers, body)
        x.resume()
        return response

    def _met(self, server: Server, pool: Pool, response: Response) -> None:
        """What the status of a reply says of its pool.

        Raises:
            Failed: it is an error that another pool may not have.
            Refused: it leads elsewhere.
        """
        status = response.status
        if status in BROKEN:
            if self._gateway.has_another(pool):
                raise Failed("5xx")
            server.breaker.left()  # it may be the request, and nobody else is left to ask
        elif server.breaker.state != "closed":
            server.breaker.well(self._x.client)
        if 300 <= status < 400 and status != 304:
            self._gateway.counts.answered(pool, "3xx")
            raise Refused(
                502,
                f"{pool} answers with a redirect, and none is followed: correct its url",
                "redirect",
            )

    async def _captured(self, server: Server, response: Response, wish: Wish) -> None:
        """Send a sampled reply on, without what was asked for beside it."""
        x, limits = self._x, self._x.limits
        self._capture = capture = Capture(wish, limits.line_bytes, limits.reply_bytes)
        headers = self._shown(named.returned(response.raw_headers, rewritten=True), "infer")
        if not is_stream(response):
            body, whole = await beginning(response, limits.reply_bytes)
            if not whole:  # no length said so before
                self._lost, self._capture = "overlong", None
                await passed(x, response, headers, server.about, body)
                return
            body = capture.reply(body)
            headers.append((b"content-length", str(len(body)).encode()))
            x.resume()
            await x.whole(response.status, headers, body)
            x.pause()
            return
        await x.start(response, headers)
        x.pause()
        x.patience.wait_for("part", server.about.first_byte_s)
        try:
            async for data in response.content.iter_any():
                for at in range(0, len(data), _TURN):
                    if at:  # a stream without pauses is not the only one
                        await asyncio.sleep(0)
                    if told := capture.feed(data[at : at + _TURN]):
                        await x.part(told)
                x.patience.wait_for("part", server.about.idle_s)
        except (ClientError, OSError):
            raise Failed("broken") from None
        if rest := capture.rest():
            await x.part(rest)
        await x.end()

    async def _read(self, response: Response) -> bytes:
        try:
            return await read(response, self._x.limits.reply_bytes)
        finally:
            response.close()

    async def _without(self, server: Server, why: str) -> None:
        """Go on where a pool gave no reply, or only a part of one.

        Raises:
            _Again: stable is asked.
            Refused: nobody is.
        """
        x = self._x
        if not x.begun:
            self.pool = None  # the client has nothing of the reply that began
        if not x.begun and not x.patience.over and self._gateway.has_another(server.name):
            if why == "connect":
                server.breaker.unreachable()
            else:
                self._doubt = why
            raise _Again(why)
        if why == "timeout" and x.begun and x.patience.over:
            server.breaker.left()  # a long answer is no fault, nor is a slow reader
        else:
            self._gateway.blame(server, why, x.client)
        refused = _REFUSED[why](server.name)
        if not x.begun:
            raise refused
        await x.give_up(refused)

    def compared(self, *, well: bool) -> None:
        """What infer's failure says of it, once stable did well at the same request, or did not."""
        why, self._doubt = self._doubt, ""
        if why and well:
            self._gateway.blame(self._gateway.servers["infer"], why, self._x.client)
        elif why:  # a request that no pool answers is at fault itself
            self._gateway.servers["infer"].breaker.left()

    async def _ended(self, server: Server, pool: Pool) -> None:
        """Go on where a wait took too long; whoever cancelled otherwise is obeyed."""
        x, why = self._x, self._x.patience.why
        whole = self._capture is not None and self._capture.whole
        if why and not whole:  # an answer that only had to reach its client is one
            self._lost = "timeout" if why in _WAITS else why
        if why in _WAITS:
            self._gateway.counts.answered(pool, "timeout")
            x.patience.again()
            await self._without(server, "timeout")
            return
        server.breaker.left()
        self._gateway.counts.answered(pool, "2xx" if whole else "gone")
        if why != "client":
            raise
        x.patience.again()
        x.cut()

    def _close(self, row: Row) -> None:
        """What became of a sampled request, once its last byte was sent."""
        capture, gateway = self._capture, self._gateway
        if capture is None or self._lost != "cancelled":
            gateway.resolve(row, self._asked, {"lost": self._lost})
            return
        answer = capture.answer()
        gateway.sensed(capture.odd, self._x.client)
        gateway.resolve(row, self._asked, answer, capture.prompt, capture.prompt_tokens)

    def _shown(self, headers: list[Header], pool: Pool) -> list[Header]:
        if self._gateway.config.shows:
            headers.append((b"x-servanda-decision", self._known.request.encode()))
            headers.append((b"x-servanda-pool", pool.encode()))
        return headers


def _outside(gateway: Gateway, known: Known) -> Refused:
    snapshot = gateway.snapshot
    span = snapshot.prompt_tokens if snapshot is not None else None
    low, high = span or (0, 0)
    return Refused(
        422,
        f"the prompt has {known.prompt_tokens} tokens, and the contract promises {low:g} to "
        f"{high:g}: send one of that length",
        "outside_envelope",
    )
