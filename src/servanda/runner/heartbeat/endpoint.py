# An endpoint that returns only texts: one request at a time, each sent once, so that the count of
# requests is exact.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from servanda.contract.model import Kernel, base_of
from servanda.engines.http.key import key_of
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import LIMITS, Transport
from servanda.engines.http_policy import KERNEL, server_url
from servanda.errors import ContractError, MeasurementError

_ONCE = replace(LIMITS, retry=replace(KERNEL, tries=1), first_tries=1)
_FEW = 8  # texts of a greedy answer that are compared, characters
_PROMPTS = 3  # that are answered twice to see whether an endpoint obeys


class DisobedientError(MeasurementError):
    """An endpoint that does not sample as it is asked to."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Args:
        width: new tokens at most; temperature 0: the most likely token each time.
        seed: None: the endpoint's own.
    """

    prompt: str
    width: int
    temperature: float
    top_p: float = 1.0
    seed: int | None = None


class Endpoint:
    """A model behind the OpenAI API, of whose answers only the text is read.

    Args:
        chat: ask /v1/chat/completions, with the prompt as the message of a user.
        count: called before each request for a completion.

    Raises:
        ContractError: not a URL.
        MeasurementError: no key, or no name of a model where none is declared.
    """

    def __init__(
        self, kernel: Kernel, *, chat: bool = False, count: Callable[[], None] = lambda: None
    ) -> None:
        if server_url(kernel.url or "") is None:
            raise ContractError(
                f"a heartbeat asks a server, and {kernel} is none",
                hint="give its URL, such as http://127.0.0.1:8000",
            )
        limits = _ONCE
        if kernel.timeout_s is not None:
            limits = replace(limits, read_s=kernel.timeout_s, token_s=0.0)
        self.url = base_of(kernel.url or "")
        self.count = count
        self._transport = Transport(self.url, 1, limits, key=key_of(kernel))
        self._endpoint = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat = chat
        self.served = kernel.served or self._first_model()

    def ask(self, asked: Ask) -> str:
        """The text of an answer.

        Raises:
            UnreachedError: the server did not take the request.
            StatusError: the endpoint refused it.
            DisobedientError: the answer is longer than the request allows.
            MeasurementError: no answer, or one of another shape.
        """
        body: dict[str, Any] = {
            "model": self.served,
            "max_tokens": asked.width,
            "temperature": asked.temperature,
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": asked.prompt}]
        else:
            body["prompt"] = asked.prompt
        if asked.top_p != 1.0:
            body["top_p"] = asked.top_p
        if asked.seed is not None:
            body["seed"] = asked.seed
        self.count()
        reply = self._transport.ask(self._endpoint, body, tokens=asked.width)
        choices = reply["choices"].items()
        if not choices:
            raise reply.refuse("choices is empty", "look at the log of the server")
        text = self._text(choices[0])
        self._refuse_longer(reply, text, asked.width)
        return text

    def refuse_disobedient(self, prompts: list[str], width: int) -> None:
        """Let an endpoint pass that answers alike at temperature 0; six requests.

        Raises:
            DisobedientError: it does not.
        """
        for prompt in prompts[:_PROMPTS]:
            asked = Ask(prompt, width, 0.0)
            first, again = self.ask(asked), self.ask(asked)
            if first.strip()[:_FEW] == again.strip()[:_FEW]:
                return
        raise DisobedientError(
            f"{self.url} ignores temperature: at 0, two answers to each of "
            f"{min(_PROMPTS, len(prompts))} prompts differ from their first characters on",
            hint="a test of its distribution needs the declared sampling: ask for an endpoint or "
            "a model that takes temperature",
        )

    def close(self) -> None:
        self._transport.close()

    def _text(self, choice: Part) -> str:
        if not self._chat:
            return choice["text"].text()
        content = choice["message"].get("content")  # null where nothing was said
        return "" if content is None else content.text()

    def _refuse_longer(self, reply: Part, text: str, width: int) -> None:
        usage = reply.get("usage")
        told = None if usage is None else usage.get("completion_tokens")
        tokens = len(text.split()) if told is None else told.whole()
        if tokens > width:
            unit = "words" if told is None else "tokens"
            raise DisobedientError(
                f"{self.url} ignores max_tokens: it answered with {tokens} {unit}, and at most "
                f"{width} tokens were asked for",
                hint="models that reason before they answer cannot be tested by their first "
                "token: turn reasoning off, or name another model with ,served=NAME",
            )

    def _first_model(self) -> str:
        listed = self._transport.ask("/v1/models")["data"].items()
        if len(listed) != 1:
            names = ", ".join(one["id"].text() for one in listed[:4])
            raise MeasurementError(
                f"{self.url} serves {len(listed)} models: {names or 'none'}",
                hint="name the one to ask, as URL,served=NAME",
            )
        return listed[0]["id"].text()
