"""The Responses API: OpenAI's second shape for an answer, made of items."""
