// Updates the page and sends pins.  The focus, a selection and the scrolling survive an update.
"use strict";

(() => {
  const EVERY_MS = 2000;
  const live = document.getElementById("live");
  const stale = document.getElementById("stale");
  const said = document.getElementById("said");
  const dialog = document.getElementById("act");
  let fresh = Date.now();
  let asking = false;
  let refused = false; // the key: a browser would ask for another one every time
  let opener = null; // of the dialog: what is done, and of which slice

  document.documentElement.classList.add("has-script");

  const keyOf = (element) =>
    element && live.contains(element) ? [element.dataset.act, element.dataset.slice || element.dataset.key] : null;

  const find = (key) =>
    key &&
    [...live.querySelectorAll("[data-slice],[data-key]")].find((one) => {
      const other = keyOf(one);
      return other[0] === key[0] && other[1] === key[1];
    });

  const scrolled = () => [...live.querySelectorAll(".scroll")];

  function show(html) {
    const chosen = document.getSelection();
    if (chosen && !chosen.isCollapsed && live.contains(chosen.anchorNode)) return;
    const page = new DOMParser().parseFromString(html, "text/html");
    const focus = keyOf(document.activeElement);
    const left = new Map(scrolled().map((one) => [one.dataset.key, one.scrollLeft]));
    const before = live.querySelector("#head")?.textContent;
    live.replaceChildren(...page.body.childNodes);
    for (const one of scrolled()) one.scrollLeft = left.get(one.dataset.key) || 0;
    find(focus)?.focus({ preventScroll: true });
    const now = live.querySelector("#head")?.textContent;
    if (now !== before) {
      said.textContent = now;
      document.title = `${now.trim().slice(0, 1)} ${document.title.slice(2)}`;
    }
  }

  async function poll() {
    if (asking || refused || document.visibilityState === "hidden") return;
    asking = true;
    try {
      const answer = await fetch(live.dataset.polls, {
        cache: "no-store",
        signal: AbortSignal.timeout(5 * EVERY_MS),
      });
      refused = answer.status === 401 || answer.status === 403;
      if (refused) {
        stale.textContent = `! This key is no longer accepted (status ${answer.status}). The page is out of date: reload it.`;
        stale.hidden = false;
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show(await answer.text());
      fresh = Date.now();
      stale.hidden = true;
    } catch (error) {
      const seconds = Math.round((Date.now() - fresh) / 1000);
      if (seconds * 1000 > 2 * EVERY_MS) {
        stale.textContent = `! No response for ${seconds} s (${error.message}). The page is out of date.`;
        stale.hidden = false;
      }
    } finally {
      asking = false;
    }
  }

  function ask(button) {
    opener = [button.dataset.act, button.dataset.slice];
    const pins = opener[0] === "pin";
    document.getElementById("act-title").textContent = `${pins ? "Pin" : "Unpin"} ${opener[1]}`;
    document.getElementById("act-do").textContent = pins ? "Pin" : "Unpin";
    document.getElementById("act-problem").textContent = "";
    dialog.classList.toggle("unpin", !pins);
    dialog.showModal();
    document.querySelector("#act-form [name=reason]").focus();
  }

  async function act(form) {
    const body = { slice: opener[1], reason: form.elements.reason.value };
    if (opener[0] === "pin") {
      body.to = form.elements.to.value;
      body.ttl_s = Number(form.elements.ttl_s.value);
    }
    const problem = document.getElementById("act-problem");
    const button = document.getElementById("act-do");
    button.disabled = true;
    try {
      const answer = await fetch(`/v1/admin/${opener[0]}`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      if (answer.ok) {
        form.reset();
        dialog.close();
        await poll();
      } else {
        const found = (await answer.json()).error;
        problem.textContent = [found.message, found.hint].filter(Boolean).join(" – ");
      }
    } catch (error) {
      problem.textContent = `The leader does not respond (${error.message}). Nothing was changed.`;
    } finally {
      button.disabled = false;
    }
  }

  if (dialog) {
    live.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-act]");
      if (button) ask(button);
    });
    document.getElementById("act-form").addEventListener("submit", (event) => {
      event.preventDefault();
      act(event.target);
    });
    document.getElementById("act-not").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => (find(opener) || find(["pin", opener[1]]))?.focus());
  }
  document.addEventListener("visibilitychange", poll);
  setInterval(poll, EVERY_MS);
})();
