"""How this process's C library handles memory that comes and goes with every image."""

import ctypes
import functools

# Of glibc's malloc.h, and the values given to them: bytes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_TRIM_THRESHOLD: 512 << 20, _TOP_PAD: 16 << 20, _MMAP_THRESHOLD: 32 << 20}


@functools.cache
def keep_freed_memory() -> None:
    """Keep up to half a gigabyte of freed memory for what comes next, instead of handing it back after each image.

    TensorFlow's generator data sets, once the first of them runs, make glibc map every buffer above 128 kB anew and
    hand it back after use: three hundred page faults an image, a third of a stream's time. To be called after that; it
    has effect once. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _SETTINGS.items():
            mallopt(setting, value)
