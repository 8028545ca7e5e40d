"""The HDF5 report of a run: what is written, read, shown, drawn, compared, exported and rebuilt. The home of h5py."""
