"""Lesson 6: what goes wrong with checkpoints, and with their parts.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

STATE = "ctx.random, ctx.precision = random_state(), autocast_state()"
SAVE = "ctx.save_for_backward(*[keeper.keep(tensor) for tensor in tensors])"


def forward(begin="", state=STATE, describe="ctx.before = [keeper.describe(tensor) for tensor in tensors]", save=SAVE,
            end="return run(tensors)", zeros="ctx.set_materialize_grads(False)"):
    return {"_Checkpoint.forward": "@staticmethod\n" + function(
        "def forward(ctx, run, keeper, anchor, *tensors):", begin,
        "ctx.run, ctx.keeper = run, keeper", zeros, state, describe, save, end)}


BACK = "tensors = [ctx.keeper.bring_back(*pair) for pair in zip(ctx.saved_tensors, ctx.before)]"
LEAVES = """
inputs = [tensor.detach().requires_grad_(before.requires_grad) for tensor, before in zip(tensors, ctx.before)]
"""
AGAIN = "random_state_of(ctx.random), autocast_as(ctx.precision), torch.enable_grad()"
THROUGH = """
wanted = [(output, gradient) for output, gradient in zip(outputs, gradients)
          if gradient is not None and output.requires_grad]
if wanted:
    torch.autograd.backward([output for output, _ in wanted], [gradient for _, gradient in wanted])
"""


def backward(begin="", back=BACK, leaves=LEAVES, again=AGAIN, run="outputs = ctx.run(inputs)", through=THROUGH,
             end="return None, None, None, *[tensor.grad for tensor in inputs]"):
    return {"_Checkpoint.backward": "@staticmethod\n@checkpoints.plain_backward_only\n" + function(
        "def backward(ctx, *gradients):", begin, back, leaves, function(f"with {again}:", run), through, end)}


def random_state_of(begin="before = random_state()", take="set_random_state(states)", end="set_random_state(before)",
                    body=None):
    body = body or function("try:", "yield") + "\n" + function("finally:", end)
    return {"random_state_of": "@contextmanager\n" + function(
        "def random_state_of(states):", begin, take, body)}


def autocast_as(loop="for kind, enabled, dtype in states:",
                enter="stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))"):
    return {"autocast_as": "@contextmanager\n" + function(
        "def autocast_as(states):", function("with ExitStack() as stack:", function(loop, enter), "yield"))}


SIZE = "size = (tensor.numel() + world_size - 1) // world_size"
PART = """
part = tensor.new_zeros(size)
mine = tensor.flatten()[rank * size : (rank + 1) * size]
part[: len(mine)] = mine
"""


def cut(ranks="rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)", size=SIZE, part=PART,
        end="return part"):
    return {"_Keeper.cut": function("def cut(self, tensor):", ranks, size, part, end)}


ROOM = "whole = part.new_empty(dist.get_world_size(self.group) * len(part))"
GATHER = "collectives.all_gather(whole, part, group=self.group)"


def gather(begin="", room=ROOM, gather=GATHER, end="return whole[: shape.numel()].reshape(shape)"):
    return {"_Keeper.gather": function("def gather(self, part, shape):", begin, room, gather, end)}


def to_host(copy="copy = tensor.clone()", tell="announce(copy)", end="return copy"):
    return {"to_host": function("def to_host(tensor):", copy, tell, end)}


def keep(kept="kept = self.cut(tensor.detach()) if self.describe(tensor).is_cut else tensor.detach()",
         host="if self.to_host:\n    return to_host(kept)",
         end="return self.place(kept) if self.place and kept.is_floating_point() else kept"):
    return {"_Keeper.keep": function("def keep(self, tensor):", kept, host, end)}


def checkpoint(body):
    return {"checkpoint": function(
        "def checkpoint(function, *args, group=None, to_host=False, place=None, **kwargs):", body)}


WITHOUT_ANCHOR = checkpoint("""
if not torch.is_grad_enabled():
    return function(*args, **kwargs)
