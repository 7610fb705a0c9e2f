"""`ryzanstein bench soak`: hours of load with faults, and what grows meanwhile."""
