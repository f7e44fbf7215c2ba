"""Version 14: at each shape the faster of two versions, which the first call with it finds out. Tiles that fill the card at one
shape leave a quarter of it idle at another: no kernel is the fastest at all of them."""

import functools
from collections.abc import Callable

from kernels import cublas
from kernels.choices import Choices
from kernels.matmul import wgmma
from kernels.target import CACHE_FOLDER


def missing() -> str | None:
    """Why there are no two versions to choose from here, in a sentence; None where there are."""
    return cublas.missing() or wgmma.missing()


@functools.cache
def _choices() -> Choices:
    return Choices(CACHE_FOLDER, "matmul")  # a folder for these sources: edited kernels are timed anew


def faster_of(launchers: tuple[Callable, ...], *arguments, may_run: bool = True, stream=0) -> None:
    """Call the launcher that is the fastest with arguments of these shapes. may_run: whether they can be timed, that is, whether
    the outputs may be written several times over."""
    names = tuple(launcher.__name__ for launcher in launchers)
    shapes = tuple(getattr(argument, "shape", argument) for argument in arguments)

    def run(index: int, stream) -> None:
        launchers[index](*arguments, stream=stream)

    run(_choices().index((names, shapes), run, len(launchers), stream, may_run), stream)
