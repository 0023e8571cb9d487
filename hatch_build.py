"""Build hook: compiles the native CPU library for a wheel, and in the source tree for an editable install.

Without a C compiler the `ziglang` package is one. BOUGH_NATIVE=0 builds a wheel without native code,
which decodes with PyTorch on a CPU.
"""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "src/bough/kernels/native"


class NativeBuildHook(BuildHookInterface):
    def dependencies(self) -> list[str]:
        build = self._build()
        return ["ziglang"] if build.skip_reason() is None and build.compiler() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = self._build()
        libraries, problem = build.build_all()
        if problem:
            self.app.display_warning(f"native CPU code is missing: {problem}")
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{build.PLATFORMS[build.here()][2]}"
            build_data["artifacts"] += [f"{_FOLDER}/{library.name}" for library in libraries]

    def _build(self) -> Any:
        spec = importlib.util.spec_from_file_location("build", Path(self.root, _FOLDER, "build.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
