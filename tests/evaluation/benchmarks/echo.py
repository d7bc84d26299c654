"""What worker processes run in the tests, in a module that is imported at once."""

import os
import time


def echo(task, report):
    """Runs in a worker process."""
    if task == "fail":
        raise ValueError("two\nlines")
    if task == "die":
        os._exit(1)
    if task == "hang":
        time.sleep(600)
    report(f"got {task}")
    return os.environ["OMP_NUM_THREADS"]
