"""Says what numba compiles for the CPU: on a terminal in a line that is gone when it is done, elsewhere once."""

import sys

from numba.core import event


class Compiling(event.Listener):
    """Functions compile those that they call: the outermost is named."""

    def __init__(self):
        self.names, self.done = [], 0

    def on_start(self, event) -> None:
        self.names.append(event.data["dispatcher"].py_func.__name__)
        self.show()

    def on_end(self, event) -> None:
        self.names.pop()
        self.done += 1
        self.show()

    def show(self) -> None:
        text = f"compiling {self.names[0]}, {self.done} done (the first run only)" if self.names else ""
        sys.stderr.write(f"\r\033[K{text}")  # back to the start of the line, which is erased
        sys.stderr.flush()


class Once(event.Listener):
    """The first function of cpu_reference that is not in the cache gets a line for all."""

    said = False

    def on_start(self, event) -> None:
        if not self.said and event.data["dispatcher"].py_func.__module__ == "cpu_reference":
            self.said = True
            print("compiling cpu_reference for this CPU: it is kept for the next run", file=sys.stderr, flush=True)

    def on_end(self, event) -> None: ...


def name_what_compiles() -> None:
    """From now on, on stderr, where there is one."""
    if sys.stderr is None:  # the shell closed it
        return
    event.register("numba:compile", Compiling() if sys.stderr.isatty() else Once())
