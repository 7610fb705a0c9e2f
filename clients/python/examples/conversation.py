"""Two turns of a conversation that the cluster keeps, and what it keeps. `conversation.py [ROUTERS]`."""

import sys

from ryzanstein.client import Client

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    conversation = client.conversation(temperature=0)
    conversation.say("My name is Tavik.")
    print(conversation.say("What is my name?").text)
    for message in client.sessions.get(conversation.session).messages:
        print(f"- {message.content}")
    client.sessions.delete(conversation.session)
