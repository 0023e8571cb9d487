"""Makes Python look like that of another system, as far as this package can tell: `LIKE` says which.

With `CARD` torch says that there is a GPU, on which nothing can be computed; with `DRIVER` a driver is there,
and a PyTorch without CUDA; with `TRITON` Triton is there.

On the path of a program it is imported before anything else. Modules are missing for this package only: the
libraries that it uses know their systems.
"""

import builtins
import os
import pathlib
import platform
import signal
import sys
import types

LIKE = os.environ.get("LIKE", "")
MISSING = {"windows": {"resource", "fcntl", "termios", "pwd", "grp"}, "wsl2": set(), "macos": set()}
GONE = {
    "windows": (
        *("sysconf", "sysconf_names", "getloadavg", "sched_getaffinity", "getuid", "geteuid", "fork"),
        *("fchmod", "mkfifo", "statvfs", "uname", "setsid", "getpgid", "killpg", "nice", "ttyname"),
        *("posix_fadvise", "preadv"),
    ),
    "wsl2": (),
    "macos": ("sched_getaffinity", "posix_fadvise"),
}
SIGNALS = {"windows": ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "SIGPIPE"), "wsl2": (), "macos": ()}
# What `platform` says there.
NAMES = {"windows": ("Windows", "10"), "wsl2": ("Linux", "5.15.167.4-microsoft-standard-WSL2")}

real_import, real_open = builtins.__import__, builtins.open


def importing(name, globals=None, locals=None, fromlist=(), level=0):
    if name.partition(".")[0] == "triton" and "TRITON" not in os.environ:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    importer = (globals or {}).get("__name__", "")
    if importer.partition(".")[0] in ("bough", "__main__") and name.partition(".")[0] in MISSING[LIKE]:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = real_import(name, globals, locals, fromlist, level)
    if name == "torch" and "CARD" in os.environ and hasattr(module, "cuda") and importer.startswith("bough"):
        add_card(module)
    return module


def add_card(torch):
    """Have torch find an RTX 4090, as far as it is asked before anything is computed."""
    if torch.version.cuda:
        return
    facts = {"name": "NVIDIA GeForce RTX 4090", "major": 8, "minor": 9, "multi_processor_count": 128}
    facts |= {"shared_memory_per_multiprocessor": 102400, "shared_memory_per_block_optin": 101376}
    properties = types.SimpleNamespace(**facts, total_memory=25383993344, is_integrated=False)
    said = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": facts["name"],
        "get_device_capability": (8, 9),
        "get_device_properties": properties,
        "mem_get_info": (22 << 30, properties.total_memory),
        "memory_reserved": 0,
        "empty_cache": None,
    }
    for name, value in said.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.version.cuda = "13.0"


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


DRIVERS = {"windows": "C:/Windows/System32/nvcuda.dll", "wsl2": "/usr/lib/wsl/lib/libcuda.so.1"}

if LIKE and "DRIVER" in os.environ:
    real_exists = pathlib.Path.exists
    pathlib.Path.exists = lambda path, **options: str(path) == DRIVERS[LIKE] or real_exists(path, **options)
if LIKE:
    for name, value in zip(("system", "release"), NAMES.get(LIKE, ()), strict=False):
        setattr(platform, name, lambda value=value: value)
    builtins.__import__ = importing
    builtins.open = opening
    os.__class__ = signal.__class__ = Attributes
