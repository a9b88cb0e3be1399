"""Tests of this folder need packages of the extra `trainers`; without them, they are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") and find_spec("peft") else ["test_*.py"]
