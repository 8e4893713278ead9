"""Drawn: what a program of the fuzzer is, as plain data. model.py builds its model, loop.py runs it.

Each choice shrinks to the first of its list, which is the plainest. What stages refuse is drawn seldom: a program that
is refused says nothing about its other parts.
"""

from hypothesis import strategies as st

STAGES = ("stage0", "stage1", "stage2", "stage3", "late1", "late2", "kept3")
LADDER = STAGES[:4]


def choice(plain, *others, often=1):
    """One of them; the plain one is drawn as often as `often` others."""
    return st.sampled_from([plain] * often + list(others))


@st.composite
def odd(draw, one_in, **choices):
    """A dict with each field one time in so many: a program that is printed names what is odd about it alone."""
    there = st.sampled_from([False] * (one_in - 1) + [True])
    return {name: draw(values) for name, values in choices.items() if draw(there)}


def both(fields, odd_ones):
    return st.tuples(fields, odd_ones).map(lambda two: two[0] | two[1])


AUX = odd(3, aux=choice("attribute", "dict", "closure", "global", "deque", "returned"))
BLOCKS = both(AUX, odd(
    5,
    kind=choice("experts", "batch norm", "attention"),
    frozen=choice("all", "weight", "gain", "router"),
    buffer=choice("counter", "running", "constant", "hidden"),
    checkpoint=choice("not reentrant", "reentrant", "inside"),
    inner=st.integers(1, 2),  # blocks in a list of its own
    uses=choice("parameter", "part"),  # which the model's forward uses after the block's turn
    dtype=choice("float32", "bfloat16"),
))
TIES = st.tuples(
    choice("linear", "gain", "module", "submodule", "ends", "first", "within", often=2),
    st.integers(0, 3), st.integers(0, 3),
)
MODELS = both(
    st.fixed_dictionaries(dict(blocks=st.lists(BLOCKS, min_size=1, max_size=4))),
    odd(
        4,
        held=choice("list in list", "dict in list", "sequential", "attributes", "dict", "two lists"),
        calls=st.lists(st.integers(0, 3), min_size=1, max_size=6),  # by default each block once
        words=st.just(True),
        ties=st.lists(TIES, min_size=1, max_size=2),
        frozen=choice("first", "head", "both"),
        norm=st.just(True),  # a batch norm in the root
        checkpoint=choice("not reentrant", "reentrant"),  # around all blocks
        penalty=choice("in forward", "in the loop"),
        unused=choice("root", "block"),
        seldom=st.integers(0, 3),  # this block is called in every other forward
        dropout=st.just(True),
    ),
)
LOOPS = both(
    st.fixed_dictionaries(dict(steps=st.integers(2, 4))),
    odd(
        3,
        optimizer=choice("AdamW", "Adagrad", "plain SGD"),
        groups=choice("decay", "by block"),
        bucket_bytes=st.sampled_from([400, None, 3000]),
        micro=st.tuples(st.integers(2, 3), choice("all", "first", "none")),  # batches a step, those under no_sync()
        losses=choice("joint", "own", "later", "retained", "aux alone", "aux own", "a block's", "saliency",
                      "thrown away"),
        since=st.integers(1, 2),  # the step from which auxiliary losses count
        evaluate=st.tuples(choice("after", "before step", "between", "inside", "first"),
                           choice("no grad", "inference mode", "with gradients")),
        clip=st.lists(st.sampled_from([0.1, 1.0]), min_size=1, max_size=2),
        schedule=choice("step", "cosine"),
        drop=st.integers(0, 2),  # the gradients of this step
        # after this step, in gather_parameters()
        edit=st.tuples(st.integers(0, 2), choice("read", "clamp", "copy")),
        forget=choice("model", "optimizer", "late"),  # whose zero_grad() is called, or when
        after=st.tuples(
            choice("saved", "weights", "shards", "wrapped again"), st.integers(1, 3), st.sampled_from(LADDER)
        ),
        hook=st.just(True),  # on a parameter, which changes its gradient
        on_host=st.just(True),  # saved tensors lie in host memory
    ),
)
PROGRAMS = st.fixed_dictionaries(dict(world=st.sampled_from([2, 3, 1]), model=MODELS, loop=LOOPS))
