"""SCRIPT ARGS: a script on CUDA devices made of host memory. See device.py; started with cudart.c preloaded."""

import runpy
import sys

import device

device.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
