"""Rules: for each card what its lab must have run, and which fallacies lead to which numbers and verdicts."""

from evidence import SEEDS, Case, Rule

SIZES = ("layers", "hidden", "heads", "sequence", "batch")  # of what is trained: the lab's, if a card says no others
ALIKE = (*SIZES, "seed", "steps", "dtype", "ranks", "accumulate", "bucket_mb", "recompute", "lr", "offload", "fresh")
ALIKE_SIMULATED = ("stage", "ranks", "dtype", "batch", "layers", "hidden", "heads", "vocabulary", "sequence", "steps",
                   "recompute", "model_parallel", "config", "offload", "bucket_bytes")


# ------------------------------------------------------------------------------------------------- what must have run


def ran(kind, missing, at_least=1, **like):
    """At least so many entries of this kind, with these values. missing: a sentence, in which {case} is the case."""
    def need(case: Case) -> str:
        has = len(case.entries(kind, **like)) >= at_least
        return "" if has else f"card {case.card}: {missing.format(case=case)}"
    return need


def looked_up(what):
    return ran("published", f"{what} of the paper was not looked up (lab.published): a figure from memory is the "
                            "text's, "
               "not the source's", what=what)


def trained(*stages, **like):
    """A new model at each of these stages."""
    def need(case: Case) -> str:
        for stage in stages:
            if not case.entries("train", stage=stage, **like):
                with_what = "".join(f", with {name}={value!r}" for name, value in like.items())
                return f"card {case.card}: no training at stage {stage}{with_what}: what is compared with what?"
        return ""
    return need


def alike(*groups):
    """A run of each of these groups, new models of the lab's sizes, that differ in nothing else. groups: values of an
    entry of kind "train"; one may be a function of the case."""
    def need(case: Case) -> str:
        wanted = [of_case(case, group) for group in groups]
        varied = {name for group in wanted for name in group}
        kept, found = [name for name in ALIKE if name not in varied], []
        for group in wanted:
            if not (runs := case.entries("train", fresh=True, **group)):
                return f"card {case.card}: no run of a new model with {told(group)}: what is compared with what?"
            own = [{name: entry[name] for name in SIZES if name in kept and entry[name] != getattr(case.setting, name)}
                   for entry in runs]
            if all(own):
                return own_sizes(case, own[0])
            found.append([entry for entry, others in zip(runs, own, strict=True) if not others])
        first, *others = found
        for group, runs in zip(wanted[1:], others, strict=True):
            differences = [[name for name in kept if entry[name] != run[name]] for entry in first for run in runs]
            if all(differences):
                names = min(differences, key=len)
                return (f"card {case.card}: between the run with {told(wanted[0])} and the one with {told(group)} more "
                        f"differs than that: {', '.join(names)}. Which of them is the cause? Change one thing")
        return ""
    return need


def of_case(case: Case, values: dict) -> dict:
    """The values, where one may be a function of the case."""
    return {name: value(case) if callable(value) else value for name, value in values.items()}


