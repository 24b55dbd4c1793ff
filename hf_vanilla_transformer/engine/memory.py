"""How the process gets its memory on a CPU."""

import ctypes


def keep_freed_memory() -> bool:
    """Lets glibc keep freed blocks for the next use; returns whether this process has it: others lack the settings.

    Fresh pages have to be zeroed. On a CPU, that takes longer than much of the arithmetic on them. The process then
    holds its peak memory until it ends.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # M_... of malloc.h
    return all((mallopt(mmap_max, 0), mallopt(trim_threshold, -1), mallopt(top_pad, 64 << 20)))
