"""Core: what ZeRO is. A stage file stands on these files alone; core/seams.py says how the rest
attaches.

In the order of reading:
    seams                        where everything else attaches: tell() calls who listens
    collectives, work, sums      what ranks send each other
    layout                       flats, buckets, shards
    set_up, replicas             what all stages begin with; what is equal on all ranks
    reducer, weak_hooks          when a bucket's gradients are complete
    optimizers, precision        torch's optimizers on shards; masters, norm
    gradient_memory              where gradients of stages 2 and 3 lie
    units, freed_parameter       what stage 3 gathers and frees
    execution_order              and when
and beside them: loss_scaler (fp16); and for the lessons after stage 3: ring, mesh, random_state,
fused, blocks.
"""
