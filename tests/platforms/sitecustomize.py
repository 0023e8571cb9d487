"""Makes Python look like that of another system, as far as this package can tell: `LIKE` says which.

On the path of a program it is imported before anything else. Modules are missing for this package only: the
libraries that it uses know their systems.
"""

import builtins
import os
import signal
import sys

LIKE = os.environ.get("LIKE", "")
MISSING = {"windows": {"resource", "fcntl", "termios", "pwd", "grp"}, "macos": set()}
GONE = {
    "windows": (
        *("sysconf", "sysconf_names", "getloadavg", "sched_getaffinity", "getuid", "geteuid", "fork"),
        *("fchmod", "mkfifo", "statvfs", "uname", "setsid", "getpgid", "killpg", "nice", "ttyname"),
        *("posix_fadvise", "preadv"),
    ),
    "macos": ("sched_getaffinity", "posix_fadvise"),
}
SIGNALS = {"windows": ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "SIGPIPE"), "macos": ()}

real_import, real_open = builtins.__import__, builtins.open


def importing(name, globals=None, locals=None, fromlist=(), level=0):
    if name.partition(".")[0] == "triton":
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    importer = (globals or {}).get("__name__", "")
    if importer.partition(".")[0] in ("bough", "__main__") and name.partition(".")[0] in MISSING[LIKE]:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real_import(name, globals, locals, fromlist, level)


def opening(file, *arguments, **options):
    if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
    return real_open(file, *arguments, **options)


class Attributes(type(os)):
    """A module without some of its attributes, for this package alone."""

    def __getattribute__(self, name):
        gone = {"os": GONE[LIKE], "signal": SIGNALS[LIKE]}[object.__getattribute__(self, "__name__")]
        if name in gone:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] in ("bough", "__main__"):
                raise AttributeError(f"module 'os' has no attribute {name!r}")
        return object.__getattribute__(self, name)


if LIKE:
    builtins.__import__ = importing
    builtins.open = opening
    os.__class__ = signal.__class__ = Attributes
