"""The fault laboratory: real clusters on separate hosts, faults under load, a table of costs."""
