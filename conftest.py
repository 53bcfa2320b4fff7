"""The order of the tests: those of test_scripts.py first, its long ones in threads; these are waited for last."""
import os

# tensors are small here: threads that wait for each other double the CPU time, and more where processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

def pytest_collection_modifyitems(items):
    """The kernels' tests are one busy process: beside them the threads' processes keep the other cores busy."""
    items.sort(key=lambda item: (hasattr(item.function, "beside"), item.path.name != "test_scripts.py"))
