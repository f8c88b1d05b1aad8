// Includes the part of libtorch's stable ABI that every operator uses. The rest takes time to compile, so the
// few sources that need it include it themselves, after this header.
//
// The stable ABI is the only part of the framework that this library uses: a binary built against the headers
// of one torch then loads under every later one.
#pragma once

#include "build_options.h"

// Must be set before any torch header. It cannot be a compiler flag, because torch 2.11's pybind11 refuses to
// be included with it.
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION SELFATTN_TORCH_TARGET
#endif

#include <torch/csrc/stable/stableivalue_conversions.h>