leaves, structure = pytree.tree_flatten((args, kwargs))
tensors = [leaf for leaf in leaves if _is_input(leaf)]
checkpoints.check_group(function, tensors, group)
call = _Call(function, leaves, structure)
return call.result(_Checkpoint.apply(call.run, _Keeper(group, to_host, place), None, *tensors))
""")
ONE_BY_ONE = "dist.all_gather(list(whole.chunk(dist.get_world_size(self.group))), part, group=self.group)"

WRONG = {
    "nothing is checkpointed": Wrong(
        1, "test_only_the_inputs_stay", r"423\.\d kB a block live on rank 0, .*a graph leads to all that was computed",
        checkpoint("return function(*args, **kwargs)")),
    "forward records a graph, and keeps it": Wrong(
        1, "test_only_the_inputs_stay", r"a block live on rank 0, .*a graph leads to all that was computed",
        forward(end="with torch.enable_grad():\n    ctx.outputs = run([t.detach().requires_grad_() for t in tensors])\n"
                    "return tuple(output.detach() for output in ctx.outputs)")),
    "a copy of the input is kept besides": Wrong(
        1, "test_only_the_inputs_stay", r"169\.4 kB a block live on rank 0, .*more than the input is kept",
        forward(begin="ctx.inputs = [tensor.clone() for tensor in tensors]")),
    "the tensors themselves are saved": Wrong(
        1, "test_only_the_inputs_stay", r"a copy of 42\.\d kB, 8\d\.\d kB a block live .*: is what keeper\.keep",
        forward(save="ctx.save_for_backward(*tensors)")),
    "forward runs twice": Wrong(
        1, "test_forward_runs_the_function_once", r"the 6 blocks have run \[2, 2, 2, 2, 2, 2\] times",
        forward(begin="run(tensors)")),
    "a block whose input wants no gradient never gets backward": Wrong(
        1, "test_the_result_is_the_functions", r"requires no gradient though the block has parameters", WITHOUT_ANCHOR),

    "the second run makes no graph": Wrong(
        2, "test_parameters_get_their_gradients",
        r"(no gradient came to up.weight\. Backward must run the function again with a graph|it raised RuntimeError)",
        backward(again="random_state_of(ctx.random), autocast_as(ctx.precision), torch.no_grad()")),
    "backward inside backward, twice": Wrong(
        2, "test_parameters_get_their_gradients", r"the gradient of up.weight is 2 times what it should be",
        backward(through=THROUGH.replace("[gradient for _, gradient in wanted]", "[gradient for _, gradient in wanted],"
                                         " retain_graph=True") + THROUGH)),
    "the input gets no gradient": Wrong(
        2, "test_the_input_gets_its_gradient",
        r"no gradient came to blocks.1.\S+. The blocks above have theirs, so the chain ends at a checkpoint", backward(
            end="return None, None, None, *[None for _ in inputs]")),
    "inputs are detached, and require no gradient": Wrong(
        2, "test_the_input_gets_its_gradient", r"Did the tensor that the second run began with require one\?",
        backward(leaves="inputs = [tensor.detach() for tensor in tensors]")),
    "the gradient of the output goes down unchanged": Wrong(
        2, "test_the_input_gets_its_gradient", 
        r"the gradient of blocks.1.\S+ is \S+ where \S+ is right .*the tensor with which the second run began",
        backward(end="return None, None, None, *gradients")),
    "the second run happens twice": Wrong(
        2, "test_the_function_runs_twice_in_all", r"have run \[3, 3, 3\] times, and each runs twice",
        backward(run="ctx.run(inputs)\noutputs = ctx.run(inputs)")),
    "inputs are attributes of ctx": Wrong(
        2, "test_what_was_kept_goes_with_backward",
        r"after backward 508\.\d kB still live of 6 blocks.*\(look at forward, step 1\)",
        forward(save="ctx.kept = [keeper.keep(tensor) for tensor in tensors]")
        | backward(back=BACK.replace("ctx.saved_tensors", "ctx.kept"))),
    "the graph of each second run stays": Wrong(
        2, "test_one_block_at_a_time", r"live at the peak .*before the next block runs again",
        backward(through=THROUGH.replace("wanted])", "wanted], retain_graph=True)"),
                 end="ctx.outputs = outputs\nreturn None, None, None, *[tensor.grad for tensor in inputs]")),
    "each output has a gradient": Wrong(
        2, "test_any_arguments", r"(?s)it raised .*To look at: an output may get no gradient \(None\)",
        backward(through="torch.autograd.backward(outputs, gradients)")),
    "a result that no operator made is left out": Wrong(
        2, "test_any_arguments", r"the gradient of the input is .* One of the results is an argument itself",
        backward(through=THROUGH.replace("output.requires_grad", "output.grad_fn is not None"))),
    "one output that leads back is taken for all": Wrong(
        2, "test_any_arguments", r"(?s)does not require grad.*To look at: an output may get no gradient",
        backward(through=THROUGH.replace(" and output.requires_grad", "").replace(
            "if wanted:", "if any(output.requires_grad for output, _ in wanted):"))),
    "every number that comes in requires a gradient": Wrong(
        2, "test_any_arguments", r"of two inputs the first requires a gradient, and in the second run 2 did",
        backward(leaves=LEAVES.replace("before.requires_grad", "tensor.is_floating_point()"))),
    "attributes of ctx, which go with backward": Wrong(
        2, "test_any_arguments", r"input was changed in place between .*: the gradient of up.weight .* by ctx\.save",
        forward(save="ctx.kept = [keeper.keep(tensor) for tensor in tensors]")
        | backward(begin="kept, ctx.kept = ctx.kept, None", back=BACK.replace("ctx.saved_tensors", "kept"),
                   leaves=LEAVES + "\ndel kept")),
    "the saved tensor itself begins the graph": Wrong(
        2, "test_any_arguments", r"backward\(retain_graph=True\), then .* the gradient of the input is .*\(detach\)",
        backward(leaves=LEAVES.replace(".detach()", ""))),
    "any pass goes through it": Wrong(
        2, "test_what_is_no_plain_backward_is_refused",
        r"autograd.grad\(loss, x\) .* has put gradients into up.weight, .*plain_backward_only refuses it",
        {"_Checkpoint.backward": backward()["_Checkpoint.backward"].replace("@checkpoints.plain_backward_only\n", "")}),
    "zeros for an output that nobody uses": Wrong(
        2, "test_what_nobody_uses_gets_no_gradient", r"backward got zeros for .*: see ctx\.set_materialize_grads",
        forward(zeros="")),
    "zeros for an input that got no gradient": Wrong(
        2, "test_what_nobody_uses_gets_no_gradient", r"the other input comes has None .*, and no zeros",
        backward(end="return None, None, None, *[torch.zeros_like(tensor) if tensor.requires_grad and tensor.grad is "
                     "None else tensor.grad for tensor in inputs]")),

    "dropout drops others in backward": Wrong(
        3, "test_dropout_drops_the_same_again", r"in backward other numbers were dropped than in forward",
        backward(again="autocast_as(ctx.precision), torch.enable_grad()")),
    "the state is taken after the run": Wrong(
        3, "test_dropout_drops_the_same_again", r"in backward other numbers were dropped than in forward",
        forward(state="outputs = run(tensors)\n" + STATE, end="return outputs")),
    "two random states a block": Wrong(
        3, "test_one_random_state_a_block", r"of 6 blocks as much is kept as 12 states of random numbers have",
        forward(begin="ctx.before_it = random_state()")),
    "random states as lists": Wrong(
        3, "test_one_random_state_a_block", r"of 6 blocks as much is kept as 5\d(\.\d)? states of random numbers have",
        forward(begin="ctx.numbers = torch.get_rng_state().tolist()")),
    "a list of all random states": Wrong(
        3, "test_one_random_state_a_block", r"when the output of 6 blocks is gone, as much is still kept as 6 states",
        forward(state=STATE + "\n_Keeper.states = [*getattr(_Keeper, 'states', []), ctx.random]")),
    "random numbers go on from the second run": Wrong(
        3, "test_who_draws_next_draws_the_same", r"the next random number is 0\.\d+, and 0\.\d+ without checkpoints",
        random_state_of(end="pass")),
    "an error leaves the random state of the second run": Wrong(
        3, "test_an_error_leaves_all_as_it_was", r"the random state is not what it was before backward",
        random_state_of(body="yield\nset_random_state(before)")),
    "autocast is on in the second run, and stays on": Wrong(
        3, "test_autocast_is_as_it_was", r"ran in torch.autocast, with backward outside of it: the gradient",
        backward(again="random_state_of(ctx.random), torch.enable_grad()")),
    "autocast has the dtype that a CPU takes by itself": Wrong(
        3, "test_autocast_is_as_it_was", r"ran in torch.autocast of torch.float16, with backward .*: the gradient",
        autocast_as(enter="stack.enter_context(torch.autocast(kind, enabled=enabled))")),
    "autocast is never switched off": Wrong(
        3, "test_autocast_is_as_it_was", r"ran outside of torch.autocast, with backward in it: the gradient",
        autocast_as(enter="if enabled:\n    stack.enter_context(torch.autocast(kind, dtype=dtype))")),
    "autocast is set by its flags": Wrong(
        3, "test_autocast_is_as_it_was", r"then its weights were doubled, and the next loss is",
        {"autocast_as": "@contextmanager\n" + function("def autocast_as(states):", """
            before = autocast_state()
            def put(states):
                for kind, enabled, dtype in states:
                    torch.set_autocast_enabled(kind, enabled)
                    torch.set_autocast_dtype(kind, dtype)
            put(states)
            try:
                yield
            finally:
                put(before)
            """)}),
    "a yield for each device type": Wrong(
        3, "test_autocast_of_two_device_types",
        r"(?s)it raised .*To look at: here autocast_state\(\) has an entry for each of two .* before the one yield",
        {"autocast_as": "@contextmanager\n" + function("def autocast_as(states):", function(
            "for kind, enabled, dtype in states:", function(
                "with torch.autocast(kind, enabled=enabled, dtype=dtype):", "yield")))}),

    "the part is a view of the whole": Wrong(
        4, "test_a_rank_keeps_its_part", r"a view keeps all of its storage alive",
        cut(size="size = -(-tensor.numel() // world_size)\nflat = torch.nn.functional.pad(tensor.flatten(), (0, size * "
                 "world_size - tensor.numel()))", part="part = flat[rank * size : (rank + 1) * size]"), 2),
    "a view of the copy that reshape made": Wrong(
        4, "test_a_rank_keeps_its_part", r"Its input, which is not contiguous, has .* a view keeps the copy",
        cut(size=f"{SIZE}\nflat = tensor.reshape(-1)",
            part=PART + "\nif flat.data_ptr() != tensor.data_ptr() and len(mine) == size:\n    part = mine"), 2),
    "the tail is lost": Wrong(
        4, "test_what_is_gathered_is_the_input", r"P_a over 2 ranks, rank \d.*(it raised|gradient)|it raised",
        cut(size="size = tensor.numel() // world_size") | gather(
            end="return torch.nn.functional.pad(whole, (0, shape.numel() - len(whole))).view(shape)"), 2),
    "parts in the wrong order": Wrong(
        4, "test_what_is_gathered_is_the_input", r"the parts in order of rank", gather(
            end="return whole.roll(len(part))[: shape.numel()].reshape(shape)"), 3),
    "an all-reduce of parts among zeros": Wrong(
        4, "test_one_gather_a_block_and_only_in_backward",
        r"sent 677\.\d kB in backward. 6 blocks gather their inputs once each: 338\.\d kB",
        gather(gather="rank = dist.get_rank(self.group)\nwhole.zero_()\n"
                      "whole[rank * len(part) : (rank + 1) * len(part)] = part\n"
                      "collectives.all_reduce(whole, op='sum', group=self.group)")),
    "integers are cut too": Wrong(
        4, "test_integers_stay_whole", r"of a block that takes 169\.4 kB of integers .*Only floating-point tensors",
        {"_Keeper.describe": function(
            "def describe(self, tensor):", "return _Description(tensor.shape, tensor.device, tensor.requires_grad, "
            "self.group is not None)")}),
    "all ranks there are": Wrong(
        4, "test_a_group_of_some_ranks", r"Here group= is a group of ranks 0 and 2 of three",
        gather(room="whole = part.new_empty(dist.get_world_size() * len(part))",
               gather="collectives.all_gather(whole, part)"), hangs=True),
    "the rank among all ranks": Wrong(
        4, "test_a_group_of_some_ranks", r"is the rank the one in the group, dist\.get_rank\(group\)\?",
        cut(ranks="rank, world_size = dist.get_rank(), dist.get_world_size(self.group)")),
    "the whole, where Python's list of tensors does not show it": Wrong(
        4, "test_the_kernel_counts_parts", r"rank 0 holds up to \d+\.\d MB, as the kernel counts",
        forward(begin="ctx.hidden = [tensor.detach().numpy().copy() for tensor in tensors]")),

    "to('cpu') is the tensor itself": Wrong(
        5, "test_a_copy_goes_to_the_host", r"is a block's input itself, 6 times",
        to_host(copy="copy = tensor.to('cpu')")),
    "nobody is told": Wrong(
        5, "test_a_copy_goes_to_the_host", r"with to_host=True nothing was announced", to_host(tell="")),
    "the whole crosses the bus, and is cut there": Wrong(
        5, "test_only_the_part_goes_there", r"brought 508\.\d kB to host memory .* its parts are 254\.\d kB: cut first",
        keep(kept="kept = to_host(tensor.detach()) if self.to_host else tensor.detach()",
             host="if self.describe(tensor).is_cut:\n    kept = self.cut(kept)")),
    "an empty copy": Wrong(
        5, "test_it_comes_back_from_there", r"Is the copy filled with the tensor's values\?",
        to_host(copy="copy = torch.zeros_like(tensor)")),
    "integers and masks are not announced": Wrong(
        5, "test_a_copy_has_the_tensors_dtype", r"had copies of bfloat16 announced, and none of int64, bool: what is",
        to_host(tell="if tensor.is_floating_point():\n    announce(copy)")),
    "a copy of the default dtype": Wrong(
        5, "test_a_copy_has_the_tensors_dtype",
        r"takes tensors of bfloat16, int64, bool had copies of float32, float32, float32 announced.*made with dtype=",
        to_host(copy='copy = torch.empty(tensor.shape, device="cpu")\ncopy.copy_(tensor)')),
}


def beside_the_saved(which, kept="kept[place]"):
    """Tensors for which this is true become an attribute of ctx; the others are saved as they are in the reference."""
    return edited("06_activation_partitioning", "_Checkpoint.forward", (
        "    ctx.save_for_backward(*(keeper.keep(tensor) for tensor in tensors))", f"""
    kept = [keeper.keep(tensor) for tensor in tensors]
    ctx.beside = {{place: {kept} for place in range(len(kept)) if {which}}}
    ctx.save_for_backward(*(one for place, one in enumerate(kept) if place not in ctx.beside))""")) | edited(
        "06_activation_partitioning", "_Checkpoint.backward", ("    inputs = []", """
    saved = iter(ctx.saved_tensors)
    whole = [ctx.beside[place] if place in ctx.beside else next(saved) for place in range(len(ctx.before))]
    inputs = []"""), ("zip(ctx.saved_tensors,", "zip(whole,"))


WRONG |= {  # what strangers handed in, and had full marks
    "arguments known by their address": Wrong(
        2, "test_any_arguments", r"a function of a tensor and of its first row",
        edited("06_activation_partitioning", "_Checkpoint.forward",
               ("*(keeper.keep(tensor) for tensor in tensors)",
                "*({one.data_ptr(): keeper.keep(one) for one in reversed(tensors)}[tensor.data_ptr()] "
                "for tensor in tensors)"))),
    "integers and masks are attributes": Wrong(
        2, "test_any_arguments", r"also takes a tensor of torch.int64, which was changed in place between forward and",
        beside_the_saved("not tensors[place].is_floating_point()")),
    "copies of integers and masks are attributes": Wrong(
        2, "test_what_was_kept_goes_with_backward", r"1\.1 MB still live of 6 .* take integers and a mask besides",
        beside_the_saved("not tensors[place].is_floating_point()", "kept[place].clone()")),
    "a random state where an input requires a gradient": Wrong(
        3, "test_dropout_drops_the_same_again", r"a block with dropout whose input requires no gradient: the",
        backward(again="random_state_of(ctx.random) if any(before.requires_grad for before in ctx.before) else "
                       "ExitStack(), autocast_as(ctx.precision), torch.enable_grad()")),
    "autocast is set where an input requires a gradient": Wrong(
        3, "test_autocast_is_as_it_was", r"ran outside of torch.autocast, with backward in it: the gradient",
        backward(again="random_state_of(ctx.random), autocast_as(ctx.precision) if any(before.requires_grad for before "
                       "in ctx.before) else ExitStack(), torch.enable_grad()")),
    "gather frees the part": Wrong(
        4, "test_what_is_gathered_is_the_input", r"\d of the parts that place= gave have no memory on rank \d",
        gather(end="collectives.free(part)\nreturn whole[: shape.numel()].reshape(shape)")),
    "gather adds to the part": Wrong(
        4, "test_what_is_gathered_is_the_input", r"backward\(retain_graph=True\), then .* neither changes nor frees it",
        gather(end="part.data.add_(1)\nreturn whole[: shape.numel()].reshape(shape)")),
    "16 host buffers, in turn": Wrong(
        5, "test_it_comes_back_from_there", r"(?s)it raised RuntimeError.*Is host memory used again that is",
        to_host(copy="""
            pool = announce.__dict__.setdefault((tensor.shape, tensor.dtype), [])
            pool.append(torch.empty_like(tensor) if len(pool) < 16 else pool.pop(0))
            copy = pool[-1].copy_(tensor)
            """)),
    "16 host buffers, in turn, and nobody is told": Wrong(
        5, "test_it_comes_back_from_there", r"of 200 inputs that were kept at a time, 184 have a wrong",
        to_host(copy="""
            pool = announce.__dict__.setdefault((tensor.shape, tensor.dtype), [])
            pool.append(torch.empty_like(tensor) if len(pool) < 16 else pool.pop(0))
            copy = pool[-1].data.copy_(tensor)
            """)),
    "16-bit parts travel in fp32": Wrong(
        4, "test_one_gather_a_block_and_only_in_backward", r"of a block whose input is in bf16, and its parts are",
        gather(room="", gather="", end="""
            wide = part.float()
            whole = wide.new_empty(wide.numel() * dist.get_world_size(self.group))
            collectives.all_gather(whole, wide, group=self.group)
            return whole[: shape.numel()].view(shape).to(part.dtype)
            """)),
    "one buffer for all inputs of a size": Wrong(
        4, "test_what_is_gathered_is_the_input", r"a second input of its size|an input that is not contiguous",
        gather(end="""
            if not hasattr(type(self), "kept") or type(self).kept.shape != whole.shape:
                type(self).kept = torch.empty_like(whole)
            return type(self).kept.copy_(whole)[: shape.numel()].view(shape)
            """)),
    "an input that wants no gradient is not cut": Wrong(
        4, "test_a_rank_keeps_its_part", r"the second one wants no gradient: rank 0 keeps .* two parts have",
        edited("06_activation_partitioning", "_Keeper.describe", (
            "tensor.is_floating_point()", "tensor.is_floating_point() and tensor.requires_grad"))),
    "a random state for modules with nn.Dropout alone": Wrong(
        3, "test_dropout_drops_the_same_again", r"in backward other numbers were dropped than in forward",
        backward(begin="parts = getattr(ctx.run.__self__.function, 'modules', lambda: [torch.nn.Dropout()])()",
                 again="random_state_of(ctx.random) if any(isinstance(part, torch.nn.Dropout) for part in parts) else "
                       "ExitStack(), autocast_as(ctx.precision), torch.enable_grad()")),
}

WRONG |= {  # right for some arguments, groups and calls
    "int32 and uint8 are attributes": Wrong(
        2, "test_any_arguments", r"also takes a tensor of torch\.int32, which was changed in place between forward and",
        beside_the_saved("tensors[place].dtype in (torch.int32, torch.uint8)")),
    "gradients of 16 bits are dropped": Wrong(
        2, "test_any_arguments", r"the gradient of argument \d is None instead of (bfloat16|float16)",
        backward(end="return None, None, None, *[tensor.grad if tensor.dtype.itemsize > 2 else None for tensor in "
                     "inputs]")),
    "no random state with a group": Wrong(
        4, "test_what_is_gathered_is_the_input", r"result \d \(float64 \[.*\) is off by",
        backward(again="random_state_of(ctx.random) if ctx.keeper.group is None else ExitStack(), "
                       "autocast_as(ctx.precision), torch.enable_grad()")),
    "fp64 is cut in fp32": Wrong(
        4, "test_what_is_gathered_is_the_input", r"when the function ran last is float32 \[.*\] instead of float64",
        cut(end="return part.float() if part.dtype == torch.float64 else part"), 3),
    "the size of the first group": Wrong(
        4, "test_what_is_gathered_is_the_input", r"it raised RuntimeError: shape", cut(
            ranks="_Keeper.ranks = getattr(_Keeper, 'ranks', None) or (dist.get_rank(self.group), dist.get_world_size("
                  "self.group))\nrank, world_size = _Keeper.ranks"), 3),
    "parts of a multiple of 256": Wrong(
        4, "test_what_is_gathered_is_the_input", r"bytes that were sent in backward are \d+, and may be \d+",
        cut(size=f"{SIZE}\nsize = -(-size // 256) * 256"), 3),
    "a barrier at each 64th gather": Wrong(
        4, "test_one_gather_a_block_and_only_in_backward", r"called [12] barriers in 100 steps", gather(
            begin="type(self).calls = getattr(type(self), 'calls', 0) + 1\nif type(self).calls % 64 == 0:\n"
                  "    dist.barrier(self.group)")),
    "integers go to the host as they are": Wrong(
        5, "test_it_comes_back_from_there", r"arguments that are a copy for the host are \d, and may be 0",
        to_host(copy="copy = tensor.clone() if tensor.is_floating_point() else tensor")),
}

FOLDER = "06_activation_partitioning"


def kept_beside(where):
    """What is kept is an attribute of ctx where this is true of keeper."""
    return edited(FOLDER, "_Checkpoint.forward", (
        "    ctx.save_for_backward(*(keeper.keep(tensor) for tensor in tensors))", f"""
    kept = [keeper.keep(tensor) for tensor in tensors]
    ctx.copies = kept if {where} else None
    ctx.save_for_backward(*(() if ctx.copies else kept))""")) | edited(
        FOLDER, "_Checkpoint.backward", ("zip(ctx.saved_tensors,", "zip(ctx.copies or ctx.saved_tensors,"))


def given_twice(key):
    """Tensors that are one by this key are kept once, and are one in the second run."""
    return edited(FOLDER, "_Checkpoint.forward", ("    ctx.before =", f"""
    keys = [{key} for tensor in tensors]
    each = list(dict.fromkeys(keys))
    ctx.places, tensors = [each.index(one) for one in keys], [tensors[keys.index(one)] for one in each]
    ctx.before ="""), ("return run(tensors)", "return run([tensors[place] for place in ctx.places])")) | edited(
        FOLDER, "_Checkpoint.backward", ("    with random_state_of", """
    inputs = [inputs[place] for place in ctx.places]
    with random_state_of"""))


WRONG |= {  # wrong where a part or a copy is kept, where a tensor comes twice, and where numbers are complex
    "parts and copies are attributes": Wrong(
        4, "test_what_is_gathered_is_the_input",
        r"bytes that live after backward, while the results do are \d+, and may be 8192\. What ctx has as an attribute",
        kept_beside("keeper.group is not None or keeper.to_host"), 3),
    "copies for the host are attributes": Wrong(
        5, "test_it_comes_back_from_there",
        r"while the results (live|do) are \d+, and may be (0|8192)\. What ctx has as an",
        kept_beside("keeper.to_host")),
    "copies that place= gave are attributes": Wrong(
        2, "test_what_was_kept_goes_with_backward", r"508\.\d kB still live of 6 .*, of which place= gave copies,",
        kept_beside("keeper.place")),
    "a tensor that is given twice begins the graph once": Wrong(
        2, "test_any_arguments", r"the gradient of argument \d .* is off by .*Here two arguments are one tensor",
        given_twice("id(tensor)")),
    "a tensor and a view of all of it are one": Wrong(
        2, "test_any_arguments", r"the gradient of argument \d .* is off by .*Here two arguments are one tensor",
        given_twice("id(tensor) if not tensor.numel() else (tensor.data_ptr(), tensor.shape, tensor.requires_grad)")),
    "complex results lead nowhere": Wrong(
        2, "test_any_arguments", r"the gradient of \w+ \d .* is .*, also a complex one",
        backward(through=THROUGH.replace("output.requires_grad", "output.is_floating_point() and "
                                         "output.requires_grad"))),
    "complex arguments have no gradient": Wrong(
        2, "test_any_arguments", r"(whether argument \d required a gradient then is False|gradient of arg.* None)",
        backward(leaves=LEAVES.replace("before.requires_grad", "before.requires_grad and tensor.is_floating_point()"))),
}

RIGHT = {
    "a tensor that is given twice is kept once": edited(FOLDER, "_Checkpoint.forward", (
        "    ctx.save_for_backward(*(keeper.keep(tensor) for tensor in tensors))", """
    each = {id(tensor): tensor for tensor in tensors}
    ctx.places = [list(each).index(id(tensor)) for tensor in tensors]
    ctx.save_for_backward(*map(keeper.keep, each.values()))""")
    ) | edited(FOLDER, "_Checkpoint.backward", (
        "zip(ctx.saved_tensors,", "zip([ctx.saved_tensors[place] for place in ctx.places],")),
    "other words": forward() | backward(through=THROUGH.replace(
        "gradient is not None and output.requires_grad", "output.requires_grad and gradient is not None"))
    | random_state_of() | autocast_as() | cut() | gather() | to_host(),
    "torch's own all-gather, and padding": cut(
        part="flat = tensor.new_zeros(size * world_size)\nflat[: tensor.numel()] = tensor.flatten()\n"
             "part = flat.chunk(world_size)[rank].clone()") | gather(gather=ONE_BY_ONE),
}
SHORT = {"forward records a graph, and keeps it", "the input gets no gradient", "dropout drops others in backward",
         "the part is a view of the whole"}

ORDER = "the two statements do not touch what the other one does"
PAIRS = "what is paired is of one length in every call that comes here"
GPU = "it matters on a GPU alone, and lessons are graded where there is none"
EMPTY = ("`torch.empty(tensor.shape, dtype=tensor.dtype, device='cpu', pin_memory=tensor.is_cuda and torch.cuda`")
CLASS = "torch calls it of the class, where a function is the same"
UNTOLD = {
    "_Checkpoint.forward: `ctx.run, ctx.keeper = (run, keeper)` a statement later": ORDER,
    "_Checkpoint.forward: `ctx.random, ctx.precision = (random_state(), autocast_state())` a statement later": ORDER,
    "_Checkpoint.forward: `ctx.set_materialize_grads(False)` a statement later": ORDER,
    "_Checkpoint.forward: `ctx.before = [keeper.describe(tensor) for tensor in tensors]` a statement later": ORDER,
    "_Checkpoint.forward: without @staticmethod": CLASS,
    "_Checkpoint.backward: without @staticmethod": CLASS,
    "_Checkpoint.backward: `zip(ctx.saved_tensors, ctx.before, strict=True)` without strict=True": PAIRS,
    "_Checkpoint.backward: `zip(outputs, gradients, strict=True)` without strict=True": PAIRS,
    "_Checkpoint.backward: `zip(*pairs, strict=True)` without strict=True": PAIRS,
    "_Checkpoint.backward: True turned": PAIRS,
    "_Checkpoint.backward: True turned (2)": PAIRS,
    "_Checkpoint.backward: True turned (3)": PAIRS,
    "random_state_of: 1 + 1": GPU,
    "to_host: `with beside_computation(tensor):` a statement later": ORDER,
    "to_host: not inside `with beside_computation(tensor):`": GPU,
    f"to_host: {EMPTY} without device='cpu'": GPU,
    f"to_host: {EMPTY} without pin_memory=tensor.is_cuda and torch.cuda.is_available()": GPU,
    "to_host: `copy.copy_(tensor, non_blocking=True)` without non_blocking=True": GPU,
    "to_host: `tensor.is_cuda and torch.cuda.is_available()`: and for or": GPU,
    "to_host: True turned": GPU,
    "_Keeper.cut: `mine = tensor.reshape(-1)[rank * size:(rank + 1) * size]` a statement later": ORDER,
}
