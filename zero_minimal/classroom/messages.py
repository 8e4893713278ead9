"""Messages: explain to a learner what happened to the ranks: which waited in which collective, at which line."""

import ast
import linecache
import re
from pathlib import Path

from zero_minimal.classroom.guard import Fault
from zero_minimal.classroom.lessons import LOOK_AT, UNWRITTEN
from zero_minimal.guards.collective_fingerprint import Mismatch
from zero_minimal.processes.ranks import RankError

COLLECTIVES = {"collectives.py", "work.py"}  # core's files in which ranks wait for each other
ROOMS = ("/zero_minimal/core/", "/zero_minimal/guards/", "/zero_minimal/processes/",
         "/zero_minimal/extensions/", "/zero_minimal/checkpoint/", "/zero_minimal/offloading/", "/tests/")
_RANK = re.compile(r"^((?:host of )?rank \d+) stands here", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SENDS = re.compile(r" waited .*\bsend")
_INSIDE = re.compile(r" at line \d+ of .+? \((\w+)\): ")  # the function where a rank was
_WAITS = re.compile(r"\b(wait|recv|send|synchronize)\(")  # functions in C, which have no frame on the stack
_GLOO = re.compile(r"\[[^\]\[]*\.(?:cc|h):\d+\] *")  # places in gloo's source
_CUT = re.compile(r"RuntimeError: .*Connection (?:closed|reset) by peer.*")
WHY_CUT = ("RuntimeError: the connection to another rank broke, and no other rank had failed before. gloo does this "
           "when a collective is dropped that nobody waited for, or when ranks call different ones")
AT = "stood"  # of a rank that computes
BUS = "waited at the bus"
WHY_AT_THE_BUS = {"send": "all its buffers are in use", "receive": "nothing has come"}
DIED_AT = "\nit died here (innermost first):\n"  # between the cause of a rank's death and its stack
LOST = ("gloo", "is not part of group", "Connection")  # signs that a rank failed because of another
# errors that need no hint: a wrong name, or wrong arguments of a call
_PLAIN = re.compile(r"it raised (NameError|UnboundLocalError|ImportError|ModuleNotFoundError|"
                    r"AttributeError: (?!'NoneType')|TypeError: .*(argument|is not callable|is not subscriptable))")
_LATE = re.compile(r"^after (\S+) s rank ([\d, ]+) of (\d+) had not finished")


def of_failure(error: Exception, path: str) -> str:
    """The message on the submission in the file `path`, from a RankError or TimeoutError of ranks.run."""
    if isinstance(error, TimeoutError):
        return _stuck(str(error), path)
    if isinstance(error, RankError):
        fault = isinstance(error.__cause__, Fault)
        words = str(error.__cause__) if fault else str(error).split("failed:\n", 1)[-1].split("\n(after it")[0].strip()
        words, _, stack = words.partition(DIED_AT)  # a fault may have the stack of its host
        if not fault and "\n" in words:  # our traceback: the rank could not even begin or end
            words = words.splitlines()[-1]
        words += _when(_FRAME.findall(stack), path)
        if fault:
            return words if UNWRITTEN in words else f"rank {error.rank}: {_CUT.sub(WHY_CUT, words)}"
        if "SIGABRT" in words:
            words += (". gloo ends a rank when a message is larger than expected: do all ranks call the same "
                      "collectives in the same order, with the same sizes? Or was memory freed that was being sent, or "
                      "a collective dropped that nobody waited for?")
        if "SIGSEGV" in words:
            words += f"{LOOK_AT}does it use memory that is gone? A shard that is a view of a freed tensor is gone too."
        return f"rank {error.rank} is gone in the middle of the test: {_CUT.sub(WHY_CUT, words)}"
    return f"{type(error).__name__}: {error}"


def _when(frames: list, path: str) -> str:
    """Where a rank crashed, from its stack, innermost frame first; "" if unknown."""
    for file, line, function in frames:
        if _same_file(file, path):
            return f" at {_line(path, line, function)}"
    outside = [f" outside of your file ({Path(file).name}, {function})" for file, _, function in frames
               if any(room in file for room in ROOMS)]
    return outside[0] if outside else ""


def _same_file(file: str, path: str) -> bool:
    """Whether a frame is in the file `path`. Python escapes letters such as ü where it prints stacks itself."""
    return file in (path, path.encode("ascii", "backslashreplace").decode())


def _line(path: str, line: str, function: str) -> str:
    return f"line {line} of {Path(path).name} ({function}): {linecache.getline(path, int(line)).strip()}"


def _stuck(text: str, path: str) -> str:
    seconds, late, world_size = _LATE.match(text).groups()
    _, *parts = _RANK.split(text)  # rank, its stack, rank, its stack, …
    stacks = {who: _FRAME.findall(stack) for who, stack in zip(parts[::2], parts[1::2], strict=True)}
    places, of_hosts = {}, {}
    for rank in late.split(", "):
        places.setdefault(_place(stacks.get(f"rank {rank}", []), path), []).append(rank)
        if host := stacks.get(f"host of rank {rank}"):
            of_hosts.setdefault(_place(host, path), []).append(rank)
    lines = [f"the ranks had not come to an end after {seconds} s."]
    lines += [f"    {listed(ranks)} {place}" for place, ranks in places.items()]
    lines += [f"    the host of {listed(ranks)} {place}" for place, ranks in of_hosts.items()]
    at_the_bus = any(place.startswith(BUS) for place in places)
    if not at_the_bus and not any(_same_file(file, path) for stack in stacks.values() for file, *_ in stack):
        lines.append("    A collective that you started and nobody waited for can hold up the next one.")
    done = [rank for rank in map(str, range(int(world_size))) if rank not in late.split(", ")]
    if done:
        lines.append(f"    {listed(done)} had returned, and waited for nobody")
    if any(place.startswith(AT) for place in (*places, *of_hosts)):
        lines.append("    A rank that stood at a line waited for nobody: it is slow (a sleep, work on single "
                     "elements), or in a loop that never ends")
    return "\n".join(lines)


def listed(ranks) -> str:
    """Ranks in words: "rank 0", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def hint(error: Exception, words: str, hints: dict, path: str) -> str:
    """The hint of a test that fits, if any:

    left      ranks wait to receive from a rank that has returned
    dropped   ranks wait to receive, none to send, and a function in which they wait drops the result of isend
    unsent    ranks wait to receive, and none to send
    unheard   ranks wait to send, and none to receive
    stuck     ranks wait for each other, or failed because of another
    raised    a line of the file raised an error that needs explanation

    Hints on isend are skipped for functions that do not call it.
    """
    if isinstance(error, TimeoutError):
        loops, waits, sends = f" {AT} " in words, " waited " in words, _SENDS.search(words)
        functions = _functions(path, set(_INSIDE.findall(words)))
        only_receive = " waited in recv" in words and not sends
        fitting = {"left": "had returned" in words and not sends,
                   "dropped": only_receive and any(map(_drops, functions)),
                   "unsent": only_receive, "unheard": sends and " waited in recv" not in words}
        hints = {name: text for name, text in hints.items()
                 if "isend" not in str(text) or any(map(_isends, functions))}
        fits = [name for name, it_does in fitting.items() if it_does and name in hints]
        found = "" if loops or not waits else (*fits, "stuck")[0]
    elif Mismatch.__name__ in words:
        found = "left" if "has finished" in words and "left" in hints else "stuck"
    else:
        raised = "it raised" in words or "whose memory was freed" in words
        found = ("" if _PLAIN.search(words) else "stuck" if any(sign in words for sign in LOST)
                 else "raised" if raised else "")
    text = hints.get(found, "")
    return f"{LOOK_AT}{text}{'' if text.endswith('?') else '.'}" if text else ""


def _functions(path: str, names: set[str]) -> list[ast.FunctionDef]:
    """The functions of these names in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:  # the file was saved meanwhile
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]


