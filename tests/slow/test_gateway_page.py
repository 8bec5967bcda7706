"""The page in a real browser: what a person sees, clicks and reads."""

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.gateway.controller.web import chromium, fake
from tests.gateway.controller.web.serving import KEY, WAIT_S, live
from tests.gateway.controller.web.test_page import HOSTILE, hostile

EVIDENCE = "document.querySelector('[data-key=Evidence]')"


def in_browser(leader, look, role="operator", **how):
    async def looked(url):
        async with chromium.tab() as tab:
            await tab.open(url, KEY[role], **how)
            found = await look(tab)
            assert tab.complaints() == []
            return found

    chromium.binary()
    with live(leader) as client:
        return asyncio.run(looked(f"{client.base_url}"))


def test_a_slice_is_pinned_by_a_click_and_seen_pinned():
    leader = fake.Controller()

    async def look(tab):
        await tab.until("document.querySelector('button[data-act=pin]')")
        assert await tab.js("document.querySelector('#head').textContent") == (
            "✗ 1 quarantined · 3 active, within limits"
        )
        await tab.click("button[data-act=pin][data-slice='domain=code']")
        await tab.until("document.querySelector('dialog').open")
        assert await tab.js("document.activeElement.name") == "reason"
        assert await tab.js("document.querySelector('#act-title').textContent") == "Pin domain=code"
        await tab.type("a <b>new</b> driver")
        await tab.click("#act-do")
        await tab.until("document.querySelector('.state').textContent.includes('pinned to stable')")
        assert not await tab.js("document.querySelector('dialog').open")
        row = await tab.js("document.querySelector('tr.slice').innerText")
        assert "domain=code" in row and "by a-operator, for 1 d more: a <b>new</b> driver" in row

        await tab.click("button[data-act=unpin][data-slice='domain=code']")
        await tab.until("document.querySelector('dialog').open")
        assert not await tab.js("document.querySelector('.pin-only').checkVisibility()")
        await tab.type("it works")
        await tab.press("Enter", 13)
        await tab.ask(
            "Input.dispatchKeyEvent", type="char", text="\r", key="Enter", windowsVirtualKeyCode=13
        )
        await tab.until("!document.querySelector('button[data-act=unpin]')")

    in_browser(leader, look)

    assert leader.asked == [
        ("pin", "domain=code", "stable", 86_400.0, "a-operator", "a <b>new</b> driver"),
        ("unpin", "domain=code", "a-operator", "it works"),
    ]


def test_what_is_refused_is_said_in_the_dialog_and_nothing_is_lost():
    leader = fake.Controller()

    async def look(tab):
        await tab.until("document.querySelector('button[data-act=pin]')")
        await tab.click("button[data-act=pin][data-slice='domain=code']")
        leader.now = replace(leader.now, slices=leader.now.slices[:1])
        await tab.type("why not")
        await tab.click("#act-do")
        await tab.until("document.querySelector('#act-problem').textContent")
        assert await tab.js("document.querySelector('#act-problem').textContent") == (
            "no slice is named 'domain=code' – known: long"
        )
        assert await tab.js("document.querySelector('[name=reason]').value") == "why not"
        await tab.press("Escape", 27)
        await tab.until("!document.querySelector('dialog').open")
        tab.events.clear()  # the browser notes that an answer had the status 404

    in_browser(leader, look)
    assert leader.asked == []


