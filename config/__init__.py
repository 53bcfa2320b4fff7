"""
Settings: a frozen dataclass holds the defaults; Python config files and --key=value flags override them, left to
right. Every key must be a field of the dataclass and every value must have the field's type (int, float, bool, str).

    cfg = config.load(TrainConfig)   # reads sys.argv
"""
import difflib
import os
import runpy
import sys
from dataclasses import fields

PARSE = {int: int, float: float, str: str, bool: {"True": True, "False": False}.__getitem__}

def load(cls, argv=None):
    """An instance of the dataclass `cls` from its defaults and `argv` (sys.argv[1:]); exits with one sentence."""
    types, values = {f.name: f.type for f in fields(cls)}, {}

    def override(key, value, source):
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            sys.exit(f"{source}: unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        if types[key] is float and type(value) is int:
            value = float(value)
        if type(value) is not types[key]:
            sys.exit(f"{source}: {key} must be {types[key].__name__}, got {value!r}")
        values[key] = value

    for arg in sys.argv[1:] if argv is None else argv:
        if arg in ("-h", "--help"):
            print("flags are --key=value; keys, types and defaults:")
            print("\n".join(f"  {f.name}: {f.type.__name__} = {f.default!r}" for f in fields(cls)))
            sys.exit(0)
        elif arg.startswith("--"):
            key, eq, text = arg[2:].partition("=")
            if not eq:
                sys.exit(f"{arg}: flags are written --key=value")
            try:
                value = PARSE[types[key]](text) if key in types else text
            except (KeyError, ValueError):
                value = text # of the wrong type: override says so
            override(key, value, arg)
        elif os.path.isfile(arg):
            for key, value in run_file(arg).items():
                if not key.startswith("_"): # Python's own names, and the file's helpers
                    override(key, value, arg)
        else:
            sys.exit(f"{arg}: not a config file and not a --key=value flag")
    return cls(**values)

def run_file(path):
    try:
        return runpy.run_path(path)
    except Exception as error: # whatever the user's file raises, its name and the line belong in one sentence
        sys.exit(f"{path}: {type(error).__name__}: {error}")
