"""Processes: ranks start, join, fail together and end."""
