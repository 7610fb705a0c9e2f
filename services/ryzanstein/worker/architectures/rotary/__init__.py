"""The rotary settings of a config.json."""
