"""`ryzanstein chat`: a conversation with the cluster."""
