"""Answers in OpenAI's language, whole and in chunks."""
