"""The limit of open files. Each connection is a file, and so is each pipe from a started process."""

import resource

_OTHER_FILES = 1024


def raise_file_limit(files: int) -> None:
    """Raise the limit of open files of this process for a number of files, as far as the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < required:
        limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
