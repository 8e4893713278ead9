"""What watches a run from outside: memory, traffic, time, and the formulas to hold them against."""
