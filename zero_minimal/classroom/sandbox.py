"""Sandbox: what the kernel itself denies to a submission, whatever it does to Python. (Linux)

    rights      processes started as root become nobody's; they cannot gain rights
    files       Landlock: it reads Python and the staged copy, and writes only into its own folder
    processes   seccomp: it starts none, signals and traces only itself, and sends only by write(), which is counted

A denied call raises an OSError in the submission. Where the kernel or system lacks one of these, it is left out:
`holds` returns False, and the grader tells its user.
"""

import contextlib
import ctypes
import errno
import os
import platform
import stat
import struct
import sys

NOBODY = 65534
NO_NEW_PRIVILEGES, END_WITH_PARENT = 38, 1  # from linux/prctl.h
CREATE, ADD_RULE, RESTRICT = 444, 445, 446  # Landlock's system calls
READ, WRITE, REMOVE, MAKE, TRUNCATE = 0b1101, 0b10, 0b110000, 0b1111111 << 6, 1 << 14
REFER, DEVICES = 1 << 13, 1 << 15  # move files between folders, ioctl
ON_FILES = 0b111 | TRUNCATE | DEVICES  # the others are rights on folders


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def holds() -> bool:
    """Whether this kernel supports all of it."""
    return sys.platform == "linux" and _abi() > 0 and platform.machine() in CALLS


def end_with_parent() -> None:
    """Let this process end when the one that started it ends."""
    if sys.platform == "linux":
        _libc().prctl(END_WITH_PARENT, 9, 0, 0, 0)


# -------------------------------------------------------------------------------------------------------------- rights


def give_up_root(needed: list[str], own: str) -> None:
    """Become nobody, if this is root: the owner of the folder `own` and of nothing else.

    If Python itself (`needed`) is in a folder that only root can read, nobody could not read it: then only root's
    capabilities are dropped. So they are where root may not become nobody, as in some containers.
    """
    if not hasattr(os, "geteuid") or os.geteuid():
        return
    with contextlib.suppress(OSError):
        if all(map(_open_to_all, needed)):
            os.chown(own, NOBODY, NOBODY)
            os.setgroups([])
            os.setgid(NOBODY)  # for root, these calls set all three ids, also on macOS
            os.setuid(NOBODY)
            return
    if sys.platform == "linux":
        none = struct.pack("6I", *[0] * 6)
        if _libc().capset(struct.pack("Ii", 0x20080522, 0), none):
            raise OSError(ctypes.get_errno(), "capset")


def _open_to_all(path: str) -> bool:
    while path != os.path.dirname(path):
        if not os.stat(path).st_mode & (stat.S_IXOTH if os.path.isdir(path) else stat.S_IROTH):
            return False
        path = os.path.dirname(path)
    return True


# --------------------------------------------------------------------------------------------------------------- files


def _abi() -> int:
    return max(0, _libc().syscall(CREATE, None, ctypes.c_size_t(0), 1))


def only_files(readable: list[str], writable: list[str]) -> None:
    """From now on, this thread and what it starts can read below `readable`, and read and write below `writable`."""
    if sys.platform != "linux" or not (abi := _abi()):
        return
    handled = READ | WRITE | REMOVE | MAKE
    handled |= (REFER if abi > 1 else 0) | (TRUNCATE if abi > 2 else 0) | (DEVICES if abi > 4 else 0)
    scoped = 0b11 if abi > 5 else 0  # no signals and no abstract sockets to others
    attributes = struct.pack("QQQ", handled, 0, scoped)[: 24 if abi > 5 else 8]
    rules = _landlock(CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for paths, rights in ((readable, READ), (writable, handled)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                on = handled & rights & (-1 if os.path.isdir(path) else ON_FILES)
                _landlock(ADD_RULE, rules, 1, struct.pack("=Qi", on, folder), 0)
                os.close(folder)
    _libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _landlock(RESTRICT, rules, 0)
    os.close(rules)


def _landlock(*arguments) -> int:
    result = _libc().syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    return result


def without(path: str, hidden: list[str]) -> list[str]:
    """The path, or, if something hidden is inside it, those parts of it without hidden files."""
    path = os.path.realpath(path)
    if path in hidden:
        return []
    if not any(other.startswith(os.path.join(path, "")) for other in hidden):
        return [path]
    return [found for name in os.listdir(path) for found in without(os.path.join(path, name), hidden)]


# ----------------------------------------------------------------------------------------------------------- processes

# numbers of system calls: on x86_64, on aarch64
NUMBERS = {
    "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269), "socket": (41, 198), "socketpair": (53, 199),
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None), "execve": (59, 221),
    "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "shmget": (29, 194), "memfd_create": (319, 279), "io_uring_setup": (425, 425),
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "sendfile": (40, 71), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "utimensat": (280, 88), "setxattr": (188, 5),
    "unshare": (272, 97), "sched_setaffinity": (203, 122),  # those that need a right of root's are denied anyway
}
CALLS = {  # machine: (its name for the kernel, {call: number})
    machine: (name, {call: numbers[column] for call, numbers in NUMBERS.items() if numbers[column] is not None})
    for column, (machine, name) in enumerate({"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.items())
}
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # of BPF, the kernel's language for filters
ALLOW, DENY, ABSENT = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER, MACHINE, FIRST, THIRD = 0, 4, 16, 32  # where a filter finds the call, and its arguments
THREAD = 0x10000  # CLONE_THREAD
SEVERAL_THREADS = 1  # SECCOMP_FILTER_FLAG_TSYNC: the filter applies to all threads
SHORT = 128  # bytes; requests to the kernel about network interfaces are shorter


def no_other_processes() -> None:
    """From now on, no thread of this process can start a process, or affect another one."""
    machine, call = CALLS.get(platform.machine(), (None, {}))
    if sys.platform != "linux" or machine is None:
        return
    program = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, machine), (RETURN, 0, 0, DENY), (LOAD, 0, 0, NUMBER),
               (ABOVE, 0, 1, 0x3FFFFFFF), (RETURN, 0, 0, DENY)]
    allowed_if = {  # {call: (deciding argument, comparison, value)}
        "clone": (FIRST, ANY_BIT, [THREAD]), "kill": (FIRST, EQUAL, [os.getpid()]),
        "tgkill": (FIRST, EQUAL, [os.getpid()]), "socket": (FIRST, EQUAL, [2, 10, 16]),
    }
    for name, number in call.items():
        if name == "sendto":
            then = [(LOAD, 0, 0, THIRD), (ABOVE, 0, 1, SHORT), (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
        elif name in allowed_if:
            place, compare, values = allowed_if[name]
            then = [(LOAD, 0, 0, place)]
            for value in values:
                then += [(compare, 0, 1, value), (RETURN, 0, 0, ALLOW)]
            then += [(RETURN, 0, 0, DENY)]
        else:
            then = [(RETURN, 0, 0, ABSENT if name == "clone3" else DENY)]  # then libc uses clone
        program += [(EQUAL, 0, len(then), number), *then]
    program += [(RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = _libc()
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    number = 317 if platform.machine() == "x86_64" else 277
    if libc.syscall(number, 1, SEVERAL_THREADS, filter):
        raise OSError(ctypes.get_errno(), "seccomp")
