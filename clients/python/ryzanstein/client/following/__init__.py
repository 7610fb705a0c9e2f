"""How an answer is followed to its end: what is read, what is tried again, and where."""
