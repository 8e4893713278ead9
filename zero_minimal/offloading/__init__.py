"""Offloading: what offload.py stands on, the rank's host, its disk, and the way there."""
