"""Core: what ZeRO is. A stage imports only these files; core/seams.py says how the rest attaches.

In the order of reading, after naive.py:
    seams                        where all else attaches: tell() calls the listeners
    collectives, work, sums      what ranks send each other
    layout                       flats, buckets, shards
    set_up, replicas             what all stages begin with; what is equal on all ranks
    weak_hooks, reducer          when a bucket's gradients are complete
    precision, optimizers        masters, norm; torch's optimizers on shards. Now stage0, stage1
    gradient_memory              where gradients of stages 2 and 3 lie. Now stage2
    units                        what stage 3 gathers and frees
    execution_order              and when. Now stage3
and beside them: loss_scaler (fp16); and for the lessons after stage 3: ring, mesh, random_state,
fused, block_pool.
"""
