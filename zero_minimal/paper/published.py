"""The figures of the paper (arXiv:1910.02054v3), to compare formulas and running code with.

Numbers are as printed, and strings where the last digit matters. Values read off a chart are within ±0.3.
"""

from typing import NamedTuple

STAGES = ("P_os", "P_os+g", "P_os+g+p")  # 1, 2, 3

# Table 1: GB a device, for each N and then for stages 1, 2, 3. 7.5B is rounded there, 128B and 1T are truncated.
TABLE1 = {
    "7.5B": {
        1: ("120", "120", "120"), 4: ("52.5", "41.3", "30"), 16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"), 256: ("30.4", "15.4", "0.47"), 1024: ("30.1", "15.1", "0.12"),
    },
    "128B": {
        1: ("2048", "2048", "2048"), 4: ("896", "704", "512"), 16: ("608", "368", "128"),
        64: ("536", "284", "32"), 256: ("518", "263", "8"), 1024: ("513", "257", "2"),
    },
    "1T": {
        1: ("16000", "16000", "16000"), 4: ("7000", "5500", "4000"), 16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"), 256: ("4046", "2054", "62.5"), 1024: ("4011", "2013", "15.6"),
    },
}

# Figure 1: GB a device for 7.5B parameters, N = 64, K = 12; stages 0 to 3
FIGURE1 = ("120", "31.4", "16.6", "1.9")

# Table 2: largest model on 32 GB with N = 64. Billions: in theory for stages 0 to 3, measured for stages 0 and 1.
TABLE2 = {
    1: (("2", "7.6", "14.4", "128"), ("1.3", "6.2")),
    2: (("4", "15.2", "28.8", "256"), ("2.5", "12.5")),
    4: (("8", "30.4", "57.6", "500"), ("5", "25")),
    8: (("16", "60.8", "115.2", "1000"), ("10", "50")),
    16: (("32", "121.6", "230.4", "2000"), ("20", "100")),
}


class Shape(NamedTuple):
    """A model of the paper, and how it was run. Sequences have 1024 tokens."""

    layers: int
    hidden: int
    heads: int
    batch: int  # sequences per model-parallel group
    model_parallel: int


# Figure 7, shapes from the appendix: the most GB that PyTorch's allocator had cached, read off the chart; None: no bar
FIGURE7 = {
    "40B": (Shape(50, 8192, 32, 16, 16), {"C1": 29.7, "C2": 24.1, "C3": 25.4, "C4": 19.8, "C5": 19.8}),
    "100B": (Shape(125, 8192, 64, 32, 16), {"C1": None, "C2": None, "C3": None, "C4": 29.6, "C5": 26.5}),
}


class Run(NamedTuple):
    """A pair of Figure 2: ZeRO-100B on 400 GPUs and the baseline, Megatron. TFLOP/s a GPU, read off the chart."""

    zero: Shape
    zero_tflops: float
    baseline: Shape
    baseline_gpus: int
    baseline_tflops: float


FIGURE2_GPUS = 400
FIGURE2 = {  # billions of parameters
    1.5: Run(Shape(48, 1600, 16, 24, 1), 30.3, Shape(48, 1600, 16, 16, 2), 400, 26.3),
    8: Run(Shape(72, 3072, 24, 64, 4), 36.9, Shape(72, 3072, 24, 8, 8), 400, 23.1),
    40: Run(Shape(88, 6144, 32, 12, 4), 36.0, Shape(88, 6144, 64, 4, 32), 384, 4.9),
    60: Run(Shape(132, 6144, 32, 64, 16), 36.5, Shape(132, 6144, 64, 4, 64), 384, 6.3),
    80: Run(Shape(100, 8192, 64, 32, 16), 37.6, Shape(100, 8192, 128, 4, 128), 384, 5.2),
    100: Run(Shape(125, 8192, 64, 32, 16), 38.7, Shape(125, 8192, 128, 2, 128), 384, 3.8),
    120: Run(Shape(150, 8192, 64, 24, 16), 28.2, Shape(150, 8192, 128, 2, 128), 384, 3.8),
    140: Run(Shape(175, 8192, 64, 16, 16), 26.9, Shape(175, 8192, 128, 2, 128), 384, 3.9),
    170: Run(Shape(212, 8192, 64, 12, 16), 20.9, Shape(212, 8192, 256, 2, 256), 256, 2.2),
}
LARGEST = {"C1": "40B", "C2": "60B", "C3": "50B", "C4": "140B", "C5": "150B"}  # models that ran, Table 3 and Figure 6
DEVICE = 32e9  # bytes, as the paper counts
# billions of parameters: TFLOP/s per GPU, on 128 GPUs without model parallelism
FIGURE4 = {1.5: 40.3, 2.5: 41.9, 4: 43.6, 6: 47.0, 8: 47.0, 10: 41.1, 11: 35.7, 12: 32.8, 13: 21.2}
FIGURE3 = {64: 25.7, 128: 37.5, 256: 39.0, 400: 36.6}  # GPUs: TFLOP/s a GPU, 60B
# billions of parameters that could be trained before ZeRO, in two places: the basis of "8x", and the text
BASELINES = {"beside the 8x": 20, "in the text": 40}
