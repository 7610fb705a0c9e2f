"""`ryzanstein up`: a local cluster until Ctrl-C."""
