// Headers that every source of the operators includes, compiled once for all of them.
#include "ops/stable.h"
