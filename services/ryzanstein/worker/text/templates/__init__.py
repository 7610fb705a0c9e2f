"""Chat templates: the text of a conversation, and what of it is the template's own. They run in their own process."""