def test_the_page_stays_fresh_and_keeps_the_place_of_a_reader():
    """The focus, the place on the page and in a table, and an open dialog outlast a poll."""
    leader = fake.Controller()

    async def look(tab):
        await tab.until("document.documentElement.classList.contains('has-script')")
        await tab.js(f"{EVIDENCE}.scrollLeft = 40")
        assert await tab.js(f"{EVIDENCE}.scrollLeft") == 40
        await tab.js("document.querySelector('[data-act=pin][data-slice=all]').focus()")
        await tab.js("window.scrollTo(0, 120)")
        before = await tab.js("window.scrollY")
        assert before > 0

        leader.now = replace(leader.now, slices=(*leader.now.slices[1:], fake.broken(acts=False)))
        await tab.until("document.querySelector('#head').textContent.includes('would be')")

        assert await tab.js(f"{EVIDENCE}.scrollLeft") == 40
        assert await tab.js("document.activeElement.dataset.slice") == "all"
        assert await tab.js("window.scrollY") == before
        said = await tab.js("document.querySelector('#said').textContent")
        assert said == "✗ 1 would be quarantined · 3 active, within limits"

        await tab.click("button[data-act=pin][data-slice='domain=code']")
        await tab.type("half a rea")
        leader.now = replace(leader.now, slices=leader.now.slices[:-1])
        await tab.until("document.querySelector('#head').textContent.includes('✓ 3 active')")
        assert await tab.js("document.querySelector('dialog').open")
        assert await tab.js("document.activeElement.name") == "reason"
        await tab.type("son")
        assert await tab.js("document.activeElement.value") == "half a reason"

    in_browser(leader, look, width=600, height=500)


