"""The baselines: torch eager, torch.compile, cuBLAS and Triton, one file each. pyproject.toml registers them."""
