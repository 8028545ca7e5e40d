"""``fastdecode`` whose ranks leave their peak memory, and whether torch was loaded, in the folder FOOTPRINT."""

import json
import os
import re
import sys
from pathlib import Path

from fastdecode_hpc.__main__ import main
from fastdecode_hpc.launch import detect

code = main()
rank = detect().rank or 0
peak_kb = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
Path(os.environ["FOOTPRINT"], f"{rank}.json").write_text(
    json.dumps({"peak_bytes": peak_kb * 1024, "torch": "torch" in sys.modules})
)
sys.exit(code)
