// The functions of scores that a process has loaded, by name. Whoever writes and compiles them
// (selfattn_ext/flex) loads each once; calls of operators name them.
#pragma once

#include <string>

#include "../core/score_function.h"

namespace selfattn::ops {

// Loads the shared library at `path` for good; nothing happens where the name is known already. Throws
// std::invalid_argument for a name that the operators cannot be given, a file that is no such library, and a
// library without a table.
void load_score_function(const std::string& name, const std::string& path);

// nullptr where none of that name has been loaded.
const ScoreFunctionTable* find_score_function(const char* name);

}  // namespace selfattn::ops
