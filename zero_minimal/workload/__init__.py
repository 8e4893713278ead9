"""What is trained: one model, one data file, one loop, shared by all stages."""
