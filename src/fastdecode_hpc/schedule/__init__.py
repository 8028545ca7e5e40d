"""WHEN and WHERE: pure Python, no torch, no MPI, no clock."""
