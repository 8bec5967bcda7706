# Who may what: keys, paths, and headers that claim something.

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import aiohttp
from yarl import URL

from benchmarks.gateway.chaos.asking import SLICES, pinned, raw, unpinned
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import KEYS, KEYS_FILE, Deployment, user_key
from benchmarks.gateway.traffic import request
from benchmarks.gateway.upstream import Upstream

_READ_S = 5.0  # within which a file that was written is read


@scenario("no key, wrong keys, and a client's key at the leader")
async def wrong_keys(d: Deployment, found: Finding) -> None:
    before = sum(d.seen(pool)["count"] for pool in d.pools)
    for key in ("", "Bearer wrong-key-0123456789", "Bearer ", f"Bearer {KEYS['admin']}", "Basic x"):
        status = await raw(d, request(0), {"authorization": key})
        found.check(status in (401, 403), f"{key[:12]!r} had {status} from the gateway")
    after = sum(d.seen(pool)["count"] for pool in d.pools)
    found.check(after == before, "an upstream was asked")
    acts = {
        ("client", "GET", "/v1/status"),
        ("client", "POST", "/v1/admin/pin"),
        ("viewer", "POST", "/v1/admin/pin"),
        ("viewer", "POST", "/v1/follow"),
        ("operator", "POST", "/v1/admin/reload"),
        ("gateway", "POST", "/v1/admin/pin"),
    }
    for role, method, path in sorted(acts):
        act = {"slice": "all", "to": "stable", "ttl_s": 60, "reason": "x"}
        status = d.ask(method, path, role, json=act).status_code
        found.check(status in (401, 403), f"{role} had {status} from {path}")
    await well(found, d)


@scenario("paths of the leader, asked of the gateway")
async def admin_paths(d: Deployment, found: Finding) -> None:
    pins = (d.status() or {})["slices"]
    act = {"slice": "all", "to": "stable", "ttl_s": 60, "reason": "x"}
    paths = ("/v1/admin/pin", "/v1/admin/reload", "/v1/follow", "/v1/status", "/page", "/metrics")
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for path in (*paths, "/v1/../v1/admin/pin", "//v1/admin/pin", "/v1/%61dmin/pin"):
            for role in ("client", "admin"):
                key = user_key(0) if role == "client" else KEYS[role]
                headers = {"authorization": f"Bearer {key}"}
                async with session.post(d.url + path, json=act, headers=headers) as reply:
                    text = await reply.text()
                # an upstream may be asked for what the gateway does not know; the leader may not
                led = any(word in text for word in ("log_price", "kernel_contract", '"taken"'))
                found.check(not led, f"{path} reached the leader: {text[:100]}")
    now = (d.status() or {})["slices"]
    same = [one["pin"] for one in now] == [one["pin"] for one in pins]
    found.check(same, "a pin was set")
    await well(found, d)


# of servers behind a gateway, and none of inference: who asks them changes what others are served
_CLOSED = (
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "POST /v1/files",
    "DELETE /v1/models/fake",
    "GET /v1/fine_tuning/jobs",
    "POST /v1/batches",
    "POST /v1/models%2f..%2fload_lora_adapter",
)


@scenario("a client asked to load an adapter, to delete a model, and for files of others")
async def closed_paths(d: Deployment, found: Finding) -> None:
    before = {pool: d.seen(pool)["asked"] for pool in d.pools}
    headers = {"authorization": f"Bearer {user_key(0)}"}
    statuses = set[int]()
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for method, path in (one.split(" ") for one in _CLOSED):
            url = URL(d.url + path, encoded=True)
            async with session.request(method, url, json={}, headers=headers) as reply:
                statuses.add(reply.status)
    found.check(statuses <= {400, 403, 404, 405}, f"they had {sorted(statuses)}")
    for pool in d.pools:
        new = d.seen(pool)["asked"].keys() - before[pool].keys()
        found.check(not new, f"{pool} was asked {sorted(new)[:3]}")
        found.misrouted += len(new)
    found.notes.append(f"{len(_CLOSED)} had {', '.join(map(str, sorted(statuses)))}")
    await well(found, d)