def test_a_leader_that_is_gone_is_said_so():
    leader = fake.Controller()

    async def look(tab):
        await tab.until("document.documentElement.classList.contains('has-script')")
        await tab.ask(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        await tab.until("!document.querySelector('#stale').hidden")
        told = await tab.js("document.querySelector('#stale').textContent")
        assert told.startswith("! No response for ") and told.endswith("The page is out of date.")

        await tab.ask(
            "Network.emulateNetworkConditions",
            offline=False,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        await tab.until("document.querySelector('#stale').hidden")
        tab.events.clear()  # the browser noted that it was offline

    in_browser(leader, look)


def test_a_slow_leader_is_asked_once_at_a_time():
    leader, go, inside, most = fake.Controller(), threading.Event(), threading.Event(), []
    told, under_way = leader.status, []

    def slowly():
        under_way.append(1)
        most.append(len(under_way))
        inside.set()
        assert go.wait(WAIT_S)
        under_way.pop()
        return told()

    async def look(tab):
        await tab.until("document.documentElement.classList.contains('has-script')")
        leader.status = slowly
        look_again = "document.dispatchEvent(new Event('visibilitychange'))"
        await tab.js(f"for (let i = 0; i < 20; i++) {look_again}")
        await asyncio.to_thread(inside.wait, WAIT_S)
        await tab.js(f"for (let i = 0; i < 20; i++) {look_again}")
        leader.now = replace(leader.now, slices=leader.now.slices[1:])
        go.set()
        await tab.until("document.querySelector('#head').textContent.includes('✓ 3 active')")

    in_browser(leader, look)
    assert set(most) == {1}


def test_a_key_that_is_taken_away_is_said_so_and_asked_with_no_more():
    """A browser would ask its user for another one at every poll."""

    async def look(tab):
        await tab.until("document.documentElement.classList.contains('has-script')")
        await tab.js(
            "window.polls = 0; window.fetch = async () => "
            "{ window.polls++; return new Response('', {status: 401}); }"
        )
        again = "document.dispatchEvent(new Event('visibilitychange'))"
        await tab.js(again)
        await tab.until("!document.querySelector('#stale').hidden")
        polls = await tab.js("window.polls")
        await tab.js(f"for (let i = 0; i < 20; i++) {again}")
        assert await tab.js("window.polls") == polls
        said = await tab.js("document.querySelector('#stale').textContent")
        assert said.startswith("! This key is no longer accepted (status 401)")

    in_browser(fake.Controller(), look)


def test_two_tabs_see_one_pin():
    leader = fake.Controller()

    async def looked(url):
        async with chromium.tab() as one, chromium.tab() as other:
            for tab in (one, other):
                await tab.open(url, KEY["operator"])
                await tab.until("document.documentElement.classList.contains('has-script')")
            await one.js("document.querySelector('[data-act=pin][data-slice=all]').focus()")
            await press_enter(one)
            await one.until("document.querySelector('dialog').open")
            await one.type("by keyboard")
            await press_enter(one)
            for tab in (one, other):
                await tab.until("document.body.innerText.includes('by a-operator, for 1 d')")
            assert await one.js("document.activeElement.dataset.slice") == "all"

    chromium.binary()
    with live(leader) as client:
        asyncio.run(looked(f"{client.base_url}"))
    assert [act[0] for act in leader.asked] == ["pin"]


async def press_enter(tab):
    for kind, more in (("rawKeyDown", {}), ("char", {"text": "\r"}), ("keyUp", {})):
        await tab.ask(
            "Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, **more
        )


@pytest.mark.parametrize("width", [380, 600, 900, 1280])
def test_the_page_never_scrolls_sideways(width):
    long = fake.broken("x" * 200, held="a_reason_without_any_blank_" * 12)
    leader = fake.Controller(fake.status(slices=(long, *fake.status().slices[1:])))

    async def look(tab):
        assert await tab.js("document.documentElement.scrollWidth") <= width
        await tab.until("document.querySelector('button[data-act=pin]').checkVisibility()")
        await tab.click("button[data-act=pin]")
        assert (
            await tab.js("document.querySelector('dialog').getBoundingClientRect().right") < width
        )

    in_browser(leader, look, width=width)


def test_without_a_script_the_page_is_whole_and_loads_itself_anew():
    leader = fake.Controller()

    async def look(tab):
        await tab.ask("Emulation.setScriptExecutionDisabled", value=True)
        await tab.ask("Page.reload")
        # what the page cannot run itself, the protocol still can
        await tab.until(
            "document.querySelector('meta[http-equiv=refresh]')"
            " && document.querySelectorAll('tr.slice').length === 4"
            " && !document.querySelector('[data-act]').checkVisibility()"
        )
        leader.now = fake.status(slices=fake.status().slices[1:])
        await tab.until("document.querySelector('#head').textContent.includes('✓ 3 active')")

    in_browser(leader, look)


def test_hostile_texts_do_nothing_in_a_browser():
    slices = tuple(hostile(text).slices[0] for text in HOSTILE)
    standing = replace(hostile(HOSTILE[0]), slices=slices)
    leader = fake.Controller(standing)

    async def look(tab):
        await tab.until("document.documentElement.classList.contains('has-script')")
        assert await tab.js("document.querySelectorAll('tr.slice').length") == len(HOSTILE)
        assert await tab.js("document.querySelectorAll('img, #live script').length") == 0
        names = await tab.js(
            "[...document.querySelectorAll('[data-act=pin]')].map((one) => one.dataset.slice)"
        )
        assert {name.replace("\ufffd", "?") for name in names} >= {
            text for text in HOSTILE if text.isprintable()
        }
        assert await tab.js("document.documentElement.scrollWidth") <= 1280
        assert not [e for e in tab.events if e["method"] == "Page.javascriptDialogOpening"]

    in_browser(leader, look)


def test_a_viewer_looks_and_cannot_touch():
    async def look(tab):
        await tab.until("document.documentElement.classList.contains('has-script')")
        assert await tab.js("document.querySelectorAll('button, dialog, form').length") == 0

    in_browser(fake.Controller(), look, role="viewer")


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read_in_both_lights(dark):
    """WCAG's contrast of every text against what lies behind it: 4.5 at least."""

    async def look(tab):
        return await tab.js(CONTRASTS)

    worst = in_browser(fake.Controller(fake.status(store="locked")), look, dark=dark)
    assert worst and min(ratio for ratio, _ in worst) >= 4.5, sorted(worst)[:5]


CONTRASTS = """(() => {
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => {
    const [r, g, b] = parts(c).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const c = getComputedStyle(one).backgroundColor;
      if ((parts(c)[3] ?? 1) > 0) return c;
    }
    return "rgb(255,255,255)";
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !one.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.textContent.slice(0, 40)]);
  }
  return found;
})()"""
