"""Requests in OpenAI's language, checked and read."""
