"""Certificates in files: read as a set, checked before they are used, and replaced while a service runs."""
