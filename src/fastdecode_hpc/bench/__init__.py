"""Benchmarks that an admin or a developer runs: ``fastdecode bench ...``."""