def told(values: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def own_sizes(case: Case, own: dict) -> str:
    """own: {option: its value}, where the lab has another."""
    lab = ", ".join(f"lab.{name} is {getattr(case.setting, name)}" for name in own)
    return (f"card {case.card}: it ran with {told(own)}, and {lab}. The card names the lab's sizes: no sizes of your "
            "own")


def compared(*stages):
    """A new model at each of these stages, all of the same batch and seed."""
    def need(case: Case) -> str:
        runs = [case.entries("train", stage=stage, fresh=True) for stage in stages]
        for stage, of_stage in zip(stages, runs, strict=True):
            if not of_stage and case.entries("train", stage=stage):
                return (f"card {case.card}: the same object ran twice: stage {stage} went on with the model of an "
                        "earlier "
                        "run, which had learned already. To compare, each run needs a new model")
            if not of_stage:
                return f"card {case.card}: no training at stage {stage}: what is compared with what?"
        batches = [{entry["batch"] for entry in of_stage} for of_stage in runs]
        if not set.intersection(*batches):
            return (f"card {case.card}: the batch is confounded with the stage: no two of your runs have one batch and "
                    f"differ in the stage alone (batches {', '.join(map(str, sorted(set.union(*batches))))})")
        return ""
    return need


def seeds(*groups):
    """Three seeds with a run of each of these groups. groups: values of an entry of kind "train"."""
    def need(case: Case) -> str:
        common = set.intersection(*({entry["seed"] for entry in case.entries("train", **like)} for like in groups))
        if len(common) >= SEEDS:
            return ""
        return (f"card {case.card}: {'one seed' if len(common) == 1 else f'{len(common)} seeds'}: a difference between "
                "two runs could be chance, and nothing here tells by how much two seeds differ. lab.seeds has three; "
                "run all that is compared with each of them")
    return need


def reset(first, second):
    """The meter began anew between the run of one stage and that of the other, whichever came first."""
    def need(case: Case) -> str:
        kinds = [entry["stage"] if entry["kind"] == "train" else "reset" for entry in case.journal
                 if entry["kind"] == "reset_peak" or entry["kind"] == "train" and entry["stage"] in (first, second)]
        for before, after in zip(kinds, kinds[1:], strict=False):
            if {before, after} == {first, second}:
                return (f"card {case.card}: the peak was never reset between stage {before} and stage {after}: a meter "
                        "that only rises shows the larger of the two, whichever came second (lab.reset_peak)")
        return ""
    return need


def simulated(*stages, **like):
    """One rank at each of these stages, with these values."""
    def need(case: Case) -> str:
        with_what = " and ".join(f"{name}={value}" for name, value in of_case(case, like).items())
        for stage in stages:
            missing = (f"stage {stage} was not simulated{' with ' * bool(like)}{with_what}: it is what the card asks "
                       "about")
            if fault := sized({"stage": stage}, missing, **like)(case):
                return fault
        return ""
    return need


def no_such(case: Case, what: str, runs: list[dict], wanted: dict) -> str:
    """It was simulated, and not with what is wanted."""
    off = [{name: (run.get(name), value) for name, value in wanted.items() if run.get(name) != value} for run in runs]
    nearest = min(off, key=len)
    has = ", ".join(f"{name}={value}" for name, (value, _) in nearest.items())
    asked = ", ".join(f"{name}={value}" for name, (_, value) in nearest.items())
    return (f"card {case.card}: {what} was simulated with {has}, and the card asks for {asked}: no sizes of your own "
            "where it names the lab's")


def sized(what, missing, **like):
    """Simulations with these values, where something of the kind was simulated at all. what: values that say so."""
    def need(case: Case) -> str:
        wanted = of_case(case, like)
        if case.entries("simulate", **what, **wanted):
            return ""
        runs = case.entries("simulate", **what)
        return no_such(case, told(what), runs, wanted) if runs else f"card {case.card}: {missing}"
    return need


def own(name):
    """The lab's value."""
    return lambda case: getattr(case.setting, name)


OWN = {"layers": own("layers"), "hidden": own("hidden")}


def far(case: Case) -> str:
    """Card 8: a limit is not seen at one N."""
    if any(entry["ranks"] >= 4 * case.setting.devices for entry in case.entries("simulate", stage=2)):
        return ""
    return (f"card {case.card}: 8 is a limit, and only N = {case.setting.devices} was looked at: nobody can tell false "
            "from a condition that is not said. Simulate many more devices, too")


# card 4: the claim is about a device by itself, and there is another way to run it
one_device = ran("train", "N = 1 is what the claim speaks of, and this ran on {case.ranks} ranks, which share. What "
                          "is a partition of one? (ranks=1)", ranks=1)
hosted = ran("train", "N = 1 alone says nothing yet: there is another way to run ZeRO on one device, with "
                      "model states on its host (offload=True)", ranks=1, offload=True)
# card 1: what the report really did
goes_on = ran("train", "no run went on with the model of another (model=…): the number is what such a run gains, "
                       "and it is what was taken for a merit of ZeRO", fresh=False)


def two_batches(case: Case) -> str:
    of_run = {}
    for entry in case.entries("train", stage=2, fresh=True):
        of_run.setdefault(tuple(entry[name] for name in ALIKE if name != "batch"), set()).add(entry["batch"])
    if any(case.setting.batch in batches and len(batches) > 1 for batches in of_run.values()):
        return ""
    if len(set().union(*of_run.values())) > 1:
        return (f"card {case.card}: two batches, and something else differs, too: lab.batch is {case.setting.batch}; "
                "run it and another one, and change nothing else")
    return (f"card {case.card}: with one batch alone nobody sees whether a payload depends on it: run a second one, "
            "and "
            "change nothing else")


def watched(collective, missing, payload, what, at_least=1, in_all=False):
    """So many times the lab watched such a collective, of this payload (case -> bytes), which is `what`. in_all: all
    that was watched together had at least so many of them."""
    def need(case: Case) -> str:
        seen = [entry[collective] for entry in case.entries("watch") if collective in entry]
        wanted = payload(case)
        if sum(seen) >= at_least * wanted if in_all else seen.count(wanted) >= at_least:
            return ""
        if not seen or not in_all and len(seen) < at_least and set(seen) <= {wanted}:
            return f"card {case.card}: {missing}"
        return (f"card {case.card}: what was watched had {collective} of {', '.join(map(str, seen))} bytes, and "
                f"{what} {wanted} bytes{f', at least {at_least} times' if at_least > 1 else ''}")
    return need


def forward_of_the_layer(case: Case) -> str:
    """Card 18: f is where X enters the layer."""
    if any("ColumnParallelLinear" in entry["modules"].split() for entry in case.entries("watch")):
        return ""
    return (f"card {case.card}: no forward pass of a ColumnParallelLinear was watched: what f does to X is seen where "
            "X goes into the layer (forward and backward inside of lab.watch())")


def differ(name, missing, **like):
    """Simulations with two values of an option, and all else alike."""
    def need(case: Case) -> str:
        rest, found = [other for other in ALIKE_SIMULATED if other != name], {}
        for entry in case.entries("simulate", **like):
            found.setdefault(tuple(entry.get(other) for other in rest), set()).add(entry.get(name))
        if any(len(values) > 1 for values in found.values()):
            return ""
        if len(set().union(*found.values())) > 1:
            return f"card {case.card}: two values of {name}, and something else differs, too: change nothing else"
        return f"card {case.card}: {missing}"
    return need


def parallel_degrees(case: Case) -> str:
    """Card 20: P_a with M ranks that share a model, and with as many as there are devices."""
    degrees = {entry.get("model_parallel") for entry in case.entries("simulate", config="C2")}
    if case.setting.model_parallel not in degrees:
        return (f"card {case.card}: C2 was not simulated with lab.model_parallel = {case.setting.model_parallel}: over "
                "whom does P_a cut?")
    if case.setting.devices not in degrees:
        return (f"card {case.card}: with one model-parallel degree nobody sees which number divides. Let all devices "
                "share one model, too")
    return ""


# ------------------------------------------------------------------------------------------- numbers of known fallacies


def psi(case: Case) -> float:
    """Elements of the model that the reference's last run had."""
    return next(entry["parameters"] for entry in reversed(case.right[2]) if entry.get("parameters"))


def ring(case: Case) -> float:
    """What a ring sends of card 14's payload for a reduce-scatter, MB."""
    return (case.ranks - 1) * case.setting.hidden * 4e3 / 1e6


def printed(name):
    from zero_minimal.paper import published

    return getattr(published, name)


def sent(case: Case) -> dict:
    """What a ring sends in the step, for a payload that is half of all that travels, or an all-reduce's."""
    return {case.right[1] * 2 * (case.ranks - 1) / case.ranks: "that is what a ring sends (sent), and the payload is "
            "asked for: what the collective carries, on whatever network"}


def of_the_card(case: Case) -> int:
    """Card 14's payload, bytes."""
    return case.ranks * case.setting.hidden * 4000


def of_x(case: Case) -> int:
    """Card 18's X, bytes."""
    return case.setting.batch * case.setting.sequence * case.setting.hidden * 4


def of_part(case: Case) -> int:
    """Card 19's partial results, bytes."""
    return case.setting.hidden * case.setting.sequence * 4


LIMIT = "A limit is taken for the value at this N: 1/N is not 0 yet"
TEXT = "the claim's own number, not one that a run gave"


def of_07(case):
    bytes_ = 16 * psi(case) / 1e9
    return {bytes_: "Units are mixed: 16Ψ are bytes. A number of fp16 has two of them, one of fp32 has four: what is "
                    "asked for is how many numbers", 14 * psi(case) / 1e9: "Ψ + Ψ + 12Ψ is the claim's own sum: the "
                                                                           "first "
                    "two count elements, and 12Ψ are bytes. Units are mixed"}


def of_11(case):
    plain = 8 * psi(case) * (case.ranks - 1) / case.ranks / 1e6
    return {plain: "that is what data parallelism sends, all of it; what is asked for is what comes on top",
            1.5 * plain: "that is all that the rank sends; what is asked for is what comes on top of data parallelism",
            0.0: "that compares two that both reduce-scatter, such as stages 0 and 1 of this course"}


def of_12(case):
    held = 12 * psi(case) / 1e6
    return sent(case) | {
        held: "that is the optimizer's state of all ranks, which is held, and not what is gathered: optimizer state "
              "never moves",
        held / case.ranks: "that is what this rank holds of the optimizer's state, and not what is gathered"}


def of_13(case):
    return sent(case) | {2 * case.right[1]: "that is stage 3, which gathers before forward and before backward"}


def of_18(case):
    return sent(case) | {0.0: "f sends nothing forward; what does it do with the input's gradient in backward?"}


def of_20(case):
    whole = 2 * case.setting.layers * case.setting.sequence * 192
    return {whole * (1 - 1 / case.setting.devices) / 1e3: "that is with as many model-parallel ranks as there "
            "are devices. P_a cuts over lab.model_parallel: data-parallel ranks have no copies"}


def of_21(case):
    elements = case.setting.elements / 1e9
    return {elements: "Units are mixed: a bucket size counts elements, and in fp16 each has two bytes",
            2 * elements: "that is one buffer by arithmetic, not the difference of two peaks. How many buffers work "
                          "at a "
                          "time?"}


def of_22(case):
    setting = case.setting
    inputs = 32 * setting.sequences * setting.tokens * 4096 * 2 / 1e9
    return {inputs: "that is with recomputation, where a block keeps its input alone",
            6 * inputs: "12·h·b·s numbers of two bytes a block, by the formula: it does not say what it counts. What "
                        "does "
                        "the run keep?"}


def of_23(case):
    return {33.554432 / case.setting.row: "Units are mixed: 33.6 billion are elements, and in fp16 each has two bytes",
            33.0 / case.setting.row: "33 is the claim's number, and it counts elements: units are mixed"}


def of_24(case):
    points = printed("FIGURE4")
    mean, own = sum(points.values()) / len(points), points[case.setting.without]
    return {own - 40: "40 is the claim's number: the mean of the points is another one", mean: "that is the mean; "
                                                                                               "what is "
            "asked for is how far one model is from it", own: "that is the model's own speed, not how far it is from "
                                                              "the "
            "mean", 21.2 - mean: "that is the model of 13B, and another one is asked for here (lab.without)"}


def of_25(case):
    points, gpus = printed("FIGURE3"), case.setting.gpus
    return {points[400] * 400 / (points[gpus] * gpus): "that is how many times faster, not yet over how many times "
                                                       "more "
            "GPUs", points[400] / points[64]: f"that begins at 64 GPUs, and lab.gpus are {gpus}: a ratio is to a "
                                              "baseline"}


def of_26(case):
    theory, measured = printed("TABLE2")[case.setting.row]
    baseline = float(theory[0]) - float(measured[0])
    return {baseline: "that is the baseline's column: stage 1 is the next",
            float(theory[1]) - float(measured[0]): "theory is of stage 1, and measurement of the baseline: whose is "
                                                   "it?"}


def of_27(case):
    return {case.setting.largest / 20: "that is over the smaller baseline, 20B; the same source names a larger one",
            8.0: TEXT, 170 / 40: "that is the model of 170B, and another one is asked for here (lab.largest)"}


RULES = {
    1: Rule("nats", (compared(0, 2), seeds({"stage": 0, "fresh": True}, {"stage": 2, "fresh": True}), goes_on,
                     alike({"stage": 0}, {"stage": 2})),
            lambda case: {0.0: "that is by how much ZeRO lowers it, with a new model; the number is what the same "
                               "object "
                               "gains when it goes on"},
            {"true": "the same object ran twice: what went on learning got better. With a new model ZeRO changes "
                     "nothing"}),
    2: Rule("MB", (ran("arguments", "no arguments were made (lab.arguments): did the thing that the claim speaks of "
                                    "run "
                       "at all?"),
                   ran("train", "no run had arguments whose zero was written after they were made: that is what the "
                       "claim speaks of (late = lab.arguments(); late.zero = …; lab.train(arguments=late))",
                       configured="later"),
                   ran("train", "no run had arguments that were made with their configuration (lab.arguments(zero=…)): "
                       "what is compared with what?", configured="at building"),
                   alike({"configured": "later", "stage": 0}, {"configured": "at building", "stage": 2})),
            lambda case: {0.0: "both runs had the same stage: look at the stage that each really was (run.stage)"}),
    3: Rule("MB", (compared(0, 3), reset(0, 3), alike({"stage": 0}, {"stage": 3})),
            lambda case: {0.0: "the peak was never reset: the second run shows that of the first"},
            {"true": "the peak was never reset: a meter that only rises cannot show a lower one"}),
    4: Rule("MB", (one_device, trained(0, ranks=1), hosted,
                   alike(*(dict(stage=stage, offload=offload, ranks=1, dtype="bf16")
                           for stage, offload in ((0, False), (2, False), (2, True))))),
            lambda case: {0.0: "that is N = 1 without a host: the whole is one part. In which way does it shrink?"},
            {"true": "N = 1 \"saves\": with one rank each partition is the whole, and stage 2 holds as much as stage "
                     "0. "
                     "Under which condition is there less on the device?",
             "false": "there is a way to run it that makes them smaller on the device: name it as a condition"}),
    5: Rule("nats", (seeds({"stage": 0}), compared(0, 2),
                     seeds({"stage": 0, "fresh": True}, {"stage": 2, "fresh": True}),
                     alike(*({"stage": stage, "batch": lambda case, times=times: times * case.setting.batch}
                             for stage, times in ((0, 1), (0, 2), (2, 2))))),
            lambda case: {0.0: "that is what ZeRO does at one batch; what is asked for is what the batch does without "
                               "ZeRO"},
            {"true": "the batch is confounded with ZeRO: both changed, and the batch alone makes the same difference",
             "false": "the claim is about what was shown. It has two causes in it, so it shows neither: what is true "
                      "of "
                      "ZeRO your run says, not theirs"}),
    6: Rule("times", (simulated(0, 1, ranks=own("devices"), **OWN),),
            lambda case: {float(case.setting.devices): f"N is {TEXT}: only the optimizer's state is divided",
                          4.0: f"{LIMIT}: 4 is stage 1's for N without end"},
            {"true if": "at no N: parameters and gradients stay whole, so it never comes above 4"}),
    7: Rule("billions", (simulated(0, dtype="fp16", ranks=own("devices"), parameters=own("parameters")),), of_07),
    8: Rule("times", (simulated(0, 2, ranks=own("devices"), **OWN), far),
            lambda case: {8.0: f"{LIMIT}: 8 is stage 2's for N without end", 4.0: f"{LIMIT}: 4 is stage 1's for N "
                                                                                  "without "
                          "end", 16 / (4 + 12 / case.setting.devices): "that is stage 1's, and stage 2 is asked for"},
            {"true": "\"true\" for what holds in the limit only: at this N it is less. For which N is it nearly so?",
             "false": "on many more devices it comes near: it holds under a condition that is not said"}),
    9: Rule("MB", (trained(0, dtype="fp32"), trained(0, dtype="bf16"),
                   alike({"stage": 0, "dtype": "fp32"}, {"stage": 0, "dtype": "bf16"})),
            lambda case: {8 * psi(case) / 1e6: "that is with fp32: in mixed precision the optimizer also holds the "
                                               "masters",
                          2 * psi(case) / 1e6: "Units are mixed: 2Ψ are numbers, of four bytes each"}),
    10: Rule("times", (trained(0, ranks=1), trained(3), reset(0, 3),
                       alike({"stage": 0, "ranks": 1}, {"stage": 3, "ranks": lambda case: case.ranks})),
             lambda case: {float(case.ranks): "N is what model states shrink by. The peak holds more than these",
                           1.0: "the peak was never reset: the second run shows that of the first"},
             {"true": "the peak is not N times lower: activations and gathered layers are not divided",
              "false": "of model states it holds: under a condition that is not said"}),
    11: Rule("MB", (ran("train", "DDP did not run: beyond what is it?", name="DDP"),
                    ran("train", "no stage 1 that all-reduces its gradients ran: \"ZeroRedundancy\" is one. The stage "
                                 "1 "
                        "of this course reduce-scatters: to run it refutes a claim that nobody made", name=
                            "ZeroRedundancy"), alike({"name": "DDP"}, {"name": "ZeroRedundancy"})),
             of_11),
    12: Rule("MB", (ran("train", "stage 1 did not run in bf16: in fp32 parameters and a shard of state look too much "
                                 "alike",
                        stage=1, dtype="bf16"), alike({"stage": 1, "dtype": "bf16"})), of_12),
    13: Rule("MB", (trained(2), alike({"stage": 2})), of_13,
             {"true": "that is stage 3. At stage 2 nothing is gathered in forward (run.when)"}),
    14: Rule("MB", (watched("all_reduce", "no all-reduce was watched: half of what?", of_the_card, "the card's "
                            "payload has"),
                    watched("reduce_scatter", "two reduce-scatters are asked for, that of torch.distributed and that "
                            "of this course, each watched by itself (with lab.watch() as …)", of_the_card,
                            "the card's payload has", at_least=2)),
             lambda case: {ring(case): "that is what a ring sends, by arithmetic (sent). What was really written is "
                                       "another "
                           "number (wire)", },
             {"true": "one library's reduce-scatter sends as much as an all-reduce: a name is not what is sent",
              "false": "there is a reduce-scatter that sends half: it depends on whose it is"}, near=0.06),
    15: Rule("MB", (trained(0, 1, 2, 3), alike(*({"stage": stage} for stage in range(4)))),
             lambda case: {0.0: "that is stages 1 and 2, which send as much as stage 0; the number is stage 3's"},
             {"true": "stages 1 and 2 send no more than stage 0",
              "false": "stage 3 does: it holds for one stage. That is a condition"}),
    16: Rule("MB", (two_batches, alike({"stage": 2, "batch": own("batch")})), sent),
    17: Rule("MB", (compared(2, 3), reset(2, 3), alike({"stage": 2}, {"stage": 3})),
             lambda case: {0.0: "the peak was never reset: the second run shows that of the first"},
             {"true": "the peak is lower, and the reduce-scatters are the same: something else is the cause",
              "not shown": "your two runs can tell: the payload of the reduce-scatters is the same"}),
    18: Rule("kB", (forward_of_the_layer,
                    watched("all_reduce", "no all-reduce was seen: did X want a gradient, and was backward run inside "
                            "of lab.watch(), too?", of_x, "what f adds up has the size of X,")), of_18),
    19: Rule("percent", (watched("all_reduce", "no sum over the ranks was watched: partial results lie on all of "
                                               "them", of_part, "sums of mixed and of positive numbers, before ReLU "
                                               "and after it, have",
                            at_least=3, in_all=True),),
             lambda case: {0.0: "with numbers of one sign only it never matters: the claim says so itself"},
             {"false": "this refutes a claim that nobody made: that positive numbers do not show it is what it says"}),
    20: Rule("kB", (*(sized({"config": config}, f"{config} was not simulated: P_a is what C2 has, and C1 has not",
                            ranks=own("devices"), layers=own("layers"), hidden=192, sequence=own("sequence"), batch=1)
                      for config in ("C1", "C2")), parallel_degrees), of_20,
             {"true": "with lab.model_parallel it is less: data-parallel ranks have no copies",
              "false": "with all devices sharing one model it holds: a condition that is not said"}),
    21: Rule("GB", (sized({"stage": 2}, "stage 2 was not simulated", ranks=256,
                          parameters=lambda case: 6 * case.setting.elements, sequence=8,
                          bucket_bytes=lambda case: 2 * case.setting.elements),
                    differ("bucket_bytes", "with one size of bucket nobody sees what a bucket takes: change it, and "
                           "nothing else", stage=2)), of_21, near=0.03),
    22: Rule("GB", (differ("layers", "with one number of blocks embedding and logits count as blocks, too: take the "
                           "difference of two"), differ("recompute", "with and without recomputation are two ways to "
                                                                     "run "
                                                        "blocks: which one does the claim mean?"),
                    sized({"recompute": False}, "", hidden=4096, batch=own("sequences"), sequence=own("tokens"))),
             of_22,
             {"true": "without recomputation it is ten times as much",
              "false": "with recomputation it fits: a condition that is not said"}, near=0.03),
    23: Rule("GB", (looked_up("figure 7"), differ("layers", "one block's checkpoint is the difference of two models "
                                                            "that "
                                                  "differ by one block"),
                    sized({"config": "C2"}, "C2, which has P_a, was not simulated", ranks=own("row"),
                          model_parallel=own("row"), sequence=1024)), of_23),
    24: Rule("TFLOP/s", (looked_up("figure 4"),), of_24,
             {"true": "a tolerance wider than the effect: the mean is below 40, and \"more than 40\" was said",
              "true if": "which models must be left out for that? The claim says: up to 13B"}, near=0.005),
    25: Rule("times", (looked_up("figure 3"),), of_25,
             {"true": "\"true\" for one baseline only: from the last number of GPUs to 400 it grows less",
              "false": "from 64 GPUs on it does: it depends on the baseline, and that is a condition"}, near=0.005),
    26: Rule("billions of parameters", (looked_up("table 2"),), of_26,
             {"true": "a tolerance wider than the effect: nearly a fifth is missing, and a tenth was allowed"},
             near=0.005),
    27: Rule("times", (looked_up("figure 2"), looked_up("baselines")), of_27,
             {"true": "over the larger baseline of the same source it is half of that",
              "false": "over one of the two baselines it holds: that is a condition"}, near=0.005),
    28: Rule("GB", (looked_up("figure 7"), ran("simulate", "what CUDA's allocator takes was not simulated "
                                                           "(cached=True)",
                                               cached=True),
                    sized({"cached": True}, "", config=own("config"), ranks=400)),
             verdicts={"false": "you have shown that your parts do not add up to it, not that the bar is wrong: a "
                                "refuted "
                                "claim would need the part that is missing",
                       "true": "a tolerance wider than the effect: what is missing is several GB"}),
}
