"""AsyncClient: OpenAI's calls against any server that speaks them, with openai's names.

The loop that uses it first, and no other. It never knows how a request is sent or a stream read.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, overload
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from ..wire.sse import MAX_EVENT_BYTES
from .accumulate import ChatAccumulator, ChatEvent, ResponseAccumulator, TextAccumulator
from .api import Api
from .http import Http, Timeout
from .lane import Limits
from .message_stream import StreamManager
from .replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenized,
    Model,
    ModelList,
    ReplyT,
    Response,
    ResponseEvent,
    Tokens,
)
from .retries import Retries
from .stream import Stream, chat_reading, event_reading, text_reading
from .websocket import SessionManager

DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"  # where `asyncllm serve` listens



class AsyncClient:
    """A client of one server; `async with` or `aclose()` ends its connections.

        async with AsyncClient("http://127.0.0.1:8000/v1") as client:
            stream = await client.chat.completions.create(messages=[...], stream=True)
            async for chunk in stream: ...

    It belongs to the event loop that uses it first. Its connections are not limited in number: a limit
    would make the next stream wait for the end of another.

    `timeout`: a number of seconds, or a Timeout with its three waits. `max_retries`: a number, or a Retries.
    Only what failed before the first byte of an answer is tried again, within the timeout, under the same
    X-Request-Id. `session`: your aiohttp session instead of one of ours; it is never closed here.

    Every call takes its fields as the API has them, and extra_headers, extra_body and timeout.

    Raises, in every call:
        APIStatusError: by status a BadRequestError, RateLimitError, ... (errors.py has the tree).
        APIConnectionError: no server, or it broke off; APITimeoutError among them.
        APIResponseValidationError, ReplyTooLargeError: an answer that cannot be used.
        RuntimeError: the client is closed, or used from another loop.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str | None = None,
        *,
        timeout: float | Timeout | None = Timeout(),  # noqa: B008  # frozen
        max_retries: int | Retries = 2,
        default_headers: Mapping[str, str] | None = None,
        session: aiohttp.ClientSession | None = None,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._api = Api(
            http=Http(session),
            base_url=_base_url(base_url),
            headers=headers | dict(default_headers or {}),
            timeout=timeout,
            retries=_retries(max_retries),
            max_event_bytes=max_event_bytes,
        )

    def __repr__(self) -> str:
        return f"AsyncClient({self._api.base_url!r}, {self._api.http!r})"

    @property
    def base_url(self) -> str:
        return self._api.base_url

    @property
    def chat(self) -> "Chat":
        return Chat(self._api)

    @property
    def completions(self) -> "Completions":
        return Completions(self._api)

    @property
    def models(self) -> "Models":
        return Models(self._api)

    @property
    def responses(self) -> "Responses":
        return Responses(self._api)

    async def tokenize(self, prompt: str | None = None, *, model: str | None = None, **fields: Any) -> Tokens:
        """POST /tokenize: the ids of a prompt, or of `messages=` through the chat template."""
        return await self._api.root().whole(Tokens, "POST", "/tokenize", _given(fields, prompt=prompt, model=model))

    async def detokenize(self, tokens: Sequence[int], *, model: str | None = None, **fields: Any) -> str:
        """POST /detokenize: the text of token ids."""
        fields = _given(fields, tokens=list(tokens), model=model)
        return (await self._api.root().whole(Detokenized, "POST", "/detokenize", fields)).prompt

    def with_options(self, **changes: Any) -> "AsyncClient":
        """This client with another timeout, max_retries, api_key or default_headers, over the same connections.

        Raises:
            TypeError: another option.
        """
        headers = self._api.headers | dict(changes.pop("default_headers", None) or {})
        if (api_key := changes.pop("api_key", None)) is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        if "max_retries" in changes:
            changes["retries"] = _retries(changes.pop("max_retries"))
        if unknown := changes.keys() - {"timeout", "retries"}:
            raise TypeError(f"with_options() knows no {', '.join(sorted(unknown))}")
        client = AsyncClient.__new__(AsyncClient)
        client._api = msgspec.structs.replace(self._api, headers=headers, **changes)
        return client

    async def aclose(self) -> None:
        """Close the connections, also those of `with_options()`. Streams that are open break. Idempotent."""
        await self._api.http.aclose()

    close = aclose  # openai's name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class Chat:
    def __init__(self, api: Api) -> None:
        self.completions = ChatCompletions(api)


