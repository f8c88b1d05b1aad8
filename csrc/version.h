// The version of the package; selfattn_ext/sources.py reads it from here.
#pragma once

#define SELFATTN_VERSION "0.1.0"
