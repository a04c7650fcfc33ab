"""`certify`, in a process that knows the model of `check_process`, whose loader forgets a copy.

python -m tests.checkpoint_engine.certify_process [options of certify]
"""

from __future__ import annotations

import os
import sys

from tests.checkpoint_engine.check_process import register_forgetful
from verl.checkpoint_engine.certify import main

if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    register_forgetful()
    sys.exit(main())
