"""Compiles kernels and steps for GPUs and TPUs with their real compilers, on machines without."""

import os

# XLA reads it when it is loaded. Its warnings speak of devices that are not there.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
