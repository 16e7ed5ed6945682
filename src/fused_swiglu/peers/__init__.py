"""Kernels of other projects behind the `Kernel` interface, as baselines. Their packages are imported only to run."""
