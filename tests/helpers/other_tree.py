"""Run a script in the current directory, a checkout, in a `Ranks` process, which has torch."""

import os
import runpy
import sys

from tests.helpers.processes import ROOT

PARTS = ("conf", "pipeline", "models", "engine", "extras", "train", "scripts", "tests")
for name in list(sys.modules):
    if name.split(".")[0] in PARTS:
        del sys.modules[name]
folders = [folder for folder in sys.path if folder not in ("", str(ROOT))]
sys.path[:] = [os.getcwd(), *folders]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
