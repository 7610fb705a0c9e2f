"""The items of a response: what it thinks, what it says, and the functions that it calls.

An item has one identity, made of its generation's and its place: the same while it is streamed, in
the object that ends the stream, and when the response is retrieved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ryzanstein.generation.prompts import Message

Shape = dict[str, Any]
DONE, CUT, RUNNING = "completed", "incomplete", "in_progress"


class Item(ABC):
    """One item while it grows.

    `kind` names the events that tell of it; `place` are the fields that say which part of it they
    mean. It has a part that is added and done, or none.
    """

    kind = ""
    has_part = True

    def __init__(self, item_id: str, output_index: int) -> None:
        self.id = item_id
        self.output_index = output_index
        self.text = ""

    @property
    def place(self) -> Shape:
        return {"item_id": self.id, "output_index": self.output_index, "content_index": 0}

    @abstractmethod
    def shape(self, status: str) -> Shape:
        """Returns the item; without its content while it runs."""

    def part(self, text: str) -> Shape:
        """Returns its part with this text; of an item without one, nothing."""
        return {}

    def done(self) -> Shape:
        """Returns the fields of the event that has all of its text."""
        return {"text": self.text}

    def delta(self, text: str) -> Shape:
        self.text += text
        return {"delta": text}


class MessageItem(Item):
    """What the assistant says."""

    kind = "output_text"

    def shape(self, status: str) -> Shape:
        content = [] if status == RUNNING else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> Shape:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def delta(self, text: str) -> Shape:
        return {**super().delta(text), "logprobs": []}

    def done(self) -> Shape:
        return {**super().done(), "logprobs": []}


class ReasoningItem(Item):
    """What it thinks before."""

    kind = "reasoning_text"

    def shape(self, status: str) -> Shape:
        content = [] if status == RUNNING else [self.part(self.text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def part(self, text: str) -> Shape:
        return {"type": "reasoning_text", "text": text}


class CallItem(Item):
    """A function that it calls. Its text are the arguments."""

    kind = "function_call_arguments"
    has_part = False

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, output_index)
        self.call_id = call_id
        self.name = name

    @property
    def place(self) -> Shape:
        return {"item_id": self.id, "output_index": self.output_index}

    def shape(self, status: str) -> Shape:
        arguments = "" if status == RUNNING else self.text
        own = {"call_id": self.call_id, "name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function_call", "status": status, **own}

    def done(self) -> Shape:
        return {"name": self.name, "arguments": self.text}


class Items:
    """Makes the items of one response, in order."""

    def __init__(self, generation_id: str) -> None:
        self._generation_id = generation_id
        self.all: list[Item] = []

    def message(self) -> Item:
        return self._add(MessageItem(self._id("msg", MessageItem), len(self.all)))

    def reasoning(self) -> Item:
        return self._add(ReasoningItem(self._id("rs", ReasoningItem), len(self.all)))

    def call(self, call_id: str, name: str) -> Item:
        return self._add(CallItem(self._id("fc", CallItem), len(self.all), call_id, name))

    def _add(self, item: Item) -> Item:
        self.all.append(item)
        return item

    def _id(self, prefix: str, kind: type[Item]) -> str:
        """Returns `msg_GENERATION` for the first item of its kind, `msg_GENERATION_1` for the next, ..."""
        number = sum(isinstance(item, kind) for item in self.all)
        return f"{prefix}_{self._generation_id}" + (f"_{number}" if number else "")


def items_of(generation_id: str, message: Message) -> list[Shape]:
    """Returns the items of a message, as they were streamed."""
    items = Items(generation_id)
    if message.reasoning:
        items.reasoning().delta(message.reasoning)
    if message.content or not message.tool_calls:
        items.message().delta(message.content)
    for call in message.tool_calls:
        items.call(call.id, call.name).delta(call.arguments)
    return [item.shape(DONE) for item in items.all]
