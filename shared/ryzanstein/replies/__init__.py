"""What an assistant's text says: content, reasoning and calls of functions. A pure function of the text.

A generation's log keeps tokens and their text alone. What they say is read from there, by every
face and for the session's turn, from index 0: after a failover or at another router it comes out
the same, and no log, journal or node keeps more for it.
"""
