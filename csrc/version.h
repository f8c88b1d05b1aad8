// The version of the package; selfattn_ext/build/sources.py reads it from here.
#pragma once

#define SELFATTN_VERSION "0.1.0"
