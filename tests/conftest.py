"""Put this folder on the path, so that tests can share its helper modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