@scenario("the file of keys was written six times: one user left, one came, and twice it was wrong")
async def keys_written(d: Deployment, found: Finding) -> None:
    file = d.folder / KEYS_FILE
    before = file.read_text()
    gone, came = "leaves-key-0123456789", "comes-key-0123456789"
    leaving = {"name": "leaves", "role": "client", "key": gone}
    coming = {"name": "comes", "role": "client", "key": came}
    held = json.loads(before)

    def write(text: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(file)

    async def status(key: str) -> int:
        return await raw(d, request(0), {"authorization": f"Bearer {key}"})

    async def known(key: str, wanted: int) -> None:
        end = time.monotonic() + _READ_S
        while await status(key) != wanted:
            if time.monotonic() > end:
                found.check(False, f"a key had no {wanted} within {_READ_S:g} s")
                return
            await asyncio.sleep(0.05)

    async def writes() -> None:
        write(json.dumps([*held, leaving]))
        await known(gone, 200)
        write(json.dumps([*held, coming]))
        await known(gone, 401)
        await known(came, 200)
        for wrong in (before[: len(before) // 2], json.dumps([held[1]])):
            write(wrong)
            await asyncio.sleep(1.5)
            found.check(await status(came) == 200, "a wrong file took a key away")
        write(json.dumps([*held, coming]))
        write(before)
        await known(came, 401)

    own, _ = await asyncio.gather(during(found, d, 10.0), writes())
    found.all_answered(own)
    await well(found, d)


@scenario("headers and bodies that name a pool, a server, a slice or a path")
async def spoofed(d: Deployment, found: Finding) -> None:
    trap = Upstream(keep=8)
    server = await trap.serve()
    at = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    names = ("x-servanda-pool", "x-servanda-decision", "x-mirror-cluster", "x-original-url")
    headers = dict.fromkeys((*names, "host", "x-forwarded-host", "x-envoy-original-dst-host"), at)
    await pinned(d, SLICES[:1])
    await asyncio.sleep(0.5)
    before = d.seen("stable")["count"]
    for n in range(10):
        one = request(4 * n, metadata={"domain": "code"})
        status = await raw(d, one, {**headers, "x-servanda-pool": "infer"})
        found.check(status == 200, f"headers alone had {status}")
    found.check(d.seen("stable")["count"] - before >= 10, "a header chose the pool")
    leaked = [
        name
        for pool in d.pools
        for one in d.seen(pool)["seen"]
        for name, value in one["headers"].items()
        if at in value or (name.startswith("x-servanda") and value == "infer")
    ]
    found.check(not leaked, f"{sorted(set(leaked))} reached an upstream")
    for name in ("api_base", "base_url"):
        status = await raw(d, request(0, **{name: f"http://{at}/v1"}), {})
        found.check(status in (200, 400), f"{name} had {status}")
    for line in (f"POST http://{at}/v1/completions", f"CONNECT {at}", f"GET http://{at}/v1/x"):
        status = await _line(d, line)
        found.notes.append(f"{line.split(' ')[0]} of another server had {status or 'no answer'}")
    await unpinned(d, SLICES[:1])
    found.check(trap.count == 0, f"another server was asked {trap.count} times")
    server.close()
    await well(found, d)


async def _line(d: Deployment, line: str) -> str:
    """The status of a bare request line that names a server; "" where nothing came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
    head = f"{line} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {user_key(0)}\r\n"
    writer.write(f"{head}content-length: 0\r\nconnection: close\r\n\r\n".encode())
    with contextlib.suppress(OSError, TimeoutError):
        first = await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        return first.decode().split(" ")[1] if first else ""
    return ""
