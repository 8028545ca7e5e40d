"""Requests in, records out: JSONL files; no torch, no MPI."""
