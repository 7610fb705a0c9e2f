"""Hosts, networks, clocks and disks of the laboratory."""
