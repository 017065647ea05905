"""A worker process: tasks come in on stdin, one JSON line each, and outcomes leave through a pipe of their own.

    python -m tailguard.population.worker FD

It lives as long as its parent: when stdin ends, however the parent ended, so does it, with all its children.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from tailguard.population.tasks import perform
from tailguard.run import StoppedNow


class Pipe:
    """The way back to the parent: whole lines, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.lock = descriptor, Lock()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self.lock:
            while data:
                data = data[os.write(self.descriptor, data) :]


def main() -> None:
    """Work until the parent is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    pipe = Pipe(int(sys.argv[1]))
    tasks: SimpleQueue[str] = SimpleQueue()
    Thread(target=listen, args=(tasks,), daemon=True).start()
    while True:
        task = json.loads(tasks.get())
        pipe.send({"key": task["key"], "beat": True})
        try:
            result = perform(task["kind"], task["payload"], partial(pipe.send, {"key": task["key"], "beat": True}))
            pipe.send({"key": task["key"], "result": dict(result)})
        except (Exception, StoppedNow) as error:
            logging.exception("task %s failed", task["key"])
            pipe.send({"key": task["key"], "reason": f"{type(error).__name__}: {error}"})


def listen(tasks: SimpleQueue[str]) -> None:
    """Take in tasks until stdin ends, then end this process and everything it started."""
    for line in sys.stdin:
        tasks.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
