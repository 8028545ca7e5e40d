"""``fastdecode`` on two ranks that take themselves to be on hosts of their own, so that rank 1 shares no cores.

Each rank leaves the cores of its main thread, and of its kernels' threads, at the end in the folder CORES.
"""

import json
import os
import socket
import sys
from pathlib import Path

from fastdecode_hpc.__main__ import main
from fastdecode_hpc.launch import detect

rank = detect().rank or 0
socket.gethostname = lambda: f"host{rank}"
code = main()
found = {"main": sorted(os.sched_getaffinity(0)), "torch": "torch" in sys.modules}
if rank:
    from fastdecode_hpc.r_part.attention import thread_cores

    found["threads"] = thread_cores(2)
Path(os.environ["CORES"], f"{rank}.json").write_text(json.dumps(found))
sys.exit(code)
