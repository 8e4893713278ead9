"""Guardian: ipyparallel's controller, between a notebook and its ranks. It outlives the notebook only long enough to
end them.

    notebook's kernel ── the server that ranks are forked from ──► the controller, and one engine a rank

The kernel may be closed, restarted or killed. The controller notices, and kills its process group, which contains all
ranks and the processes that they have started.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection


def process(function: Callable, folder: str, group: int, *args) -> None:
    """Run function(folder, *args) as a process of a notebook, in the process group `group`; 0: as leader of a new one.
    Its output and errors go into log.txt, which the notebook shows."""
    warnings.simplefilter("ignore", DeprecationWarning)  # ipyparallel raises some, and -W error applies here, too
    multiprocessing.set_start_method(None, force=True)  # a cell's processes (data loaders) must not use our server
    log = os.open(f"{folder}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    try:
        while True:
            with contextlib.suppress(PermissionError):  # the controller does not lead its group yet
                os.setpgid(0, group)
                break
            time.sleep(0.01)
        function(folder, *args)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(1)


def controller(folder: str) -> None:
    from ipyparallel.controller.app import IPController

    threading.Thread(target=_end_all, args=(folder,), daemon=True).start()
    IPController.launch_instance([
        f"--profile-dir={folder}", "--ip=127.0.0.1", "--nodb", "--log-level=WARN",
        "--IPController.use_threads=True", "--HeartMonitor.period=500", "--HeartMonitor.max_heartmonitor_misses=240",
    ])


def _end_all(folder: str) -> None:
    """End all processes once the kernel is gone."""
    connection.wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # ourselves included
