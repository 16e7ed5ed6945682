"""CUDA C++ kernels on CUTLASS 3.x and CuTe."""
