// The framework as this library sees it: libtorch's stable ABI, and nothing else of it. A binary built
// against the headers of one torch then loads under every later one.
#pragma once

#include "build_options.h"

// Must be set before any torch header. Not a compiler flag: under it, torch 2.11's pybind11 refuses to be
// included.
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION SELFATTN_TORCH_TARGET
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
