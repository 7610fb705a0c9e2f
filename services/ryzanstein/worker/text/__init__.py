"""The text side of a node's model: messages to token ids, and token ids back to text.

Token ids become text as soon as the text is certain.
"""
