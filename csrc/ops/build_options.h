// Macros by which a build is configured. This file includes nothing, so that the Python module can read it
// without the framework.
#pragma once

// The oldest torch that can load the result: 2.11.
#define SELFATTN_TORCH_TARGET 0x020b000000000000ULL

// torch.ops.<SELFATTN_NAMESPACE>. Registering one namespace twice ends the process, so a build by
// torch.utils.cpp_extension.load, which does not set this macro, gets a namespace named after the extension.
#ifndef SELFATTN_NAMESPACE
#ifdef TORCH_EXTENSION_NAME
#define SELFATTN_NAMESPACE TORCH_EXTENSION_NAME
#else
#define SELFATTN_NAMESPACE selfattn
#endif
#endif

// Why the build has no CUDA kernels: a key of ABSENT in selfattn_ext/build/cuda_build.py; empty if it has
// them or nobody asked for them.
#ifndef SELFATTN_CUDA_ABSENT
#define SELFATTN_CUDA_ABSENT
#endif

#define SELFATTN_STRINGIZE_TOKEN(token) #token
#define SELFATTN_STRINGIZE(token) SELFATTN_STRINGIZE_TOKEN(token)
