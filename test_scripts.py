"""
The scripts as their users run them: subprocesses, real files, kills, two ranks on gloo, exit codes and messages.

    pytest test_scripts.py                                      # CPU
    TIKTOKEN_CACHE_DIR=DIR pytest test_scripts.py               # also what needs the GPT-2 vocabulary offline
"""
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.abspath(__file__))

def run(*args, cwd=ROOT, env=None, timeout=300):
    """`python ARGS` in its own process; returns the finished process with text stdout and stderr."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env=env, timeout=timeout,
                          capture_output=True, text=True)

def refused(p, *words):
    """A user's mistake: exit status 1, one sentence on stderr that holds every one of `words`, no traceback."""
    assert p.returncode == 1, (p.returncode, p.stdout, p.stderr)
    assert "Traceback" not in p.stderr, p.stderr
    lines = [line for line in p.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, p.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])

# ----------------------------------------------------------------------------------------------------------------------
# config/

# ----------------------------------------------------------------------------------------------------------------------
# prepare.py

# ----------------------------------------------------------------------------------------------------------------------
# train.py

# ----------------------------------------------------------------------------------------------------------------------
# sample.py

# ----------------------------------------------------------------------------------------------------------------------
# bench.py
