"""Between the S-worker and the R-workers: one protocol, over MPI or inside one process."""
