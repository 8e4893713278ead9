"""The programs that `python -m zero_minimal NAME` and the lessons' last lines start."""
