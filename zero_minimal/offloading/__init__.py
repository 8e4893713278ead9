"""Offloading: the parts of offload.py: the rank's host, its disk, and the bus between them."""
