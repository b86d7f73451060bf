"""Compiles kernels and model steps for GPUs and TPUs with their real compilers, without either."""

import os

# XLA reads it when it is loaded. Its warnings speak of devices that are not there.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
