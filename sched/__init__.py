"""Scheduling: requests, blocks, plans and policies, and what plans cost; NumPy only."""

if __name__ == "sched":
    # Imported from the root of a clone, where this hides Python's own module: it is meant.
    import importlib.util
    import sys
    import sysconfig
    from pathlib import Path

    _FILE = Path(sysconfig.get_path("stdlib")) / "sched.py"
    _SPEC = importlib.util.spec_from_file_location("sched", _FILE)
    assert _SPEC is not None and _SPEC.loader is not None
    _MODULE = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(_MODULE)
    sys.modules["sched"] = _MODULE
