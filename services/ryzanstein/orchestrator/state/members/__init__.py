"""The members of the cluster: their leases, where they are reached, and those that a restart waits for."""
