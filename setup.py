"""Build entry: metadata is in pyproject.toml, native code in CMakeLists.txt."""

from setuptools import setup

setup(cmake_source_dir=".")
