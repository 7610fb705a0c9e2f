"""OpenAI's language, which HTTP and WebSockets speak."""