def _isends(function: ast.AST) -> bool:
    return any("isend" in (getattr(node, "attr", ""), getattr(node, "id", "")) for node in ast.walk(function))


def _drops(function: ast.FunctionDef) -> bool:
    """Whether it calls isend, but drops the result or never calls wait."""
    alone = [node.value for node in ast.walk(function) if isinstance(node, ast.Expr)]
    dropped = any(isinstance(call, ast.Call) and _isends(call.func) and getattr(call.func, "attr", "") != "wait"
                  for call in alone)
    waits = any(getattr(node, "attr", "") == "wait" for node in ast.walk(function))
    return dropped or _isends(function) and not waits or any(map(_overwrites, ast.walk(function)))


def _overwrites(loop: ast.AST) -> bool:
    """Whether a loop assigns each result of isend to the same name, and does not use it inside the loop."""
    if not isinstance(loop, (ast.For, ast.While)):
        return False
    inside = list(ast.walk(loop))
    used = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    kept = [node.targets[0] for node in inside if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and _isends(node.value.func)]
    return any(isinstance(name, ast.Name) and name.id not in used for name in kept)


def brief(words: str) -> str:
    """Remove the places in gloo's source."""
    return _GLOO.sub("", words)


def _place(frames: list, path: str) -> str:
    """Where a rank is, from its stack, innermost frame first."""
    own = next((index for index, (file, _, _) in enumerate(frames) if _same_file(file, path)), None)
    if own is None:
        outside = [(Path(file).name, function) for file, _, function in frames
                   if any(room in file for room in ROOMS)]
        at_bus = [function for file, function in outside if file == "host_link.py" and function in WHY_AT_THE_BUS]
        if at_bus:
            return f"{BUS}, in {at_bus[0]}: {WHY_AT_THE_BUS[at_bus[0]]}"
        waits = [function for file, function in outside if file in COLLECTIVES]
        others = [f"{file}, {function}" for file, function in outside if file not in COLLECTIVES]
        if not frames or not others:
            return "could not say where it was"
        return f"waited outside of your file{f', in {waits[-1]}' if waits else f' ({others[0]})'}"
    _, line, function = frames[own]
    called = [inner for file, _, inner in frames[:own] if inner not in ("wrapper", "_fn")]
    waits = _WAITS.search(linecache.getline(path, int(line)))
    what = f"waited in {called[-1]}, at" if called else "waited at" if waits else f"{AT} at"
    return f"{what} {_line(path, line, function)}"
