"""Cases for the CUDA kernels, which run on the PTX machine with any torch."""
