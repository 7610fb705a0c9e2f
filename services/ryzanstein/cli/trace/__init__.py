"""`ryzanstein trace`: what a request spent its time on, without a collector."""
