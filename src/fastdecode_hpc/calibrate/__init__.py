"""``fastdecode calibrate``: measures the ranks of a job and writes their profile."""
