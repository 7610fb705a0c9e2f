"""The client of a Ryzanstein cluster: `Client` for threads, `AsyncClient` for event loops.

from ryzanstein.client import Client

with Client("127.0.0.1:50051") as client:
    print(client.chat("Hello!").text)
"""

from ryzanstein.client.answer import Answer, AnswerChoice, Move, Part, Position
from ryzanstein.client.cleaning import clean
from ryzanstein.client.conversation import Parsed, SessionView
from ryzanstein.client.drivers.aio import AsyncClient, AsyncConversation, AsyncStream
from ryzanstein.client.drivers.sync import Client, Conversation, Stream
from ryzanstein.client.errors import ClientError
from ryzanstein.client.events import Ended, Event, Moved, Reasoning, Reattached, Started, Text, ToolPiece
from ryzanstein.client.transport import Tls

__all__ = [
    "Answer",
    "AnswerChoice",
    "AsyncClient",
    "AsyncConversation",
    "AsyncStream",
    "Client",
    "ClientError",
    "Conversation",
    "Ended",
    "Event",
    "Move",
    "Moved",
    "Parsed",
    "Part",
    "Position",
    "Reasoning",
    "Reattached",
    "SessionView",
    "Started",
    "Stream",
    "Text",
    "Tls",
    "ToolPiece",
    "clean",
]
