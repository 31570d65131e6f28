"""Builds the native host optimizer; everything else is in pyproject.toml.

A wheel holds one shared library behind a C interface, so it fits any Python 3 of its platform. Without a working
compiler the package installs all the same, and torch does the library's work.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("zeroshard", "offload", "native")


class BuildWithLibrary(build_py):
    """Adds the library to the Python files: to the wheel's, or for an editable install to the sources'."""

    def run(self):
        super().run()
        # By its path: importing the package would need torch, which an isolated build does not have.
        spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            native.install(NATIVE if self.editable_mode else Path(self.build_lib) / NATIVE)
        except native.BuildError as error:
            print(f"the native host optimizer is left out: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Tagged for the platform, but for no version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Goes where platform-dependent packages go."""

    def has_ext_modules(self):
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
