"""Identities of services and operators: certificates, who a peer is, and what it may call."""
