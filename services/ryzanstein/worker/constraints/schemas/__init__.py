"""JSON schemas as grammars."""
