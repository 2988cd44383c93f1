"""Chunks and events, added up to whole replies.

Any thread. It never knows streams.

Pieces are kept in lists and joined when asked for: rebuilding the message at every chunk, as others do, is
quadratic in its length.
"""

from typing import Any

import msgspec

from .replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    Completion,
    ContentPart,
    Function,
    Message,
    OutputItem,
    Response,
    ResponseEvent,
    ToolCall,
    Usage,
)

# -- chat and completions --


class ChatEvent(msgspec.Struct, kw_only=True):
    """`type` is one of openai's: chunk, content.delta, content.done, refusal.delta,
    tool_calls.function.arguments.delta, tool_calls.function.arguments.done."""

    type: str
    chunk: ChatCompletionChunk | None = None
    choice_index: int = 0
    delta: str = ""
    content: str = ""
    index: int = 0  # of the tool call
    name: str | None = None
    arguments: str = ""


class _OpenChoice:
    """One choice in the making."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.role = "assistant"
        self.text: list[str] = []
        self.refusal: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, _OpenCall] = {}
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, choice: Choice) -> list[ChatEvent]:
        delta = choice.delta
        self.role = delta.role or self.role
        events = self._add_texts(delta)
        for call in delta.tool_calls or ():
            events.append(self.calls.setdefault(call.index, _OpenCall()).add(call, self.index))
        if isinstance(choice.logprobs, dict):
            self.logprobs += choice.logprobs.get("content") or ()
        if choice.finish_reason is not None and self.finish_reason is None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
            events += self._done_events()
        return events

    def _add_texts(self, delta: Message) -> list[ChatEvent]:
        if delta.reasoning_content:
            self.reasoning.append(delta.reasoning_content)
        events = []
        for kind, piece, pieces in (("content", delta.content, self.text), ("refusal", delta.refusal, self.refusal)):
            if piece:
                pieces.append(piece)
                events.append(ChatEvent(type=f"{kind}.delta", delta=piece, choice_index=self.index))
        return events

    def _done_events(self) -> list[ChatEvent]:
        events = [
            ChatEvent(
                type="tool_calls.function.arguments.done",
                choice_index=self.index,
                index=index,
                name=call.name,
                arguments="".join(call.arguments),
            )
            for index, call in self.calls.items()
        ]
        if self.text:
            events.append(ChatEvent(type="content.done", content="".join(self.text), choice_index=self.index))
        return events

    def message(self) -> Message:
        calls = [call.whole() for _, call in sorted(self.calls.items())]
        return Message(
            role=self.role,
            content="".join(self.text) if self.text or not calls else None,
            refusal="".join(self.refusal) or None,
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=calls or None,
        )

    def whole(self) -> Choice:
        return Choice(
            index=self.index,
            message=self.message(),
            logprobs={"content": list(self.logprobs)} if self.logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class _OpenCall:
    """One tool call in the making. Some servers repeat its id and name: the first counts."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.arguments: list[str] = []

    def add(self, call: ToolCall, choice_index: int) -> ChatEvent:
        self.id = self.id or call.id
        self.name = self.name or call.function.name
        self.arguments.append(call.function.arguments)
        return ChatEvent(
            type="tool_calls.function.arguments.delta",
            choice_index=choice_index,
            index=call.index,
            name=self.name,
            delta=call.function.arguments,
        )

    def whole(self) -> ToolCall:
        function = Function(name=self.name, arguments="".join(self.arguments))
        return ToolCall(id=self.id, type="function", function=function)


class ChatAccumulator:
    """Chunks to a ChatCompletion."""

    def __init__(self) -> None:
        self._head = ChatCompletionChunk()
        self._usage: Usage | None = None
        self._choices: dict[int, _OpenChoice] = {}

    def add(self, item: ChatCompletionChunk) -> list[ChatEvent]:
        self._head = self._head if self._head.id else item
        self._usage = item.usage or self._usage
        events = [ChatEvent(type="chunk", chunk=item)]
        for choice in item.choices:
            events += self._choices.setdefault(choice.index, _OpenChoice(choice.index)).add(choice)
        return events

    def text_of(self, event: ChatEvent) -> str:
        return event.delta if event.type == "content.delta" and event.choice_index == 0 else ""

    def message(self) -> Message:
        return self._choices[0].message() if 0 in self._choices else Message(role="assistant", content="")

    def snapshot(self) -> ChatCompletion:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[choice.whole() for _, choice in sorted(self._choices.items())],
            usage=self._usage,
        )


class TextAccumulator:
    """Chunks of a text completion to a whole one. Its events are the chunks."""

    def __init__(self) -> None:
        self._head = Completion()
        self._usage: Usage | None = None
        self._texts: dict[int, list[str]] = {}
        self._last: dict[int, Choice] = {}

    def add(self, item: Completion) -> list[Completion]:
        self._head = self._head if self._head.id else item
        self._usage = item.usage or self._usage
        for choice in item.choices:
            self._texts.setdefault(choice.index, []).append(choice.text)
            self._last[choice.index] = choice
        return [item]

    def text_of(self, event: Completion) -> str:
        return "".join([choice.text for choice in event.choices if choice.index == 0])

    def message(self) -> Message:
        return Message(role="assistant", content="".join(self._texts.get(0, ())))

    def snapshot(self) -> Completion:
        texts = {index: "".join(parts) for index, parts in self._texts.items()}
        choices = [msgspec.structs.replace(last, text=texts[i]) for i, last in sorted(self._last.items())]
        head = self._head
        return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=self._usage)


# -- responses --


class ResponseAccumulator:
    """Events to a Response: the terminal event's own, until then one made of what has come."""

    def __init__(self) -> None:
        self._response = Response(status="in_progress")
        self._items: dict[int, OutputItem] = {}
        self._texts: dict[tuple[int, int], list[str]] = {}  # by output and content index

    def add(self, item: ResponseEvent) -> list[ResponseEvent]:
        if item.response is not None:
            self._response = item.response
        if item.item is not None:
            self._items[item.output_index] = item.item
        place = (item.output_index, item.content_index)
        if item.type == "response.output_text.delta":
            self._texts.setdefault(place, []).append(item.delta)
        elif item.type == "response.output_text.done":
            self._texts[place] = [item.text]
        return [item]

    def text_of(self, event: ResponseEvent) -> str:
        return event.delta if event.type == "response.output_text.delta" else ""

    def message(self) -> Message:
        return Message(role="assistant", content=self.snapshot().output_text)

    def snapshot(self) -> Response:
        if self._response.output or not (self._items or self._texts):
            return self._response
        indexes = sorted(self._items.keys() | {index for index, _ in self._texts})
        return msgspec.structs.replace(self._response, output=[self._item(index) for index in indexes])

    def _item(self, index: int) -> OutputItem:
        item = self._items.get(index, OutputItem(role="assistant", status="in_progress"))
        texts = [("".join(parts)) for (output, _), parts in sorted(self._texts.items()) if output == index]
        if item.content or not texts:
            return item
        return msgspec.structs.replace(item, content=[ContentPart(type="output_text", text=text) for text in texts])
