"""Compiles kernels and steps for GPUs and TPUs with their real compilers, on machines
without these devices."""

import os

# XLA reads it when it is loaded. Its warnings are about missing devices.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
