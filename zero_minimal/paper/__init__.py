"""The paper's formulas, its published numbers, and tensors that have a size and no memory."""
