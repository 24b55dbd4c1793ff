#!/usr/bin/env bash
# datasets 5.2.0: Ctrl+C in `Dataset.map(..., num_proc=2)` raises a TimeoutError in place of the KeyboardInterrupt, so
# that `except KeyboardInterrupt` isn't reached, and `except Exception` is.
#
# A `finally` asks for the results of the processes for 0.05 seconds; those that are still at work raise the TimeoutError.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11):
#     one process: KeyboardInterrupt
#     two processes: TimeoutError
# It takes a minute, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import os
import signal
import sys
import threading
import time

from datasets import Dataset

signal.signal(signal.SIGINT, signal.default_int_handler)
data = Dataset.from_dict({"number": range(1000)})
found = {}
for name, processes in (("one process", None), ("two processes", 2)):
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        data.map(lambda row: time.sleep(0.02), num_proc=processes)
    except BaseException as error:
        found[name] = type(error).__name__
        print(f"{name}: {found[name]}")
sys.exit(found != {"one process": "KeyboardInterrupt", "two processes": "TimeoutError"})
PROGRAM
HF_HOME="$folder/cache" "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