class ChatCompletions:
    """/v1/chat/completions."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @overload
    async def create(self, *, stream: Literal[True], **fields: Any) -> Stream[ChatCompletionChunk]: ...
    @overload
    async def create(self, *, stream: Literal[False] | None = None, **fields: Any) -> ChatCompletion: ...

    async def create(
        self, *, stream: bool | None = None, **fields: Any
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """Answer `messages`: whole, or as a Stream of chunks.

        Raises: as AsyncClient says.
        """
        if stream:
            return await self._api.stream("/chat/completions", _given(fields), chat_reading())
        return await self._api.whole(ChatCompletion, "POST", "/chat/completions", _given(fields))

    def stream(self, **fields: Any) -> StreamManager[ChatCompletionChunk, ChatEvent, ChatCompletion]:
        """`async with client.chat.completions.stream(messages=...) as s`: a MessageStream that adds up."""
        return StreamManager(partial(self.create, stream=True, **fields), ChatAccumulator())


class Completions:
    """/v1/completions."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @overload
    async def create(self, *, stream: Literal[True], **fields: Any) -> Stream[Completion]: ...
    @overload
    async def create(self, *, stream: Literal[False] | None = None, **fields: Any) -> Completion: ...

    async def create(self, *, stream: bool | None = None, **fields: Any) -> Completion | Stream[Completion]:
        """Continue `prompt`, text or token ids: whole, or as a Stream of chunks.

        Raises: as AsyncClient says.
        """
        if stream:
            return await self._api.stream("/completions", _given(fields), text_reading())
        return await self._api.whole(Completion, "POST", "/completions", _given(fields))

    def stream(self, **fields: Any) -> StreamManager[Completion, Completion, Completion]:
        """As `create(stream=True)`, adding up; its events are the chunks."""
        return StreamManager(partial(self.create, stream=True, **fields), TextAccumulator())


class Models:
    """/v1/models."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self, **options: Any) -> ModelList:
        """What the server serves, in `.data`."""
        return await self._get(ModelList, "/models", options)

    async def retrieve(self, model: str, **options: Any) -> Model:
        """One model; its name may hold slashes."""
        return await self._get(Model, f"/models/{quote(model, safe='')}", options)

    async def _get(self, kind: type[ReplyT], path: str, options: dict[str, Any]) -> ReplyT:
        return await _with_options(self._api, options).whole(kind, "GET", path)


class Responses:
    """/v1/responses, over HTTP and, by `connect()`, over a WebSocket."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @overload
    async def create(self, *, stream: Literal[True], **fields: Any) -> Stream[ResponseEvent]: ...
    @overload
    async def create(self, *, stream: Literal[False] | None = None, **fields: Any) -> Response: ...

    async def create(self, *, stream: bool | None = None, **fields: Any) -> Response | Stream[ResponseEvent]:
        """Answer `input`: whole, or as a Stream of events.

        Raises: as AsyncClient says.
        """
        if stream:
            return await self._api.stream("/responses", _given(fields), event_reading())
        return await self._api.whole(Response, "POST", "/responses", _given(fields))

    def stream(self, **fields: Any) -> StreamManager[ResponseEvent, ResponseEvent, Response]:
        """As `create(stream=True)`, adding up; its events are the server's."""
        return StreamManager(partial(self.create, stream=True, **fields), ResponseAccumulator())

    async def retrieve(self, response_id: str, **options: Any) -> Response:
        """A response that the server still holds."""
        path = f"/responses/{quote(response_id, safe='')}"
        return await _with_options(self._api, options).whole(Response, "GET", path)

    async def cancel(self, response_id: str, **options: Any) -> Response:
        """Stop one that is running."""
        path = f"/responses/{quote(response_id, safe='')}/cancel"
        return await _with_options(self._api, options).whole(Response, "POST", path)

    def connect(self, limits: Limits | None = None, **options: Any) -> SessionManager:
        """`async with client.responses.connect() as session`: many generations over one WebSocket."""
        api = _with_options(self._api, options)
        make_call = partial(api.call, "GET", "/responses", None, stream=True)
        limits = limits or Limits(max_event_bytes=api.max_event_bytes)
        return SessionManager(api.http, make_call, api.retries, limits)


def _base_url(url: str) -> str:
    """As openai has it, with /v1 at its end; a bare host gets that.

    Raises:
        ValueError: no http:// or https:// address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a server's address, base_url, begins with http:// or https://, got {url!r}")
    return url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def _retries(value: int | Retries) -> Retries:
    return value if isinstance(value, Retries) else Retries(max_retries=value)


def _given(fields: dict[str, Any], **named: Any) -> dict[str, Any]:
    """The body's fields; a model or a prompt that is None was not given."""
    fields = fields | named
    return {name: value for name, value in fields.items() if value is not None or name not in ("model", "prompt")}


def _with_options(api: Api, options: dict[str, Any]) -> Api:
    """For calls without a body: their extra_headers and timeout.

    Raises:
        TypeError: another option.
    """
    if unknown := options.keys() - {"extra_headers", "timeout"}:
        raise TypeError(f"this call takes no {', '.join(sorted(unknown))}")
    headers = api.headers | dict(options.get("extra_headers") or {})
    return msgspec.structs.replace(api, headers=headers, timeout=options.get("timeout", api.timeout))
