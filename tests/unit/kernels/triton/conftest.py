"""What is in `interpreted/` runs in Triton's interpreter, for which TRITON_INTERPRET=1 must stand
before Triton is first imported: in a process of its own, which test_interpreted.py starts.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
