"""What `python -m zero_minimal check-gpu` checks: each file has parts, which run as separate programs."""
