"""Knowing before a job how fast it will be: profiles, costs, simulation, plans. Pure: no torch, no MPI, no clock."""
