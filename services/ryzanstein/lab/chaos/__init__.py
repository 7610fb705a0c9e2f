"""The fault laboratory: real clusters on hosts of their own, faults under load, and what they cost as a table."""
