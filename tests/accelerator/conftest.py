"""One child process for everything that runs under Triton's interpreter; a test sends it a function and its arguments."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def child():
    """`child(function, *arguments)` runs a module's function there and returns what it returns."""
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    kept = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        pool.submit(os.getpid).result()  # the child has the environment now
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    yield lambda function, *arguments: pool.submit(function, *arguments).result()
    pool.shutdown()
