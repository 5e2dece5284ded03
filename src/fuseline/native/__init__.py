"""Find compilers, build, cache and load the compiled libraries."""
