"""What `python -m zero_minimal check-gpu` looks at: each file is a part, a program of its own."""
