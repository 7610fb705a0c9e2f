"""Chat templates: a conversation's text, and which parts of it are the template's own.

They run in their own process.
"""
