"""ZeRO (arXiv:1910.02054) step by step: one small file a stage, each runs under torchrun."""

__version__ = "0.1.0"
